"""Cuts and gathers of a plan that meet: they would be made twice, whatever the source is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cpgen.diagnostics import Finding
from cpgen.plan import Gather, Plan, Shard, as_written


def meeting_entries(plan: Plan) -> Iterator[Finding]:
    """Of the region's cuts, those of what an earlier one cuts at the same place; and likewise of its gathers."""
    yield from _meeting(plan.shards, "cut", plan.begin)
    yield from _meeting(plan.gathers, "gathered", plan.begin)


def _meeting(entries: Sequence[Shard | Gather], done: str, begin: str | None) -> Iterator[Finding]:
    for number, entry in enumerate(entries):
        for earlier in entries[:number]:
            same = entry.variable == earlier.variable and _place(entry, begin) == _place(earlier, begin)
            if same and _meet(entry.path, earlier.path) and not _may_exclude(entry, earlier):
                line = f"line {earlier.location.line}" if earlier.location else "above"
                message = f"{as_written(entry)} is {done} there by '{as_written(earlier)}' already"
                yield Finding("CP105", message, entry.location, note=f"see {line}: one of them would be {done} twice")


def _place(entry: Shard | Gather, begin: str | None) -> tuple[str | None, str | None]:
    before = entry.before if isinstance(entry, Shard) else None
    return entry.after, before if before != begin else None


def _meet(one: tuple[str | int, ...], other: tuple[str | int, ...]) -> bool:
    """Whether some value is at or below both paths. Of [0] and [-1] that depends on a length: taken for two values."""
    return all(a == b or "*" in (a, b) for a, b in zip(one, other, strict=False))


def _may_exclude(one: Shard | Gather, other: Shard | Gather) -> bool:
    conditions = {entry.when for entry in (one, other) if isinstance(entry, Shard)} - {None}
    return len(conditions) == 2
