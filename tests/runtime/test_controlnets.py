"""A model and its ControlNet together under context parallelism, as pipelines and trainings run them.

Each forward has a region of its own: residuals are put together at the end of one and cut again in the other.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from cpgen.verify.pool import WorkerPool

from .controlnet_cases import FLUX, HUNYUAN, QWEN, SD3, Pair, saved, several, together
from .emitted import emit

EXACT = 1e-13  # float64
OF_FLOAT32 = {"HunyuanDiT": 1e-6}  # its tables are float32 inside, and so are their gradients
PAIRS = {"Flux": FLUX, "SD3": SD3, "QwenImage": QWEN, "HunyuanDiT": HUNYUAN}


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("name", PAIRS)
def test_output_and_gradients_of_both_are_those_of_one_process(
    tmp_path: Path, pool: WorkerPool, name: str, cp: int
) -> None:
    pair = PAIRS[name]
    packages = [emit(tmp_path, model, cp) for model in (pair.model, pair.controlnet)]
    for data_parallel in ("none", "fsdp") if (name, cp) == ("SD3", 2) else ("none",):
        for forward, backward in pool.run(together, pair, *packages, data_parallel, world_size=cp):
            assert forward <= EXACT
            assert backward <= OF_FLOAT32.get(name, EXACT)


@pytest.mark.parametrize(
    ("name", "count", "hints"),
    [
        ("Flux", 2, 2),
        ("Flux", 1, 2),  # a union of kinds of control: one ControlNet for all images
        ("SD3", 2, 2),
        ("QwenImage", 1, 2),
        ("HunyuanDiT", 3, 3),
    ],
)
def test_diffusers_wrapper_around_several(tmp_path: Path, pool: WorkerPool, name: str, count: int, hints: int) -> None:
    pair: Pair = PAIRS[name]
    packages = [emit(tmp_path, model, 2, "allgather") for model in (pair.model, pair.controlnet)]
    for forward, backward in pool.run(several, pair, *packages, count, hints, world_size=2):
        assert forward <= EXACT
        assert backward <= OF_FLOAT32.get(name, EXACT)


def test_checkpoints_and_files_of_an_emitted_wrapper(tmp_path: Path, pool: WorkerPool) -> None:
    emitted = emit(tmp_path / "generated", FLUX.wrapper, 2)
    for restored, equal, messages in pool.run(saved, emitted, str(tmp_path), world_size=2):
        assert restored and equal
        assert messages == [
            "FluxMultiControlNetModel has no files of its own: save each of its nets",
            "FluxMultiControlNetModel has no files of its own: load each of its nets with "
            "FluxControlNetModel.from_pretrained, build it from them, and parallelize that",
        ]
