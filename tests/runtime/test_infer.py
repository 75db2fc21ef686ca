"""`plan infer`: plans that it finds, and what it must find and report."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from cpgen.diagnostics import CpgenError, Finding
from cpgen.infer.branches import untaken_branches
from cpgen.infer.draft import differences, plan_text
from cpgen.infer.guess import guess_probes
from cpgen.infer.inference import infer_plan
from cpgen.plan import Plan, Probe
from cpgen.plan_files import read_plan
from cpgen.plan_loader import load_plan
from cpgen.resources import shipped_plans
from cpgen.source import SourceTree
from cpgen.target import find_target

from ..unit.projects import run

MODELS = Path(__file__).parents[1] / "models"
TINY = (MODELS / "transformer_tiny.py").read_text("utf-8")
PLAN = read_plan(MODELS / "tiny.yaml", "tiny.yaml")


@pytest.mark.parametrize("name", ["tiny", "causal"])
def test_the_plans_of_the_projects_own_models_are_found(name: str) -> None:
    written = read_plan(MODELS / f"{name}.yaml", name)
    tree = SourceTree()
    target = find_target(f"{MODELS / f'transformer_{name}.py'}:{written.model}", tree)
    found = infer_plan(target, written.probes, tree)
    assert (found.problems, found.warnings) == ([], [])
    assert not differences(load_plan(plan_text(found.plan, "found"), "found"), written)


def test_a_shipped_plan_is_found_with_values_that_are_cut_in_one_form_only() -> None:
    written = read_plan(shipped_plans()["WanTransformer3DModel"], "wan.yaml")
    probes = tuple(probe for probe in written.probes if probe.name != "text-to-video" and not probe.before)
    tree = SourceTree()
    found = infer_plan(find_target(written.model, tree), probes, tree)
    assert found.problems == []
    assert differences(load_plan(plan_text(found.plan, "found"), "found"), written) == set()


HIDDEN = {  # X is the tensor
    "a mean": "X = X - X.mean(dim=1, keepdim=True)",
    "a maximum": "X = X - X.amax(dim=1, keepdim=True)",
    "a convolution": (
        "X = X + torch.nn.functional.conv1d(X.transpose(1, 2), X.new_ones(X.shape[2], 1, 3), padding=1, "
        "groups=X.shape[2]).transpose(1, 2)"
    ),
    "a convolution with holes": (
        "X = X + torch.nn.functional.conv1d(X.transpose(1, 2), X.new_ones(X.shape[2], 1, 2), padding=2, dilation=4, "
        "groups=X.shape[2]).transpose(1, 2)"
    ),
    "a norm over tokens": "X = torch.nn.functional.group_norm(X.transpose(1, 2), 2).transpose(1, 2)",
    "a sort": "X = X.sort(dim=1).values",
    "the largest": "X = X * (X.norm(dim=2) >= X.norm(dim=2).topk(3, dim=1).values[:, -1:])[:, :, None]",
    "a running sum": "X = X.cumsum(dim=1)",
    "a difference of neighbours": "X = torch.cat([X[:, :1], X[:, 1:] - X[:, :-1]], dim=1)",
    "attention by hand": "X = X + (X @ X.transpose(1, 2)).softmax(dim=-1) @ X",
    "a branch on a token's value": "X = X * 2 if X[:, 0].sum() > 0 else X",
    "a shape that values decide": "X = X + X[X > 0].shape[0]",
    "a mean of a few tokens": "X = X + X[:, 1:3].mean(dim=1, keepdim=True)",
    "a branch on a list of values": "X = X * 2 if X[0, 0].tolist()[0] > 1e9 else X",
    "a branch on an array of values": "X = X * 2 if X.numpy().max() > 1e9 else X",
    "a branch on equality": "X = X * 2 if torch.equal(X[:, :1], X[:, -1:]) else X",
    "a shape that values decide, at other values": "X = X + X[X > 1e9].shape[0]",
    "a norm that is one over tokens in training": (
        "X = torch.nn.functional.batch_norm(X.mT, X.new_zeros(X.shape[2]), X.new_ones(X.shape[2]), "
        "training=self.training).mT"
    ),
    "a mean in training": "X = X - X.mean(dim=1, keepdim=True) if self.training else X",
    "a comparison that no value passes": "X = X * (1 + (X.abs() > 1e9).any())",
    "a comparison that all values pass": "X = X * (X.norm(dim=2) < 1e9).all()",
    "two inner tokens that change places": "X = X[:, [*range(5), 6, 5, *range(7, X.shape[1])]]",
    "a roll": "X = X.roll(1, dims=1)",
    "a mean of two inner tokens": (
        "X = torch.cat([X[:, :5], X[:, 5:7].mean(1, True).expand(-1, 2, -1), X[:, 7:]], dim=1)"
    ),
    "a convolution of stride two": (
        "X = torch.nn.functional.conv1d(X.mT, X.new_ones(X.shape[2], 1, 1), stride=2, groups=X.shape[2])"
        ".repeat_interleave(2, dim=2).mT[:, :X.shape[1]] + X"
    ),
    "a write by index": "X = X.index_add(1, torch.tensor([4]), X[:, :1])",
    "a branch on near equality": "X = X * 2 if torch.allclose(X[:, :1], X[:, -1:]) else X",
    "a size by numbers of repeats": "X = X + torch.repeat_interleave((X[0, :, 0] / 1e9).long()).shape[0]",
    "a size by counts": "X = X + torch.bincount((X[0, :, 0] / 1e9).long().abs()).shape[0]",
    "a branch on shared memory": "X = X * 2 if __import__('numpy').from_dlpack(X).max() > 1e9 else X",
    "a window that is longer than the tokens": (
        "X = torch.nn.functional.conv1d(X.mT, X.new_ones(X.shape[2], 1, 3), padding=16, dilation=16, "
        "groups=X.shape[2]).mT"
    ),
    "a window that is longer than the grid": (
        "X = torch.nn.functional.conv2d(X.mT.unflatten(2, (3, 3)), X.new_ones(X.shape[2], 1, 3, 3), padding=16, "
        "dilation=16, groups=X.shape[2]).flatten(2).mT"
    ),
    "neighbours that are far": (
        "X = torch.nn.functional.unfold(X.mT[..., None], (3, 1), padding=(16, 0), dilation=(16, 1))[:, 1::3].mT"
    ),
}
WINDOWS_OF_ONE = (  # no window over tokens of more than one
    "X = torch.nn.functional.conv1d(X.mT, X.new_ones(X.shape[2], 1, 1), groups=X.shape[2]).mT",
    "X = torch.nn.functional.conv1d(X.relu().flatten(0, 1)[:, None], X.new_ones(1, 1, 3), padding=1).view(X.shape)",
    "X = torch.nn.functional.conv2d(X[:, None], X.new_ones(1, 1, 1, 3), padding=(0, 1))[:, 0]",
    "X = torch.nn.functional.avg_pool1d(X, 3, stride=1, padding=1)",
    "X = X + X.unfold(2, 2, 2).sum(dim=(2, 3), keepdim=False)[..., None]",
)
PLACES = {
    "self-attention": ("    def forward(self, hidden_states, context, temb, rope):\n", "hidden_states"),
    "joint": ("    def forward(self, hidden_states, text, temb, text_mask, rope):\n", "text"),
}


SMALL = Probe(
    "small",
    {},
    {
        "hidden_states": {"shape": [1, 4, 3, 3]},
        "encoder_hidden_states": {"shape": [1, 5, 16]},
        "context": {"shape": [1, 3, 16]},
        "timestep": {"shape": [1]},
        "encoder_attention_mask": {"mask": {"shape": [1, 5], "keep": 0.6}, "dtype": "bool"},
    },
)


def found_in(tmp_path: Path, text: str, *probes: Probe) -> tuple[Plan, list[Finding]]:
    file = tmp_path / "transformer_made.py"
    file.write_text(text, "utf-8")
    tree = SourceTree()
    found = infer_plan(find_target(f"{file}:TinyTransformer2DModel", tree), probes or (SMALL,), tree)
    return found.plan, found.problems


@pytest.mark.parametrize(
    ("operation", "place"),
    [*((operation, "self-attention") for operation in HIDDEN), ("a mean", "joint"), ("a sort", "joint")],
)
def test_what_mixes_tokens_outside_attention_is_found_at_its_line(tmp_path: Path, operation: str, place: str) -> None:
    head, variable = PLACES[place]
    line = HIDDEN[operation].replace("X", variable)
    assert head in TINY
    _, findings = found_in(tmp_path, TINY.replace(head, f"{head}        {line}\n"))
    assert [finding.code for finding in findings][:1] == ["CP602"], findings
    location = findings[0].location
    assert location is not None and location.text is not None and location.text.strip() == line
    assert "aten.clone" not in findings[0].message  # which nothing here calls: the notes do


@pytest.mark.parametrize("line", WINDOWS_OF_ONE)
def test_windows_over_channels_mix_no_tokens(tmp_path: Path, line: str) -> None:
    head, variable = PLACES["self-attention"]
    _, findings = found_in(tmp_path, TINY.replace(head, f"{head}        {line.replace('X', variable)}\n"))
    assert findings == []


def test_behind_the_last_gather_tokens_may_mix(tmp_path: Path) -> None:
    old = "        output = hidden_states.transpose(1, 2)"
    assert old in TINY
    new = "        hidden_states = hidden_states - hidden_states.mean(dim=1, keepdim=True)\n"
    plan, findings = found_in(tmp_path, TINY.replace(old, new + old))
    assert findings == []
    assert [(gather.variable, gather.after) for gather in plan.gathers] == [("hidden_states", "proj_out")]


def test_tensors_that_leave_in_a_list_are_gathered_there(tmp_path: Path) -> None:
    """As a ControlNet's, with a last statement that hands on what it has."""
    head, end = TINY.split("        for block in self.blocks:\n")
    loop, _ = end.split("        hidden_states = self.proj_out(")
    text = (
        f"{head}        samples = ()\n        for block in self.blocks:\n{loop.rstrip()}\n"
        "            samples = (*samples, hidden_states)\n"
        "        samples = [self.proj_out(sample) for sample in samples]\n"
        "        samples = None if len(samples) == 0 else samples\n"
        "        return (samples,)\n"
    )
    plan, findings = found_in(tmp_path, text, replace(SMALL, config={"num_layers": 2}))
    assert findings == []
    (gather,) = plan.gathers
    assert (gather.variable, gather.path, gather.after, gather.dim) == ("samples", ("*",), None, 1)
    assert gather.cut_again


