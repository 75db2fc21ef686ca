"""Data for training: which rank gets which samples, and loaders that a resumed run continues where it stopped.

Every loader takes the mesh: ranks that differ in dp_replicate or dp_shard get other samples, ranks of one context- or
tensor-parallel group get the same. State goes into `extra` of `save_checkpoint` or of a `Checkpointer`:

    loader = ResumableLoader(dataset, mesh, batch_size=2, seed=0, num_workers=4)
    checkpointer = Checkpointer(directory, model, optimizer, every=500, extra={"data": loader})

A sample counts as seen when its batch is handed out, not when a worker has read it ahead.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

from .mesh import data_rank
from .random_state import drawing_from

DatasetT = TypeVar("DatasetT")

_DECIDED = {"shuffle", "sampler", "batch_sampler", "batch_size", "drop_last", "generator"}


def split_by_data_rank(dataset: DatasetT, mesh: DeviceMesh) -> DatasetT:
    """This data rank's part of a Hugging Face dataset, map-style or iterable: `datasets.distributed` splits it.

    An iterable one is split by shards if their number is a multiple of the data ranks, else every rank reads all and
    keeps its share. For a map-style dataset `ResumableLoader` needs no split. Raises ValueError for another dataset.
    """
    if not is_hugging_face(dataset):
        raise ValueError(f"{type(dataset).__name__} is not a dataset of Hugging Face's datasets")
    rank, size = data_rank(mesh)
    part: DatasetT = importlib.import_module("datasets.distributed").split_dataset_by_node(
        dataset, rank=rank, world_size=size
    )
    return part


class ResumableLoader:
    """Batches of a map-style dataset. One iteration is the rest of an epoch.

        for epoch in range(loader.epoch, epochs):
            for batch in loader:
                ...

    A global step takes `batch_size` samples for each data rank. The order of an epoch follows from `seed` and the
    epoch's number: `shuffle` draws it, or `sampler` gives indices (what it draws from the global generators is made to
    depend on these two as well, so every rank has the same order). `collate_fn`, `num_workers` and so on are those of
    torch's DataLoader.

    Exact: the state is a place in that order, the same on all ranks, so a resumed run gets every remaining sample of
    the epoch once, in the same order, on any number of data ranks and of workers. With the same batch size times data
    ranks, each global step has the same samples (the last two may differ). Random draws in the dataset's `__getitem__`
    (Python's, NumPy's, torch's on the host) depend on seed, epoch and the sample's place alone: noise that is drawn
    there is the same on every mesh.

    The last step of an epoch takes what is left, in parts that differ by one sample at most. Every rank needs a sample,
    so the step before leaves enough where it can; where it can't (`batch_size` 1), fewer samples than data ranks are
    left out. `drop_last` leaves the step out, where it would have smaller batches; `pad_last` fills it up with the
    epoch's first samples, so that each sample comes at least once and all batches are equal.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        mesh: DeviceMesh | None,
        *,
        batch_size: int,
        shuffle: bool = True,
        sampler: Sampler[int] | Sequence[int] | None = None,
        seed: int = 0,
        drop_last: bool = False,
        pad_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,
    ) -> None:
        """`mesh` None is one process that takes all.

        Raises ValueError for options that don't go together, or if an epoch would have no step.
        """
        check_options(batch_size, options)
        if drop_last and pad_last:
            raise ValueError("drop_last and pad_last contradict each other")
        if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
            raise ValueError(f"{type(dataset).__name__} has no length: use ResumableStream for an iterable dataset")
        if sampler is not None and not isinstance(sampler, Sized):
            raise ValueError(f"{type(sampler).__name__} has no length, so the loader can't tell where an epoch ends")
        if getattr(sampler, "generator", None) is not None:
            raise ValueError(
                f"{type(sampler).__name__} has a generator of its own, whose state a resumed run would not have: "
                f"leave it out, and the loader's seed and epoch decide what it draws"
            )
        self.epoch = 0
        self._consumed = 0  # samples of this epoch, over all data ranks
        self._seed = seed
        self._length = len(dataset if sampler is None else sampler)
        self._shuffle = shuffle and sampler is None
        self._sampler = sampler
        self._rank, self._size = data_rank(mesh) if mesh is not None else (0, 1)
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._pad_last = pad_last
        self._latest = 0  # number of the latest iterator
        if not any(self._takes()):
            raise ValueError(
                f"{self._length} samples make no step of {self._size} data ranks with batch_size={batch_size}: "
                f"pad_last=True repeats samples until each rank has its batch"
            )
        fetch = _Fetch(dataset, default_collate if collate_fn is None else collate_fn)
        # Without a generator of its own, each new iterator would draw a number from the training's.
        self._loader = DataLoader(
            fetch,
            batch_size=None,
            sampler=_Plan(self),
            collate_fn=unchanged,
            generator=torch.Generator(),
            **options,
        )

    def __len__(self) -> int:
        """The number of batches that are left in this epoch."""
        return sum(1 for _ in self._takes())

    def __iter__(self) -> Iterator[Any]:
        """Hand out what is left of this epoch; of the next one if nothing is.

        Raises ValueError if asked for more after another iterator has begun or a state was loaded.
        """
        self._latest += 1
        own = self._latest
        self._roll_over()
        for take, batch in zip(list(self._takes()), self._loader, strict=True):
            self._consumed = min(self._consumed + take, self._length)
            yield batch
            check_latest(own, self._latest)
        self.epoch, self._consumed = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int | bool]:
        """The place in the data, the same on every rank."""
        return {
            "epoch": self.epoch,
            "consumed": self._consumed,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "length": self._length,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at that place, in the order that was saved (its seed, its shuffle). New iterators start there.

        Raises ValueError if it is no loader's state, or if the dataset has another length: then what is left of the
        epoch is not known.
        """
        if not isinstance(state, dict) or state.keys() != self.state_dict().keys():
            raise ValueError(f"this is not the state of a ResumableLoader: {state!r}")
        if state["length"] != self._length:
            raise ValueError(
                f"the loader's state is for {state['length']} samples, but there are {self._length}: resume with the "
                f"same dataset, or leave the loader out of extra"
            )
        self.epoch, self._consumed = state["epoch"], state["consumed"]
        self._seed, self._shuffle = state["seed"], state["shuffle"]
        self._latest += 1
        self._roll_over()

    def _roll_over(self) -> None:
        if self._consumed and not any(True for _ in self._takes()):
            self.epoch, self._consumed = self.epoch + 1, 0

    def _takes(self) -> Iterator[int]:
        """The number of samples that each remaining global step of this epoch takes, with those that pad the last."""
        whole = self._batch_size * self._size
        left = self._length - self._consumed
        if self._pad_last:
            yield from [whole] * math.ceil(left / whole)
            return
        while left >= (whole if self._drop_last else self._size):
            take = min(whole, left)
            short = self._size - (left - take)
            if not self._drop_last and 0 < short < self._size and take - short >= self._size:
                take -= short  # so that the last step has a sample for every rank
            yield take
            left -= take

    def _order(self) -> Sequence[int] | torch.Tensor:
        """The indices of this epoch's samples, in order."""
        with drawing_from("order", self._seed, self.epoch):
            if self._sampler is not None:
                set_epoch_of(self._sampler, self.epoch)
                return [int(index) for index in self._sampler]
            return torch.randperm(self._length) if self._shuffle else range(self._length)

    def _batches(self) -> Iterator[_Batch]:
        """This rank's batches from here to the end of the epoch."""
        order = self._order()
        if len(order) != self._length:
            raise ValueError(
                f"{type(self._sampler).__name__} gave {len(order)} indices, but its length is {self._length}"
            )
        start = self._consumed
        for take in self._takes():
            places = range(start, start + take)[self._rank :: self._size]
            yield _Batch(self._seed, self.epoch, [(p, int(order[p % self._length])) for p in places])
            start += take


@dataclass(frozen=True)
class _Batch:
    """What a worker is asked for: (place in the epoch, index in the dataset) of each sample."""

    seed: int
    epoch: int
    samples: list[tuple[int, int]]


class _Plan(Sampler[_Batch]):
    """The batches of a loader, from where it stands when it is asked."""

    def __init__(self, loader: ResumableLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[_Batch]:
        return self._loader._batches()


class _Fetch(Dataset[Any]):
    """Gives whole batches. What is drawn at random for a sample depends on its place only, not on the worker."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any]) -> None:
        self._dataset = dataset
        self._collate = collate

    def __getitem__(self, batch: _Batch) -> Any:
        samples = []
        for place, index in batch.samples:
            with drawing_from("sample", batch.seed, batch.epoch, place):
                samples.append(self._dataset[index])
        with drawing_from("batch", batch.seed, batch.epoch, batch.samples[0][0]):
            return self._collate(samples)


def check_options(batch_size: int, options: Collection[str]) -> None:
    """Raise ValueError for a batch size below 1 and for options of DataLoader that a loader decides itself."""
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size={batch_size!r} must be a whole number of at least 1")
    if taken := sorted(_DECIDED.intersection(options)):
        raise ValueError(f"{', '.join(taken)} can't be given: the loader decides it, so that it can resume")


def check_latest(own: int, latest: int) -> None:
    """Raise ValueError if an iterator goes on though it is not the latest: samples would come twice, others never."""
    if own != latest:
        raise ValueError(
            "this iterator began before another one, or before load_state_dict: go on with a new one, iter(loader)"
        )


def set_epoch_of(source: object, epoch: int) -> None:
    """Tell a sampler or dataset the epoch, where it wants to know."""
    if callable(set_epoch := getattr(source, "set_epoch", None)):
        set_epoch(epoch)


def is_hugging_face(dataset: object) -> bool:
    """Whether it is a dataset of Hugging Face's `datasets`, which is not imported to find out."""
    return any(cls.__module__.partition(".")[0] == "datasets" for cls in type(dataset).__mro__)


def unchanged(batch: Any) -> Any:
    """For DataLoader's collate_fn where batches are collated already: its default would convert their content."""
    return batch
