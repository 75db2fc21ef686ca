"""Runs every probe of every package at each degree and strategy, and gives one result for each."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cpgen.diagnostics import did_you_mean
from cpgen.plan import Plan, Probe
from cpgen.verify.case import MODES, Case, RankReport, Reference, run_case, worst
from cpgen.verify.pool import WorkerError, WorkerPool

OnProgress = Callable[[int, int, "Result"], None]  # cases done, of how many, the latest result


@dataclass(frozen=True)
class PackageToVerify:
    """A package, emitted once for each degree and strategy: see `variant`."""

    name: str
    directory: Path
    plan: Plan
    reference: Reference
    tp: int = 1

    def variant(self, cp: int, strategy: str) -> Path:
        """The directory to emit into, with `--out`, for `cp` and `strategy`."""
        return self.directory / f"{strategy}-cp{cp}"


@dataclass(frozen=True)
class Result:
    """What came of one (probe, cp, strategy). `skipped` says why a probe does not apply; that is no failure.

    `forward_max_abs`, `reference_max_abs` and `grad_max_rel` belong to the worst output (max|out - ref| to max|ref|)
    and the worst gradient over all modes and ranks; None where nothing was measured. `output` and `gradient` name them.
    """

    model: str
    package: str
    probe: str
    cp: int
    strategy: str
    forward_max_abs: float | None
    reference_max_abs: float | None
    grad_max_rel: float | None
    ok: bool
    error: str | None
    seconds: float
    output: str | None = None
    gradient: str | None = None
    gradient_dtype: str = "float32"  # "float64" where rounding in float32 left a doubt: see RankReport
    tp: int = 1
    skipped: str | None = None
    checkpointed: bool | None = None  # whether a mode ran with gradient checkpointing; None where nothing ran


def verify(
    packages: Sequence[PackageToVerify],
    cps: Sequence[int],
    strategies: Sequence[str],
    *,
    pool: WorkerPool,
    on_progress: OnProgress | None = None,
    probes: Sequence[str] | None = None,
    modes: tuple[str, ...] = MODES,
) -> list[Result]:
    """Verify `packages`: a result for each (package, probe, cp, strategy), by package; nothing is left out.

    What can't run (more ranks than heads under ulysses, a package that doesn't import, a class whose requirements are
    not installed) is a result with `error`, as is a package without probes. Probes that tensor parallelism rules out
    are results with `skipped`, and an error where that leaves a package without any. `probes` limits the run to these
    names.
    Raises ValueError for a name that no package's plan has.
    """
    _check_names(packages, probes)
    wanted = [
        (index, probe, cp, strategy)
        # The degree outermost: the pool joins a new group when it changes.
        for cp in cps
        for index, package in enumerate(packages)
        for probe in _probes(package.plan, probes)
        for strategy in strategies
    ]
    results: list[list[Result]] = [[] for _ in packages]
    for done, (index, probe, cp, strategy) in enumerate(wanted, start=1):
        result = _verify_one(packages[index], probe, cp, strategy, pool, modes)
        results[index].append(result)
        if on_progress is not None:
            on_progress(done, len(wanted), result)
    return [result for of_package in results for result in _with_something_verified(of_package)]


def _with_something_verified(results: list[Result]) -> list[Result]:
    """`results`, but as failures if all were skipped: then nothing is proven."""
    if not all(result.skipped for result in results):
        return results
    return [replace(r, ok=False, error=f"{r.skipped}: no probe is left, so nothing was verified") for r in results]


def _check_names(packages: Sequence[PackageToVerify], probes: Sequence[str] | None) -> None:
    known = {probe.name for package in packages for probe in package.plan.probes}
    for name in probes or ():
        if name not in known:
            hint = did_you_mean(name, known) or f"probes: {', '.join(sorted(known)) or 'none'}"
            raise ValueError(f"no plan has a probe named {name!r}; {hint}")


def _probes(plan: Plan, names: Sequence[str] | None) -> Iterator[Probe | None]:
    """The probes to run; None stands for a plan that has none."""
    if not plan.probes:
        yield None
    yield from (probe for probe in plan.probes if names is None or probe.name in names)


def _verify_one(
    package: PackageToVerify, probe: Probe | None, cp: int, strategy: str, pool: WorkerPool, modes: tuple[str, ...]
) -> Result:
    start = time.monotonic()
    reports: list[RankReport] = []
    directory = package.variant(cp, strategy)
    skipped = probe and _inapplicable(package, probe)
    missing = [name for name in package.plan.requires if importlib.util.find_spec(name) is None]
    if missing:
        error: str | None = f"{package.plan.model} needs {', '.join(missing)}, not installed here: nothing was verified"
    elif probe is None:
        error = "the plan has no probes, so nothing was verified"
    elif skipped:
        error = None
    elif not (directory / package.name).is_dir():
        error = f"no package was emitted in {directory}"
    else:
        case = Case(str(directory), package.name, package.reference, probe, cp, strategy, modes, tp=package.tp)
        try:
            reports = pool.run(run_case, case, world_size=case.ranks)
            error = _failures(reports)
        except WorkerError as failure:
            error = _cause(failure)
        except ValueError as failure:  # more ranks than the pool has
            error = str(failure)
    forward = worst(report.forward for report in reports if report.forward)
    gradient = worst(report.gradient for report in reports if report.gradient)
    return Result(
        model=package.plan.model,
        package=package.name,
        probe=probe.name if probe else "",
        cp=cp,
        strategy=strategy,
        forward_max_abs=forward.difference if forward else None,
        reference_max_abs=forward.scale if forward else None,
        grad_max_rel=gradient.relative if gradient else None,
        ok=error is None,
        error=error,
        seconds=time.monotonic() - start,
        output=forward.name if forward else None,
        gradient=gradient.name if gradient else None,
        gradient_dtype=reports[0].gradient_dtype if reports else "float32",
        tp=package.tp,
        skipped=skipped or None,
        checkpointed=any(report.checkpointed for report in reports) if reports else None,
    )


def _inapplicable(package: PackageToVerify, probe: Probe) -> str | None:
    """Why `probe` does not apply to a package of this tensor-parallel degree, or None."""
    if package.tp == 1:
        return None
    for method in probe.before:
        if method.startswith("fuse"):
            return f"{method} makes one weight of several, which tensor parallelism refuses"
    heads = probe.config.get(package.plan.heads) if package.plan.heads else None
    if isinstance(heads, int) and heads % package.tp:
        return f"its {heads} heads do not divide by {package.tp}"
    return None


def _failures(reports: list[RankReport]) -> str | None:
    """One line a failure, as the lowest rank saw it: the same fault has other numbers on other ranks."""
    return _by_rank({report.rank: "\n".join(report.failures) for report in reports if report.failures})


def _cause(failure: WorkerError) -> str | None:
    """What went wrong first: where one rank raises, the others only report that it left their collective."""
    causes = {
        rank: message if kind in ("CaseError", "ProbeError") else f"{kind}: {message}"
        for rank, (kind, message, _) in failure.failures.items()
    }
    own = {rank: text for rank, text in causes.items() if not _is_echo(text)}
    return _by_rank(own or causes)


def _is_echo(text: str) -> bool:
    return any(word in text for word in ("Connection closed by peer", "Connection reset by peer", "Timed out waiting"))


def _by_rank(texts: dict[int, str]) -> str | None:
    if not texts:
        return None
    rank, text = min(texts.items())
    others = ", ".join(str(other) for other in sorted(texts) if other != rank)
    return f"rank {rank}{f' (and {others})' if others else ''}: {text}"
