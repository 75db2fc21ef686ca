"""`verify` passes right packages, and reports each way of getting context parallelism wrong."""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from cpgen.verify import report
from cpgen.verify.case import Deviation
from cpgen.verify.compare import compare_gradients, compare_outputs, named_tensors
from cpgen.verify.models import randomise
from cpgen.verify.pool import WorkerPool
from cpgen.verify.run import PackageToVerify, Result, verify
from tests.preloaded import PRELOADED

from . import verify_packages as packages
from .emitted import ROOT
from .verify_packages import GATHER, SHARD_HIDDEN, SHARD_ROPE, WAN_CONFIG, WAN_PER_TOKEN, WAN_PROBE

IF_BOUND = 'if type(cp).__name__ in ("Region", "AttentionSite"): '
GATHER_TEXT = 'text = cp.gather(text, "text", dim=1, ndim=3, stream="text")\n'


def verify_one(package: PackageToVerify, pool: WorkerPool, cp: int = 2, strategy: str = "ulysses") -> Result:
    (result,) = verify([package], [cp], [strategy], pool=pool)
    return result


# Right packages.


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("strategy", ["ulysses", "allgather"])
def test_right_package_passes(tmp_path: Path, pool: WorkerPool, cp: int, strategy: str) -> None:
    package = packages.wan(tmp_path, cp, strategy=strategy, probes=(WAN_PROBE, WAN_PER_TOKEN))
    results = verify([package], [cp], [strategy], pool=pool)
    assert [result.probe for result in results] == ["uneven", "per-token"]
    for result in results:
        assert result.ok, result.error
        assert result.forward_max_abs is not None and result.forward_max_abs <= 1e-5 * (result.reference_max_abs or 0)
        assert result.grad_max_rel is not None and 0 < result.grad_max_rel <= 1e-5
        assert result.model == "WanTransformer3DModel" and result.output == "sample" and result.error is None


def test_ddp_passes(tmp_path: Path, pool: WorkerPool) -> None:
    (result,) = verify([packages.wan(tmp_path, 2)], [2], ["ulysses"], pool=pool, modes=("ddp",))
    assert result.ok, result.error


@pytest.mark.parametrize("cp", [2, 4])
def test_rounding_of_a_gradient_that_is_zero_is_decided_in_float64(tmp_path: Path, pool: WorkerPool, cp: int) -> None:
    result = verify_one(packages.masked(tmp_path, cp), pool, cp)
    assert result.ok, result.error
    assert result.gradient_dtype == "float64"


def test_methods_of_the_probe_run_first(tmp_path: Path, pool: WorkerPool) -> None:
    probe = replace(WAN_PROBE, name="fused", before=("fuse_qkv_projections",))
    result = verify_one(packages.wan(tmp_path, 2, probes=(probe,)), pool)
    assert result.ok, result.error
    unknown = replace(WAN_PROBE, before=("fuse_everything",))
    result = verify_one(packages.wan(tmp_path / "unknown", 2, probes=(unknown,)), pool)
    assert "the reference fails on it" in str(result.error) and "fuse_everything" in str(result.error)


# Broken packages: what is inserted or left out, and what the report must say.

