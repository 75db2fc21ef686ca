"""Plans on another diffusers: one that has moved, made here from the installed one by renaming things in its text."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from cpgen.diagnostics import CpgenError
from cpgen.package import Package, Request, generate
from cpgen.source import SourceTree, diffusers_version
from cpgen.target import find_target


def emitted(
    model: str,
    renamed: dict[str, str],
    *,
    version: str | None = None,
    module: str | None = None,
    plan: Path | None = None,
) -> Package:
    """The package of `model` from a source in which each key of `renamed` is called otherwise."""
    tree = SourceTree()
    source = tree.find(module) if module else find_target(model, tree).module
    root = tree.find("diffusers")
    assert source is not None and root is not None
    text = source.text
    for old, new in renamed.items():
        assert old in text
        text = text.replace(old, new)
    tree._modules[source.name] = replace(source, text=text)
    if version is not None:
        tree._modules["diffusers"] = replace(root, text=root.text.replace(diffusers_version(tree), version))
    return generate(Request(model, 2, plan=plan), Path("generated"), tree)


def line_of(path: str, start: str) -> int:
    lines = Path(path).read_text().splitlines()
    return 1 + next(i for i, line in enumerate(lines) if line.strip().startswith(start))


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])


@pytest.mark.parametrize(
    ("model", "renamed", "plan", "entry", "message", "place"),
    [
        ("WanTransformer3DModel", {"self.proj_out": "self.head"}, "wan", "hidden_states: {after: proj_out",
         "forward neither calls self.proj_out", "transformer_wan.py:"),
        ("WanTransformer3DModel", {"rotary_emb": "freqs"}, "wan", "rotary_emb[*]",
         "'rotary_emb' has no value there", "transformer_wan.py:"),
        ("LTXVideoTransformer3DModel", {"self.transformer_blocks": "self.layers"}, "ltx", "blocks: [",
         "LTXVideoTransformer3DModel has no module 'transformer_blocks'", "transformer_ltx.py:"),
        ("WanTransformer3DModel", {"num_attention_heads: int": "heads: int"}, "wan", "heads:",
         "'num_attention_heads' (the plan's heads) is not an argument", "transformer_wan.py:"),
        ("WanTransformer3DModel", {"hidden_states_img = dispatch_attention_fn": "hidden_states_img = local"}, "wan",
         "- {call: 1", "WanAttnProcessor has no attention call 1", "transformer_wan.py:"),
        ("QwenImageTransformer2DModel", {"QwenDoubleStreamAttnProcessor2_0": "QwenProcessor"}, "qwenimage",
         "QwenDoubleStreamAttnProcessor2_0", "neither defines nor imports a class", "transformer_qwenimage.py"),
    ],
)  # fmt: skip
def test_what_a_plan_misses_is_named_with_its_line(
    model: str, renamed: dict[str, str], plan: str, entry: str, message: str, place: str
) -> None:
    with pytest.raises(CpgenError) as caught:
        emitted(model, renamed)
    text = str(caught.value)
    assert "error[CP104]: " in text and message in text
    assert f"--> plans/{plan}.yaml:{line_of(f'plans/{plan}.yaml', entry)}:" in text
    assert f"diffusers/models/transformers/{place}" in text and caught.value.exit_code == 2


def test_new_attention_is_named_with_the_line_in_the_source() -> None:
    call = "hidden_states = dispatch_attention_fn("
    with pytest.raises(CpgenError) as caught:
        emitted("FluxTransformer2DModel", {call: f"{call}query, key, value) + dispatch_attention_fn("})
    text = str(caught.value)
    assert "error[CP501]: call 1 of FluxAttnProcessor attends, but the plan does not describe it" in text
    assert re.search(r"it is at diffusers/models/transformers/transformer_flux.py:\d+: hidden_states = ", text)


def test_processor_that_moved_away_is_named_with_both_files() -> None:
    module = "diffusers.models.attention_processor"
    with pytest.raises(CpgenError) as caught:
        emitted("SD3Transformer2DModel", {"class JointAttnProcessor2_0": "class Joint"}, module=module)
    text = str(caught.value)
    assert "imports 'JointAttnProcessor2_0', but diffusers/models/attention_processor.py defines no such class" in text
    assert f"--> plans/sd3.yaml:{line_of('plans/sd3.yaml', 'JointAttnProcessor2_0')}:" in text


def test_version_outside_the_range_says_what_does_not_fit() -> None:
    with pytest.raises(CpgenError) as caught:
        emitted("WanTransformer3DModel", {"timestep_proj": "proj"}, version="99.1.0")
    first, second = caught.value.findings
    assert first.code == "CP106" and "but 99.1.0 is installed" in first.message
    assert first.location is not None and first.location.line == line_of("plans/wan.yaml", "diffusers:")
    assert "does not fit this version" in (first.note or "")
    assert second.code == "CP104" and "'timestep_proj' has no value there" in second.message
    assert second.location is not None and second.location.line == line_of("plans/wan.yaml", "timestep_proj")


def test_version_outside_the_range_that_would_fit() -> None:
    with pytest.raises(CpgenError) as caught:
        emitted("WanTransformer3DModel", {}, version="99.1.0")
    (finding,) = caught.value.findings
    assert finding.code == "CP106" and finding.note == "all that it names is in this version"


def test_widened_copy_of_a_plan_emits_there(tmp_path: Path) -> None:
    text = Path("plans/wan.yaml").read_text()
    widened = tmp_path / "wan.yaml"
    widened.write_text("".join(line for line in text.splitlines(keepends=True) if not line.startswith("diffusers:")))
    package = emitted("WanTransformer3DModel", {}, version="99.1.0", plan=widened)
    assert '"diffusers": "99.1.0"' in package.files["MANIFEST.json"]
