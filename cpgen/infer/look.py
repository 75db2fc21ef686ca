"""What one probe shows: the streams, what carries them, what each attention call sees, and where streams leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from cpgen.diagnostics import Finding, Location
from cpgen.infer.course import Course
from cpgen.infer.effects import KEY, QUERY, VALUE, Run, View, effects_of, rows_that_changed, views_of
from cpgen.infer.exits import Exit, exits_of
from cpgen.infer.leaves import Change, Leaf
from cpgen.infer.mixing import Mixing, Token, find_mixing
from cpgen.infer.streams import Carrier, Streams, find_streams
from cpgen.infer.watch import RETURNED, AttentionCall, Record, Refused, Watcher

MAIN = "latent"  # the stream that leaves last
_TEXT = ("text", "txt", "encoder", "context", "caption", "prompt", "cap_")


@dataclass(frozen=True)
class Cut:
    """A variable's tensor that must be cut: dim `dim` of `ndim` counts the tokens of `streams`."""

    dim: int
    ndim: int
    streams: tuple[str, ...]


@dataclass(frozen=True)
class Seen:
    """What an attention call saw: the streams that its queries and keys are of; () for tokens that are not cut.

    `inside` says whether it was in the region: ahead of it and behind it nothing is cut.
    """

    call: AttentionCall
    query: tuple[str, ...]
    key: tuple[str, ...]
    lengths: Mapping[str, int]  # of all streams that are cut, in tokens
    inside: bool = True


@dataclass(frozen=True)
class Look:
    """What one probe shows. `present` are all tensors among forward's variables where the region begins."""

    cuts: Mapping[Leaf, Cut]
    present: Mapping[Leaf, tuple[int, ...]]  # shapes
    absent: frozenset[str]  # variables that were None there
    assigned: frozenset[str]  # all variables that there were
    numbers: Mapping[str, int]
    prefixes: Mapping[str, str]  # of `numbers`, those of leading tokens -> their stream
    lengths: Mapping[str, int]
    seen: tuple[Seen, ...]
    exits: tuple[Exit, ...]
    findings: tuple[Finding, ...]


