"""One case of `verify`: a model, a probe, a degree and a strategy; and what a rank found out about it.

Nothing here imports torch, so that the process that hands out cases and prints results starts quickly.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cpgen.plan import Probe
from cpgen.target import Target

UNBOUND, NONE, FSDP, DDP = "unbound", "none", "fsdp", "ddp"
MODES = (UNBOUND, NONE, FSDP)  # what a case runs unless told otherwise
TOLERANCE = 1e-5  # of the largest output value, and of a gradient's norm: DESIGN, "How it is proven"


@dataclass(frozen=True)
class Reference:
    """Where the unmodified class is: `source` is a module's dotted name, or a path to a .py file."""

    source: str
    class_name: str


def reference_of(target: Target) -> Reference:
    """The unmodified class of `target`."""
    if target.kind == "file":
        return Reference(str(target.module.path.resolve()), target.class_name)
    return Reference(target.module.name, target.class_name)


@dataclass(frozen=True)
class Case:
    """`package` in `directory` was emitted for `cp`, `strategy` and `tp`; it must compute what `reference` computes.

    `modes` are run one after the other: "unbound" is the class as imported, the others are values of
    `parallelize(data_parallel=...)`. "fsdp" and "ddp" run with gradient checkpointing where the class supports it.
    """

    directory: str
    package: str
    reference: Reference
    probe: Probe
    cp: int
    strategy: str
    modes: tuple[str, ...] = MODES
    seed: int = 0
    tp: int = 1

    @property
    def ranks(self) -> int:
        return self.cp * self.tp


@dataclass(frozen=True)
class Deviation:
    """How far one tensor is from the reference's. `difference` <= TOLERANCE * `scale` is right.

    For an output these are max|out - ref| and max|ref|, for a gradient ||g - ref|| and max(||ref||, floor).
    """

    name: str
    difference: float
    scale: float

    @property
    def relative(self) -> float:
        # A comparison with nothing: any difference at all is too much.
        return self.difference / self.scale if self.scale else float("inf") if self.difference else 0.0

    @property
    def badness(self) -> float:
        """`relative`, to compare by: NaN is worst."""
        return self.relative if self.relative == self.relative else float("inf")

    @property
    def ok(self) -> bool:
        return self.relative <= TOLERANCE  # false for NaN

    def accepted(self, exact: bool) -> bool:
        return self.difference == 0 if exact else self.ok


def worst(deviations: Iterable[Deviation]) -> Deviation | None:
    """The one that is furthest from its reference; None of none."""
    return max(deviations, key=lambda deviation: deviation.badness, default=None)


@dataclass(frozen=True)
class RankReport:
    """What one rank measured: its worst output and gradient over all modes, and a sentence for each failure.

    `gradient_dtype` is "float64" where gradients were above the tolerance in float32 by what could be rounding: then
    everything was run again in float64, under the same tolerance, and that run decided on those gradients.
    `checkpointed` says whether a mode ran with gradient checkpointing.
    """

    rank: int
    forward: Deviation | None
    gradient: Deviation | None
    failures: tuple[str, ...]
    gradient_dtype: str = "float32"
    checkpointed: bool = False


class CaseError(RuntimeError):
    """A case could not be run to its end: the message says in which mode, and why."""


class ProbeError(CaseError):
    """The reference itself fails on the probe, or gives values that prove nothing."""


def run_case(case: Case) -> RankReport:
    """Run `case` on this rank of an initialised gloo group of exactly `case.ranks` ranks, in a pool's worker.

    Raises ProbeError if the reference can't run the probe, CaseError if the generated package raises.
    """
    from cpgen.verify.execute import execute

    return execute(case)
