"""Tensor parallelism without running it: the plan's section, and the emitted text."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cpgen import resources
from cpgen.catalog import describe
from cpgen.diagnostics import CpgenError
from cpgen.package import Package, Request, generate
from cpgen.plan import TensorParallel
from cpgen.plan_files import read_plan
from cpgen.plan_loader import load_plan
from cpgen.source import SourceTree
from cpgen.verify.report import describe_failure, from_json, markdown_table, render, to_json
from cpgen.verify.run import Result
from tests.unit.projects import REPOSITORY, plan_text
from tests.unit.test_plan_loader import findings

TREE = SourceTree()
WITH_PLAN = {
    "FluxTransformer2DModel",
    "HunyuanVideoTransformer3DModel",
    "QwenImageTransformer2DModel",
    "SD3Transformer2DModel",
    "WanTransformer3DModel",
}
SECTION = """\
tensor_parallel:
  blocks:
    attn: {style: heads, attributes: [heads, inner_dim], inputs: [x], masks: [mask], shared: [rope, ids]}
    attn.to_q: column
    attn.norm_q: {style: head_norm, dim: 1, optional: true}
    attn.norm_k: norm_across_heads
    attn.to_out.0: row
    mlp: {style: column}
    out: {style: row, parts: [attn.to_q, mlp]}
