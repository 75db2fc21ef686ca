"""From what each probe showed to one plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cpgen.diagnostics import Finding
from cpgen.infer.course import Course
from cpgen.infer.exits import Exit
from cpgen.infer.leaves import Leaf
from cpgen.infer.look import MAIN, Cut, Look
from cpgen.infer.sites import attention_entries
from cpgen.plan import Gather, Plan, Prefix, Probe, Shard, Wraps

Pattern = tuple[str, tuple["str | int", ...]]  # a variable and a path, with "*" for every element of a list


def merge(
    model: str,
    diffusers: str | None,
    course: Course,
    looks: Sequence[Look],
    probes: Sequence[Probe],
    configs: Sequence[Mapping[str, Any]],
    wraps: Wraps | None,
) -> tuple[Plan, list[Finding], list[Finding]]:
    """The plan that fits all `looks`, what could not be decided, and what was guessed.

    `configs` has a constructor's for each look.
    """
    guesses: list[Finding] = []
    findings = list(dict.fromkeys(finding for look in looks for finding in look.findings))
    streams = tuple(dict.fromkeys(name for look in looks for name in look.lengths))
    seen = [each for look in looks for each in look.seen]
    gathers = _gathers(looks, course, findings)
    plan = Plan(
        model=model,
        diffusers=diffusers,
        heads=_heads(looks, configs),
        blocks=course.lists,
        streams=streams,
        begin=course.lists[0],
        shards=_shards(looks, course, findings),
        prefixes=_prefixes(looks),
        gathers=gathers,
        attention=attention_entries(seen, findings, guesses),
        wraps=wraps,
        probes=tuple(probes),
    )
    return plan, findings, guesses


def _shards(looks: Sequence[Look], course: Course, findings: list[Finding]) -> tuple[Shard, ...]:
    cuts: dict[Pattern, list[Cut]] = {}
    for look in looks:
        for leaf, cut in look.cuts.items():
            cuts.setdefault(_pattern(leaf, cut, looks), []).append(cut)
    shards = []
    for (variable, path), found in cuts.items():
        kinds = list(dict.fromkeys(found))
        if len(kinds) > 1:
            shown = "; ".join(f"dim {kind.dim} of {kind.ndim}, {' and '.join(kind.streams)}" for kind in kinds)
            findings.append(Finding("CP603", f"'{variable}' carries tokens in several ways", note=shown))
            continue
        (cut,) = kinds
        shapes = [
            shape
            for look in looks
            for leaf, shape in look.present.items()
            if leaf.variable == variable and len(leaf.path) == len(path) and _matches(leaf.path, path)
        ]
        missing = any(variable in look.absent for look in looks)
        if any(variable not in look.assigned for look in looks):
            message = f"'{variable}' carries tokens, but is not assigned in every probe: a plan has no words for that"
            findings.append(Finding("CP603", message, course.forward.module.location(course.begin)))
            continue
        when = " and ".join(_conditions(cut, shapes)) or None
        shards.append(Shard(variable, path, cut.dim, cut.ndim, cut.streams, optional=missing, when=when))
    return tuple(shards)


def _conditions(cut: Cut, shapes: Sequence[tuple[int, ...]]) -> list[str]:
    """What tells tensors that are cut from those of other probes, that have another ndim or one row for all tokens."""
    conditions = []
    if any(len(shape) != cut.ndim for shape in shapes):
        conditions.append(f"ndim == {cut.ndim}")
    if any(len(shape) == cut.ndim and shape[cut.dim] == 1 for shape in shapes):
        conditions.append(f"shape[{cut.dim}] != 1")
    return conditions


def _pattern(leaf: Leaf, cut: Cut, looks: Sequence[Look]) -> Pattern:
    """The leaf's path, with "*" for an index wherever all elements there are alike, in all probes."""
    path = leaf.path
    for position in reversed(range(len(path))):
        wider = (*path[:position], "*", *path[position + 1 :])
        if isinstance(path[position], int) and all(_alike(look, leaf.variable, wider, cut) for look in looks):
            path = wider
    return leaf.variable, path


