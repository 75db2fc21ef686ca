"""Loaders of iterable datasets, of Hugging Face's too: a resumed run sees every remaining sample once."""

from __future__ import annotations

from typing import Any

import pytest

from cpgen.runtime.streams import ResumableStream
from tests.runtime.data_cases import DrawnStream, StatefulStream, Stream, listed
from tests.runtime.loading import flat, numbers_of_hugging_face, ranks_by_hand, take


@pytest.fixture(autouse=True, scope="module")
def by_hand():
    with ranks_by_hand():
        yield


def stream_ranks(dataset: Any, size: int, **options: Any) -> list[ResumableStream]:
    return [ResumableStream(dataset, (rank, size), **{"collate_fn": listed, **options}) for rank in range(size)]


@pytest.mark.parametrize("workers", [0, 2, 3])
@pytest.mark.parametrize("after", [(1, 4), (2, 2), (4, 1)])
def test_a_stream_is_resumed_by_skipping_on_any_number_of_ranks_and_workers(workers, after):
    ranks = stream_ranks(Stream(31), 2, batch_size=2, num_workers=workers)
    first = take([iter(stream) for stream in ranks], 3)
    states = [stream.state_dict() for stream in ranks]
    assert states[0] == states[1] and states[0]["consumed"] == 12
    size, batch_size = after
    resumed = stream_ranks(Stream(31), size, batch_size=batch_size, num_workers=workers)
    for stream in resumed:
        stream.load_state_dict(states[0])
    rest = take([iter(stream) for stream in resumed], 99)
    everything = flat(first) + flat(rest)
    assert len(set(everything)) == len(everything) == (28 if size == 4 else 31)  # four ranks can't share three samples
    (whole,) = stream_ranks(Stream(31), 1, batch_size=4)
    expected = [sorted(batch) for batch in whole]
    assert [sorted(flat([step])) for step in [*first, *rest]][:7] == expected[:7]


def test_a_streams_epochs_and_its_random_draws():
    (stream,) = stream_ranks(DrawnStream(12), 1, batch_size=4)
    first, second = flat([list(stream)]), flat([list(stream)])
    assert stream.epoch == 2 and stream.state_dict()["consumed"] == 0
    assert sorted(index for index, _ in first) == list(range(12)) and first != second
    for workers in (0, 2):
        ranks = stream_ranks(DrawnStream(12), 2, batch_size=2, num_workers=workers)
        for one in ranks:
            one.load_state_dict({**one.state_dict(), "consumed": 4})
        assert sorted(flat(take([iter(one) for one in ranks], 9))) == sorted(first[4:])


def test_a_stream_without_its_last_step():
    ranks = stream_ranks(Stream(11), 2, batch_size=2, drop_last=True)
    assert len(flat(take([iter(stream) for stream in ranks], 9))) == 8


def test_a_stream_without_a_batch_for_each_rank_is_an_error():
    """`while True: yield from stream` would never end."""
    with pytest.raises(ValueError, match="an epoch has no batch for this data rank"):
        list(ResumableStream(Stream(3), (0, 4), batch_size=1))
    with pytest.raises(ValueError, match="an epoch has no batch for this data rank"):
        list(ResumableStream(StatefulStream(3), (0, 4), batch_size=1))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_knows_its_place_is_not_read_twice(workers):
    datasets = [StatefulStream(20) for _ in range(2)]
    ranks = [
        ResumableStream(datasets[rank], (rank, 2), batch_size=3, collate_fn=listed, num_workers=workers)
        for rank in range(2)
    ]
    first = take([iter(stream) for stream in ranks], 2)
    states = [stream.state_dict() for stream in ranks]
    again = [StatefulStream(20) for _ in range(2)]
    resumed = [
        ResumableStream(again[rank], (rank, 2), batch_size=3, collate_fn=listed, num_workers=workers)
        for rank in range(2)
    ]
    for stream, state in zip(resumed, states, strict=True):
        stream.load_state_dict(state)
    rest = take([iter(stream) for stream in resumed], 9)
    assert sorted(flat(first) + flat(rest)) == list(range(20))
    if workers == 0:
        assert again[0].read == list(range(12, 20))
    assert sorted(flat(take([iter(stream) for stream in resumed], 9))) == list(range(20))  # the next epoch, whole


def test_states_of_streams_that_do_not_fit():
    plain = ResumableStream(Stream(4), None, batch_size=1)
    placed = ResumableStream(StatefulStream(4), None, batch_size=1)
    with pytest.raises(ValueError, match="saved with skip=False"):
        plain.load_state_dict(placed.state_dict())
    with pytest.raises(ValueError, match="saved with num_workers=0"):
        ResumableStream(StatefulStream(4), None, batch_size=1, num_workers=1).load_state_dict(placed.state_dict())


@pytest.mark.parametrize(("shards", "workers"), [(4, 0), (4, 1), (4, 2), (3, 0)])
def test_hugging_face_streams(shards, workers):
    """By shards (4) or by examples (3); each remaining sample once after a resume, and a new epoch is whole."""

    def streams_of() -> list[ResumableStream]:
        return [
            ResumableStream(
                numbers_of_hugging_face(24).to_iterable_dataset(num_shards=shards).map(lambda row: {"x": row["x"]}),
                (rank, 2),
                batch_size=2,
                collate_fn=listed,
                num_workers=workers,
            )
            for rank in range(2)  # each from its own source: their state would be one in this process
        ]

    ranks = streams_of()
    first = take([iter(stream) for stream in ranks], 3)
    resumed = streams_of()
    for stream, old in zip(resumed, ranks, strict=True):
        stream.load_state_dict(old.state_dict())
    rest = take([iter(stream) for stream in resumed], 99)
    assert sorted(row["x"] for row in flat(first) + flat(rest)) == list(range(24))
    assert sorted(row["x"] for row in flat(take([iter(stream) for stream in resumed], 99))) == list(range(24))


def test_hugging_face_shuffle_buffer_is_exact_by_skipping():
    def streams_of(size: int) -> list[ResumableStream]:
        source = numbers_of_hugging_face(24).to_iterable_dataset(num_shards=2)
        return stream_ranks(source.shuffle(seed=1, buffer_size=10), size, batch_size=4 // size, skip=True)

    ranks = streams_of(2)
    first = take([iter(stream) for stream in ranks], 3)
    resumed = streams_of(4)
    for stream in resumed:
        stream.load_state_dict(ranks[0].state_dict())
    rest = take([iter(stream) for stream in resumed], 99)
    order = [row["x"] for row in flat(first) + flat(rest)]
    assert sorted(order) == list(range(24)) and order != list(range(24))
