"""`emit --tp`: the models with cp and tp together, with FSDP2 and DDP around, their files, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import diffusers
import pytest
import torch
from torch import Tensor

from cpgen.plan import Probe
from cpgen.resources import shipped_plans
from cpgen.verify.case import DDP, FSDP, NONE
from cpgen.verify.pool import WorkerPool
from cpgen.verify.report import from_json, to_json
from cpgen.verify.run import PackageToVerify, Result, verify

from . import tensor_parallel_cases as cases
from .emitted import Emitted, emit, inputs_of

EXACT = 1e-12  # float64
FLUX, WAN = "FluxTransformer2DModel", "WanTransformer3DModel"
MODELS = [FLUX, "HunyuanVideoTransformer3DModel", "QwenImageTransformer2DModel", "SD3Transformer2DModel", WAN]
FUSED = "fuse_qkv_projections makes one weight of several, which tensor parallelism refuses"
FIVE = "its 5 heads do not divide by 2"
PROBES = {
    FLUX: ["guidance-and-controlnet", "masked"],
    "HunyuanVideoTransformer3DModel": ["text-mask-with-holes", "token-replace"],
    "QwenImageTransformer2DModel": ["masked-text", "edit"],
    "SD3Transformer2DModel": ["joint-226", "dual-attention", "controlnet-and-skipped-layers"],
    WAN: ["text-to-video", "image-to-video", "timestep-per-token"],
}
SKIPPED = {
    FLUX: {"fused-projections": FUSED},
    "HunyuanVideoTransformer3DModel": {"latent-concat-one-block-each": FIVE},
    "QwenImageTransformer2DModel": {"controlnet-one-block": FIVE},
    "SD3Transformer2DModel": {"one-block": FIVE, "fused-projections": FUSED},
    WAN: {"one-block": FIVE, "fused-projections": FUSED},
}


def packages(out: Path, model: str, cp: int, tp: int, *strategies: str) -> PackageToVerify:
    for strategy in strategies:
        emitted = emit(out / f"{strategy}-cp{cp}", model, cp, strategy, tp=tp)
    return PackageToVerify(emitted.name, out, emitted.plan, emitted.reference, tp)


def errors(results: list[Result]) -> list[str | None]:
    return [result.error for result in results if not result.ok]


def shallow(emitted: Emitted, name: str | None = None) -> Probe:
    """One block of each kind."""
    probe = emitted.probe(name)
    return replace(
        probe, config=probe.config | {n: 1 for n in ("num_layers", "num_single_layers") if n in probe.config}
    )


@pytest.mark.parametrize("model", MODELS)
def test_probes_at_cp_2_and_tp_2(tmp_path: Path, pool: WorkerPool, model: str) -> None:
    package = packages(tmp_path, model, 2, 2, "ulysses")
    results = verify([package], [2], ["ulysses"], pool=pool, probes=[*PROBES[model], *SKIPPED[model]])
    assert errors(results) == []
    assert {result.probe for result in results if result.skipped is None} == set(PROBES[model])
    assert {result.probe: result.skipped for result in results if result.skipped} == SKIPPED[model]
    assert all(result.tp == 2 for result in results) and from_json(to_json(results)) == results


@pytest.mark.parametrize("model", [FLUX, WAN])
def test_other_strategies(tmp_path: Path, pool: WorkerPool, model: str) -> None:
    package = packages(tmp_path, model, 2, 2, "allgather", "ring")
    first = package.plan.probes[0].name
    results = verify([package], [2], ["allgather", "ring"], pool=pool, probes=[first], modes=(FSDP,))
    assert errors(results) == [] and len(results) == 2


@pytest.mark.parametrize("model", [FLUX, WAN])
def test_tensor_parallelism_alone_on_four_ranks(tmp_path: Path, pool: WorkerPool, model: str) -> None:
    package = packages(tmp_path, model, 1, 4, "ulysses")
    names = ["biased"] if model == FLUX else ["image-to-video"]
    results = verify([package], [1], ["ulysses"], pool=pool, probes=names, modes=(NONE, FSDP, DDP))
    assert errors(results) == []


@pytest.mark.parametrize(("cp", "tp"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("model", MODELS)
def test_two_data_ranks(tmp_path: Path, pool: WorkerPool, model: str, cp: int, tp: int) -> None:
    emitted = emit(tmp_path, model, cp, tp=tp)
    for size, gradient, norm, clipped in pool.run(cases.over_data_ranks, emitted, shallow(emitted), "fsdp", {}):
        assert size == 2
        assert gradient <= EXACT
        assert norm <= EXACT
        assert clipped <= EXACT


@pytest.mark.parametrize(("mode", "axes"), [("ddp", {}), ("fsdp", {"dp_replicate": 2})])
def test_two_copies(tmp_path: Path, pool: WorkerPool, mode: str, axes: dict[str, int]) -> None:
    emitted = emit(tmp_path, FLUX, 1, tp=2)
    for size, gradient, norm, clipped in pool.run(cases.over_data_ranks, emitted, shallow(emitted), mode, axes):
        assert size == 2 and max(gradient, norm, clipped) <= EXACT


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_without_a_wrap(tmp_path: Path, pool: WorkerPool, norm_type: float) -> None:
    emitted = emit(tmp_path, FLUX, 1, tp=2)
    for norm, clipped in pool.run(cases.clipped_without_wrap, emitted, shallow(emitted), norm_type, world_size=2):
        assert norm <= EXACT and clipped <= EXACT


@pytest.mark.parametrize(("model", "cp"), [(FLUX, 1), (WAN, 2)])
def test_one_graph(tmp_path: Path, pool: WorkerPool, model: str, cp: int) -> None:
    emitted = emit(tmp_path, model, cp, tp=2)
    for forward, gradient, graphs in pool.run(cases.compiled, emitted, shallow(emitted), world_size=2 * cp):
        assert forward < 1e-5 and gradient < 1e-5 and graphs == 1


@pytest.mark.parametrize(("cp", "compile"), [(1, True), (2, True), (2, "model")])
def test_compiled_under_fsdp(tmp_path: Path, pool: WorkerPool, cp: int, compile: bool | str) -> None:
    """A single block of Flux returns two views of one tensor."""
    emitted = emit(tmp_path, FLUX, cp, tp=2)
    for forward, gradient in pool.run(cases.compiled_under_fsdp, emitted, shallow(emitted), compile, world_size=2 * cp):
        assert forward < 1e-5 and gradient < 1e-5


def test_collectives_of_a_block(tmp_path: Path, pool: WorkerPool) -> None:
    wan = emit(tmp_path / "wan", WAN, 1, tp=2)
    # parallelize compares the ranks' weights: the least and the most of a number for each parameter.
    compared = {"allreduce_": 2}
    # In forward a sum for each row-wise layer (attn1, attn2, ffn) and each norm (q and k of both attentions); in
    # backward one for each input of column-wise layers (1 + 2 + 1) and each norm.
    [found, _] = pool.run(cases.collectives, wan, shallow(wan), world_size=2)
    assert found == [compared, {"all_reduce": 3 + 4}, {"all_reduce": 4 + 4}]
    flux = emit(tmp_path / "flux", FLUX, 1, tp=2)
    # One block has 4 row-wise layers and 4 inputs of column-wise ones, the other 1 and 2; it trades columns of
    # proj_out's weight, and their gradients. The probe wants gradients of both rotary tables, too.
    [found, _] = pool.run(cases.collectives, flux, shallow(flux), world_size=2)
    assert found[:2] == [compared, {"all_reduce": 4 + 1, "all_to_all_single": 1}]
    assert found[2] == {"all_reduce": 4 + 2 + 2 * 2, "all_to_all_single": 1}


def test_half_precision(tmp_path: Path, pool: WorkerPool) -> None:
    emitted = emit(tmp_path, FLUX, 2, tp=2)
    for distance, of_one_process, dtypes in pool.run(cases.half_precision, emitted, emitted.probe()):
        assert 0 < distance < 1.5 * of_one_process
        assert dtypes == {torch.bfloat16}


@pytest.mark.parametrize("model", [FLUX, WAN])
def test_frozen_parameters_and_copies(tmp_path: Path, pool: WorkerPool, model: str) -> None:
    emitted = emit(tmp_path, model, 1, tp=2)
    for gradient, same, distance in pool.run(cases.kept_settings, emitted, shallow(emitted), world_size=2):
        assert gradient <= EXACT and same and distance == 0


def test_each_rank_holds_its_part(tmp_path: Path, pool: WorkerPool) -> None:
    emitted = emit(tmp_path, FLUX, 1, tp=4)
    for stored, whole in pool.run(cases.held, emitted, shallow(emitted)):
        for name, count in whole.items():
            cut = any(
                part in name for part in ("to_q", "add_k_proj", "proj_mlp", "single_transformer_blocks.0.proj_out")
            )
            cut = cut or (any(part in name for part in ("to_out", "to_add_out", "net.0", "net.2")))
            cut = cut or any(part in name for part in ("to_k", "to_v", "add_q_proj", "add_v_proj"))
            row_bias = name.endswith("bias") and any(part in name for part in ("_out", "net.2"))
            assert stored[name] == (count // 4 if cut and not row_bias else count), name


@pytest.mark.parametrize(
    ("model", "targets"),
    [
        (FLUX, [(1, 4, "none"), (1, 2, "fsdp"), (2, 2, "ddp"), (1, 1, "fsdp")]),
        (WAN, [(1, 4, "none"), (1, 2, "fsdp")]),
    ],
)
def test_files_move_between_layouts(
    tmp_path: Path, pool: WorkerPool, model: str, targets: list[tuple[int, int, str]]
) -> None:
    """A checkpoint and an export of cp 2 x tp 2 at others, such as dp 2 x tp 2; and those of dp 4 at cp 2 x tp 2."""
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    source = emit(tmp_path / "source", model, 2, tp=2)
    probe = shallow(source)
    saved, *others = pool.run(cases.trained, source, probe, first, "fsdp")
    assert all(equal(other, saved) for other in others)  # what is not cut stays the same on the tp axis, to the bit
    plain = getattr(diffusers, model).from_pretrained(f"{first}/exported")
    assert equal(plain.state_dict(), saved)
    with torch.no_grad():
        expected = plain(**inputs_of(probe, torch.float32), return_dict=False)[0]
    later = []
    for cp, tp, mode in targets:
        emitted = emit(tmp_path / f"cp{cp}-tp{tp}", model, cp, tp=tp)
        for resumed in pool.run(cases.resumed, emitted, probe, first, mode):
            assert equal(resumed.loaded, saved) and equal(resumed.exported, saved)
            assert (resumed.output - expected).abs().max() < 1e-5 * expected.abs().max()
            later.append(resumed.later)
    # The optimizer's state came along: the next step is the same but for rounding, which Adam amplifies.
    moved = [(later[0][name] - each[name]).norm() / each[name].norm() for each in later for name in saved]
    assert max(moved) < 1e-5
    saved, *_ = pool.run(cases.trained, emit(tmp_path / "plain", model, 1), probe, second, "fsdp")
    for resumed in pool.run(cases.resumed, source, probe, second, "fsdp"):
        assert equal(resumed.loaded, saved) and equal(resumed.exported, saved)


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, EXACT), (torch.float32, 1e-6), (torch.bfloat16, 2**-7)]
)
@pytest.mark.parametrize(("affine", "eps"), [(True, 1e-6), (False, None)])
def test_norm_across_heads(
    pool: WorkerPool, dtype: torch.dtype, tolerance: float, affine: bool, eps: float | None
) -> None:
    for found in pool.run(cases.norm_across_heads, dtype, affine, eps):
        assert max(found) <= tolerance


@pytest.mark.parametrize("sizes", [(8, 12), (4, 32), (12, 4, 8), (8,)])
def test_linear_layer_on_a_concatenation(pool: WorkerPool, sizes: tuple[int, ...]) -> None:
    for world_size in (2, 4):
        for found in pool.run(cases.linear_of_concat, sizes, world_size == 2, world_size=world_size):
            assert max(found) <= EXACT


# What is refused


@pytest.mark.parametrize(
    ("model", "probe", "what", "message"),
    [
        (WAN, "one-block", "", "(?s)blocks.0 .WanTransformerBlock.*2 parts.*plans/wan.yaml.*attn1: its heads is 5"),
        (WAN, "fused-projections", "", "(?s)attn1: its projections are fused into one weight"),
        (WAN, None, "lora", "(?s)attn1.to_q: peft.*is not a plain torch.nn.Linear"),
        (WAN, None, "quantised", "(?s)ffn.net.2: torch.nn.*Linear with a _Quantised is not a plain"),
        (WAN, None, "twice", "(?s)attn1: it is cut already"),
        (FLUX, None, "image prompt", "FluxIPAdapterAttnProcessor has weights of its own"),
    ],
)
def test_models_that_are_refused(
    tmp_path: Path, pool: WorkerPool, model: str, probe: str | None, what: str, message: str
) -> None:
    emitted = emit(tmp_path, model, 1, tp=2)
    for found in pool.run(cases.refusal, emitted, emitted.probe(probe), what, world_size=2):
        assert pytest.raises(ValueError, match=message) and __import__("re").search(message, found), found


def test_ulysses_needs_a_head_for_each_rank(tmp_path: Path, pool: WorkerPool) -> None:
    emitted = emit(tmp_path, WAN, 2, tp=2)
    probe = emitted.probe()
    probe = replace(probe, config=probe.config | {"num_attention_heads": 2})
    for found in pool.run(cases.refusal, emitted, probe, ""):
        assert "has 1 attention heads on each rank of the tp axis" in found


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("attn1.to_q: column", "attn1.to_query: column", "attn1.to_query: there is no such module"),
        ("ffn.net.2: row", "norm3: row", "norm3: .*FP32LayerNorm is not a plain torch.nn.Linear"),
        ("attn1.norm_q: norm_across_heads", "norm3: norm_across_heads", "norm3: .* is not a torch.nn.RMSNorm"),
        ("attn2: {style: heads, attributes: [h", "attn2: {style: heads, attributes: [hh", "attn2: its hheads is None"),
        (
            "ffn.net.2: row",
            "ffn.net.2: {style: row, parts: [attn1.to_q]}",
            "its 32 input channels are not those of attn1",
        ),
    ],
)
def test_plans_that_do_not_fit(tmp_path: Path, pool: WorkerPool, old: str, new: str, message: str) -> None:
    text = shipped_plans()[WAN].read_text("utf-8")
    assert text.count(old) == 1
    (tmp_path / "my_plan.yaml").write_text(text.replace(old, new))
    emitted = emit(tmp_path, WAN, 1, tp=2, plan=tmp_path / "my_plan.yaml")
    [found, _] = pool.run(cases.refusal, emitted, emitted.probe(), "", world_size=2)
    assert "WanTransformer3DModel: blocks.0 (WanTransformerBlock)" in found and "my_plan.yaml says" in found
    assert __import__("re").search(message, found), found


def test_a_wrong_plan_is_found_out(tmp_path: Path, pool: WorkerPool) -> None:
    """A norm of one head's channels that is left out: its weight's gradient lacks the other ranks' heads."""
    text = shipped_plans()[FLUX].read_text("utf-8").replace("    attn.norm_q: {style: head_norm, dim: 2}\n", "")
    (tmp_path / "plan.yaml").write_text(text)
    emitted = emit(tmp_path / "ulysses-cp1", FLUX, 1, tp=2, plan=tmp_path / "plan.yaml")
    package = PackageToVerify(emitted.name, tmp_path, emitted.plan, emitted.reference, 2)
    [result] = verify([package], [1], ["ulysses"], pool=pool, probes=["joint"], modes=(NONE,))
    assert not result.ok and "norm_q" in str(result.error)


def test_nothing_but_skipped_probes_proves_nothing(tmp_path: Path, pool: WorkerPool) -> None:
    package = packages(tmp_path, WAN, 1, 2, "ulysses")
    results = verify([package], [1], ["ulysses"], pool=pool, probes=["one-block", "fused-projections"])
    assert [result.ok for result in results] == [False, False]
    assert all("nothing was verified" in str(result.error) for result in results)
    assert all(row["skipped"] and row["tp"] == 2 for row in json.loads(to_json(results)))
