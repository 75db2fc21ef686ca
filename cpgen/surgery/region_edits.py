"""The model's forward: where the region begins, what is cut there, and where streams are put together again."""

from __future__ import annotations

import ast

from cpgen.diagnostics import Finding, Location, did_you_mean
from cpgen.plan import Gather, Plan, Prefix, Shard
from cpgen.surgery.edits import Edit, Insertion, Wrap
from cpgen.surgery.functions import Function, submodules


def region_edits(plan: Plan, forward: Function, cp: str, findings: list[Finding]) -> list[Edit]:
    """The edits to `forward`; `cp` is the variable that holds the region. Adds to `findings` what doesn't fit."""
    loops = forward.loops_over(plan.begin)
    if not loops:
        near = did_you_mean(plan.begin, submodules(forward.owner))
        note = f"forward is defined at {forward.module.label}:{forward.node.lineno}"
        findings.append(
            Finding("CP104", f"forward has no loop over self.{plan.begin}", plan_location(plan), hint=near, note=note)
        )
        return []
    start = forward.top_statement_of(loops[0])
    edits: list[Edit] = []
    line = _ahead_of_comments(forward, start.lineno)
    indent = " " * start.col_offset
    known = forward.bound_before(start.lineno)

    def insert(code: str, reason: str) -> None:
        edits.append(Insertion(line, indent, code, reason))

    insert(f"{cp} = begin_region(self)", "region begins")
    for shard in plan.shards:
        if _known(shard.variable, known, shard.location, forward, findings):
            insert(_shard_code(shard, cp), f"cut {', '.join(shard.streams)}")
    for prefix in plan.prefixes:
        if _known(prefix.variable, known, prefix.location, forward, findings):
            insert(_prefix_code(prefix, cp), f"those in this rank's {prefix.stream}")
    for gather in plan.gathers:
        edits += gather_edits(gather, forward, start.lineno, cp, findings)
    edits += pin_edits(forward, start.lineno, cp)
    return edits


def plan_location(plan: Plan) -> Location | None:
    return plan.shards[0].location if plan.shards else None


def gather_edits(gather: Gather, forward: Function, after_line: int, cp: str, findings: list[Finding]) -> list[Edit]:
    """A gather behind each call of the module that the plan names."""
    calls = [call for call in forward.calls_of(gather.after) if call.lineno > after_line]
    if not calls:
        near = did_you_mean(gather.after, submodules(forward.owner))
        note = f"forward is defined at {forward.module.label}:{forward.node.lineno}"
        message = f"forward does not call self.{gather.after} in the region"
        findings.append(Finding("CP104", message, gather.location, hint=near, note=note))
    edits: list[Edit] = []
    for call in calls:
        arguments = f"{gather.variable!r}, {_path(gather.path)}dim={gather.dim}, ndim={gather.ndim}, stream={gather.stream!r}"
        arguments = arguments.replace("'", '"')
        reason = "region ends"
        statement = forward.statement_of(call)
        if isinstance(statement, ast.Assign) and statement.value is call:
            targets = [node.id for target in statement.targets for node in ast.walk(target) if isinstance(node, ast.Name)]
            if gather.variable not in targets:
                hint = did_you_mean(gather.variable, targets) or f"it is assigned to {', '.join(targets)}"
                message = f"the result of self.{gather.after} is not called '{gather.variable}'"
                findings.append(Finding("CP104", message, gather.location, hint=hint))
            code = f"{gather.variable} = {cp}.gather({gather.variable}, {arguments})"
            edits.append(_behind(statement, code, reason))
        else:
            edits.append(wrap(forward, call, f"{cp}.gather(", f", {arguments})", reason))
    return edits


def pin_edits(forward: Function, after_line: int, cp: str) -> list[Edit]:
    """Blocks under activation checkpointing keep this forward's lengths for their recomputation."""
    return [
        wrap(forward, call.args[0], f"{cp}.pin(", ")", "recompute with this forward's lengths")
        for call in forward.checkpoint_calls()
        if call.lineno > after_line
    ]


def wrap(function: Function, node: ast.expr, before: str, after: str, reason: str) -> Wrap:
    lines = function.module.lines
    assert node.end_lineno is not None and node.end_col_offset is not None
    start = (node.lineno, len(lines[node.lineno - 1].encode()[: node.col_offset].decode()))
    end = (node.end_lineno, len(lines[node.end_lineno - 1].encode()[: node.end_col_offset].decode()))
    return Wrap(start, end, before, after, reason)


def _behind(statement: ast.stmt, code: str, reason: str) -> Insertion:
    assert statement.end_lineno is not None
    return Insertion(statement.end_lineno + 1, " " * statement.col_offset, code, reason, follows=True)


def _shard_code(shard: Shard, cp: str) -> str:
    stream = f'"{shard.streams[0]}"' if len(shard.streams) == 1 else _strings(shard.streams)
    options = ", optional=True" if shard.optional else ""
    options += f", when={shard.when}" if shard.when else ""
    variable = shard.variable
    return (
        f'{variable} = {cp}.shard({variable}, "{variable}", {_path(shard.path)}dim={shard.dim}, ndim={shard.ndim}, '
        f"stream={stream}{options})"
    )


def _prefix_code(prefix: Prefix, cp: str) -> str:
    return f'{prefix.variable} = {cp}.local_prefix({prefix.variable}, "{prefix.stream}")'


def _path(path: tuple[str | int, ...]) -> str:
    return "".join(f"{step}, " if isinstance(step, int) else f'"{step}", ' for step in path)


def _strings(names: tuple[str, ...]) -> str:
    return "(" + ", ".join(f'"{name}"' for name in names) + ")"


def _ahead_of_comments(function: Function, line: int) -> int:
    """The first of the comment lines right above `line`, or `line`."""
    while function.module.lines[line - 2].lstrip().startswith("#"):
        line -= 1
    return line


def _known(
    variable: str, known: set[str], location: Location | None, forward: Function, findings: list[Finding]
) -> bool:
    if variable in known:
        return True
    message = f"'{variable}' has no value where the region of {forward.owner.name}.forward begins"
    note = f"forward is defined at {forward.module.label}:{forward.node.lineno}"
    findings.append(Finding("CP104", message, location, hint=did_you_mean(variable, known), note=note))
    return False
