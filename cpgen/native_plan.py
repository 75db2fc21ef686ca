"""A class's own `_cp_plan`, in diffusers' convention, as a `Plan`."""

from __future__ import annotations

from cpgen.diagnostics import fail
from cpgen.plan import Plan
from cpgen.source import SourceTree
from cpgen.target import Target


def has_native_plan(target: Target) -> bool:
    return False


def native_plan(target: Target, tree: SourceTree) -> Plan:
    raise fail("CP110", "not yet")
