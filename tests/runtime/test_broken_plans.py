"""Plans that are wrong in the ways in which others are wrong: `cpgen verify` reports each, and what it is about."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cpgen import resources
from cpgen.cli import main
from cpgen.verify.pool import WorkerPool
from cpgen.verify.run import PackageToVerify, verify

from .emitted import emit

QWEN, WAN, HUNYUAN, LTX = "qwenimage", "wan", "hunyuan_video", "ltx"
BROKEN = {
    "a split forgotten (rotary tables)": (
        WAN,
        "    rotary_emb[*]: {dim: 1, ndim: 4, stream: latent}\n",
        "",
        "text-to-video",
        ["The size of tensor a (23) must match the size of tensor b (45)"],
    ),
    "a mask left local": (
        QWEN,
        "      - {variables: {seq_img: latent}, after: seq_img}\n",
        "      - {variables: {seq_txt: text}, after: seq_txt}\n",
        "masked-text",
        ["QwenImageTransformer2DModel: the attention mask has shape (2, 1, 1, 17)", "24 queries and 24 keys"],
    ),
    "text split for a local cross-attention": (
        WAN,
        "streams: [latent]\n\nregion:\n  begin: {before: blocks}\n  shard:\n",
        "streams: [latent, text]\n\nregion:\n  begin: {before: blocks}\n  shard:\n"
        "    encoder_hidden_states: {dim: 1, ndim: 3, stream: text}\n",
        "text-to-video",
        ["output 'sample'", "max|difference|", "of 1440 values wrong"],
    ),
    "the order of a joint sequence": (
        QWEN,
        "stream: [text, latent]}",
        "stream: [latent, text]}",
        "masked-text",
        ["output 'sample'", "max|difference|"],
    ),
    "a first-frame slice by the global length": (
        HUNYUAN,
        "  prefix:\n    first_frame_num_tokens: latent\n",
        "",
        "token-replace",
        ["output 'sample'", "max|difference|"],
    ),
    "modulation of every token left whole": (
        LTX,
        '    temb: {dim: 1, ndim: 3, stream: latent, when: "shape[1] != 1"}\n',
        "",
        "timestep-per-token",
        ["The size of tensor a (15) must match the size of tensor b (30)"],
    ),
    "an ndim that is not the tensor's": (
        WAN,
        "rotary_emb[*]: {dim: 1, ndim: 4,",
        "rotary_emb[*]: {dim: 1, ndim: 3,",
        "text-to-video",
        ["WanTransformer3DModel: plan entry 'rotary_emb[0]' says ndim 3", "shape (1, 45, 1, 12)"],
    ),
    "self-attention taken for local": (
        WAN,
        "    - {call: 1, kind: self, stream: latent, when: encoder_hidden_states is None}\n",
        "    - {call: 1, kind: cross}\n",
        "text-to-video",
        ["WanTransformer3DModel: no attention call exchanged tokens in this forward"],
    ),
    "a gather forgotten": (
        WAN,
        "  gather:\n    hidden_states: {after: proj_out, dim: 1, ndim: 3, stream: latent}\n",
        "  gather: {}\n",
        "text-to-video",
        ["shape '[2, 3, 3, 5, 1, 2, 2, -1]' is invalid"],
    ),
}


def write_broken(folder: Path, fault: str) -> tuple[str, Path]:
    """The model, and its plan with the fault in it."""
    name, old, new, _, _ = BROKEN[fault]
    text = (resources.folder("plans") / f"{name}.yaml").read_text("utf-8")
    assert old in text
    plan = folder / "broken.yaml"
    plan.write_text(text.replace(old, new))
    return next(model for model, path in resources.shipped_plans().items() if path.stem == name), plan


@pytest.mark.parametrize("fault", BROKEN)
def test_verify_reports_it(tmp_path: Path, pool: WorkerPool, fault: str) -> None:
    model, plan = write_broken(tmp_path, fault)
    probe, expected = BROKEN[fault][3:]
    emitted = emit(tmp_path / "ulysses-cp2", model, 2, plan=plan)
    package = PackageToVerify(emitted.name, tmp_path, emitted.plan, emitted.reference)
    (result,) = verify([package], [2], ["ulysses"], pool=pool, probes=[probe])
    assert (result.ok, result.model, result.probe) == (False, model, probe)
    for part in expected:
        assert part in (result.error or "")


def test_the_command_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, plan = write_broken(tmp_path, "an ndim that is not the tensor's")
    with pytest.raises(SystemExit) as exit_:
        main(["verify", "--model", model, "--plan", str(plan), "--cp", "2", "--probe", "text-to-video", "--json"])
    assert exit_.value.code == 1
    (result,) = json.loads(capsys.readouterr().out)
    assert {"model", "package", "probe", "cp", "strategy", "ok", "error", "seconds"} <= set(result)
    assert {"forward_max_abs", "reference_max_abs", "grad_max_rel"} <= set(result)
    assert not result["ok"]
    assert "says ndim 3" in result["error"]