def look(probe: str, model: nn.Module, course: Course, watcher: Watcher, inputs: Callable[[], dict[str, Any]]) -> Look:
    """Run `model` on changed inputs, many times, and say what that shows. Raises `Refused` if it fails unchanged."""

    def run(
        changes: Mapping[Leaf, Change],
        operations: bool = False,
        stop_at: int | None = None,
        opposing: Record | None = None,
        training: bool = False,
    ) -> Record | None:
        options: dict[str, Any] = {"operations": operations, "opposing": opposing, "training": training}
        try:
            return watcher.run(inputs(), changes, stop_at=stop_at, **options)
        except Refused:
            return None  # the class takes no such values there

    base = watcher.run(inputs())
    leaves = [leaf for leaf in base.begin if leaf.variable in course.read and leaf.variable != "self"]
    streams = find_streams(list(effects_of(base, leaves, run)))
    cut = _cut(base, streams)
    findings: list[Finding] = []
    tokens = _tokens(streams, cut) + _by_size(base, leaves, streams, cut)
    followed = {leaf for token in tokens for leaf, _, _ in token.places}
    noted = watcher.run(inputs(), operations=True, followed=followed)
    exits = exits_of(noted, course, streams, cut)
    until = max((each.operations for each in exits), default=len(noted.operations))
    ordered = bool(cut) and not streams.unclear and not _gaps(base, streams, cut)
    mixing = find_mixing(noted, tokens, lambda changes, stop: run(changes, True, stop, noted), until, ordered)
    if mixing is None and any(".training" in line for line in course.forward.module.lines):
        trained = watcher.run(inputs(), operations=True, followed=followed, training=True)
        leaving = exits_of(trained, course, streams, cut)
        until = max((each.operations for each in leaving), default=len(trained.operations))
        mixing = find_mixing(trained, tokens, lambda changes, stop: run(changes, True, stop, trained, True), until)
    if mixing is not None:
        findings.append(_mixing_finding(mixing, watcher))
    elif not cut:
        message = f"no variable of {course.forward.owner.name}.forward carries tokens into its blocks and out of them"
        place = course.forward.module.location(course.begin)
        findings.append(Finding("CP603", message, place, note=f"seen with probe '{probe}'"))
    findings += [Finding("CP603", sentence, note=f"seen with probe '{probe}'") for sentence in streams.unclear]
    names = _names(streams, cut, exits)
    numbers = {name: value for name, value in base.numbers.items() if name in course.read}
    lengths = {names[stream]: streams.lengths[stream] for stream in sorted(cut)}
    last = max((each.calls for each in exits), default=len(base.calls))
    seen = [Seen(call, (), (), {}, inside=False) for call in base.calls[: base.first_call] + base.calls[last:]]
    for number, call in enumerate(base.calls[base.first_call : last], start=base.first_call):
        sides = []
        for name, tensor in ((QUERY, call.query), (KEY, call.key)):
            view = View(name, number, 2, tensor.shape[2])
            order = streams.of(view) or ()
            if streams.touching(view) & cut and not (order and set(order) <= cut):
                message = f"some tokens of the {name} of this attention call are of no stream that is cut"
                findings.append(_call_finding(message, call, watcher))
            sides.append(tuple(names[stream] for stream in order if stream in cut))
        value = View(VALUE, number, 2, call.value.shape[2])
        order = streams.of(value) or ()
        out_of_order = streams.scattered(value) | streams.touching(value) - set(order)
        if tuple(names[stream] for stream in order if stream in cut) != sides[1] or out_of_order & cut:
            message = "the value of this attention call has not the tokens of its key, in their order"
            findings.append(_call_finding(message, call, watcher))
        seen.append(Seen(call, sides[0], sides[1], lengths))
    cuts = {
        carrier.leaf: Cut(carrier.dim, base.begin[carrier.leaf].ndim, tuple(names[s] for s in carrier.streams))
        for carrier in streams.carriers
        if set(carrier.streams) <= cut
    }
    findings += [
        Finding("CP603", f"'{carrier.leaf}' holds tokens that are cut beside others that are not")
        for carrier in streams.carriers
        if set(carrier.streams) & cut and not set(carrier.streams) <= cut
    ]
    return Look(
        cuts,
        {leaf: tuple(tensor.shape) for leaf, tensor in base.begin.items()},
        base.absent,
        base.assigned,
        numbers,
        {name: names[stream] for name, stream in _prefixes(base, numbers, streams, cut, run).items()},
        lengths,
        tuple(seen),
        tuple(each.named(names) for each in exits),
        tuple(findings),
    )


def _prefixes(
    base: Record, numbers: Mapping[str, int], streams: Streams, cut: frozenset[int], run: Run
) -> dict[str, int]:
    """The numbers of leading tokens of a stream: one less changes the last of so many tokens, and no other."""
    expected = views_of(base)
    found = {}
    for name, value in numbers.items():
        record = run({Leaf(name): lambda number: number - 1}) if value > 0 and cut else None
        views = views_of(record) if record is not None else {}
        if views.keys() != expected.keys():
            continue
        rows = {(view, row) for view in views for row in rows_that_changed(expected[view], views[view], view.dim)}
        tokens = {streams.token(view, row) for view, row in rows if view.name in (QUERY, KEY, VALUE)}
        if len(tokens) == 1 and (token := tokens.pop()) is not None and token[0] in cut and token[1] == value - 1:
            found[name] = token[0]
    return found


def _cut(base: Record, streams: Streams) -> frozenset[int]:
    """The streams to cut: those that queries hold and that reach what forward returns; then those beside them."""
    sides = []
    for number, call in enumerate(base.calls[base.first_call :], start=base.first_call):
        query, key = (
            set(streams.of(View(name, number, 2, tensor.shape[2])) or ())
            for name, tensor in ((QUERY, call.query), (KEY, call.key))
        )
        sides.append((query, key))
    asking = set().union(*(query for query, _ in sides)) if sides else set()
    cut = {
        stream
        for carrier in streams.carriers
        for stream in carrier.streams
        if stream in asking and _leaves_alone(carrier)
    }
    before = -1
    while len(cut) != before:
        before = len(cut)
        for side in (side for pair in sides for side in pair):
            if side & cut:
                cut |= side
    return frozenset(cut)


