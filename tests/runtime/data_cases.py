"""Datasets of the data tests, and what they run on the workers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset


class Numbers(Dataset[int]):
    """0, 1, ..., and how often each was asked for (in this process)."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Augmented(Numbers):
    """Each sample is drawn at random, from all three generators."""

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:  # type: ignore[override]
        return index, random.random(), float(np.random.rand()), torch.rand(()).item()


class Stream(IterableDataset[int]):
    """0, 1, ..., in an order of the epoch's own."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from ((index * 7 + self.epoch) % self.length for index in range(self.length))


class DrawnStream(Stream):
    """Shuffled by the global generator, and each sample has a number of its own."""

    def __iter__(self) -> Iterator[tuple[int, float]]:  # type: ignore[override]
        order = list(range(self.length))
        random.shuffle(order)
        for index in order:
            yield index, torch.rand(()).item()


class StatefulStream(Stream):
    """Knows its place."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.place = 0
        self.read: list[int] = []

    def __iter__(self) -> Iterator[int]:
        while self.place < self.length:
            self.place += 1
            self.read.append(self.place - 1)
            yield self.place - 1
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def listed(batch: Any) -> list[Any]:
    return list(batch)


def batches_on_a_mesh(cp: int, axes: dict[str, int], tp: int = 1) -> tuple[tuple[int, int], list[list[int]], Any]:
    """(data rank, the batches that this rank gets, what its stream gives) on a real mesh."""
    from cpgen.runtime.data import ResumableLoader
    from cpgen.runtime.mesh import build_mesh, data_rank
    from cpgen.runtime.streams import ResumableStream

    mesh = build_mesh("cpu", cp=cp, tp=tp, **axes)
    loader = ResumableLoader(Numbers(16), mesh, batch_size=2, collate_fn=listed, seed=3)
    stream = ResumableStream(Stream(16), mesh, batch_size=2, collate_fn=listed)
    return data_rank(mesh), list(loader), list(stream)


def saved_and_loaded_places(root: str, directory: str) -> tuple[list[list[int]], list[list[int]], int]:
    """(what was left after a save, what a new loader gives after the load, its length) through a checkpoint."""
    from cpgen.runtime.data import ResumableLoader
    from tests.runtime.checkpoint_cases import Run

    def build(run: Run, seed: int) -> ResumableLoader:
        return ResumableLoader(Numbers(33), run.mesh, batch_size=2, collate_fn=listed, seed=seed)

    run = Run(root, 2)
    loader = build(run, 3)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    run.extra = {"data": loader}
    run.save(directory, 1)
    other = Run(root, 2)
    resumed = build(other, 4)
    other.extra = {"data": resumed}
    other.load(directory)
    left = len(resumed)
    return list(iterator), list(resumed), left


def places_after_loading(root: str, directory: str, cp: int) -> list[list[int]]:
    """What is left for this rank when the checkpoint of `saved_and_loaded_places` is loaded at another degree."""
    from cpgen.runtime.data import ResumableLoader
    from tests.runtime.checkpoint_cases import Run

    run = Run(root, cp)
    loader = ResumableLoader(Numbers(33), run.mesh, batch_size=1, collate_fn=listed)
    run.extra = {"data": loader}
    run.load(directory)
    return list(loader)