"""


def section(text: str) -> str:
    return plan_text() + "tensor_parallel:\n  blocks:\n" + "".join(f"    {line}\n" for line in text.splitlines())


def emitted(model: str, **options: Any) -> Package:
    return generate(Request(model, **{"cp": 2, "tp": 2, **options}), Path("generated"), TREE)


# The plan


def test_everything_the_section_can_say() -> None:
    plan = load_plan(plan_text() + SECTION, "made.yaml")
    assert [vars(entry) | {"location": None} for entry in plan.tensor_parallel] == [
        vars(entry)
        for entry in (
            TensorParallel(
                "blocks",
                "attn",
                "heads",
                attributes=("heads", "inner_dim"),
                inputs=("x",),
                masks=("mask",),
                shared=("rope", "ids"),
            ),
            TensorParallel("blocks", "attn.to_q", "column"),
            TensorParallel("blocks", "attn.norm_q", "head_norm", optional=True, dim=1),
            TensorParallel("blocks", "attn.norm_k", "norm_across_heads"),
            TensorParallel("blocks", "attn.to_out.0", "row"),
            TensorParallel("blocks", "mlp", "column"),
            TensorParallel("blocks", "out", "row", parts=("attn.to_q", "mlp")),
        )
    ]
    places = [entry.location.line for entry in plan.tensor_parallel if entry.location]
    first = len(plan_text().splitlines()) + 3
    assert places == list(range(first, first + 7))


def test_which_shipped_plans_have_it() -> None:
    plans = {name: read_plan(path, path.name) for name, path in resources.shipped_plans().items()}
    assert {name for name, plan in plans.items() if plan.tensor_parallel} >= WITH_PLAN
    for plan in plans.values():
        assert not plan.tensor_parallel or {entry.blocks for entry in plan.tensor_parallel} == set(plan.blocks)


@pytest.mark.parametrize(
    ("text", "code", "message", "width"),
    [
        ("a: colum", "CP105", "unknown style 'colum'", 5),
        ("a: {style: colum}", "CP105", "unknown style 'colum'", 5),
        ("a: 3", "CP105", "unknown style 3", 1),
        ("a: [column]", "CP105", "unknown style ['column']", 8),
        ("a: {optional: true}", "CP107", "missing key 'style'", 1),
        ("a: {style: column, opt: true}", "CP103", "unknown key 'opt'", 3),
        ("a: {style: column, dim: 1}", "CP103", "unknown key 'dim'", 3),
        ("a: {style: column, optional: 1}", "CP105", "1 is not a valid optional (bool)", 1),
        ("a: {style: head_norm}", "CP107", "missing key 'dim'", 1),
        ("a: head_norm", "CP107", "head_norm needs 'dim': {style: head_norm, dim: ...}", 9),
        ("a: {style: head_norm, dim: -1}", "CP105", "-1 is not a valid dim (int)", 2),
        ("a: heads", "CP107", "heads needs 'attributes'", 5),
        ("a: {style: heads, attributes: heads}", "CP105", "expected a list", 5),
        ("a: {style: heads, attributes: []}", "CP105", "an empty list of attributes", 2),
        ("a: {style: heads, attributes: [a.b]}", "CP105", "'a.b' is not a name", 3),
        ("a: {style: heads, attributes: [h], masks: ['x y']}", "CP105", "'x y' is not a name", 5),
        ("a: {style: heads, attributes: [h], shared: [class]}", "CP105", "'class' is not a name", 5),
        ("a: {style: row, parts: [b, cc]}\ncd: column", "CP105", "'cc' is not cut column-wise", 2),
        ("a: {style: row, parts: [3]}", "CP105", "3 is not the path of a submodule", 1),
        ("'a\"]; import os': column", "CP105", "is not the path of a submodule", 16),
        ("a.__class__: column", "CP105", "'a.__class__' is not the path of a submodule", 11),
        ("a..b: column", "CP105", "'a..b' is not the path of a submodule", 4),
        ("a: row", "CP107", "no layer of blocks is cut column-wise", 6),
    ],
)
def test_findings(text: str, code: str, message: str, width: int) -> None:
    column = "" if "no layer" in message else "b: column\n"
    every = findings(section(column + text))
    found = [finding for finding in every if finding.code == code and message in finding.message]
    assert len(found) == 1, every
    [place] = [finding.location for finding in found]
    assert place is not None and place.text and place.width == width
    assert place.text[place.column - 1 : place.column - 1 + width].strip()


def test_lists_that_the_plan_does_not_have() -> None:
    text = plan_text() + "tensor_parallel:\n  block:\n    a: column\n"
    [found] = findings(text)
    assert "unknown module list 'block'" in found.message and found.hint == "did you mean 'blocks'?"
    assert [f.message for f in findings(plan_text() + "tensor_parallel: [blocks]\n")] == ["expected a mapping"]
    assert any("expected a mapping" in f.message for f in findings(plan_text() + "tensor_parallel: {blocks: column}\n"))
    assert [f.code for f in findings(plan_text() + "tensor_parallel: {}\n")] == ["CP105"]
    assert any("no layer of blocks" in f.message for f in findings(plan_text() + "tensor_parallel: {blocks: {}}\n"))


def test_plan_show_tells_it() -> None:
    text = describe(load_plan(plan_text() + SECTION, "made.yaml"))
    assert "tensor      blocks\n  heads             attn\n  column            attn.to_q, mlp\n" in text
    assert "  head_norm         attn.norm_q (if there)\n" in text


# The code


def tp_function(made: Package) -> str:
    text = made.files["parallelize.py"]
    return text[text.index("def _apply_tp(") : text.index("\n\n\ndef _apply_fsdp(")]


def test_the_plan_is_written_out_line_by_line() -> None:
    assert tp_function(emitted("FluxTransformer2DModel")) == (
        """\
