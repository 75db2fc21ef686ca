"""Whether the installed diffusers is one that a plan was proven on, and if not, what the plan misses in it."""

from __future__ import annotations

from cpgen.diagnostics import CpgenError, Finding
from cpgen.plan import Plan, in_range
from cpgen.source import SourceTree, diffusers_version
from cpgen.strategy import EXCHANGES
from cpgen.surgery.operate import operate
from cpgen.target import Target


def check_version(target: Target, plan: Plan, tree: SourceTree) -> None:
    """Raise CpgenError if the installed diffusers is outside the plan's range.

    Its findings are the range, then all that the plan names and this version's source does not have.
    """
    version = diffusers_version(tree)
    if plan.diffusers is None or in_range(version, plan.diffusers):
        return
    misfits = _misfits(target, plan, tree)
    note = f"{plan.name} does not fit this version, see below" if misfits else "all that it names is in this version"
    message = f"{plan.name} is proven on diffusers {plan.diffusers}, but {version} is installed"
    help_ = "install a version in that range, or copy the plan, widen its range, and run cpgen verify"
    raise CpgenError([Finding("CP106", message, plan.diffusers_location, note=note, help=help_), *misfits])


def _misfits(target: Target, plan: Plan, tree: SourceTree) -> tuple[Finding, ...]:
    try:
        for exchange in EXCHANGES:
            operate(target, plan, exchange, "cpgen.runtime", tree)
    except CpgenError as error:
        return error.findings
    return ()
