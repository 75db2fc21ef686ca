"""Entries for attention functions, from what their calls saw in all probes."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cpgen.diagnostics import Finding
from cpgen.infer.look import Seen
from cpgen.plan import AttentionFunction, Site, Whole
from cpgen.surgery.functions import Function, argument, may_be_causal

_GIVEN, _NOT_GIVEN = " is not None", " is None"  # conditions on an argument
_DESCRIBING = ("shape", "size", "ndim", "dim", "dtype", "device", "new_ones", "new_zeros", "new_full")


@dataclass(frozen=True)
class _Kind:
    """What one call saw. No streams: its keys and values are on every rank."""

    query: tuple[str, ...] = ()
    kv: tuple[str, ...] | None = None


def attention_entries(
    seen: Iterable[Seen], findings: list[Finding], guesses: list[Finding]
) -> tuple[AttentionFunction, ...]:
    """One entry for each function that attended.

    Adds to `findings` what could not be told, and to `guesses` what fits the probes but may not fit other calls.
    """
    by_call: dict[tuple[str, int], list[Seen]] = {}
    functions: dict[str, Function] = {}
    seen = list(seen)
    inside = {each.call.place.function.owner.name for each in seen if each.inside and each.call.place is not None}
    for each in seen:
        place = each.call.place
        if not each.inside and (place is None or place.function.owner.name not in inside):
            continue  # what attends only ahead of the region, or behind it, is left as it is
        if place is None:
            file, line = each.call.where
            findings.append(
                Finding(
                    "CP603",
                    f"attention outside a class's __call__ or forward, at {file.rpartition('/')[2]}:{line}",
                    help="a plan describes the calls of such methods: the class needs a change of its own",
                )
            )
            return ()
        functions[place.key[0]] = place.function
        by_call.setdefault(place.key, []).append(each)
    return tuple(
        _entry(function, {call: found for (name, call), found in by_call.items() if name == owner}, findings, guesses)
        for owner, function in functions.items()
    )


def _entry(
    function: Function, by_call: dict[int, list[Seen]], findings: list[Finding], guesses: list[Finding]
) -> AttentionFunction:
    owner = function.owner.name
    sites = []
    for number, call in enumerate(function.attention_calls()):
        if number not in by_call:
            note = "no probe reaches it: what it sees is not known"
            message = f"call {number} of {owner} attends, in a branch that did not run"
            findings.append(Finding("CP604", message, function.module.location(call), note=note))
            continue
        site = _site(number, call, by_call[number], function, findings)
        if site is not None and site.when is not None and site.when.endswith(_GIVEN):
            guesses.append(_guess(site, call, function))
        if site is not None:
            sites.append(site)
    found = [each for group in by_call.values() for each in group]
    return AttentionFunction(owner, tuple(sites), _whole(function, found) if sites else ())


def _guess(site: Site, call: ast.Call, function: Function) -> Finding:
    argument = str(site.when).removesuffix(_GIVEN)
    return Finding(
        "CP607",
        f"call {site.call} of {function.owner.name} is told from others by '{argument}' alone, which only it was given",
        function.module.location(call),
        note=f"the plan says 'when: {site.when}': with another setting the same tokens may come without '{argument}'",
        help="if they may, add a probe in which they do, or tell the calls apart by hand (docs/plans.md)",
    )


def _site(number: int, call: ast.Call, seen: list[Seen], function: Function, findings: list[Finding]) -> Site | None:
    kinds: dict[_Kind, list[Seen]] = {}
    for each in seen:
        kinds.setdefault(_kind_of(each), []).append(each)
    if any(not kind.query and kind.kv for kind in kinds):
        message = f"call {number} of {function.owner.name} has queries of every rank, but keys that are cut"
        findings.append(Finding("CP603", message, function.module.location(call)))
        return None
    exchanging = sorted((kind for kind in kinds if kind.query), key=lambda kind: (len(kind.query), kind.query))
    if not exchanging:
        return Site(number, "cross")
    first, *others = exchanging
    whens = None
    if len(kinds) > 1:
        whens = _condition(kinds[first], [each for kind in kinds if kind != first for each in kinds[kind]], function)
    too_many = len(kinds) > 2 or any(other.kv is not None for other in others)
    if len(kinds) > 1 and (whens is None or too_many):
        within = _within(kinds)
        if within is not None:
            streams = tuple(dict.fromkeys(name for _, order in within for name in order))
            kind = "joint" if max(len(order) for _, order in within) > 1 else "self"
            return Site(number, kind, streams, within=within)
        message = f"call {number} of {function.owner.name} sees different tokens, and no argument tells which"
        what = "; ".join(
            f"queries of {_listed(kind.query)}, keys of {_listed(kind.kv or kind.query)}" for kind in kinds
        )
        findings.append(Finding("CP603", message, function.module.location(call), note=what))
        return None
    causal = may_be_causal(call)
    name = "causal" if causal else "cross" if first.kv else "joint" if len(first.query) > 1 else "self"
    otherwise = others[0].query if others else None
    return Site(number, name, first.query, first.kv, whens, otherwise)


def _within(kinds: Mapping[_Kind, Sequence[Seen]]) -> tuple[tuple[str, tuple[str, ...]], ...] | None:
    """The streams by list of blocks; None if some list has several kinds of calls, or of others than self-attention."""
    by_list: dict[str, set[tuple[str, ...]]] = {}
    for kind, seen in kinds.items():
        if not kind.query or kind.kv is not None or any(each.call.blocks is None for each in seen):
            return None
        for each in seen:
            by_list.setdefault(str(each.call.blocks), set()).add(kind.query)
    # A stream may be absent in a probe: the longest order has all.
    longest = {name: max(orders, key=len) for name, orders in by_list.items()}
    for name, orders in by_list.items():
        if any(tuple(each for each in longest[name] if each in order) != order for order in orders):
            return None
    return tuple(longest.items())


def _kind_of(seen: Seen) -> _Kind:
    if seen.query and seen.key and seen.key != seen.query:
        return _Kind(seen.query, seen.key)
    return _Kind(seen.query if seen.key else (), seen.key if seen.key and not seen.query else None)


def _condition(yes: list[Seen], no: list[Seen], function: Function) -> str | None:
    """A condition on the function's arguments that holds in all of `yes` and in none of `no`.

    Of several, one on an argument that only those of `no` have, as they have more or other tokens, and it may bring
    them. A rotary table that only self-attention gets tells the calls apart as well, but may be None some day.
    """
    found = []
    for parameter in function.parameters:
        if parameter in ("self", "attn"):
            continue
        of_yes = {parameter in each.call.absent for each in yes}
        of_no = {parameter in each.call.absent for each in no}
        if len(of_yes) == len(of_no) == 1 and of_yes != of_no:
            found.append((of_yes != {True}, f"{parameter}{_NOT_GIVEN if of_yes == {True} else _GIVEN}"))
    return min(found, key=lambda each: each[0])[1] if found else None


def _whole(function: Function, seen: list[Seen]) -> tuple[Whole, ...]:
    """Whole numbers that are lengths of streams, from which the function makes a mask."""
    exchanging = [each for each in seen if each.query and each.key]
    found = []
    for call in function.attention_calls():
        mask = argument(call, 3, "attn_mask")
        if not isinstance(mask, ast.Name):
            continue
        whole = sorted({name for each in exchanging for name in each.call.whole})
        lengths = {name: streams for name in whole if (streams := _length_of(name, exchanging))}
        feeding = _feeding(function, mask.id, call.lineno, lengths)
        steps = [
            each
            for name in feeding - lengths.keys()
            for each in function.assignments_of(name)
            if lengths.keys() & _reads(each) and each.lineno < call.lineno
        ]
        first = min(steps, key=lambda statement: statement.lineno, default=None)
        if first is not None:
            read = {name: streams for name, streams in lengths.items() if any(name in _reads(each) for each in steps)}
            beside = {name: lengths[name] for name in _assigned_beside(function, first, lengths)}
            if beside and read.keys() <= beside.keys():  # what the branch compares with a mask is made whole, too
                found.append(Whole(tuple(beside.items()), after=list(beside)[-1], before=None, until=mask.id))
                continue
            target = next(name for name in sorted(feeding) if first in function.assignments_of(name))
            found.append(Whole(tuple(read.items()), after=None, before=target, until=mask.id))
    return tuple(dict.fromkeys(found))


def _assigned_beside(function: Function, statement: ast.stmt, names: Collection[str]) -> list[str]:
    """Those of `names` that are assigned in the same branch as `statement`, ahead of it, in that order."""
    parent = function.parents[statement]
    if parent is function.node:
        return []
    body = next(of for of in (getattr(parent, part, []) for part in ("body", "orelse")) if statement in of)
    lines = {name: [each.lineno for each in function.assignments_of(name) if each in body] for name in names}
    return sorted((n for n in names if lines[n] and lines[n][0] < statement.lineno), key=lambda name: lines[name][0])


def _feeding(function: Function, name: str, line: int, lengths: Collection[str]) -> set[str]:
    """The variables that the value of `name` is made from ahead of `line`, up to `lengths`."""
    found = [name]
    for each in found:  # grows
        for statement in function.assignments_of(each) if each not in lengths else []:
            if statement.lineno < line:
                found += sorted(_reads(statement) - set(found))
    return set(found)


def _reads(statement: ast.stmt) -> set[str]:
    """The variables whose values the statement reads, not only their sizes or dtypes."""
    described = {
        id(node.value) for node in ast.walk(statement) if isinstance(node, ast.Attribute) and node.attr in _DESCRIBING
    }
    return {
        node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in described
    }


def _length_of(variable: str, seen: list[Seen]) -> tuple[str, ...]:
    """The stream, or the streams together, whose length `variable` was in every call that has it, or ()."""
    having = [each for each in seen if variable in each.call.whole]
    orders = [order for each in having for order in (each.query, each.key)]
    for streams in dict.fromkeys(streams for order in orders for streams in (order, *((name,) for name in order))):
        if all(each.call.whole[variable] == sum(each.lengths.get(name, 0) for name in streams) for each in having):
            return streams
    return ()


def _listed(streams: tuple[str, ...]) -> str:
    return "[" + ", ".join(streams) + "]"
