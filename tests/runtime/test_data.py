"""Loaders: which rank gets what, and that a resumed run sees every remaining sample once."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import WeightedRandomSampler

from cpgen.runtime.data import ResumableLoader, split_by_data_rank
from cpgen.runtime.mesh import seed_everything
from cpgen.runtime.streams import ResumableStream
from cpgen.verify.pool import WorkerPool
from tests.runtime import data_cases as cases
from tests.runtime import training_models
from tests.runtime.data_cases import Augmented, DrawnStream, Numbers, StatefulStream, Stream, listed
from tests.runtime.loading import flat, numbers_of_hugging_face, ranks_by_hand, take


@pytest.fixture(autouse=True, scope="module")
def by_hand():
    with ranks_by_hand():
        yield


def loaders(dataset: Any, size: int, **options: Any) -> list[ResumableLoader]:
    options = {"collate_fn": listed, **options}
    return [ResumableLoader(dataset, (rank, size), **options) for rank in range(size)]


@settings(max_examples=150, deadline=None)
@given(
    length=st.integers(1, 60),
    layouts=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 6)), min_size=1, max_size=4),
    shuffle=st.booleans(),
)
def test_each_sample_of_an_epoch_once_whatever_interrupts_it(length, layouts, shuffle):
    """Layouts: (data ranks, batch size, steps until the run is killed); the last goes to the end of the epoch."""
    assume(length >= max(size for size, _, _ in layouts))
    seen: list[int] = []
    state = None
    for index, (size, batch_size, steps) in enumerate(layouts):
        ranks = loaders(Numbers(length), size, batch_size=batch_size, shuffle=shuffle, seed=5)
        if state is not None:
            for loader in ranks:
                loader.load_state_dict(state)
        if ranks[0].epoch > 0:  # the epoch ended with what came before
            break
        last = index == len(layouts) - 1
        left = len(ranks[0])
        done = take([iter(loader) for loader in ranks], 10**6 if last else steps)
        assert not last or len(done) == left
        sizes = [[len(batch) for batch in step] for step in done]
        assert all(max(step) - min(step) <= 1 and max(step) <= batch_size for step in sizes)
        seen += flat(done)
        states = [loader.state_dict() for loader in ranks]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert len(set(seen)) == len(seen)
    missing = length - len(seen)
    # Only samples that can't give every rank one are left out, and with larger batches none where there is room.
    assert missing < max(size for size, _, _ in layouts)
    if batch_size > 1 and len(layouts) == 1:
        assert missing == 0


@settings(max_examples=100, deadline=None)
@given(
    length=st.integers(1, 40),
    layouts=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 6)), min_size=1, max_size=3),
)
def test_padding_gives_every_sample_in_equal_batches(length, layouts):
    """Layouts as above. Only the last step repeats samples, the first of the epoch's order."""
    done: list[Any] = []
    state = None
    for index, (size, batch_size, steps) in enumerate(layouts):
        ranks = loaders(Numbers(length), size, batch_size=batch_size, seed=5, pad_last=True)
        if state is not None:
            for loader in ranks:
                loader.load_state_dict(state)
        if ranks[0].epoch > 0:  # the epoch ended with what came before
            break
        found = take([iter(loader) for loader in ranks], 10**6 if index == len(layouts) - 1 else steps)
        assert all(len(batch) == batch_size for step in found for batch in step)
        done += found
        state = ranks[0].state_dict()
    (order,) = loaders(Numbers(length), 1, batch_size=length, seed=5)
    order = flat([list(order)])
    before = flat(done[:-1])
    last = [sample for turn in zip(*done[-1], strict=True) for sample in turn]  # ranks take turns
    assert len(set(before)) == len(before) < length
    expected = [order[place % length] for place in range(len(before), len(before) + len(last))]
    assert last == expected and {*before, *last} == set(range(length))


def test_order_is_shuffled_anew_each_epoch_and_follows_the_seed():
    (loader,) = loaders(Numbers(20), 1, batch_size=4)
    first, second = flat([list(loader)]), flat([list(loader)])
    (again,) = loaders(Numbers(20), 1, batch_size=4)
    (other,) = loaders(Numbers(20), 1, batch_size=4, seed=1)
    assert first != second and sorted(first) == sorted(second) == list(range(20))
    assert flat([list(again)]) == first
    assert flat([list(other)]) not in (first, second)
    assert loader.epoch == 2


