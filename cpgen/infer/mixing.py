"""Operations outside attention in which tokens see each other: a mean, a convolution, a sort over a stream.

One token at a time gets other values; what each operation makes of that must be apart from what it makes of any other
token. The first operation with an element that follows two tokens mixes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cpgen.infer.effects import change_at, changed_elements
from cpgen.infer.leaves import Change, Leaf
from cpgen.infer.watch import Record, Stopped

MIXES = "mixes the tokens of a stream"
STEERS = "decides on what runs next"
TRAINING = "mixes the tokens of a stream in training"

TOKENS = 64  # of a stream, that are changed one by one: all of a probe's, unless it is large

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
    """The dims and indices of the variables that belong to one token."""

    places: tuple[tuple[Leaf, int, int], ...]

    def changes(self, seed: int) -> dict[Leaf, Change]:
        changes: dict[Leaf, Change] = {}
        for number, (leaf, dim, index) in enumerate(self.places):
            change = change_at(dim, index, seed + number)
            earlier = changes.get(leaf)
            changes[leaf] = change if earlier is None else _both(earlier, change)
        return changes


def find_mixing(base: Record, tokens: Sequence[Token], run: Run, until: int) -> Mixing | None:
    """The first operation, of the first `until`, in which two of `tokens` reach one element; None if there is none.

    `base` has followed the variables of all tokens: an operation that hands Python a value of theirs counts as well,
    and one that mixes them in training.
    """
    counts = [tuple(torch.zeros(t.shape, dtype=torch.int16) for t in outputs) for _, outputs in base.operations[:until]]
    first = min((index for index in base.deciding if index < until), default=None)
    how = STEERS
    for number, token in enumerate(_chosen(tokens)):
        record = run(token.changes(seed=1000 + number), None)
        if record is None:
            continue
        for index, ((name, outputs), (_, expected)) in enumerate(
            zip(record.operations[:until], base.operations[:until], strict=False)
        ):
            if first is not None and index >= first:
                break
            other = name != base.operations[index][0] or [o.shape for o in outputs] != [e.shape for e in expected]
            if other:
                first, how = index, STEERS
                break
            if _add(counts[index], outputs, expected):
                first, how = index, MIXES
    training = min((index for index in base.in_training if index < until), default=None)
    if training is not None and (first is None or training < first):
        first, how = training, TRAINING
    return None if first is None else _located(base, first, how, run)


def _chosen(tokens: Sequence[Token]) -> Iterable[Token]:
    return tokens if len(tokens) <= TOKENS else [*tokens[: TOKENS // 2], *tokens[-TOKENS // 2 :]]


def _add(counts: tuple[Tensor, ...], outputs: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    """Count the elements that changed. Whether some were changed by two tokens."""
    mixed = False
    for count, output, reference in zip(counts, outputs, expected, strict=True):
        count += changed_elements(reference, output)
        mixed = mixed or bool((count > 1).any())
    return mixed


def _located(base: Record, index: int, how: str, run: Run) -> Mixing:
    name = base.operations[index][0]
    try:
        run({}, index)
    except Stopped as stopped:
        return Mixing(name, stopped.file, stopped.line, how)
    return Mixing(name, "", 0, how)


def _both(one: Change, other: Change) -> Change:
    return lambda tensor: other(one(tensor))