WRONG_WAN = {
    "the text split though cross-attention is local": (
        [
            (
                SHARD_ROPE,
                SHARD_ROPE + '        encoder_hidden_states = cp.shard(encoder_hidden_states, "text", '
                'dim=1, ndim=3, stream="text")\n',
            )
        ],
        ["none: output 'sample' (2, 4, 3, 6, 10)", "values wrong", "rank 0 (and 1)"],
    ),
    "rope left whole": ([(SHARD_ROPE, "pass\n")], ["none: RuntimeError", "(23)", "(45)"]),
    "hidden states left whole": ([(SHARD_HIDDEN, "pass\n")], ["none: RuntimeError", "(45)", "(23)"]),
    "gather forgotten": ([(GATHER, "pass\n")], ["none: RuntimeError", "shape '[2, 3, 3, 5, 1, 2, 2, -1]'"]),
    "heads in another order": (
        [
            (
                "hidden_states = cp.heads_to_seq(hidden_states)\n",
                "hidden_states = cp.heads_to_seq(hidden_states)\n        "
                + IF_BOUND
                + "hidden_states = hidden_states.flip(2)\n",
            )
        ],
        ["none: output 'sample'", "gradient of parameter", "fsdp: output 'sample'"],
    ),
    "gradients off by the degree": (
        [
            (
                GATHER,
                GATHER + "        " + IF_BOUND + "hidden_states = 0.5 * hidden_states + 0.5 * hidden_states.detach()\n",
            )
        ],
        ["none: gradient of parameter", "0.5 times the reference's", "fsdp: gradient of parameter"],
    ),
    "no gradient to what enters the region from outside": (
        [(SHARD_ROPE, SHARD_ROPE + "        " + IF_BOUND + "timestep_proj = timestep_proj.detach()\n")],
        ["none: gradient of parameter 'condition_embedder.time_proj.", "0 times the reference's"],
    ),
    "an input's gradient alone": (
        [
            (
                "        rotary_emb = self.rope(hidden_states)\n",
                "        cp = begin_region(self)\n        rotary_emb = self.rope(hidden_states)\n        "
                + IF_BOUND
                + "hidden_states = hidden_states.detach()\n",
            )
        ],
        ["none: gradient of input 'hidden_states' (2, 4, 3, 6, 10)"],
    ),
    "not upstream's code before parallelize": (
        [(GATHER, GATHER + "        hidden_states = hidden_states * (1 + 1e-7)\n")],
        ["unbound: output 'sample'", "unbound: gradient of parameter"],
    ),
    "broken under gradient checkpointing alone": (
        [("cp.pin(block), hidden_states", "cp.pin(block), hidden_states.detach()")],
        ["rank 0 (and 1): fsdp: gradient of parameter"],
    ),
}


@pytest.mark.parametrize("fault", WRONG_WAN)
def test_fault_is_reported(tmp_path: Path, pool: WorkerPool, fault: str) -> None:
    broken, expected = WRONG_WAN[fault]
    result = verify_one(packages.wan(tmp_path, 2, broken=tuple(broken)), pool)
    assert not result.ok
    for text in expected:
        assert text in str(result.error)


def test_gradients_that_are_not_synchronised_are_reported(tmp_path: Path, pool: WorkerPool) -> None:
    call = "            _apply_fsdp(model, mesh, precision, output_dtype, offload, reshard_after_forward)\n"
    result = verify_one(packages.wan(tmp_path, 2, broken_glue=((call, "            pass\n"),)), pool)
    assert str(result.error).startswith("rank 0 (and 1): fsdp: gradient of parameter")


WRONG_MASKED = {
    "mask cut like the tokens": (
        [
            (
                "        mask = cp.mask_heads(mask)\n",
                '        mask = cp.mask_heads(cp._region.local_rows(mask, "mask", 3, ("text", "latent")) '
                'if type(cp).__name__ == "AttentionSite" else mask)\n',
            )
        ],
        ["none: ValueError", "mask has shape (2, 1, 1, 11)", "20 keys"],
    ),
    "mask in another order than the tokens": (
        [
            (
                "        mask = cp.mask_heads(mask)\n",
                "        mask = cp.mask_heads(mask)\n        " + IF_BOUND + "mask = mask.roll(1, -1)\n",
            )
        ],
        ["none: output", "(2, 13, 4)", "values wrong"],
    ),
    "mask dropped": (
        [
            (
                "        mask = cp.mask_heads(mask)\n",
                "        mask = cp.mask_heads(mask)\n        " + IF_BOUND + "mask = None\n",
            )
        ],
        ["none: output", "values wrong"],
    ),
    "an output not gathered": (
        [(GATHER_TEXT, "pass\n")],
        ["none: output 'text' is float32 (2, 4, 32), the reference's is float32 (2, 7, 32): never gathered?"],
    ),
    "outputs swapped": (
        [("        return MaskedOutput(sample=hidden_states, text=text)", "        return text, hidden_states")],
        ["none: output 'sample' is float32 (2, 7, 32), the reference's is float32 (2, 13, 4)"],
    ),
    "one output less": (
        [("            return hidden_states, text\n", "            return (hidden_states,)\n")],
        ["unbound: number of output tensors: 1, the reference's: 2 (sample, text)"],
    ),
    # True gradient 0; too small beside the others for float32 to tell it from rounding.
    "a small gradient where there is none": (
        [
            (
                "        normed = self.norm(",
                '        if hasattr(self, "_cpgen_binding"):\n'
                "            bias = 1e-7 * self.attention.to_k.bias.sum()\n"
                "            tokens = tokens + (bias - bias.detach())\n"
                "        normed = self.norm(",
            )
        ],
        ["none in float64: gradient of parameter 'blocks.", "attention.to_k.bias'", "fsdp in float64: gradient"],
    ),
}


