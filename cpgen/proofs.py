"""What was proven: for a plan and a version of diffusers, what `cpgen verify` gave. Kept in plans/proofs.json.

Only `make table` and `make versions` write that file (tools/prove.py), from results. A proof belongs to what a plan
says of the source: it no longer counts when that changes, or when a probe comes or changes that it has not seen.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from cpgen import resources
from cpgen.plan import Plan


@dataclass(frozen=True)
class Run:
    """All probes of a plan under one strategy at one degree.

    `forward` is the worst max|out - ref| / max|ref|, `gradient` the worst ||g - ref|| / ||ref||.
    """

    strategy: str
    cp: int
    forward: float
    gradient: float
    failed: int  # probes


@dataclass(frozen=True)
class Proof:
    """One plan on one version of diffusers. `error` says why nothing ran, or what failed first; None: all passed."""

    model: str
    diffusers: str
    plan: str  # Plan.meaning of what was verified
    probes: dict[str, str]  # name -> Probe.meaning of each that was run
    runs: tuple[Run, ...]
    error: str | None = None

    @property
    def passed(self) -> bool:
        return self.error is None and bool(self.runs) and bool(self.probes)

    def is_of(self, plan: Plan) -> bool:
        """Whether it is about what this plan says now on its version."""
        plan = plan.on(self.diffusers)
        return (self.model, self.plan) == (plan.model, plan.meaning) and of_probes(plan).items() <= self.probes.items()


def of_probes(plan: Plan) -> dict[str, str]:
    """What a proof says of the probes that this plan has."""
    return {probe.name: probe.meaning for probe in plan.probes}


def proofs_file() -> Path:
    return resources.folder("plans") / "proofs.json"


def read_proofs() -> list[Proof]:
    """The proofs that come with cpgen."""
    path = proofs_file()
    rows = json.loads(path.read_text("utf-8")) if path.is_file() else []
    return [Proof(**{**row, "runs": tuple(Run(*run) for run in row["runs"])}) for row in rows]


def write_proofs(proofs: Iterable[Proof]) -> None:
    """Replace the file: a line a proof, by model and version."""
    ordered = sorted(proofs, key=lambda proof: (proof.model, Version(proof.diffusers)))
    lines = [json.dumps({**vars(proof), "runs": [list(vars(run).values()) for run in proof.runs]}) for proof in ordered]
    proofs_file().write_text("[\n" + ",\n".join(lines) + "\n]\n", "utf-8")


def last_proven(plan: Plan, proofs: Iterable[Proof]) -> str | None:
    """The newest version of diffusers on which all probes of `plan`, as it stands, passed; None if there is none."""
    versions = [proof.diffusers for proof in proofs if proof.passed and proof.is_of(plan)]
    return max(versions, key=Version, default=None)