@pytest.mark.parametrize(
    "line",
    [
        "value = torch.cat([value[:, :8].unflatten(1, (-1, 2)).flip(2).flatten(1, 2), value[:, 8:]], dim=1)",
        "value = value.roll(1, dims=1)",
        "value = torch.cat([value[:, text_length:], value[:, :text_length]], dim=1)",
    ],
)
def test_values_in_another_order_than_their_keys_are_reported_at_the_call(tmp_path: Path, line: str) -> None:
    call = "        joint = dispatch_attention_fn("
    assert TINY.count(call) == 1
    _, findings = found_in(tmp_path, TINY.replace(call, f"        {line}\n{call}"))
    assert [finding.code for finding in findings] == ["CP603"]
    assert "the value of this attention call" in findings[0].message
    assert findings[0].location is not None and (findings[0].location.text or "").startswith(call)


def test_attention_by_hand_is_told_what_to_call_and_nothing_that_follows_from_it(tmp_path: Path) -> None:
    line = HIDDEN["attention by hand"].replace("X", "hidden_states")
    signature = "    def forward(self, hidden_states, context, temb, rope):\n"
    assert TINY.count(signature) == 1
    _, findings = found_in(tmp_path, TINY.replace(signature, f"{signature}        {line}\n"))
    assert {finding.code for finding in findings} == {"CP602"}
    assert "F.scaled_dot_product_attention" in str(findings[0].help)