@pytest.mark.parametrize("fault", WRONG_MASKED)
def test_fault_with_masks_and_several_outputs_is_reported(tmp_path: Path, pool: WorkerPool, fault: str) -> None:
    broken, expected = WRONG_MASKED[fault]
    result = verify_one(packages.masked(tmp_path, 2, broken=tuple(broken)), pool)
    assert not result.ok
    for text in expected:
        assert text in str(result.error)


def test_rank_that_fails_alone_is_named_and_the_pool_goes_on(tmp_path: Path, pool: WorkerPool) -> None:
    fault = "        " + IF_BOUND + "assert cp.binding.cp.rank == 0, 'no memory left'\n"
    result = verify_one(packages.wan(tmp_path, 2, broken=((SHARD_ROPE, SHARD_ROPE + fault),)), pool)
    message, place = str(result.error).splitlines()
    assert message == "rank 1: none: AssertionError: no memory left"
    assert re.match(r"at transformer_wan\.py:\d+: if type\(cp\)", place)
    assert verify_one(packages.wan(tmp_path / "right", 2), pool).ok


def open_files_after_making_groups() -> int:
    holder: list[object] = [dist.new_group() for _ in range(4)]
    holder.append(holder)  # held by a cycle, as a model and its mesh hold theirs
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files by /proc")
def test_groups_that_cases_leave_behind_do_not_pile_up(pool: WorkerPool) -> None:
    counts = [pool.run(open_files_after_making_groups, world_size=2)[0] for _ in range(41)]
    assert max(counts[30:]) <= max(counts[:20])


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads by /proc")
def test_what_workers_are_forked_with_imports_and_starts_no_thread() -> None:
    script = f"for name in {PRELOADED!r}: __import__(name)\nimport os\nprint(os.listdir('/proc/self/task'))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("'") == 2


# What can't run is a result, never left out.


def test_more_ranks_than_heads(tmp_path: Path, pool: WorkerPool) -> None:
    probe = replace(WAN_PROBE, config={**WAN_CONFIG, "num_attention_heads": 2})
    result = verify_one(packages.wan(tmp_path, 4, probes=(probe,)), pool, cp=4)
    assert not result.ok and result.forward_max_abs is None
    assert "none: ValueError: WanTransformer3DModel has 2 attention heads" in str(result.error)


def test_packages_that_are_missing_or_do_not_import(tmp_path: Path, pool: WorkerPool) -> None:
    package = packages.wan(tmp_path, 2)
    package.variant(4, "ulysses").symlink_to(package.variant(2, "ulysses"))
    broken = packages.wan(tmp_path / "broken", 2, broken=((SHARD_ROPE, "(\n"),))
    results = verify([package, broken], [2, 4, 8], ["ulysses", "ring"], pool=pool)
    errors = {(r.package, r.cp, r.strategy): r.error for r in results[:6]}
    assert len(results) == 12 and [r.ok for r in results] == [True] + [False] * 11
    assert "no package was emitted" in str(errors["wan_stub", 2, "ring"])
    assert "emitted with CP_DEGREE 2, not 4" in str(errors["wan_stub", 4, "ulysses"])
    assert "no package was emitted" in str(errors["wan_stub", 8, "ulysses"])
    assert "import: SyntaxError" in str(results[6].error)


