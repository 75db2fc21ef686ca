"""Which rows of what follows change with which part of a variable: how tokens are found, without looking at sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cpgen.infer.leaves import Change, Leaf, changed_elements
from cpgen.infer.watch import Record

Run = Callable[[Mapping[Leaf, Change]], "Record | None"]  # None: the class refused the changed values

QUERY, KEY, VALUE = "query", "key", "value"
LARGEST = 64  # of a larger dim so many indices at both ends together are changed


@dataclass(frozen=True)
class View:
    """One dim of a tensor that followed: of query, key or value of attention call `number`, or of a variable.

    `name` is "query", "key", "value", or the variable's leaf as snapshot `number` has it.
    """

    name: str | Leaf
    number: int
    dim: int
    size: int


@dataclass(frozen=True)
class Effect:
    """What one dim of a variable's tensor does: index i changes row i + offset of each view in `offsets`, and no other.

    In the views of `spread` it changes other rows too.
    """

    leaf: Leaf
    dim: int
    size: int
    offsets: Mapping[View, int]
    spread: tuple[View, ...]

    def interval(self, view: View) -> tuple[int, int] | None:
        offset = self.offsets.get(view)
        return None if offset is None else (offset, offset + self.size)


def effects_of(base: Record, leaves: Iterable[Leaf], run: Run) -> Iterator[Effect]:
    """The effects of every dim, of more than one element, of `leaves`."""
    for leaf in leaves:
        for dim, size in enumerate(base.begin[leaf].shape):
            if size > 1:
                yield _effect(base, leaf, dim, size, run)


def indices_of(size: int) -> list[int]:
    """The indices of a dim that are changed one by one: all, as far as a probe is as small as probes are."""
    return [*range(size)] if size <= LARGEST else [*range(LARGEST // 2), *range(size - LARGEST // 2, size)]


def change_at(dim: int, index: int, seed: int) -> Change:
    """Other values at `index` of `dim`: noise for numbers, the opposite for bools, another of the same for integers."""

    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        part = tensor.select(dim, index)
        generator = torch.Generator().manual_seed(seed)
        if tensor.dtype == torch.bool:
            part.copy_(~part)
        elif tensor.is_floating_point() or tensor.is_complex():
            kind = torch.complex64 if tensor.is_complex() else torch.float32
            noise = torch.randn(part.shape, generator=generator, dtype=kind)
            finite = tensor[torch.isfinite(tensor)]
            size = float(finite.abs().mean()) if finite.numel() else 1.0
            part.add_((3 * (1 + size) * noise).to(tensor.dtype))
        else:
            low, high = int(tensor.min()), int(tensor.max())
            part.copy_(low + (part - low + 1) % max(2, high - low + 1))
        return tensor

    return change


def views_of(record: Record) -> dict[View, Tensor]:
    """Every dim of more than one element of what followed; of queries, keys and values, that of tokens."""
    found: dict[View, Tensor] = {}
    for number, call in enumerate(record.calls[record.first_call :], start=record.first_call):
        for name, tensor in ((QUERY, call.query), (KEY, call.key), (VALUE, call.value)):
            found[View(name, number, 2, tensor.shape[2])] = tensor
    for number, snapshot in enumerate(record.snapshots):
        for leaf, tensor in snapshot.tensors.items():
            for dim, size in enumerate(tensor.shape):
                if size > 1:
                    found[View(leaf, number, dim, size)] = tensor
    return found


def rows_that_changed(before: Tensor, after: Tensor, dim: int) -> tuple[int, ...]:
    """The indices of `dim` at which the two differ anywhere."""
    differs = changed_elements(before, after).movedim(dim, 0).reshape(before.shape[dim], -1).any(dim=1)
    return tuple(int(row) for row in differs.nonzero().flatten())


def _effect(base: Record, leaf: Leaf, dim: int, size: int, run: Run) -> Effect:
    expected = views_of(base)
    rows: dict[View, list[tuple[int, tuple[int, ...]]]] = {}
    for index in indices_of(size):
        record = run({leaf: change_at(dim, index, seed=index)})
        found = views_of(record) if record is not None else {}
        if found.keys() != expected.keys():  # another course, or refused: no statement about this dim
            return Effect(leaf, dim, size, {}, ())
        for view, tensor in found.items():
            changed = rows_that_changed(expected[view], tensor, view.dim)
            if changed:
                rows.setdefault(view, []).append((index, changed))
        if rows and not any(len(seen[0][1]) == 1 for view, seen in rows.items() if view.name != leaf):
            return Effect(leaf, dim, size, {}, tuple(rows))  # tokens would stay apart somewhere
    offsets = {view: offset for view, seen in rows.items() if (offset := _offset(seen, size, view)) is not None}
    return Effect(leaf, dim, size, offsets, tuple(view for view in rows if view not in offsets))


def _offset(seen: list[tuple[int, tuple[int, ...]]], size: int, view: View) -> int | None:
    """What is added to each index to give the one row that it changed; None if there is no such number."""
    differences = {changed[0] - index for index, changed in seen}
    if len(seen) < 2 or len(differences) > 1 or any(len(changed) > 1 for _, changed in seen):
        return None  # an index may change nothing, where a mask hides it, but one alone shows no order
    offset = differences.pop()
    return offset if offset >= 0 and offset + size <= view.size else None
