"""What tests of loaders share: one process plays all data ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import datasets
import pyarrow
import pytest
from datasets.table import InMemoryTable

from cpgen.runtime import data, streams


@contextlib.contextmanager
def ranks_by_hand() -> Iterator[None]:
    """A mesh may be the pair (data rank, data ranks) within, so that one process plays all ranks."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (data, streams):
            real = module.data_rank
            patch.setattr(module, "data_rank", lambda mesh, real=real: mesh if isinstance(mesh, tuple) else real(mesh))
        yield


def take(iterators: list[Any], steps: int) -> list[list[list[Any]]]:
    """Batches by step and rank. Every rank must have as many steps."""
    found = []
    for _ in range(steps):
        batches = [next(iterator, None) for iterator in iterators]
        if batches[0] is None:
            assert batches == [None] * len(batches)
            break
        assert None not in batches
        found.append(batches)
    return found


def flat(steps: list[list[list[Any]]]) -> list[Any]:
    return [sample for step in steps for batch in step for sample in batch]


def numbers_of_hugging_face(length: int) -> datasets.Dataset:
    # With a fingerprint: without one the table is hashed by dill, which fails with some versions of pyarrow.
    return datasets.Dataset(InMemoryTable(pyarrow.table({"x": list(range(length))})), fingerprint=f"numbers-{length}")