def _alike(look: Look, variable: str, path: tuple[str | int, ...], cut: Cut) -> bool:
    """Whether all that `path` leads to is cut in the same way; or could be, where nothing reads it in this probe."""
    lengths = {look.present[leaf][cut.dim] for leaf, each in look.cuts.items() if each == cut}
    for leaf, shape in look.present.items():
        if leaf.variable != variable or not _matches(leaf.path, path):
            continue
        unread = leaf not in look.cuts and len(shape) == cut.ndim and (not lengths or shape[cut.dim] in lengths)
        if len(leaf.path) != len(path) or not (unread or look.cuts.get(leaf) == cut):
            return False
    return True


def _matches(path: tuple[str | int, ...], pattern: tuple[str | int, ...]) -> bool:
    """Whether the two agree as far as both go."""
    return all(step == wanted or wanted == "*" for step, wanted in zip(path, pattern, strict=False))


def _prefixes(looks: Sequence[Look]) -> tuple[Prefix, ...]:
    """Whole numbers of leading tokens: those whose change showed it, and those that were the length of one stream in
    every probe, and not always the same."""
    found = []
    variables = {name for look in looks for name in look.numbers}
    for variable in sorted(variables):
        shown = {look.prefixes[variable] for look in looks if variable in look.prefixes}
        of = [(look.numbers[variable], look.lengths) for look in looks if variable in look.numbers]
        fitting = [
            stream
            for stream in {name for _, lengths in of for name in lengths}
            if all(lengths.get(stream) == value for value, lengths in of)
        ]
        if len(shown) == 1:
            found.append(Prefix(variable, shown.pop()))
        elif len(fitting) == 1 and len({value for value, _ in of}) > 1:
            found.append(Prefix(variable, fitting[0]))
    return tuple(found)


def _gathers(looks: Sequence[Look], course: Course, findings: list[Finding]) -> tuple[Gather, ...]:
    """What forward returns as it is, put together; else the last variable with a row a token in all probes."""
    possible = [{exit.key: exit for exit in look.exits} for look in looks]
    exits = {key: exit for each in possible for key, exit in each.items()}
    chosen = [key for key in exits if all(each[key].returned for each in possible if key in each)]
    if not any(key[-1] == MAIN for key in chosen):
        common = [key for key in exits if key[-1] == MAIN and all(key in each for each in possible)]
        chosen += sorted(common, key=lambda key: exits[key].line)[-1:]
    if not chosen:
        place = course.forward.module.location(course.begin)
        message = "no statement behind the blocks leaves a variable with one row a token in all probes"
        findings.append(Finding("CP603", message, place))
    latest = {(key[0], key[1]): key for key in sorted(chosen, key=lambda key: exits[key].line)}
    return tuple(_gather(exits[key], optional=any(key not in each for each in possible)) for key in latest.values())


def _gather(exit: Exit, optional: bool) -> Gather:
    """Lists are what ControlNets return: another model cuts them again, which is right for any other use, too."""
    path = tuple("*" if isinstance(step, int) else step for step in exit.path)
    return Gather(
        exit.variable, path, exit.dim, exit.ndim, exit.name, exit.after, optional=optional, cut_again=bool(path)
    )


def _heads(looks: Sequence[Look], configs: Sequence[Mapping[str, Any]]) -> str | None:
    """The constructor's argument that was the number of query heads in every probe."""
    names = [name for name in configs[0] if "head" in name and "dim" not in name]
    for name in sorted(names, key=lambda name: (name != "num_attention_heads", name)):
        if all(
            each.call.query.shape[1] == config.get(name)
            for look, config in zip(looks, configs, strict=True)
            for each in look.seen
            if each.query
        ):
            return name
    return None
