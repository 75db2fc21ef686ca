"""Which attention call of the source a frame stands at."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from types import FrameType

from cpgen.source import SourceModule
from cpgen.surgery.functions import Function, method


@dataclass(frozen=True)
class Place:
    """An attention call in the source: call `call` of the function `function`, counted from 0."""

    function: Function
    call: int

    @property
    def key(self) -> tuple[str, int]:
        return self.function.owner.name, self.call


def place_in(frame: FrameType, module: SourceModule) -> Place | None:
    """The attention call of `module` that `frame` is in, if it is in a method with one at its line."""
    function = _method_at(module, frame.f_lineno)
    if function is None:
        return None
    calls = [
        (call, Place(function, number))
        for number, call in enumerate(function.attention_calls())
        if call.lineno <= frame.f_lineno <= (call.end_lineno or 0)
    ]
    # Several may stand in one statement: the one that runs ends where the instruction does.
    ends = [place for call, place in calls if (call.end_lineno, call.end_col_offset) == _end_of(frame)]
    return next(iter(ends or [place for _, place in calls]), None)


def _end_of(frame: FrameType) -> tuple[int | None, int | None]:
    """Line and column behind the expression that a frame is in, as far as Python knows."""
    if sys.version_info < (3, 11):
        return None, None  # no columns are kept
    _, line, _, column = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    return line, column


def _method_at(module: SourceModule, line: int) -> Function | None:
    for owner in _classes_at(module, line):
        for name in ("__call__", "forward"):
            function = method(module, owner, name)
            if function is not None and function.node.lineno <= line <= (function.node.end_lineno or 0):
                return function
    return None


def _classes_at(module: SourceModule, line: int) -> Iterator[ast.ClassDef]:
    for node in module.tree.body:
        if isinstance(node, ast.ClassDef) and node.lineno <= line <= (node.end_lineno or 0):
            yield node
