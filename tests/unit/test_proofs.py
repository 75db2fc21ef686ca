"""The record of what was proven, and that plans claim nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from cpgen import proofs, resources
from cpgen.plan import Plan
from cpgen.plan_files import read_plan
from cpgen.plan_loader import load_plan
from cpgen.proofs import Proof, Run, last_proven, of_probes, read_proofs, write_proofs
from cpgen.source import SourceTree, diffusers_version
from tests.unit.projects import REPOSITORY, plan_text

PROBES = "probes: [{name: one, config: {}, inputs: {hidden_states: {shape: [1, 8, 4]}}}]\n"
PLAN = load_plan(plan_text() + PROBES, "made.yaml")
PROOF = Proof("Model", "0.41.0", PLAN.meaning, of_probes(PLAN), (Run("ulysses", 2, 0.0, 1.2e-06, 0),))
SHIPPED = [read_plan(path, f"plans/{path.name}") for path in resources.shipped_plans().values()]
RECORDED = read_proofs()
INSTALLED = diffusers_version(SourceTree())


def test_newest_version_that_passed() -> None:
    newer = replace(PROOF, diffusers="0.100.0")
    assert last_proven(PLAN, [newer, PROOF]) == "0.100.0"
    assert last_proven(PLAN, [PROOF, replace(newer, error="one, cp 2, ulysses: output differs")]) == "0.41.0"
    assert last_proven(PLAN, [replace(PROOF, runs=())]) is None
    assert last_proven(PLAN, [replace(PROOF, model="Other")]) is None
    assert last_proven(PLAN, []) is None


@pytest.mark.parametrize(
    ("text", "still"),
    [
        (plan_text() + "# a comment\n" + PROBES, True),
        (plan_text() + 'diffusers: "<0.43"\n' + PROBES, True),
        (plan_text() + PROBES.replace("8", "9"), False),
        (plan_text() + PROBES.replace("one", "two"), False),
        (plan_text().replace("dim: 1", "dim: 0") + PROBES, False),
        (plan_text().replace("kind: self", "kind: causal") + PROBES, False),
    ],
)
def test_proof_belongs_to_what_the_plan_says(text: str, still: bool) -> None:
    assert PROOF.is_of(load_plan(text, "made.yaml")) == still


def test_file_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "proofs_file", lambda: tmp_path / "proofs.json")
    assert read_proofs() == []
    failed = replace(PROOF, diffusers="0.9.0", runs=(), error="error[CP104]: no such loop (made.yaml:4:5)")
    write_proofs([PROOF, failed])
    assert read_proofs() == [failed, PROOF]
    assert len((tmp_path / "proofs.json").read_text().splitlines()) == 4


def test_recorded_proofs_are_of_shipped_plans() -> None:
    text = proofs.proofs_file().read_text()
    assert len({(row["model"], row["diffusers"]) for row in json.loads(text)}) == len(RECORDED)
    assert {proof.model for proof in RECORDED} <= {plan.model for plan in SHIPPED}


@pytest.mark.parametrize("plan", SHIPPED, ids=lambda plan: plan.model)
def test_range_of_a_plan_is_proven(plan: Plan) -> None:
    """Other versions than the installed one, on which the tests run the plan, need a recorded proof."""
    assert plan.diffusers is not None
    claimed = SpecifierSet(plan.diffusers)
    assert INSTALLED in claimed
    versions = sorted({proof.diffusers for proof in RECORDED} | {INSTALLED}, key=Version)
    for outside in (_minor(versions[0], -1), _minor(versions[-1], 1)):
        assert outside not in claimed, f"{plan.name}: nothing was run on {outside}"
    for version in versions:
        passed = any(p.passed and p.is_of(plan) for p in RECORDED if p.diffusers == version)
        if version != INSTALLED and version in claimed:
            assert passed, f"{plan.name} claims {version}, which is not proven: run make versions, or narrow the range"


def test_cpgen_asks_for_the_versions_that_its_plans_have() -> None:
    (asked,) = re.findall(r'^    "diffusers(.*?)"', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    versions = {proof.diffusers for proof in RECORDED} | {INSTALLED, "0.1.0", "99.0.0"}
    of_plans = {v for v in versions if any(v in SpecifierSet(plan.diffusers or "") for plan in SHIPPED)}
    assert {v for v in versions if v in SpecifierSet(asked)} == of_plans


def _minor(version: str, step: int) -> str:
    parsed = Version(version)
    return f"{parsed.major}.{parsed.minor + step}.0"
