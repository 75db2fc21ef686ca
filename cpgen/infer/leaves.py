"""Tensors among a function's variables, through tuples, lists and dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Change = Callable[[Any], Any]  # of a tensor, or of a whole number


@dataclass(frozen=True, order=True)
class Leaf:
    """A tensor among forward's variables: the variable, and the path to it through tuples, lists and dicts."""

    variable: str
    path: tuple[str | int, ...] = ()

    def __str__(self) -> str:
        return self.variable + "".join(f"[{step!r}]" for step in self.path)


def leaves_of(value: Any, leaf: Leaf) -> Iterator[tuple[Leaf, Tensor]]:
    """The tensors in `value` that have dims, through tuples, lists and dicts."""
    if isinstance(value, Tensor):
        if value.ndim:
            yield leaf, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves_of(item, Leaf(leaf.variable, (*leaf.path, key)))
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from leaves_of(item, Leaf(leaf.variable, (*leaf.path, index)))


def changed(value: Any, leaf: Leaf, changes: Mapping[Leaf, Change]) -> Any:
    if isinstance(value, (Tensor, int)):
        return changes[leaf](value) if leaf in changes else value
    if type(value) is dict:
        return {key: changed(item, Leaf(leaf.variable, (*leaf.path, key)), changes) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(
            changed(item, Leaf(leaf.variable, (*leaf.path, index)), changes) for index, item in enumerate(value)
        )
    return value


def changed_elements(before: Tensor, after: Tensor) -> Tensor:
    """Where two tensors of one shape differ, as bools; NaN is equal to NaN."""
    same: Tensor = before == after
    if before.is_floating_point() or before.is_complex():
        same = same | (before.isnan() & after.isnan())
    return ~same
