"""What Cosmos does with torchvision, which is to resize a mask ahead of the region: with a stand-in for that.

Where torchvision is installed test_models.py runs the ControlNet with the real one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cpgen.plan import Probe
from cpgen.verify.case import Case
from cpgen.verify.pool import WorkerPool

from .cosmos_cases import run_with_stand_in
from .emitted import Emitted, emit


@pytest.mark.parametrize(("cp", "strategy"), [(2, "allgather"), (4, "ulysses"), (4, "allgather")])
def test_controlnet(tmp_path: Path, pool: WorkerPool, cp: int, strategy: str) -> None:
    emitted = emit(tmp_path, "CosmosControlNetModel", cp, strategy)
    assert emitted.plan.requires == ("torchvision",)
    for probe in emitted.plan.probes:
        passes(pool, emitted, probe, cp, strategy)


@pytest.mark.parametrize(("cp", "strategy"), [(2, "allgather"), (4, "ulysses")])
def test_padding_mask(tmp_path: Path, pool: WorkerPool, cp: int, strategy: str) -> None:
    """Cosmos' transformer has a mask of padding as a channel, unless its config says otherwise, as the probes do."""
    emitted = emit(tmp_path, "CosmosTransformer3DModel", cp, strategy)
    probe = next(probe for probe in emitted.plan.probes if probe.name == "masked-text")
    with_mask = replace(
        probe,
        config={**probe.config, "concat_padding_mask": True},
        inputs={**probe.inputs, "padding_mask": {"shape": [1, 1, 12, 20], "low": 0, "high": 2}},
    )
    passes(pool, emitted, with_mask, cp, strategy)


def passes(pool: WorkerPool, emitted: Emitted, probe: Probe, cp: int, strategy: str) -> None:
    case = Case(emitted.directory, emitted.name, emitted.reference, probe, cp, strategy)
    for report in pool.run(run_with_stand_in, case, world_size=cp):
        assert report.failures == ()
        assert report.forward is not None and report.gradient is not None
