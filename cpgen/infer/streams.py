"""From effects to streams: which variables carry the same tokens, and which several streams one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cpgen.infer.effects import KEY, QUERY, Effect, View
from cpgen.infer.leaves import Leaf


@dataclass(frozen=True)
class Carrier:
    """A variable's tensor whose dim `dim` counts the tokens of `streams`, one after the other."""

    leaf: Leaf
    dim: int
    streams: tuple[int, ...]
    effect: Effect


@dataclass(frozen=True)
class Streams:
    """The streams of one run, numbered. `lengths` are in tokens."""

    carriers: tuple[Carrier, ...]
    lengths: tuple[int, ...]
    unclear: tuple[str, ...] = ()  # sentences about variables that fit none

    def of(self, view: View) -> tuple[int, ...] | None:
        """The streams that a view's rows are, in order; () if none of its rows are, None if some rows are of none."""
        pieces = self._pieces(view)
        if not pieces:
            return ()
        order: list[int] = []
        row = 0
        while row < view.size:
            if row not in pieces:
                return None
            order.append(pieces[row])
            row += self.lengths[pieces[row]]
        return tuple(order)

    def gaps(self, view: View) -> set[int]:
        """The lengths of the runs of rows of a view that are of no stream."""
        pieces = self._pieces(view)
        taken = {row for start, stream in pieces.items() for row in range(start, start + self.lengths[stream])}
        lengths = set()
        length = 0
        for row in range(view.size + 1):
            if row < view.size and row not in taken:
                length += 1
            elif length:
                lengths.add(length)
                length = 0
        return lengths

    def touching(self, view: View) -> set[int]:
        """The streams that some of a view's rows are of."""
        return set(self._pieces(view).values())

    def scattered(self, view: View) -> set[int]:
        """The streams of which a token changes other rows of a view than its own."""
        return {stream for each in self.carriers if view in each.effect.spread for stream in each.streams}

    def token(self, view: View, row: int) -> tuple[int, int] | None:
        """The stream that a view's row is of, and which of its tokens it is."""
        for start, stream in self._pieces(view).items():
            if start <= row < start + self.lengths[stream]:
                return stream, row - start
        return None

    def _pieces(self, view: View) -> dict[int, int]:
        """First row of a stream in a view -> the stream."""
        return {
            carrier.effect.offsets[view]: carrier.streams[0]
            for carrier in self.carriers
            if len(carrier.streams) == 1 and view in carrier.effect.offsets
        }


def find_streams(effects: Sequence[Effect]) -> Streams:
    """Group the dims of `effects` that carry tokens. A dim that reaches the same rows of a view is the same stream."""
    carrying = [effect for effect in effects if _carries(effect)]
    tilings = {id(effect): _tiling(effect, carrying) for effect in carrying}
    atoms = [effect for effect in carrying if tilings[id(effect)] is None]
    group: dict[int, int] = {}
    for effect in atoms:
        near = [group[id(other)] for other in atoms if id(other) in group and _same_rows(effect, other)]
        number = min(near, default=len(set(group.values())) and max(group.values()) + 1)
        group[id(effect)] = number
        for key, value in group.items():
            if value in near:
                group[key] = number
    order = {number: index for index, number in enumerate(dict.fromkeys(group[id(effect)] for effect in atoms))}
    group = {key: order[value] for key, value in group.items()}
    lengths = [next(effect.size for effect in atoms if group[id(effect)] == number) for number in order.values()]
    carriers = []
    unclear = []
    for effect in carrying:
        parts = tilings[id(effect)]
        streams = (group[id(effect)],) if parts is None else tuple(group[id(part)] for part in parts)
        carriers.append(Carrier(effect.leaf, effect.dim, streams, effect))
    for effect in atoms:
        for other in atoms:
            if _overlap(effect, other):
                unclear.append(
                    f"'{effect.leaf}' reaches some of the rows that '{other.leaf}' reaches, and nothing the others"
                )
    return Streams(tuple(carriers), tuple(lengths), tuple(dict.fromkeys(unclear)))


def _carries(effect: Effect) -> bool:
    """Whether its tokens stay apart in every attention call that they reach."""
    spread = any(view.name in (QUERY, KEY) for view in effect.spread)
    return bool(effect.offsets) and not spread


def _tiling(effect: Effect, others: Sequence[Effect]) -> list[Effect] | None:
    """The smaller ones whose rows together are those of `effect` in some view, in order, or None."""
    for view in effect.offsets:
        start, end = effect.interval(view) or (0, 0)
        inner = [
            other
            for other in others
            if other.size < effect.size and view in other.offsets and start <= other.offsets[view] < end
        ]
        parts: list[Effect] = []
        row = start
        while row < end:
            at = [other for other in inner if other.offsets[view] == row]
            if not at:
                break
            parts.append(min(at, key=lambda other: other.size))
            row += parts[-1].size
        if row == end and len(parts) > 1:
            return parts
    return None


def _same_rows(one: Effect, other: Effect) -> bool:
    shared = one.offsets.keys() & other.offsets.keys()
    return one.size == other.size and any(one.offsets[view] == other.offsets[view] for view in shared)


def _overlap(one: Effect, other: Effect) -> bool:
    """Whether `one` reaches a part of the rows of `other` in some view, and is not equal to it."""
    for view in one.offsets.keys() & other.offsets.keys():
        a, b = one.interval(view), other.interval(view)
        if a is not None and b is not None and a != b and b[0] <= a[0] and a[1] <= b[1]:
            return True
    return False
