"""Cosmos' ControlNet, whose only use of torchvision is to resize a mask ahead of the region: with a stand-in for that.

Where torchvision is installed test_models.py runs it with the real one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from cpgen.verify.case import Case
from cpgen.verify.pool import WorkerPool

from .cosmos_controlnet_cases import run_with_stand_in
from .emitted import emit


@pytest.mark.parametrize(("cp", "strategy"), [(2, "allgather"), (4, "ulysses"), (4, "allgather")])
def test_probes(tmp_path: Path, pool: WorkerPool, cp: int, strategy: str) -> None:
    emitted = emit(tmp_path, "CosmosControlNetModel", cp, strategy)
    assert emitted.plan.requires == ("torchvision",)
    for probe in emitted.plan.probes:
        case = Case(emitted.directory, emitted.name, emitted.reference, probe, cp, strategy)
        for report in pool.run(run_with_stand_in, case, world_size=cp):
            assert report.failures == ()
            assert report.forward is not None and report.gradient is not None
