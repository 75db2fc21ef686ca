"""The model's forward: where the region begins, what is cut there, and where streams are put together again."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from cpgen.conditions import parse_condition
from cpgen.diagnostics import Finding, Location, did_you_mean, fail
from cpgen.plan import Gather, Plan, Prefix, Shard, is_config
from cpgen.surgery.edits import Edit, Insertion, Wrap
from cpgen.surgery.functions import Function, submodules


@dataclass(frozen=True)
class _Place:
    """Where a new statement goes: ahead of `line`."""

    line: int
    indent: str
    follows: bool = False


def region_edits(plan: Plan, forward: Function, cp: str, findings: list[Finding]) -> list[Edit]:
    """The edits to `forward`; `cp` is the variable that holds the region. Adds to `findings` what doesn't fit."""
    begin = _begin(plan.begin, forward, plan.begin_location or plan_location(plan), findings)
    if begin is None:
        return []
    edits: list[Edit] = [Insertion(begin.line, begin.indent, f"{cp} = begin_region(self)", "region begins")]
    for refusal in plan.refusals:
        condition, names = parse_condition(refusal.when)
        if _known(set(names), begin.line, refusal.location, forward, findings):
            code = f'{cp}.refuse("{condition}", {condition})'
            edits.append(Insertion(begin.line, begin.indent, code, "would be wrong on parts of a sequence"))
    for shard in plan.shards:
        edits += _shard_edits(shard, begin, forward, cp, findings)
    gathers = [edit for gather in plan.gathers for edit in gather_edits(gather, forward, begin.line, cp, findings)]
    end = max((edit.line for edit in gathers), default=begin.line)
    for prefix in plan.prefixes:
        edits += _prefix_edits(prefix, begin, end, forward, cp, findings)
    return edits + gathers + pin_edits(forward, begin.line, cp)


def _begin(blocks: str | None, forward: Function, location: Location | None, findings: list[Finding]) -> _Place | None:
    """Ahead of the first loop over, or call of, self.<blocks> and the comments above it; or where forward begins."""
    if blocks is None:
        first = forward.first_statement
        return _Place(first.lineno, forward.module.indent(first))
    places = forward.loops_over(blocks) or forward.calls_of(blocks)
    if not places:
        near = did_you_mean(blocks, submodules(forward.owner))
        message = f"forward neither loops over self.{blocks} nor calls it"
        findings.append(Finding("CP104", message, location, hint=near, note=_defined_at(forward)))
        return None
    start = forward.top_statement_of(places[0])
    return _Place(_ahead_of_comments(forward, start.lineno), forward.module.indent(start))


def _shard_edits(shard: Shard, begin: _Place, forward: Function, cp: str, findings: list[Finding]) -> list[Edit]:
    reason = f"cut {', '.join(shard.streams)}"
    if shard.argument_of is not None:
        found = [a for call in forward.calls_of(shard.argument_of) for a in _arguments(call) if _is(a, shard.variable)]
        return [wrap(forward, a, f"{cp}.shard(", f", {shard_arguments(shard)})", reason) for a in found]
    if shard.after is not None:
        places = []
        for call in forward.calls_of(shard.after):
            statement = forward.statement_of(call)
            indent = forward.module.indent(statement)
            places.append(_Place((statement.end_lineno or 0) + 1, indent, follows=True))
        if not places:
            message = f"forward does not call self.{shard.after}"
            near = did_you_mean(shard.after, submodules(forward.owner))
            findings.append(Finding("CP104", message, shard.location, hint=near, note=_defined_at(forward)))
    elif shard.before is not None:
        place = _begin(shard.before, forward, shard.location, findings)
        places = [place] if place else []
    else:
        places = [begin]
    if shard.start and is_config(shard.start) and not forward.reads_of(shard.start):
        message = f"forward does not read {shard.start}"
        findings.append(Finding("CP104", message, shard.location, note=_defined_at(forward)))
    code = f"{shard.variable} = {cp}.shard({shard.variable}, {shard_arguments(shard)})"
    return [
        Insertion(place.line, place.indent, code, reason, place.follows)
        for place in places
        if _known(_names_read(shard), place.line, shard.location, forward, findings)
    ]


def _prefix_edits(
    prefix: Prefix, begin: _Place, end: int, forward: Function, cp: str, findings: list[Finding]
) -> list[Edit]:
    """A variable is made this rank's where the region begins; of an entry of the config, each read in the region is."""
    reason = f"those in this rank's {prefix.stream}"
    after = f', "{prefix.stream}")'
    if not is_config(prefix.variable):
        if not _known({prefix.variable}, begin.line, prefix.location, forward, findings):
            return []
        code = f"{prefix.variable} = {cp}.local_prefix({prefix.variable}{after}"
        return [Insertion(begin.line, begin.indent, code, reason)]
    reads = [read for read in forward.reads_of(prefix.variable) if begin.line <= read.lineno < end]
    if not reads:
        message = f"forward does not read {prefix.variable} in the region"
        findings.append(Finding("CP104", message, prefix.location, note=_defined_at(forward)))
    return [wrap(forward, read, f"{cp}.local_prefix(", after, reason) for read in reads]