def _apply_tp(model: FluxTransformer2DModel, mesh: DeviceMesh) -> None:
    tp_mesh = mesh["tp"]
    for block in model.transformer_blocks:
        plan = {
            "attn": LocalHeads(
                "heads",
                inputs=("hidden_states", "encoder_hidden_states"),
                masks=("attention_mask",),
                shared=("image_rotary_emb",),
            ),
            "attn.to_q": ColwiseParallel(),
            "attn.to_k": ColwiseParallel(),
            "attn.to_v": ColwiseParallel(),
            "attn.add_q_proj": ColwiseParallel(),
            "attn.add_k_proj": ColwiseParallel(),
            "attn.add_v_proj": ColwiseParallel(),
            "attn.norm_q": HeadNorm(dim=2),
            "attn.norm_k": HeadNorm(dim=2),
            "attn.norm_added_q": HeadNorm(dim=2),
            "attn.norm_added_k": HeadNorm(dim=2),
            "attn.to_out.0": RowwiseParallel(),
            "attn.to_add_out": RowwiseParallel(),
            "ff.net.0.proj": ColwiseParallel(),
            "ff.net.2": RowwiseParallel(),
            "ff_context.net.0.proj": ColwiseParallel(),
            "ff_context.net.2": RowwiseParallel(),
        }
        plan = fitting(plan, block, model, tp_mesh, "plans/flux.yaml")
        parallelize_module(block, tp_mesh, plan, src_data_rank=None)  # every rank has the weights: none are sent
    for block in model.single_transformer_blocks:
        plan = {
            "attn": LocalHeads(
                "heads",
                inputs=("hidden_states",),
                masks=("attention_mask",),
                shared=("image_rotary_emb",),
            ),
            "attn.to_q": ColwiseParallel(),
            "attn.to_k": ColwiseParallel(),
            "attn.to_v": ColwiseParallel(),
            "attn.norm_q": HeadNorm(dim=2),
            "attn.norm_k": HeadNorm(dim=2),
            "proj_mlp": ColwiseParallel(),
            "proj_out": ConcatRowwise("attn.to_v", "proj_mlp"),
        }
        plan = fitting(plan, block, model, tp_mesh, "plans/flux.yaml")
        parallelize_module(block, tp_mesh, plan, src_data_rank=None)  # every rank has the weights: none are sent"""
    )
    text = tp_function(emitted("SD3Transformer2DModel"))
    assert '"attn2.to_out.0": IfPresent(RowwiseParallel()),\n' in text
    assert '"attn.norm_q": IfPresent(HeadNorm(dim=1)),\n' in text
    assert '"attn1.norm_q": NormAcrossHeads(),\n' in tp_function(emitted("WanTransformer3DModel"))


@pytest.mark.parametrize("model", sorted(WITH_PLAN))
def test_every_entry_is_there_and_heads_are_shared_out(model: str) -> None:
    made = emitted(model)
    text = made.files["parallelize.py"]
    for entry in made.plan.tensor_parallel:
        assert f'            "{entry.module}": ' in tp_function(made)
    assert len(re.findall('\n {12}"', tp_function(made))) == len(made.plan.tensor_parallel)
    assert "        heads=model.config.num_attention_heads // TP_DEGREE,\n" in text
    cut, bound, wrapped = (text.index(f"    {call}(") for call in ("_apply_tp", "bind_context_parallel", "_apply_fsdp"))
    assert cut < bound < wrapped


