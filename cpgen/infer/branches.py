"""Branches on a size, or on whether the model is in training, of which no probe took one side: what no proof covers."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from cpgen.diagnostics import Finding
from cpgen.infer.inference import class_of
from cpgen.plan import Plan
from cpgen.probes import build_inputs
from cpgen.source import SourceModule
from cpgen.surgery.functions import Function, method
from cpgen.target import Target
from cpgen.verify.models import build_model, randomise
from cpgen.verify.quiet import quietly

Place = tuple[int, int]  # line, column
Step = tuple[Place, Place]  # what ran, and what ran next in the same frame

_SIZES = ("shape", "size", "numel")
_SEED = 0


def untaken_branches(target: Target, plan: Plan) -> list[Finding]:
    """Those in the model's own file, from the region's begin on, that the plan's probes don't take.

    A side that only raises is left aside: ranks would raise as well.
    """
    forward = method(target.module, target.node, "forward")
    loops = forward.loops_over(plan.begin) if forward is not None and plan.begin else []
    if forward is None or not loops:
        return []
    steps: set[Step] = set()
    begin = forward.top_statement_of(loops[0]).lineno
    for probe in plan.probes:
        with quietly(), torch.no_grad():
            model = build_model(class_of(target), probe, _SEED, torch.float32)
            randomise(model, _SEED)
            inputs = build_inputs(probe, _SEED)
            before = sys.gettrace()
            sys.settrace(_Tracer(forward, begin, steps).on_call)
            try:
                model(**inputs)
            finally:
                sys.settrace(before)
    return list(_untaken(target.module, steps))


class _Tracer:
    """Notes `steps` in the functions of forward's file, once forward has come to line `begin`."""

    def __init__(self, forward: Function, begin: int, steps: set[Step]) -> None:
        self._forward = forward
        self._begin = begin
        self._steps = steps
        self._began = False
        self._last: dict[FrameType, Place] = {}
        self._file = forward.module.path.resolve()

    def on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not _is_file(frame.f_code.co_filename, self._file):
            return None
        first, last = self._forward.node.lineno, self._forward.node.end_lineno or 0
        if self._began or (frame.f_code.co_name == "forward" and first <= frame.f_lineno <= last):
            frame.f_trace_opcodes = True
            return self._on_opcode
        return None

    def _on_opcode(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "return":
            self._last.pop(frame, None)
        place = _places(frame.f_code)[frame.f_lasti // 2] if event == "opcode" else None
        if place is not None:
            self._began = self._began or place[0] >= self._begin
            if self._began and frame in self._last:
                self._steps.add((self._last[frame], place))
            self._last[frame] = place
        return self._on_opcode


@cache
def _is_file(name: str, file: Path) -> bool:
    return Path(name).resolve() == file


@cache
def _places(code: CodeType) -> Sequence[Place | None]:
    """Where the expression of each instruction begins."""
    return [None if line is None or column is None else (line, column) for line, _, column, _ in code.co_positions()]


def _untaken(module: SourceModule, steps: set[Step]) -> Iterator[Finding]:
    for function in (node for node in ast.walk(module.tree) if isinstance(node, ast.FunctionDef)):
        sizes = _sizes(function)
        for node in ast.walk(function):
            if not isinstance(node, (ast.If, ast.IfExp)):
                continue
            what = _decided_by(node.test, sizes)
            out = [after for before, after in steps if _within(before, [node.test]) and not _within(after, [node.test])]
            body, orelse = (side if isinstance(side, list) else [side] for side in (node.body, node.orelse))
            taken = {_within(after, body) for after in out}
            missing = [side for side, was in ((body, True), (orelse, False)) if taken and was not in taken]
            if what and any(not _raises(side) for side in missing):
                yield Finding(
                    "CP607",
                    f"no probe takes the other side of a branch on {what}",
                    module.location(node.test),
                    help="if it matters, add a probe that does: the plan is not proven there",
                )


def _sizes(function: ast.FunctionDef) -> frozenset[str]:
    """The variables that are assigned from sizes of tensors."""
    return frozenset(
        name.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and _reads_size(node.value)
        for target in node.targets
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
    )


def _reads_size(value: ast.expr) -> bool:
    """Whether a value is made of sizes: one that is computed by a call of something else is none itself."""
    if isinstance(value, ast.Call):
        called = value.func
        return (isinstance(called, ast.Attribute) and called.attr in _SIZES) or ast.unparse(called) == "len"
    if isinstance(value, ast.Attribute):
        return value.attr in _SIZES
    if isinstance(value, ast.Subscript):
        return _reads_size(value.value)  # what is sliced by a size is none itself
    return any(_reads_size(child) for child in ast.iter_child_nodes(value) if isinstance(child, ast.expr))


def _decided_by(test: ast.expr, sizes: frozenset[str]) -> str | None:
    nodes = list(ast.walk(test))
    if any(isinstance(node, ast.Attribute) and node.attr == "training" for node in nodes):
        return "whether the model is in training"
    named = any(isinstance(node, ast.Name) and node.id in sizes for node in nodes)
    return "a size" if named or any(isinstance(node, ast.expr) and _reads_size(node) for node in nodes) else None


def _within(place: Place, nodes: Sequence[ast.AST]) -> bool:
    return any(
        (node.lineno, node.col_offset) <= place < (node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
        for node in nodes
    )


def _raises(side: Sequence[ast.AST]) -> bool:
    return bool(side) and all(isinstance(node, ast.Raise) for node in side)