def test_a_permutation_of_tokens_is_reported(tmp_path: Path) -> None:
    head, _ = PLACES["self-attention"]
    _, findings = found_in(tmp_path, TINY.replace(head, f"{head}        hidden_states = hidden_states.flip(1)\n"))
    assert findings


def test_a_call_that_no_probe_reaches_is_reported(tmp_path: Path) -> None:
    old = "        mask = None\n"
    assert old in TINY
    branch = "        if text.shape[1] > 1000:\n            query = dispatch_attention_fn(query, key, value)\n"
    _, findings = found_in(tmp_path, TINY.replace(old, branch + old))
    assert [finding.code for finding in findings] == ["CP604"]
    assert findings[0].location is not None and "dispatch_attention_fn(query, key, value)" in findings[0].location.text


def test_calls_are_told_apart_by_the_argument_that_brings_tokens(tmp_path: Path) -> None:
    text = TINY
    for old, new in (
        ("hidden_states, context=None, rope=None):", "hidden_states, rope=None, context=None):"),
        ("self.norm2(hidden_states), context)", "self.norm2(hidden_states), context=context)"),
    ):
        assert old in text
        text = text.replace(old, new)
    plan, findings = found_in(tmp_path, text)
    assert findings == []
    assert [site.when for function in plan.attention for site in function.sites] == [None, "context is None"]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("if hidden_states.shape[1] > 1000: hidden_states = hidden_states * 2", "a size"),
        ("if hidden_states.shape[1] < 1000: hidden_states = hidden_states * 2", "a size"),
        ("count = hidden_states.size(1); hidden_states = hidden_states * (2 if 4 < count < 1000 else 1)", "a size"),
        ("hidden_states = hidden_states * 2 if self.training else hidden_states", "whether the model is in training"),
        ("if hidden_states.shape[1] > 1000: raise ValueError(1)", None),
        ("hidden_states = hidden_states * (2 if hidden_states.shape[0] == 1 else 1)", None),  # one probe each
        ("if rope is None: hidden_states = hidden_states * 2", None),
    ],
)
def test_a_branch_of_which_no_probe_takes_a_side_is_said(tmp_path: Path, line: str, what: str | None) -> None:
    head, _ = PLACES["self-attention"]
    file = tmp_path / "transformer_made.py"
    file.write_text(TINY.replace(head, f"{head}        {line}\n"), "utf-8")
    found = untaken_branches(find_target(f"{file}:TinyTransformer2DModel", SourceTree()), PLAN)
    assert [each.message for each in found] == (
        [f"no probe takes the other side of a branch on {what}"] if what else []
    )
    assert all(each.location is not None and line in (each.location.text or "") for each in found)