@pytest.mark.parametrize("runtime", [False, True])
@pytest.mark.parametrize("model", sorted(WITH_PLAN))
def test_it_is_formatted_and_imports_only_what_it_may(tmp_path: Path, model: str, runtime: bool) -> None:
    text = emitted(model, vendor_runtime=runtime).files["parallelize.py"]
    (tmp_path / "parallelize.py").write_text(text.replace("# source", "# source\n#"))
    for command in (["format", "--diff"], ["check", "--ignore", "E501"]):
        config = ["--config", str(REPOSITORY / "pyproject.toml"), "--no-cache"]
        arguments = [sys.executable, "-m", "ruff", command[0], *config, *command[1:], str(tmp_path)]
        result = subprocess.run(arguments, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
    modules = [node.module or "" for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    assert all(m.split(".")[0] in ("__future__", "dataclasses", "torch", "cpgen") or "_" in m for m in modules)
    assert ("_runtime.tensor_parallel" if runtime else "cpgen.runtime.tensor_parallel") in modules


def test_another_degree_changes_one_line() -> None:
    two, four = (emitted("WanTransformer3DModel", tp=tp).files for tp in (2, 4))
    lines = zip(two["parallelize.py"].splitlines(), four["parallelize.py"].splitlines(), strict=True)
    assert [pair for pair in lines if pair[0] != pair[1]] == [("TP_DEGREE = 2", "TP_DEGREE = 4")]
    assert [name for name in two if two[name] != four[name]] == ["parallelize.py", "MANIFEST.json"]


def test_without_it_nothing_of_it_is_emitted() -> None:
    made = emitted("WanTransformer3DModel", tp=1)
    for name, text in made.files.items():
        if name != "MANIFEST.json":
            assert "tensor_parallel" not in text and "_apply_tp" not in text, name
    upstream = {name: made.files[name] for name in made.upstream}
    assert upstream == {name: emitted("WanTransformer3DModel").files[name] for name in made.upstream}


def test_a_plan_file_is_named_safely(tmp_path: Path) -> None:
    plan = tmp_path / "a\"b'c.yaml"
    plan.write_text(resources.shipped_plans()["WanTransformer3DModel"].read_text("utf-8"))
    text = emitted("WanTransformer3DModel", plan=plan).files["parallelize.py"]
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    [call] = [node for node in calls if ast.unparse(node.func) == "fitting"]
    assert ast.literal_eval(call.args[-1]) == "a\"b'c.yaml"


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("LTXVideoTransformer3DModel", {}, "--tp 2: plans/ltx.yaml has no section tensor_parallel"),
        ("WanTransformer3DModel", {"tp": 3}, "--tp 3 does not fit WanTransformer3DModel: it has 40 attention heads"),
        ("WanTransformer3DModel", {"cp": 21}, "--cp 21 does not fit .* 20 attention heads on each rank of --tp 2"),
        ("WanTransformer3DModel", {"tp": -2}, "--tp -2 is not a degree"),
    ],
)
def test_requests_that_are_refused(model: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(CpgenError, match=message):
        emitted(model, **options)


def test_allgather_takes_any_cp_with_tp() -> None:
    assert emitted("WanTransformer3DModel", cp=64, tp=8, strategy="allgather")


# What verify shows


def test_results_with_tp_and_skipped_probes() -> None:
    ran = Result("M", "m", "one", 2, "ulysses", 1e-7, 1.0, 1e-6, True, None, 1.0, tp=2)
    skipped = Result("M", "m", "two", 2, "ulysses", None, None, None, True, None, 0.0, tp=2, skipped="5 heads")
    output = StringIO()
    render([ran, skipped], Console(file=output, width=160))
    heading, *rows = output.getvalue().splitlines()
    assert heading.split()[:5] == ["package", "probe", "cp", "tp", "strategy"]
    assert rows[0].split()[:5] == ["m", "one", "2", "2", "ulysses"] and " ok " in rows[0]
    assert rows[1].split()[-2:] == ["skipped", "0.00"]
    assert rows[2:] == ["skipped m 'two': 5 heads", "1 of 2 passed, 1 skipped (tolerance 1e-05, 1.0 s)"]
    table = markdown_table([ran, skipped, replace(ran, tp=1)])
    assert table.splitlines()[0] == "| model | probes | ulysses, cp 2 | ulysses, cp 2, tp 2 |"
    assert table.splitlines()[2] == "| `M` | 1 | 1.0e-07 / 1.0e-06 | 1.0e-07 / 1.0e-06 |"
    failed = describe_failure(replace(ran, ok=False, error="wrong"))
    assert failed == "FAILED M (m), probe 'one', cp 2, tp 2, ulysses\n    wrong"
    plain = StringIO()
    render([replace(ran, tp=1)], Console(file=plain, width=160))
    assert "tp" not in plain.getvalue()
    assert from_json(to_json([ran, skipped])) == [ran, skipped]