def test_pool_that_is_too_small(tmp_path: Path, pool: WorkerPool) -> None:
    result = verify_one(packages.wan(tmp_path, 8), pool, cp=8)
    assert "world_size 8 is not in 1..4" in str(result.error)


def test_plan_without_probes(tmp_path: Path, pool: WorkerPool) -> None:
    result = verify_one(packages.wan(tmp_path, 2, probes=()), pool)
    assert not result.ok and result.error == "the plan has no probes, so nothing was verified"


def test_class_whose_requirements_are_missing(tmp_path: Path, pool: WorkerPool) -> None:
    package = packages.wan(tmp_path, 2)
    package = replace(package, plan=replace(package.plan, requires=("torch", "no_such_package")))
    result = verify_one(package, pool)
    message = "WanTransformer3DModel needs no_such_package, not installed here: nothing was verified"
    assert not result.ok and result.error == message


def test_probes_are_chosen_by_name(tmp_path: Path, pool: WorkerPool) -> None:
    package = packages.wan(tmp_path, 2, probes=(WAN_PROBE, WAN_PER_TOKEN))
    seen = []
    results = verify(
        [package],
        [2],
        ["ulysses"],
        pool=pool,
        probes=["per-token"],
        modes=("unbound",),
        on_progress=lambda *progress: seen.append(progress),
    )
    assert [result.probe for result in results] == ["per-token"]
    assert seen == [(1, 1, results[0])]
    with pytest.raises(ValueError, match="'per_token'; did you mean 'per-token'"):
        verify([package], [2], ["ulysses"], pool=pool, probes=["per_token"])


BAD_PROBES = {
    "the reference fails on it: TypeError": {"timesteps": {"value": 1}},
    "the reference's own values are not finite": {"timestep": {"tensor": [math.nan, 1.0]}},
    "inputs.timestep.dtype: unknown dtype 'int63'": {"timestep": {"shape": [2], "dtype": "int63"}},
}


@pytest.mark.parametrize("message", BAD_PROBES)
def test_bad_probe_is_told_from_a_bad_package(tmp_path: Path, pool: WorkerPool, message: str) -> None:
    probe = replace(WAN_PROBE, inputs={**WAN_PROBE.inputs, **BAD_PROBES[message]})
    result = verify_one(packages.wan(tmp_path, 2, probes=(probe,)), pool)
    assert not result.ok and message in str(result.error)


# Comparisons.


def test_tolerances_are_those_of_the_design() -> None:
    assert Deviation("x", 1e-5, 1.0).ok and not Deviation("x", 1.001e-5, 1.0).ok
    assert Deviation("x", 0.0, 0.0).ok and not Deviation("x", 1e-30, 0.0).ok
    assert not Deviation("x", math.nan, 1.0).ok and Deviation("x", math.nan, 1.0).badness == math.inf


def test_gradient_below_the_floor_is_compared_with_the_floor() -> None:
    reference = {"large": torch.tensor([100.0]), "small": torch.tensor([0.0])}
    large, small = compare_gradients({"large": torch.tensor([100.0]), "small": torch.tensor([2e-8])}, reference)
    assert large.difference == 0
    assert small.scale == pytest.approx(1e-3) and small.relative == pytest.approx(2e-5) and not small.ok


def test_outputs_with_values_that_are_not_finite_are_wrong() -> None:
    (deviation,), problems = compare_outputs([torch.tensor([1.0, math.nan])], {"x": torch.tensor([1.0, 2.0])})
    assert not problems and not deviation.ok