def test_blocks_that_forward_does_not_loop_over_are_reported(tmp_path: Path) -> None:
    text = TINY
    for name in ("joint_blocks", "blocks"):
        text = text.replace(f"in self.{name}:", f"in getattr(self, '{name}'):")
    with pytest.raises(CpgenError, match=r"(?s)CP601.*loops over no module list.*joint_blocks, blocks"):
        found_in(tmp_path, text)


def test_a_probe_that_the_class_does_not_run_is_said(tmp_path: Path) -> None:
    probe = replace(SMALL, config={"text_dim": 17})
    with pytest.raises(CpgenError, match=r"CP605.*does not run on probe 'small'"):
        found_in(tmp_path, TINY, probe)


@pytest.mark.parametrize(
    ("line", "note"),
    [
        ("raise SystemExit(0)", "SystemExit: 0"),
        (
            "self.runs = getattr(self, 'runs', 0) + 1; assert self.runs < 2",
            "run again, and watched: Assertion",
        ),
        ("self.runs = getattr(self, 'runs', 0) + 1; 1 / (self.runs < 6)", "run again, and watched: ZeroDivis"),
    ],
)
def test_whatever_the_class_raises_is_said(tmp_path: Path, line: str, note: str) -> None:
    first = "        batch, channels, height, width = hidden_states.shape\n"
    assert first in TINY
    with pytest.raises(CpgenError, match=rf"(?s)CP605.*does not run on probe 'small'.*{note}"):
        found_in(tmp_path, TINY.replace(first, f"        {line}\n{first}"))


