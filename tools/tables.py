"""Writes the recorded proofs (plans/proofs.json) as tables into README.md and docs/models.md."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version as installed_version
from pathlib import Path

from packaging.version import Version

from cpgen.plan import Plan
from cpgen.plan_files import read_plan
from cpgen.proofs import Proof, Run, read_proofs
from cpgen.resources import shipped_plans
from tools.prove import SEVEN
from tools.sections import replace_section

ROOT = Path(__file__).parent.parent


def main() -> None:
    plans = [read_plan(path, f"plans/{path.name}") for _, path in sorted(shipped_plans().items())]
    proofs = read_proofs()
    version = installed_version("diffusers")
    replace_section(ROOT / "README.md", "models", summary(plans, proofs, version))
    replace_section(ROOT / "docs/models.md", "models", models_table(plans, proofs, version))
    replace_section(ROOT / "docs/models.md", "versions", versions_table(plans, proofs))


def summary(plans: Sequence[Plan], proofs: Sequence[Proof], version: str) -> str:
    """How many plans are proven on `version` with their worst errors, and the names of all."""
    proven = {plan.model: proof for plan in plans if (proof := _proof(plan, proofs, version)) and proof.passed}
    runs = [run for proof in proven.values() for run in proof.runs]
    worst = Run("", 0, max((r.forward for r in runs), default=0), max((r.gradient for r in runs), default=0), 0)
    lines = [f"{len(proven)} of {len(plans)} plans are proven on diffusers {version}, worst errors {_errors(worst)}:\n"]
    lines.append(", ".join(f"`{plan.model}`" for plan in plans if plan.model in proven) + "\n")
    missing = [f"`{plan.model}`" for plan in plans if plan.model not in proven]
    if missing:
        reason = "Not recorded yet, or changed since; the tests run these, too, where what they require is installed"
        lines.append(f"\n{reason}: {', '.join(missing)}\n")
    return "".join(lines)


def models_table(plans: Sequence[Plan], proofs: Sequence[Proof], version: str) -> str:
    """Plans as rows: the worst errors under each strategy, at each degree."""
    found = {plan.model: _proof(plan, proofs, version) for plan in plans}
    columns = sorted({(run.strategy, run.cp) for proof in found.values() if proof for run in proof.runs})
    rows = [["model", "plan", "probes", *(f"{strategy}, cp {cp}" for strategy, cp in columns)]]
    for plan in plans:
        proof = found[plan.model]
        runs = {(run.strategy, run.cp): run for run in proof.runs} if proof else {}
        cells = [_cell(proof, runs.get(column)) for column in columns]
        name = plan.name.removeprefix("plans/")
        rows.append([f"`{plan.model}`", f"[{name}](../plans/{name})", str(len(plan.probes)), *cells])
    return _table(rows)


def versions_table(plans: Sequence[Plan], proofs: Sequence[Proof]) -> str:
    """The plans of SEVEN as rows, versions of diffusers as columns; then what failed."""
    chosen = [plan for plan in plans if plan.model in SEVEN]
    versions = sorted({proof.diffusers for proof in proofs if proof.model in SEVEN}, key=Version)
    rows = [["model", "range of its plan", *versions]]
    errors = []
    for plan in chosen:
        found = [_proof(plan, proofs, version) for version in versions]
        cells = [_cell(proof, _worst(proof) if proof else None) for proof in found]
        rows.append([f"`{plan.model}`", f"`{plan.diffusers}`", *cells])
        errors += [
            f"- `{plan.model}` on {proof.diffusers}: {proof.error}\n" for proof in found if proof and proof.error
        ]
    return _table(rows) + ("\n" + "".join(errors) if errors else "")


def _proof(plan: Plan, proofs: Sequence[Proof], version: str) -> Proof | None:
    return next((proof for proof in proofs if proof.diffusers == version and proof.is_of(plan)), None)


def _worst(proof: Proof) -> Run | None:
    if not proof.runs:
        return None
    runs = proof.runs
    failed = sum(run.failed for run in runs)
    return Run("", 0, max(run.forward for run in runs), max(run.gradient for run in runs), failed)


def _cell(proof: Proof | None, run: Run | None) -> str:
    if proof is None:
        return "not run"
    if run is None:
        return "does not fit"
    return f"{run.failed} failed" if run.failed else _errors(run)


def _errors(run: Run) -> str:
    return " / ".join("0" if value == 0 else f"{value:.1e}" for value in (run.forward, run.gradient))


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main()
