"""Iterable datasets for training: split over data ranks, and resumed where they stopped."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from .data import check_latest, check_options, is_hugging_face, set_epoch_of, split_by_data_rank, unchanged
from .mesh import data_rank
from .random_state import drawing_from

_Collate = Callable[[list[Any]], Any]


class ResumableStream:
    """Batches of an iterable dataset. One iteration is the rest of an epoch; it may be empty when resumed at its end.

    `skip=True`: every rank and every worker reads the whole stream and keeps its share. Exact for any dataset that
    gives the same samples each time it is iterated (in an epoch: its `set_epoch` is called if it has one): the state is
    the number of samples that all ranks together have seen, and a resumed run reads and drops so many. It gets every
    remaining sample once, in the same order, on any number of data ranks and workers. Reading is the price.

    `skip=False`, for a dataset with `state_dict` and `load_state_dict`: it is split over data ranks (Hugging Face's by
    shards where they divide), each rank saves its dataset's own state, and resuming reads nothing twice. As exact as
    that state is: Hugging Face's loses what a shuffle buffer holds. It needs as many data ranks and workers as before;
    with several workers the batches of different workers may change places. Ranks can end at different steps when
    shards are of different size: bound such a run by steps. `split=False` is for a dataset that is this data rank's
    part already.

    `skip=None` is False for datasets with a state, else True. Random draws while a sample is made depend on seed, epoch
    and its place alone. A last step with fewer samples than `batch_size` times data ranks is left out by `drop_last`,
    or if it does not have one for every rank.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        mesh: DeviceMesh | None,
        *,
        batch_size: int,
        seed: int = 0,
        drop_last: bool = False,
        skip: bool | None = None,
        split: bool = True,
        collate_fn: _Collate | None = None,
        **options: Any,
    ) -> None:
        """`mesh` None is one process that takes all. Raises ValueError for options that don't go together."""
        check_options(batch_size, options)
        has_state = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        if skip is False and not has_state:
            raise ValueError(f"{type(dataset).__name__} has no state_dict and load_state_dict: use skip=True")
        self._skip = not has_state if skip is None else skip
        self._workers = int(options.get("num_workers", 0))
        if self._skip and not split:
            raise ValueError("split=False is for datasets with a state of their own: skip=True splits the whole stream")
        if not self._skip and self._workers > 1 and not is_hugging_face(dataset):
            raise ValueError(
                f"{type(dataset).__name__} would give each of {self._workers} workers every sample: use num_workers 0 "
                f"or 1, or skip=True"
            )
        self.epoch = 0
        self._consumed = 0  # with skip: samples of this epoch, over all data ranks
        self._states: dict[int, Any] = {}  # without: worker -> what it said with its last batch
        self._latest = 0  # number of the latest iterator
        self._seed = seed
        collate = default_collate if collate_fn is None else collate_fn
        rank, size = data_rank(mesh) if mesh is not None else (0, 1)
        self._reader: _Skipping | _Stating
        if self._skip:
            self._reader = _Skipping(dataset, collate, batch_size, drop_last, rank, size)
        else:
            if split and mesh is not None and size > 1:
                of_hub = is_hugging_face(dataset)
                dataset = split_by_data_rank(dataset, mesh) if of_hub else _EveryNth(dataset, rank, size)
            self._reader = _Stating(dataset, collate, batch_size, drop_last, rank, size)
        self._options = options

    def __iter__(self) -> Iterator[Any]:
        """Hand out what is left of this epoch.

        Raises ValueError if a whole epoch has no batch for this rank, and if asked for more after another iterator has
        begun or a state was loaded.
        """
        self._latest += 1
        own = self._latest
        empty = not self._consumed and not self._states
        self._reader.begin = (self._seed, self.epoch, self._consumed, dict(self._states))
        loader = DataLoader(
            self._reader, batch_size=None, collate_fn=unchanged, generator=torch.Generator(), **self._options
        )
        for taken, worker, state, batch in loader:
            self._consumed += taken
            if not self._skip:
                self._states[worker] = state
            empty = False
            yield batch
            check_latest(own, self._latest)
        if empty:
            raise ValueError("the stream has too few samples: an epoch has no batch for this data rank")
        self.epoch, self._consumed, self._states = self.epoch + 1, 0, {}

    def state_dict(self) -> dict[str, Any]:
        """The place in the data: the same on every rank with `skip`, this rank's own without."""
        state: dict[str, Any] = {"epoch": self.epoch, "seed": self._seed, "skip": self._skip}
        if self._skip:
            return {**state, "consumed": self._consumed}
        return {**state, "states": copy.deepcopy(self._states), "workers": self._workers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at that place. New iterators start there.

        Raises ValueError if it is no stream's state, or was saved with another `skip`, or without it by another number
        of workers.
        """
        if not isinstance(state, dict) or "skip" not in state:
            raise ValueError(f"this is not the state of a ResumableStream: {state!r}")
        if state["skip"] != self._skip:
            raise ValueError(f"the stream's state was saved with skip={state['skip']}: pass the same, not {self._skip}")
        if not self._skip and state["workers"] != self._workers:
            raise ValueError(
                f"the stream's state was saved with num_workers={state['workers']}, each with its own place in the "
                f"data: pass the same, not {self._workers}"
            )
        self.epoch, self._seed = state["epoch"], state["seed"]
        self._latest += 1
        self._consumed = state.get("consumed", 0)
        self._states = copy.deepcopy(state.get("states", {}))


class _Reader(IterableDataset[Any]):
    """Gives (samples that all ranks take by it, worker, the worker's state, batch), in a worker or in the process."""

    def __init__(
        self, dataset: Iterable[Any], collate: _Collate, batch_size: int, drop_last: bool, rank: int, size: int
    ) -> None:
        self._dataset = dataset
        self._collate = collate
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._rank = rank
        self._size = size
        self.begin: tuple[int, int, int, dict[int, Any]] = (0, 0, 0, {})  # seed, epoch, consumed, worker -> state

    def _samples(self, first: int, *key: int) -> Iterator[tuple[int, Any]]:
        """(place, sample), counted from `first`."""
        with drawing_from("stream", *key):
            iterator = iter(self._dataset)
        place = first
        while True:
            with drawing_from("sample", *key, place):
                try:
                    sample = next(iterator)
                except StopIteration:
                    return
            yield place, sample
            place += 1

    def _collated(self, samples: list[Any], *key: int) -> Any:
        with drawing_from("batch", *key):
            return self._collate(samples)


class _Skipping(_Reader):
    """Reads the whole stream; global step i is the work of worker i mod workers, whose turn it is in the loader too."""

    def __iter__(self) -> Iterator[tuple[int, int, None, Any]]:
        worker, workers = _worker()
        seed, epoch, consumed, _ = self.begin
        set_epoch_of(self._dataset, epoch)
        whole = self._batch_size * self._size
        mine: list[Any] = []
        count = 0  # samples since `consumed`
        for place, sample in self._samples(0, seed, epoch):
            if place < consumed:
                continue
            own_turn = count // whole % workers == worker
            if own_turn and count % whole % self._size == self._rank:
                mine.append(sample)
            count += 1
            if own_turn and count % whole == 0:
                yield whole, worker, None, self._collated(mine, seed, epoch, self._rank, place)
                mine = []
        rest = count % whole
        if count // whole % workers == worker and rest >= self._size and not self._drop_last:
            yield rest, worker, None, self._collated(mine, seed, epoch, self._rank, consumed + count)


class _Stating(_Reader):
    """Reads this rank's part, and gives the dataset's own state with each batch."""

    def __iter__(self) -> Iterator[tuple[int, int, Any, Any]]:
        worker, _ = _worker()
        seed, epoch, _, states = self.begin
        set_epoch_of(self._dataset, epoch)
        key = (seed, epoch, self._rank, worker)
        first = 0
        if worker in states:
            first = states[worker]["read"]
            self._dataset.load_state_dict(states[worker]["dataset"])  # type: ignore[attr-defined]
        batch: list[Any] = []
        place = first
        for place, sample in self._samples(first, *key):
            batch.append(sample)
            if len(batch) == self._batch_size:
                yield 0, worker, self._state(place), self._collated(batch, *key, place)
                batch = []
        if batch and not self._drop_last:
            yield 0, worker, self._state(place), self._collated(batch, *key, place)

    def _state(self, place: int) -> dict[str, Any]:
        own = self._dataset.state_dict()  # type: ignore[attr-defined]
        return {"read": place + 1, "dataset": copy.deepcopy(own)}


class _EveryNth(IterableDataset[Any]):
    """One sample of each round of `size`, once the round is complete: every rank has as many."""

    def __init__(self, dataset: Any, rank: int, size: int) -> None:
        self._dataset = dataset
        self._rank = rank
        self._size = size

    def __iter__(self) -> Iterator[Any]:
        mine = None
        for index, sample in enumerate(self._dataset):
            if index % self._size == self._rank:
                mine = sample
            if index % self._size == self._size - 1:
                yield mine

    def set_epoch(self, epoch: int) -> None:
        set_epoch_of(self._dataset, epoch)

    def state_dict(self) -> Any:
        return self._dataset.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._dataset.load_state_dict(state)


def _worker() -> tuple[int, int]:
    """(worker, workers) of the DataLoader that this runs in."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)