def test_a_global_step_has_the_same_samples_for_any_number_of_ranks():
    steps = [
        [
            sorted(flat([step]))
            for step in take([iter(loader) for loader in loaders(Numbers(28), size, batch_size=8 // size)], 9)
        ]
        for size in (1, 2, 4, 8)
    ]
    assert steps[0] == steps[1] == steps[2]
    assert steps[3] == steps[0][:3]  # eight ranks can't share the last four samples


def test_a_sample_read_ahead_by_a_worker_is_not_seen_yet():
    (loader,) = loaders(Numbers(24), 1, batch_size=2, num_workers=2, prefetch_factor=4)
    iterator = iter(loader)
    first = [next(iterator) for _ in range(3)]
    state = loader.state_dict()
    assert state["consumed"] == 6
    (resumed,) = loaders(Numbers(24), 1, batch_size=2)
    resumed.load_state_dict(state)
    rest = list(resumed)
    assert list(iterator) == rest
    assert sorted(flat([first, rest])) == list(range(24))


def test_stopping_and_going_on_in_one_process():
    (loader,) = loaders(Numbers(10), 1, batch_size=2, num_workers=1, persistent_workers=True)
    first = [batch for batch, _ in zip(loader, range(2), strict=False)]  # zip asks for one more, then stops
    assert loader.state_dict()["consumed"] == 6
    rest = list(loader)
    assert len(first) + len(rest) == 4
    assert sorted(flat([list(loader)])) == list(range(10))


def test_a_state_at_the_end_of_an_epoch_is_the_next_epochs_beginning():
    (loader,) = loaders(Numbers(8), 1, batch_size=4)
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    (resumed,) = loaders(Numbers(8), 1, batch_size=4)
    resumed.load_state_dict(state)
    assert (resumed.epoch, len(resumed)) == (1, 2)
    assert len(list(loader)) == 2 and loader.epoch == 2  # an iterator that was not asked for the end: the same


def test_drop_last():
    ranks = loaders(Numbers(23), 2, batch_size=4, drop_last=True)
    assert len(ranks[0]) == 2
    steps = take([iter(loader) for loader in ranks], 9)
    assert [[len(batch) for batch in step] for step in steps] == [[4, 4], [4, 4]]


@pytest.mark.parametrize("workers", [0, 2])
def test_random_draws_of_a_sample_depend_on_its_place_only(workers):
    def run(size: int, workers: int, start: int) -> dict[int, Any]:
        ranks = loaders(Augmented(24), size, batch_size=8 // size, num_workers=workers)
        for loader in ranks:
            loader.load_state_dict({**loader.state_dict(), "consumed": start})
        return {sample[0]: sample[1:] for sample in flat(take([iter(loader) for loader in ranks], 9))}

    expected = run(1, 0, 0)
    assert len(expected) == 24 and len({value for draws in expected.values() for value in draws}) == 72
    later = run(2, workers, 8)
    assert len(later) == 16
    assert all(expected[index] == draws for index, draws in later.items())


@pytest.mark.parametrize("workers", [0, 1])
def test_loading_draws_nothing_from_the_training(workers):
    def state() -> tuple[Any, ...]:
        return random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()

    (loader,) = loaders(Augmented(6), 1, batch_size=2, num_workers=workers)
    before = state()
    assert len(list(loader)) == 3
    assert len(list(ResumableStream(DrawnStream(6), None, batch_size=2, num_workers=workers))) == 3
    assert state() == before


def test_a_sampler_gives_every_rank_the_same_order():
    sampler = WeightedRandomSampler([1.0] * 10 + [0.0] * 10, 16)
    ranks = loaders(Numbers(20), 2, batch_size=2, sampler=sampler)
    steps = flat(take([iter(loader) for loader in ranks], 9))
    assert len(steps) == 16 and max(steps) < 10 and len(set(steps)) > 3
    ranks = loaders(Numbers(20), 1, batch_size=4, sampler=sampler)
    assert sorted(flat(take([iter(ranks[0])], 9))) == sorted(steps)  # drawn under the seed, not under what came before
    (listed_order,) = loaders(Numbers(20), 1, batch_size=2, sampler=[3, 1, 2])
    assert list(listed_order) == [[3, 1], [2]]


def test_default_collate_and_options_of_the_data_loader():
    loader = ResumableLoader(Numbers(4), None, batch_size=2, shuffle=False)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


def own_generator():
    return WeightedRandomSampler([1.0] * 4, 4, generator=torch.Generator())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ResumableLoader(Numbers(4), None, batch_size=0), "batch_size=0 must be a whole number of at least 1"),
        (lambda: ResumableLoader(Numbers(4), None, batch_size="2"), "batch_size='2' must be a whole number"),
        (lambda: ResumableStream(Stream(4), None, batch_size=2.0), "batch_size=2.0 must be a whole number"),
        (lambda: ResumableLoader(Numbers(4), None, batch_size=1, drop_last=True, pad_last=True), "contradict"),
        (lambda: ResumableLoader(Numbers(3), (0, 4), batch_size=1), "3 samples make no step of 4 data ranks"),
        (lambda: ResumableLoader(Numbers(7), (0, 4), batch_size=2, drop_last=True), "7 samples make no step"),
        (lambda: ResumableLoader(Numbers(0), None, batch_size=1, pad_last=True), "0 samples make no step"),
        (lambda: ResumableLoader(Numbers(4), None, batch_size=1, generator=1), "generator can't be given"),
        (lambda: ResumableLoader(Stream(4), None, batch_size=1), "use ResumableStream"),
        (lambda: ResumableLoader(Numbers(4), None, batch_size=1, sampler=iter([1])), "has no length"),
        (lambda: ResumableLoader(Numbers(4), None, batch_size=1, sampler=own_generator()), "a generator of its own"),
        (lambda: ResumableStream(Stream(4), None, batch_size=1, skip=False), "use skip=True"),
        (lambda: ResumableStream(Stream(4), None, batch_size=1, shuffle=True), "shuffle can't be given"),
        (lambda: ResumableStream(Stream(4), None, batch_size=1, split=False), "split=False is for"),
        (lambda: ResumableStream(StatefulStream(4), None, batch_size=1, num_workers=2), "sample: use num_workers 0 or"),
        (lambda: split_by_data_rank(Numbers(4), None), "Numbers is not a dataset of Hugging Face"),
    ],
)
def test_what_does_not_go_together(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_state_of_another_dataset_is_refused():
    state = ResumableLoader(Numbers(4), None, batch_size=1).state_dict()
    with pytest.raises(ValueError, match="for 4 samples, but there are 5"):
        ResumableLoader(Numbers(5), None, batch_size=1).load_state_dict(state)


@pytest.mark.parametrize("state", [None, {}, {"epoch": 1}, 5])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(ValueError, match="not the state of a ResumableLoader"):
        ResumableLoader(Numbers(4), None, batch_size=1).load_state_dict(state)
    with pytest.raises(ValueError, match="not the state of a ResumableStream"):
        ResumableStream(Stream(4), None, batch_size=1).load_state_dict(state)


@pytest.mark.parametrize("kind", [ResumableLoader, ResumableStream])
@pytest.mark.parametrize("then", ["another", "load"])
def test_an_old_iterator_does_not_go_on(kind, then):
    """It would hand samples out again, and count them as the new one's: after a resume others would never come."""
    data = kind(Numbers(6) if kind is ResumableLoader else Stream(6), None, batch_size=1)
    state = data.state_dict()
    old = iter(data)
    next(old)
    if then == "another":
        next(iter(data))
    else:
        data.load_state_dict(state)
    with pytest.raises(ValueError, match="began before another one, or before load_state_dict"):
        next(old)
    assert len(list(data)) == (4 if then == "another" else 6)


def test_hugging_face_map_style():
    source = numbers_of_hugging_face(10)
    parts = [split_by_data_rank(source, (rank, 2))["x"] for rank in range(2)]
    assert sorted([*parts[0], *parts[1]]) == list(range(10))
    batches = list(ResumableLoader(source, None, batch_size=5, shuffle=False))
    assert [batch["x"].tolist() for batch in batches] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


# --- on meshes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cp", "axes", "tp"), [(2, {}, 1), (1, {"dp_replicate": 2, "dp_shard": 1}, 2), (2, {"dp_shard": 1}, 2)]
)
def test_peers_get_the_same_batches_and_data_ranks_each_their_own(pool: WorkerPool, cp, axes, tp):
    results = pool.run(cases.batches_on_a_mesh, cp, axes, tp)
    by_rank: dict[tuple[int, int], Any] = {}
    for rank, batches, stream in results:
        assert by_rank.setdefault(rank, (batches, stream)) == (batches, stream)
    size = 4 // (cp * tp)
    assert sorted(by_rank) == [(rank, size) for rank in range(size)]
    for part in range(2):
        assert sorted(x for found in by_rank.values() for batch in found[part] for x in batch) == list(range(16))


def test_a_checkpoint_brings_the_place_back_on_any_mesh(pool: WorkerPool, tmp_path):
    (tmp_path / "packages").mkdir()
    training_models.emit_packages(tmp_path / "packages")
    arguments = (str(tmp_path / "packages"), str(tmp_path / "runs"))
    results = pool.run(cases.saved_and_loaded_places, *arguments)
    left: set[int] = set()
    for expected, resumed, length in results:
        assert expected == resumed and length == len(resumed)
        left |= {sample for batch in expected for sample in batch}
    for cp in (1, 4):
        found = pool.run(cases.places_after_loading, *arguments, cp)
        ranks = found if cp == 1 else found[:1]
        samples = [sample for batches in ranks for batch in batches for sample in batch]
        assert len(set(samples)) == len(samples) and set(samples) <= left
        assert len(left) - len(samples) < (4 if cp == 1 else 1)


def test_numpy_is_seeded_though_nothing_has_imported_it_yet(monkeypatch):
    import sys

    class Mesh:
        mesh_dim_names = ()
        shape = ()

    monkeypatch.delitem(sys.modules, "numpy", raising=False)
    seed_everything(5, Mesh())
    first = np.random.rand()
    seed_everything(5, Mesh())
    assert np.random.rand() == first
