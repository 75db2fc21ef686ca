"""Where a stream can be put together again: behind which statements a variable still has one row a token."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from cpgen.infer.course import Course
from cpgen.infer.effects import View
from cpgen.infer.streams import Streams
from cpgen.infer.watch import RETURNED, Record, Snapshot


@dataclass(frozen=True)
class Exit:
    """A possible gather: `variable` (each tensor in it) behind its call of module `after`, or behind the loops over the
    module list `after`, or behind its last assignment.

    `operations` and `calls` are how many had run by then.
    """

    variable: str
    path: tuple[str | int, ...]
    after: str | None
    dim: int
    ndim: int
    stream: int
    operations: int
    calls: int
    line: int
    returned: bool  # forward returns it as it is
    name: str = ""

    def named(self, names: Mapping[int, str]) -> Exit:
        return replace(self, name=names[self.stream])

    @property
    def key(self) -> tuple[str, tuple[str | int, ...], str | None, int, int, str]:
        """What it is in a plan, where elements of a list are alike."""
        path = tuple("*" if isinstance(step, int) else step for step in self.path)
        return self.variable, path, self.after, self.dim, self.ndim, self.name


def exits_of(base: Record, course: Course, streams: Streams, cut: frozenset[int]) -> tuple[Exit, ...]:
    """All possible gathers, in the order in which they would run."""
    found = []
    returned = _returned(base)
    for number, snapshot in enumerate(base.snapshots):
        for leaf, tensor in snapshot.tensors.items():
            if leaf.variable in (RETURNED, "self") or course.forward.last_assignment(leaf.variable) is None:
                continue
            for dim, size in enumerate(tensor.shape):
                order = streams.of(View(leaf, number, dim, size))
                if order is None or len(order) != 1 or order[0] not in cut or size == 1:
                    continue
                place = _place(leaf.variable, number, snapshot, base, course)
                if place is not None:
                    after, line = place
                    found.append(
                        Exit(
                            leaf.variable,
                            leaf.path,
                            after,
                            dim,
                            tensor.ndim,
                            order[0],
                            snapshot.operations,
                            snapshot.calls,
                            line,
                            any(tensor.shape == each.shape and torch.equal(tensor, each) for each in returned),
                        )
                    )
    return tuple(found)


def _returned(base: Record) -> list[torch.Tensor]:
    return [
        tensor for snapshot in base.snapshots for leaf, tensor in snapshot.tensors.items() if leaf.variable == RETURNED
    ]


def _place(
    variable: str, number: int, snapshot: Snapshot, base: Record, course: Course
) -> tuple[str | None, int] | None:
    """The module whose call's result the variable is, or the list whose loop assigned it, or None for its last
    assignment; and a line. None: no place."""
    forward = course.forward
    statement = next(
        (
            node
            for node in ast.walk(forward.node)
            if isinstance(node, ast.Assign) and node.lineno <= snapshot.after <= (node.end_lineno or 0)
        ),
        None,
    )
    if statement is not None and _called(statement) and variable in _targets(statement):
        return _called(statement), statement.lineno
    last = forward.last_assignment(variable)
    if last is None or last.lineno < course.begin.lineno:
        return None
    changes_later = any(leaf.variable == variable for later in base.snapshots[number + 1 :] for leaf in later.tensors)
    if not changes_later:
        return None, last.lineno
    if number == 0 and any(
        course.begin.lineno <= each.lineno <= course.end_line for each in forward.assignments_of(variable)
    ):
        return course.last_list, course.end_line
    return None


def _called(statement: ast.Assign) -> str | None:
    call = statement.value
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return None
    owner = call.func.value
    return call.func.attr if isinstance(owner, ast.Name) and owner.id == "self" else None


def _targets(statement: ast.Assign) -> set[str]:
    return {node.id for target in statement.targets for node in ast.walk(target) if isinstance(node, ast.Name)}