def _leaves_alone(carrier: Carrier) -> bool:
    """Whether it carries one stream, which reaches what forward returns."""
    if len(carrier.streams) != 1:
        return False
    views = [*carrier.effect.offsets, *carrier.effect.spread]
    return any(isinstance(view.name, Leaf) and view.name.variable == RETURNED for view in views)


def _tokens(streams: Streams, cut: frozenset[int]) -> list[Token]:
    """Every token of the streams that are cut, with all variables that carry it."""
    tokens = []
    for stream in sorted(cut):
        for index in range(streams.lengths[stream]):
            places = []
            for carrier in streams.carriers:
                start = 0
                for part in carrier.streams:
                    if part == stream:
                        places.append((carrier.leaf, carrier.dim, start + index))
                    start += streams.lengths[part]
            tokens.append(Token(stream, index, tuple(places)))
    return tokens


def _by_size(base: Record, leaves: list[Leaf], streams: Streams, cut: frozenset[int]) -> list[Token]:
    """Dims as long as the rows of a query that are of no stream: taken for tokens, to find out why they are of none."""
    carriers = {carrier.leaf for carrier in streams.carriers}
    tokens = []
    for length in sorted(_gaps(base, streams, cut), reverse=True):
        places = [
            (leaf, dim)
            for leaf in leaves
            for dim, size in enumerate(base.begin[leaf].shape)
            if size == length > 1 and leaf not in carriers and dim < base.begin[leaf].ndim - 1
        ]
        if places:
            tokens += [
                Token(-length, index, tuple((leaf, dim, index) for leaf, dim in places)) for index in range(length)
            ]
    return tokens


def _gaps(base: Record, streams: Streams, cut: frozenset[int]) -> set[int]:
    """Lengths of runs of rows that are of no stream, in queries beside tokens that are cut; or in all, if none are."""
    lengths = set()
    for number, call in enumerate(base.calls[base.first_call :], start=base.first_call):
        view = View(QUERY, number, 2, call.query.shape[2])
        if streams.touching(view) & cut or not cut:
            lengths |= streams.gaps(view)
    return lengths


def _names(streams: Streams, cut: frozenset[int], exits: tuple[Exit, ...]) -> dict[int, str]:
    """A name for each stream: `MAIN`, or one by the variables that carry it."""
    leaving = {carrier.streams[0] for carrier in streams.carriers if _leaves_alone(carrier)}
    last = [each.stream for each in exits if each.stream in leaving] or [each.stream for each in exits]
    main = last[-1] if last else min(cut, default=-1)
    names: dict[int, str] = {}
    for stream in sorted(cut, key=lambda number: number != main):
        carriers = [carrier for carrier in streams.carriers if carrier.streams == (stream,)]
        variables = sorted({carrier.leaf.variable for carrier in carriers}, key=lambda name: "hidden" not in name)
        variable = variables[0] if variables else "tokens"
        text = any(word in name for name in variables for word in _TEXT)
        name = MAIN if stream == main else "text" if text else variable.removesuffix("_hidden_states")
        names[stream] = name if name not in names.values() else variable
    for stream in range(len(streams.lengths)):
        names.setdefault(stream, f"whole_{stream}")
    return names


def _mixing_finding(mixing: Mixing, watcher: Watcher) -> Finding:
    help = "such a class needs a plan by hand, if the operation can stand outside the region (docs/plans.md)"
    if any(word in mixing.operation for word in ("bmm", "softmax", "scaled_dot_product")):
        # As nn.MultiheadAttention has it, or written out.
        help = (
            "if this is attention: have the class call F.scaled_dot_product_attention, or diffusers' "
            "dispatch_attention_fn, on query, key and value; a plan names such calls only"
        )
    return Finding(
        "CP602",
        f"{mixing.operation} {mixing.how}",
        _location(mixing.file, mixing.line, watcher),
        note="on ranks that hold parts of the stream it would see a part",
        help=help,
    )


def _call_finding(message: str, call: AttentionCall, watcher: Watcher) -> Finding:
    return Finding("CP603", message, _location(*call.where, watcher))


def _location(file: str, line: int, watcher: Watcher) -> Location | None:
    module = watcher.source(file) if file else None
    if module is None:
        return None
    text = module.lines[line - 1].rstrip("\n")
    start = len(text) - len(text.lstrip())
    return Location(module.label, line, start + 1, max(1, len(text.strip())), text)
