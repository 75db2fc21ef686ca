"""Every option of an emitted `parallelize`, under context parallelism: gradients stay exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from cpgen.runtime.data_parallel import buckets
from cpgen.verify.pool import WorkerError, WorkerPool

from .emitted import TINY, Emitted, emit
from .model_cases import (
    compiled_frames,
    compiled_with_dropout,
    draw_after_a_bad_batch,
    gradient_reductions,
    late_adapter,
    losses_with_evaluation,
    over_data_ranks,
)

TOLERANCE = 1e-10  # float64
WAN = "WanTransformer3DModel"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Emitted:
    return emit(tmp_path_factory.mktemp("tiny"), TINY, 2)


@pytest.mark.parametrize(
    ("data_parallel", "axes", "options", "checkpointing"),
    [
        ("fsdp", {}, {}, True),
        ("fsdp", {"dp_replicate": 2}, {}, True),  # HSDP
        ("fsdp", {"dp_replicate": 2, "dp_shard": 1}, {"reshard_after_forward": True}, False),
        ("fsdp", {}, {"reshard_after_forward": True}, True),
        ("fsdp", {}, {"reshard_after_forward": False}, False),
        ("fsdp", {}, {"reshard_after_forward": 2}, True),
        ("fsdp", {"pp": 2}, {}, False),
        ("fsdp", {}, {"cpu_offload": True}, True),
        ("fsdp", {}, {"compile": True}, False),
        ("fsdp", {}, {"compile": "model"}, False),
        ("fsdp", {"dp_replicate": 2}, {"compile": "model", "cpu_offload": True}, True),
        ("ddp", {}, {}, True),
        ("ddp", {"dp_replicate": 2}, {}, False),
        ("ddp", {"pp": 2}, {}, False),
        ("ddp", {}, {"cpu_offload": True}, False),
        ("ddp", {}, {"bucket_cap_mb": 100}, True),
        ("ddp", {}, {"bucket_cap_mb": 100, "compile": True}, True),
    ],
    ids=str,
)
def test_gradients_are_the_mean_over_data_ranks(
    tiny: Emitted,
    pool: WorkerPool,
    data_parallel: str,
    axes: dict[str, int],
    options: dict[str, Any],
    checkpointing: bool,
) -> None:
    """cp 2 in a world of 4: two groups with other data, but with pipeline ranks."""
    for gradient, norm in pool.run(
        over_data_ranks, tiny, tiny.probe(), data_parallel, axes, options, checkpointing, world_size=4
    ):
        assert gradient <= TOLERANCE
        assert norm <= TOLERANCE


@pytest.mark.parametrize(
    ("data_parallel", "compile", "fewest", "most"),
    [
        ("none", "model", 1, 1),
        ("none", True, 1, 2),  # two blocks, of which the first gets an input that needs no gradient
        ("fsdp", True, 1, 2),
        ("fsdp", "model", 3, 12),  # what is before, after and in the blocks
        ("ddp", "model", 3, 12),
    ],
)
def test_what_is_compiled(
    tmp_path: Path, pool: WorkerPool, data_parallel: str, compile: bool | str, fewest: int, most: int
) -> None:
    emitted = emit(tmp_path, WAN, 2)
    for graphs, forward, backward in pool.run(
        compiled_frames, emitted, emitted.probe(), data_parallel, compile, "aot_eager"
    ):
        assert fewest <= graphs <= most
        assert forward <= 1e-5
        assert backward <= 1e-5


def test_inductor(tiny: Emitted, pool: WorkerPool) -> None:
    probe = tiny.probe("one-block-each")
    for _, forward, backward in pool.run(compiled_frames, tiny, probe, "fsdp", "model", "inductor"):
        assert forward <= 1e-5
        assert backward <= 1e-5


@pytest.mark.parametrize(("cap", "reductions"), [(None, 5), (1e-6, 5), (100, 3)])
def test_a_bucket_is_one_reduction(tiny: Emitted, pool: WorkerPool, cap: float | None, reductions: int) -> None:
    """Two joint blocks, two others, and what is outside of blocks."""
    for calls in pool.run(gradient_reductions, tiny, tiny.probe(), cap, world_size=4):
        assert calls == reductions


def test_buckets() -> None:
    blocks = [nn.Linear(512, 512, bias=False) for _ in range(5)]  # 1 MiB each in float32
    wide, narrow = (
        MixedPrecisionPolicy(),
        MixedPrecisionPolicy(reduce_dtype=None, param_dtype=blocks[0].weight.half().dtype),
    )

    def sizes(cap: float | None, policies: list[MixedPrecisionPolicy]) -> list[int]:
        return [len(bucket) for bucket, _ in buckets(blocks, policies, cap)]

    assert sizes(None, [wide] * 5) == [1] * 5
    assert sizes(0.5, [wide] * 5) == [1] * 5
    assert sizes(2, [wide] * 5) == [2, 2, 1]
    assert sizes(2, [narrow] * 5) == [4, 1]
    assert sizes(9, [wide, wide, narrow, wide, wide]) == [2, 1, 2]
    blocks[1].requires_grad_(False)
    assert sizes(2, [wide] * 5) == [3, 2]
    assert list(buckets([], [], 2)) == []


@pytest.mark.parametrize(
    ("data_parallel", "options", "message"),
    [
        ("ddp", {"reshard_after_forward": True}, "'ddp' would ignore reshard_after_forward .*is for 'fsdp'"),
        ("fsdp", {"bucket_cap_mb": 25}, "'fsdp' would ignore bucket_cap_mb .*is for 'ddp'"),
        (
            "none",
            {"reduce_dtype": None, "cpu_offload": True, "bucket_cap_mb": 25},
            "ignore cpu_offload, bucket_cap_mb, which only binds",
        ),
        ("ddp", {"bucket_cap_mb": -1}, "bucket_cap_mb=-1 is not a number of megabytes above 0"),
        ("ddp", {"bucket_cap_mb": "25"}, "bucket_cap_mb='25' is not"),
        ("fsdp", {"param_dtype": "bf16"}, "param_dtype='bf16' is not a torch.dtype"),
        ("ddp", {"output_dtype": 16}, "output_dtype=16 is not a torch.dtype"),
        ("fsdp", {"cpu_offload": "yes"}, "cpu_offload='yes' is neither True nor False"),
        ("fsdp", {"compile": "blocks"}, "compile='blocks' is none of False, True"),
    ],
)
def test_options_that_make_no_sense(
    tiny: Emitted, pool: WorkerPool, data_parallel: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(WorkerError, match=message) as caught:
        pool.run(over_data_ranks, tiny, tiny.probe(), data_parallel, {}, options, world_size=4)
    assert {kind for kind, _, _ in caught.value.failures.values()} == {"ValueError"}


@pytest.mark.parametrize("data_parallel", ["fsdp", "ddp"])
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("add_adapter", "adapters are added before parallelize"),
        ("inject", "parameters came into the model after paralle"),
    ],
)
def test_an_adapter_that_comes_too_late(
    tiny: Emitted, pool: WorkerPool, tmp_path: Path, data_parallel: str, how: str, message: str
) -> None:
    """Nothing would reduce its gradients: each rank would train another one."""
    with pytest.raises(WorkerError, match=message) as caught:
        pool.run(late_adapter, tiny, tiny.probe(), data_parallel, how, str(tmp_path), world_size=4)
    assert {kind for kind, _, _ in caught.value.failures.values()} == {"ValueError"}


@pytest.mark.parametrize(
    ("data_parallel", "options"), [("fsdp", {}), ("fsdp", {"reshard_after_forward": False}), ("ddp", {})]
)
def test_a_forward_without_gradients_before_the_step_leaves_nothing_stale(
    tiny: Emitted, pool: WorkerPool, data_parallel: str, options: dict[str, Any]
) -> None:
    for error in pool.run(losses_with_evaluation, tiny, tiny.probe(), data_parallel, options, world_size=2):
        assert error <= TOLERANCE


def test_ranks_draw_the_same_after_a_refused_batch(tiny: Emitted, pool: WorkerPool) -> None:
    probe = tiny.probe()
    short = {"hidden_states": {"shape": [1, 4, 1, 1]}, "timestep": {"shape": [1]}}
    short |= {"encoder_hidden_states": {"shape": [1, 7, 16]}, "context": {"shape": [1, 3, 16]}}
    inputs = {name: spec for name, spec in probe.inputs.items() if name != "encoder_attention_mask"} | short
    first, second = pool.run(draw_after_a_bad_batch, tiny, replace(probe, inputs=inputs), world_size=2)
    assert first == second


def test_dropout_in_a_model_that_is_compiled_whole_is_refused(tiny: Emitted, pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match=r"compile=\"model\" with dropout"):
        pool.run(compiled_with_dropout, tiny, tiny.probe(), world_size=2)