def _names_read(shard: Shard) -> set[str]:
    """The variables that cutting it reads."""
    names = {shard.variable, *(parse_condition(shard.when)[1] if shard.when else ())}
    return names if shard.start is None or is_config(shard.start) else names | {shard.start}


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _defined_at(forward: Function) -> str:
    return f"forward is defined at {forward.module.label}:{forward.node.lineno}"


def plan_location(plan: Plan) -> Location | None:
    return plan.shards[0].location if plan.shards else None


def gather_edits(gather: Gather, forward: Function, after_line: int, cp: str, findings: list[Finding]) -> list[Edit]:
    """A gather behind each call of the module that the plan names, behind the loops over the module list that it names,
    or behind the last assignment of the variable."""
    code = f"{gather.variable} = {cp}.gather({gather.variable}, {_gather_arguments(gather)})"
    reason = "region ends"
    if gather.after is None:
        last = forward.last_assignment(gather.variable)
        if last is None or last.lineno < after_line:
            message = f"forward assigns no '{gather.variable}' in the region"
            hint = did_you_mean(gather.variable, forward.names)
            findings.append(Finding("CP104", message, gather.location, hint=hint, note=_defined_at(forward)))
            return []
        return [_behind(forward, forward.top_statement_of(last), code, reason)]
    calls = [call for call in forward.calls_of(gather.after) if call.lineno > after_line]
    loops = [loop for loop in forward.loops_over(gather.after) if loop.lineno >= after_line]
    if loops and not calls:
        last = forward.top_statement_of(loops[-1])
        known = _known({gather.variable}, (last.end_lineno or 0) + 1, gather.location, forward, findings)
        return [_behind(forward, last, code, reason)] if known else []
    if not calls:
        near = did_you_mean(gather.after, submodules(forward.owner))
        message = f"forward neither calls self.{gather.after} in the region nor loops over it"
        findings.append(Finding("CP104", message, gather.location, hint=near, note=_defined_at(forward)))
    edits: list[Edit] = []
    for call in calls:
        statement = forward.statement_of(call)
        if isinstance(statement, ast.Assign) and statement.value is call:
            targets = [
                node.id for target in statement.targets for node in ast.walk(target) if isinstance(node, ast.Name)
            ]
            if gather.variable not in targets:
                hint = did_you_mean(gather.variable, targets) or f"it is assigned to {', '.join(targets)}"
                message = f"the result of self.{gather.after} is not called '{gather.variable}'"
                findings.append(Finding("CP104", message, gather.location, hint=hint))
            edits.append(_behind(forward, statement, code, reason))
        else:
            edits.append(wrap(forward, call, f"{cp}.gather(", f", {_gather_arguments(gather)})", reason))
    return edits


def _gather_arguments(gather: Gather) -> str:
    options = ", optional=True" if gather.optional else ""
    options += ", cut_again=True" if gather.cut_again else ""
    name, path = gather.variable, _path(gather.path)
    return f'"{name}", {path}dim={gather.dim}, ndim={gather.ndim}, stream="{gather.stream}"{options}'


def pin_edits(forward: Function, after_line: int, cp: str) -> list[Edit]:
    """Blocks under activation checkpointing keep this forward's lengths for their recomputation."""
    return [
        wrap(forward, call.args[0], f"{cp}.pin(", ")", "recompute with this forward's lengths")
        for call in forward.checkpoint_calls()
        if call.lineno > after_line
    ]


def wrap(function: Function, node: ast.expr, before: str, after: str, reason: str) -> Wrap:
    lines = function.module.lines
    if node.lineno in function.module.open_lines:
        place = function.module.location(node)
        raise fail("CP503", f"no comment can stand at the end of this line of {place.file}", place)
    assert node.end_lineno is not None and node.end_col_offset is not None
    start = (node.lineno, len(lines[node.lineno - 1].encode()[: node.col_offset].decode()))
    end = (node.end_lineno, len(lines[node.end_lineno - 1].encode()[: node.end_col_offset].decode()))
    return Wrap(start, end, before, after, reason)


def _behind(forward: Function, statement: ast.stmt, code: str, reason: str) -> Insertion:
    assert statement.end_lineno is not None
    return Insertion(statement.end_lineno + 1, forward.module.indent(statement), code, reason, follows=True)


def shard_arguments(shard: Shard) -> str:
    stream = f'"{shard.streams[0]}"' if len(shard.streams) == 1 else _strings(shard.streams)
    options = ", optional=True" if shard.optional else ""
    options += f", start={shard.start}" if shard.start else ""
    options += f", when={shard.when}" if shard.when else ""
    return f'"{shard.variable}", {_path(shard.path)}dim={shard.dim}, ndim={shard.ndim}, stream={stream}{options}'


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
    variables: set[str], line: int, location: Location | None, forward: Function, findings: list[Finding]
) -> bool:
    known = forward.bound_before(line)
    unknown = sorted(variables - known)
    for variable in unknown:
        message = f"'{variable}' has no value there in {forward.owner.name}.forward"
        hint = did_you_mean(variable, known)
        findings.append(Finding("CP104", message, location, hint=hint, note=f"line {line}; {_defined_at(forward)}"))
    return not unknown