@pytest.mark.parametrize("line", ["raise SystemExit(0)", "raise OSError('no')"])
def test_a_file_that_cannot_be_imported_is_said(tmp_path: Path, line: str) -> None:
    with pytest.raises(CpgenError, match=r"CP605.*transformer_made\.py cannot be imported"):
        found_in(tmp_path, f"{TINY}\n{line}\n")


def test_a_place_that_cannot_be_written_to_is_said_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for place in ("folder", "pipe", "missing/plan.yaml"):
        ran = run("plan", "infer", "--model", "FluxTransformer2DModel", "--force", "--write", str(tmp_path / place))
        assert ran.exit == 2 and "error[CP404]" in ran.err and "running" not in ran.err
    assert (tmp_path / "pipe").is_fifo()


def test_what_the_model_prints_is_not_in_the_plan(tmp_path: Path) -> None:
    first = "        batch, channels, height, width = hidden_states.shape\n"
    file = tmp_path / "made.py"
    file.write_text(TINY.replace(first, f"        print('words of the model', flush=True)\n{first}"), "utf-8")
    command = [sys.executable, "-m", "cpgen", "plan", "infer", "--model", f"{file}:TinyTransformer2DModel"]
    command += ["--probes", str(MODELS / "tiny.yaml")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "words of the model" in ran.stderr and ran.stdout.startswith("# TinyTransformer2DModel. Found and proven")
    assert differences(load_plan(ran.stdout, "printed"), PLAN) == set()


def test_probes_are_guessed_from_signatures() -> None:
    probes = guess_probes(find_target("FluxTransformer2DModel", SourceTree()))
    assert [probe.name for probe in probes] == ["guessed-1", "guessed-2"]
    assert probes[0].inputs["hidden_states"] != probes[1].inputs["hidden_states"]
    with pytest.raises(
        CpgenError, match=r"(?s)CP605.*nothing is known about its argument.*position_ids.*--probes FILE"
    ):
        guess_probes(find_target("Krea2Transformer2DModel", SourceTree()))


def test_the_plan_is_written_with_its_proof_and_only_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    probes = textwrap.dedent(
        """
        probes:
          - name: only
            config: {num_attention_heads: 4}
            inputs:
              hidden_states: {shape: [1, 4, 3, 3]}
              encoder_hidden_states: {shape: [1, 5, 16]}
              context: {shape: [1, 3, 16]}
              timestep: {shape: [1]}
              encoder_attention_mask: {mask: {shape: [1, 5], keep: 0.6}, dtype: bool}
        """
    )
    Path("probes.yaml").write_text(probes, "utf-8")
    Path("made.py").write_text(TINY, "utf-8")
    command = ["plan", "infer", "--model", "made.py:TinyTransformer2DModel", "--probes", "probes.yaml"]
    ran = run(*command, "--write", "plan.yaml", "--draft", "draft.yaml")
    assert (ran.exit, ran.out) == (0, "plan.yaml\n"), ran.err
    assert not Path("draft.yaml").exists()
    text = Path("plan.yaml").read_text("utf-8")
    assert "Found and proven by cpgen plan infer: cp 2, ulysses and allgather, 2 cases" in text
    assert re.search(r"\n# Not proven:\n# - made.py:\d+, no probe has a batch of more than one: def forward", text)
    assert "warning[CP607]: no probe has a batch of more than one\n" in ran.err
    assert differences(read_plan(Path("plan.yaml"), "plan.yaml"), PLAN) == set()
    assert run(*command, "--write", "plan.yaml").exit == 2  # it exists

    broken = TINY.replace(
        "context, temb, rope):\n",
        "context, temb, rope):\n        context = context.cumsum(0) * hidden_states.shape[1]\n",
    )
    Path("made.py").write_text(broken, "utf-8")
    ran = run(*command, "--write", "other.yaml", "--draft", "draft.yaml")
    assert ran.exit == 1 and "error[CP606]: the plan that was found is not right: probe 'only'" in ran.err
    assert not Path("other.yaml").exists()
    assert Path("draft.yaml").read_text("utf-8").startswith("# Not proven.")