def test_tensors_are_found_in_nested_outputs() -> None:
    value = {"sample": (torch.zeros(1), None, [torch.ones(2)]), "extra": 3}
    assert [(name, tuple(t.shape)) for name, t in named_tensors(value)] == [("sample[0]", (1,)), ("sample[2][0]", (2,))]


def test_every_parameter_is_random_and_depends_on_its_name_only() -> None:
    def make(width: int) -> torch.nn.Module:
        model = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(8), "out": torch.nn.Linear(8, width)})
        model.register_parameter("gate", torch.nn.Parameter(torch.zeros(8)))
        model.register_parameter("table", torch.nn.Parameter(torch.zeros(1, 6, 8)))
        randomise(model, 0)
        return model

    first, second = make(4), make(5)
    assert all(parameter.std() > 0.01 for parameter in first.parameters())
    assert torch.equal(first["norm"].weight, second["norm"].weight)
    assert abs(first["norm"].weight.mean() - 1) < 0.2 and abs(first["norm"].bias.mean()) < 0.2


# Reports.

GOOD = Result("AModel", "a", "even", 2, "ulysses", 2e-6, 4.0, 3e-7, True, None, 0.5, "sample", "w")
BAD = Result("AModel", "a", "odd", 2, "ulysses", math.inf, 4.0, math.nan, False, "rank 0: none: x\nfsdp: y", 0.5)


def test_json_has_the_contract_fields_and_no_nan() -> None:
    objects = json.loads(report.to_json([GOOD, BAD]), parse_constant=lambda constant: pytest.fail(constant))
    contract = ["model", "package", "probe", "cp", "strategy", "forward_max_abs", "reference_max_abs"]
    contract += ["grad_max_rel", "ok", "error", "seconds"]
    assert list(objects[0])[: len(contract)] == contract
    assert objects[1]["grad_max_rel"] is None and objects[1]["forward_max_abs"] is None
    assert report.from_json(report.to_json([GOOD])) == [GOOD]
    assert report.to_json([]) == "[]"


def test_table_shows_every_result_and_failures_in_full() -> None:
    stream = io.StringIO()
    report.render([GOOD, BAD], Console(file=stream, width=120))
    text = stream.getvalue()
    assert "\x1b" not in text
    assert "FAILED AModel (a), probe 'odd', cp 2, ulysses\n    rank 0: none: x\n    fsdp: y\n" in text
    assert "1 of 2 passed (tolerance 1e-05, 1.0 s)" in text
    report.render([replace(GOOD, gradient_dtype="float64")], Console(file=stream, width=120))
    assert "1 times rounding was told from error in float64" in stream.getvalue()


def test_progress_is_for_terminals_only() -> None:
    stream = io.StringIO()
    with report.progress(Console(file=stream)) as on_progress:
        assert on_progress is None
    with report.progress(Console(file=stream, force_terminal=True)) as on_progress:
        assert on_progress is not None
        on_progress(1, 2, GOOD)
    assert "1/2" in stream.getvalue()


def test_markdown_table_comes_from_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    allgather = replace(GOOD, strategy="allgather", forward_max_abs=0.0)
    other = replace(GOOD, model="BModel", probe="odd")
    path = tmp_path / "results.json"
    path.write_text(report.to_json([GOOD, replace(GOOD, probe="odd", grad_max_rel=4e-7), allgather, other]))
    assert report.main([str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| model | probes | allgather, cp 2 | ulysses, cp 2 |",
        "| --- | --- | --- | --- |",
        "| `AModel` | 2 | 0 / 3.0e-07 | 5.0e-07 / 4.0e-07 |",
        "| `BModel` | 1 | not run | 5.0e-07 / 3.0e-07 |",
    ]
    assert "1 of 2 failed" in report.markdown_table([GOOD, BAD])
    path.write_text('[{"model": 1}]')
    assert report.main([str(path)]) == 2
    assert "not the output of cpgen verify --json" in capsys.readouterr().err
