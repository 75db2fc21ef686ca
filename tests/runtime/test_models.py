"""Every shipped plan: its probes at cp 2 and 4, and each model as one compiled graph.

Eight models run under every strategy. Of the others only the attention calls could differ from theirs, which
test_exchange.py covers: they run under two.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.exc import Unsupported

from cpgen.plan import Probe
from cpgen.strategy import STRATEGIES
from cpgen.verify.case import DDP, FSDP, MODES, NONE
from cpgen.verify.models import build_model, load_reference
from cpgen.verify.pool import WorkerPool
from cpgen.verify.run import PackageToVerify, verify

from .emitted import emit, inputs_of, shipped
from .model_cases import compiled

SHIPPED = shipped()
MODELS = [model.values[0] for model in SHIPPED]
ONE_AXIS = [name for name in STRATEGIES if name != "hybrid"]
TWO = ["ulysses", "allgather"]
# What upstream itself does not compile as one graph: it branches on a tensor's values.
NOT_COMPILED = {
    "HunyuanVideo15Transformer3DModel",  # whether there is an image
    "OmniGenTransformer2DModel",  # the largest position
}
# One layer does not fit the other settings of their first probe: these are compiled with all of its layers.
NOT_SHALLOW = {"BriaFiboTransformer2DModel", "ConsisIDTransformer3DModel", "WanVACETransformer3DModel"}
# Upstream asks for a norm in float32, which torch refuses of float64.
FLOAT32 = {"CosmosControlNetModel", "CosmosTransformer3DModel"}
EIGHT = [
    "CogVideoXTransformer3DModel",
    "CogView4Transformer2DModel",
    "FluxTransformer2DModel",
    "HunyuanVideoTransformer3DModel",
    "LTXVideoTransformer3DModel",
    "QwenImageTransformer2DModel",
    "SD3Transformer2DModel",
    "WanTransformer3DModel",
]


def by_model(names: Iterable[str]) -> pytest.MarkDecorator:
    wanted = set(names)
    return pytest.mark.parametrize("model", [model for model in SHIPPED if model.values[0] in wanted])


@pytest.mark.parametrize("cp", [2, 4])
@by_model(MODELS)
def test_probes(tmp_path: Path, pool: WorkerPool, model: str, cp: int) -> None:
    strategies = ONE_AXIS if model in EIGHT else TWO
    package = _emit(tmp_path, model, cp, strategies)
    # Model files don't depend on the degree (tests/unit/test_emission.py), so that at 4 the unbound class is as at 2.
    modes = MODES if cp == 2 else (NONE, FSDP)
    results = verify([package], [cp], strategies, pool=pool, modes=modes)
    assert [result.error for result in results if not result.ok] == []
    assert len(results) == len(strategies) * len(package.plan.probes) > 0


@pytest.mark.parametrize("outer", ["allgather", "ring"])
@by_model(EIGHT)
def test_ulysses_inside(tmp_path: Path, pool: WorkerPool, model: str, outer: str) -> None:
    package = _emit(tmp_path, model, 4, ["hybrid"], outer=outer)
    results = verify([package], [4], ["hybrid"], pool=pool)
    assert [result.error for result in results if not result.ok] == []
    assert len(results) == len(package.plan.probes) > 0


@by_model(EIGHT)
def test_ddp_gradients_are_those_of_one_process(tmp_path: Path, pool: WorkerPool, model: str) -> None:
    package = _emit(tmp_path, model, 2, ["ulysses"])
    first = package.plan.probes[0].name
    results = verify([package], [2], ["ulysses"], pool=pool, probes=[first], modes=(DDP,))
    assert [result.error for result in results if not result.ok] == []


@by_model(model for model in MODELS if model not in NOT_COMPILED)
def test_each_compiles_to_one_graph(tmp_path: Path, pool: WorkerPool, model: str) -> None:
    emitted = emit(tmp_path, model, 2)
    probe = emitted.probe() if model in NOT_SHALLOW else _shallow(emitted.probe())
    dtype = torch.float32 if model in FLOAT32 else torch.float64
    for forward, backward, graphs in pool.run(compiled, emitted, probe, "aot_eager", (), False, dtype, world_size=2):
        assert forward <= 1e-5
        assert backward <= 1e-5
        assert graphs == 1


@by_model(sorted(NOT_COMPILED))
def test_upstream_itself_does_not_compile_to_one_graph(tmp_path: Path, model: str) -> None:
    emitted = emit(tmp_path, model, 2)
    reference = build_model(load_reference(emitted.reference), emitted.probe(), 0, torch.float32)
    whole = torch.compile(reference, fullgraph=True, backend="eager")
    with pytest.raises(Unsupported, match=r"(?i)data-dependent"):
        whole(**inputs_of(emitted.probe(), torch.float32))


def _emit(out: Path, model: str, cp: int, strategies: list[str], **options: Any) -> PackageToVerify:
    for strategy in strategies:
        emitted = emit(out / f"{strategy}-cp{cp}", model, cp, strategy, **options)
    return PackageToVerify(emitted.name, out, emitted.plan, emitted.reference)


def _shallow(probe: Probe) -> Probe:
    """One block of each kind: compiling is slow, and the second is like the first."""
    layers = {name: 1 for name in probe.config if name in ("num_layers", "num_single_layers")}
    return replace(probe, config=probe.config | layers)
