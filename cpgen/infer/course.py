"""The course of a model's forward, from its source: the loops over its blocks, ahead of them, and behind them."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cached_property

from cpgen.diagnostics import fail
from cpgen.surgery.functions import Function, method
from cpgen.target import Target


@dataclass(frozen=True)
class Course:
    """`lists` are the module lists whose blocks attend, in the order of forward's loops over them."""

    forward: Function
    lists: tuple[str, ...]

    @cached_property
    def begin(self) -> ast.stmt:
        """The statement of forward that holds the first loop over blocks."""
        return self.forward.top_statement_of(self.forward.loops_over(self.lists[0])[0])

    @cached_property
    def end_line(self) -> int:
        """The last line of the statements that hold loops over blocks."""
        loops = [loop for name in self.lists for loop in self.forward.loops_over(name)]
        return max(self.forward.top_statement_of(loop).end_lineno or 0 for loop in loops)

    @property
    def last_list(self) -> str:
        """The list of the last loop over blocks."""
        return max(self.lists, key=lambda name: self.forward.loops_over(name)[-1].lineno)

    @cached_property
    def read(self) -> frozenset[str]:
        """The variables that forward reads once the region has begun."""
        return self.read_from(self.begin.lineno)

    def read_from(self, line: int) -> frozenset[str]:
        return frozenset(
            node.id
            for node in ast.walk(self.forward.node)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.lineno >= line
        )


def forward_of(target: Target) -> Function:
    """The class's own forward. Raises CpgenError if it has none."""
    forward = method(target.module, target.node, "forward")
    if forward is None:
        place = target.module.location(target.node)
        raise fail("CP504", f"{target.class_name} defines no forward of its own", place, note="it inherits it")
    return forward


def course_of(forward: Function, attending: tuple[str, ...]) -> Course:
    """`attending` are the attributes of the model that hold blocks in which attention was seen.

    Raises CpgenError if forward loops over none of them.
    """
    loops = {name: forward.loops_over(name) for name in attending}
    lists = sorted((name for name in loops if loops[name]), key=lambda name: loops[name][0].lineno)
    if not lists:
        raise fail(
            "CP601",
            f"{forward.owner.name}.forward loops over no module list whose blocks attend",
            forward.module.location(forward.node),
            note=f"lists with attention: {', '.join(attending) or 'none'}",
            help="the region of a plan begins ahead of such a loop: write the plan by hand (docs/plans.md)",
        )
    return Course(forward, tuple(lists))
