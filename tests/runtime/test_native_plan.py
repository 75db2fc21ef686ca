"""Classes emitted from their own `_cp_plan`, as a third party's class would be: the numbers are right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cpgen.diagnostics import CpgenError
from cpgen.package import find_plan
from cpgen.plan import Probe
from cpgen.source import SourceTree
from cpgen.strategy import STRATEGIES
from cpgen.target import find_target
from cpgen.verify.pool import WorkerPool
from cpgen.verify.run import PackageToVerify, verify

from .emitted import emit
from .third_party import HIDDEN, write

PROBES = {
    "WanTransformer3DModel": ["text-to-video", "image-to-video", "timestep-per-token", "one-block"],
    "FluxTransformer2DModel": ["joint", "one-block-each", "fused-projections"],
    "QwenImageTransformer2DModel": ["text-to-image", "edit-without-mask", "layered"],
    "LTXVideoTransformer3DModel": ["no-mask"],  # its plan cuts text, so cross-attention is exchanged as well
}


@pytest.mark.parametrize("model", sorted(PROBES))
def test_numbers(tmp_path: Path, pool: WorkerPool, model: str) -> None:
    tree = SourceTree()
    shipped = find_target(model, tree)
    spec = f"{shipped.module.path}:{model}"  # by its file: then the shipped plan is not looked for
    probes = find_plan(shipped, None, tree).probes
    probes += tuple(
        replace(
            probe,
            name=f"{probe.name}-without-mask",
            inputs=probe.inputs | {"encoder_hidden_states_mask": {"value": None}},
        )
        for probe in probes
        if "encoder_hidden_states_mask" in probe.inputs
    )
    for strategy in STRATEGIES:
        emitted = emit(tmp_path / f"{strategy}-cp2", spec, 2, strategy)
    assert emitted.plan.name.endswith("(_cp_plan)")
    plan = replace(emitted.plan, probes=tuple(probe for probe in probes if probe.name in PROBES[model]))
    assert len(plan.probes) == len(PROBES[model])
    package = PackageToVerify(emitted.name, tmp_path, plan, emitted.reference)
    results = verify([package], [2], STRATEGIES, pool=pool)
    assert [f"{result.probe} {result.strategy}: {result.error}" for result in results if not result.ok] == []


@pytest.mark.parametrize(
    ("model", "probe", "expected"),
    [
        # Upstream's plans cut the mask as well, and masks built from local lengths are refused, not used.
        ("QwenImageTransformer2DModel", "masked-text", "a mask must be built from global lengths"),
        ("LTXVideoTransformer3DModel", "masked-text", "a mask must be built from global lengths"),
    ],
)
def test_what_a_class_own_plan_gets_wrong_is_an_error(
    tmp_path: Path, pool: WorkerPool, model: str, probe: str, expected: str
) -> None:
    tree = SourceTree()
    shipped = find_target(model, tree)
    emitted = emit(tmp_path / "ulysses-cp2", f"{shipped.module.path}:{model}", 2)
    probes = tuple(each for each in find_plan(shipped, None, tree).probes if each.name == probe)
    package = PackageToVerify(emitted.name, tmp_path, replace(emitted.plan, probes=probes), emitted.reference)
    (result,) = verify([package], [2], ["ulysses"], pool=pool)
    assert expected in (result.error or "")


def test_verify_needs_probes(tmp_path: Path, pool: WorkerPool) -> None:
    shipped = find_target("WanTransformer3DModel", SourceTree())
    emitted = emit(tmp_path / "ulysses-cp2", f"{shipped.module.path}:WanTransformer3DModel", 2)
    package = PackageToVerify(emitted.name, tmp_path, emitted.plan, emitted.reference)
    (result,) = verify([package], [2], ["ulysses"], pool=pool)
    assert not result.ok
    assert "no probes" in (result.error or "")


@pytest.mark.parametrize("how", HIDDEN)
def test_attention_that_is_not_seen_is_an_error(tmp_path: Path, how: str) -> None:
    path = write(tmp_path, *HIDDEN[how])
    with pytest.raises(CpgenError) as caught:
        emit(tmp_path, f"{path}:Model", 2)
    assert {finding.code for finding in caught.value.findings} <= {"CP111", "CP501"}


def test_a_third_party_class_without_any_config(tmp_path: Path, pool: WorkerPool) -> None:
    path = write(tmp_path)
    probe = Probe("odd", {}, {"x": {"shape": [2, 9, 8]}})
    emitted = emit(tmp_path / "ulysses-cp2", f"{path}:Model", 2)
    package = PackageToVerify(emitted.name, tmp_path, replace(emitted.plan, probes=(probe,)), emitted.reference)
    (result,) = verify([package], [2], ["ulysses"], pool=pool)
    assert result.error is None


def test_a_forward_in_which_nothing_is_exchanged_is_an_error(tmp_path: Path, pool: WorkerPool) -> None:
    """As where attention moved into a module that the source does not show."""
    path = write(tmp_path)
    emitted = emit(tmp_path / "ulysses-cp2", f"{path}:Model", 2)
    file = tmp_path / "ulysses-cp2" / emitted.name / "third.py"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if "_heads" not in line and "heads_to" not in line))
    probe = Probe("odd", {}, {"x": {"shape": [2, 9, 8]}})
    package = PackageToVerify(emitted.name, tmp_path, replace(emitted.plan, probes=(probe,)), emitted.reference)
    (result,) = verify([package], [2], ["ulysses"], pool=pool)
    assert "no attention call exchanged tokens in this forward" in (result.error or "")
