"""Operations outside attention in which tokens see each other, or change places: a mean, a convolution, a roll.

One token at a time gets other values; what each operation makes of that must be apart from what it makes of any other
token. The first operation with an element that follows two tokens mixes them, and so does one with a window of several
tokens, whatever its elements follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cpgen.infer.effects import change_at, indices_of, rows_that_changed
from cpgen.infer.leaves import Change, Leaf, changed_elements
from cpgen.infer.watch import Record, Stopped

MIXES = "mixes the tokens of a stream, outside attention"
REACHES = "slides a window of several tokens over a stream, outside attention"
STEERS = "decides on what runs next, outside attention"
TRAINING = "mixes the tokens of a stream in training, outside attention"
MOVES = "changes the order of a stream's tokens"
REFUSES = "raises for other values of a token, so whether tokens mix there cannot be seen"

Run = Callable[[Mapping[Leaf, Change], "int | None"], "Record | None"]


@dataclass(frozen=True)
class Mixing:
    """An operation that mixes tokens, and the line of the class's code that asked for it."""

    operation: str
    file: str
    line: int
    how: str = MIXES


@dataclass(frozen=True)
class Token:
    """Token `index` of a stream: the dims and indices of the variables that belong to it."""

    stream: int
    index: int
    places: tuple[tuple[Leaf, int, int], ...]

    def changes(self, seed: int) -> dict[Leaf, Change]:
        changes: dict[Leaf, Change] = {}
        for number, (leaf, dim, index) in enumerate(self.places):
            change = change_at(dim, index, seed + number)
            earlier = changes.get(leaf)
            changes[leaf] = change if earlier is None else _both(earlier, change)
        return changes


def find_mixing(base: Record, tokens: Sequence[Token], run: Run, until: int, ordered: bool = True) -> Mixing | None:
    """The first operation, of the first `until`, in which two of `tokens` reach one element; None if there is none.

    `base` has followed the variables of all tokens: an operation that hands Python a value of theirs counts as well,
    and one that mixes them in training. `ordered` is false if tokens do not arrive where they are looked for: then
    one that puts them in another order counts, too, which meets values of other tokens further on.
    """
    until = min(until, len(base.operations))
    owners = [tuple(torch.zeros(t.shape, dtype=torch.int16) for t in outputs) for _, outputs in base.operations[:until]]
    first = min((index for index in base.deciding if index < until), default=None)
    how = STEERS
    chosen = _chosen(tokens)
    rows: dict[tuple[int, int], list[set[int]]] = {}  # of a dim with a window: those that each token has changed
    for number, token in enumerate(chosen, start=1):
        record = run(token.changes(seed=1000 + number), None)
        if record is None:
            return Mixing("forward", "", 0, REFUSES)
        for index in range(until if first is None else first):
            name, expected = base.operations[index]
            there = record.operations[index : index + 1]
            if not there or there[0][0] != name or [o.shape for o in there[0][1]] != [e.shape for e in expected]:
                first, how = index, STEERS
                break
            if _claim(owners[index], number, there[0][1], expected):
                first, how = index, MIXES
                break
            if _reaches(index, base, record, rows):
                first, how = index, REACHES
                break
    training = min((index for index in base.in_training if index < until), default=None)
    if training is not None and (first is None or training < first):
        first, how = training, TRAINING
    if not ordered:
        ahead = range(until if first is None else first)
        moved = next((index for index in ahead if any(_disordered(each, chosen) for each in owners[index])), None)
        if moved is not None:
            first, how = moved, MOVES
    return None if first is None else _located(base, first, how, run)


def _chosen(tokens: Sequence[Token]) -> list[Token]:
    """Every token of each stream that is as small as those of probes are, and both ends of another."""
    streams: dict[int, list[Token]] = {}
    for token in tokens:
        streams.setdefault(token.stream, []).append(token)
    return [of_one[index] for of_one in streams.values() for index in indices_of(len(of_one))]


def _claim(owners: tuple[Tensor, ...], number: int, outputs: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    """Note the elements that token `number` changed as its own. Whether some were another's."""
    mixed = False
    for owner, output, reference in zip(owners, outputs, expected, strict=True):
        changed = changed_elements(reference, output)
        mixed = mixed or bool((owner[changed] > 0).any())
        owner[changed] = number
    return mixed


def _reaches(index: int, base: Record, record: Record, rows: dict[tuple[int, int], list[set[int]]]) -> bool:
    """Whether operation `index` slides a window over a dim in which this token has other rows than one before.

    Adds those of this token to `rows`.
    """
    expected, found = base.windows.get(index), record.windows.get(index)
    if expected is None or found is None or expected.tensor.shape != found.tensor.shape:
        return False
    reaches = False
    for dim in expected.dims:
        changed = set(rows_that_changed(expected.tensor, found.tensor, dim))
        before = rows.setdefault((index, dim), [])
        if changed:
            reaches = reaches or any(changed.isdisjoint(each) for each in before)
            before.append(changed)
    return reaches


def _disordered(owners: Tensor, tokens: Sequence[Token]) -> bool:
    """Whether a stream's tokens follow each other otherwise than by their numbers, row after row of the same ones."""
    found = owners[owners > 0]
    begin = before = None
    for number in torch.unique_consecutive(found).tolist():
        token = tokens[number - 1]
        if before is None or token.stream != before.stream:
            begin = token.index
        elif token.index not in (before.index + 1, begin):
            return True
        before = token
    return False


def _located(base: Record, index: int, how: str, run: Run) -> Mixing:
    name = base.operations[index][0]
    try:
        run({}, index)
    except Stopped as stopped:
        return Mixing(name, stopped.file, stopped.line, how)
    return Mixing(name, "", 0, how)


def _both(one: Change, other: Change) -> Change:
    return lambda tensor: other(one(tensor))
