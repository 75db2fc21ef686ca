"""The exchange around attention is exact: forward and gradients, any lengths, heads, masks and layouts."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Placement, Replicate, Shard

from cpgen.runtime.parts import head_parts, part_sizes
from cpgen.verify.pool import WorkerPool

from .exchange_cases import (
    Arrival,
    Shape,
    attention_errors,
    cut_errors,
    dtensor_errors,
    gather_within_errors,
    leading_tokens_errors,
)

EXACT = 1e-12  # float64


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, Shape]:
    degree = draw(st.integers(2, 4))
    ulysses = draw(st.sampled_from([n for n in (1, 2, 3, 4) if degree % n == 0]))
    outer = draw(st.sampled_from(["allgather", "ring"])) if ulysses < degree else None
    kv_heads = draw(st.integers(1, 4))
    heads = kv_heads * draw(st.integers(1, 3))
    if heads < ulysses:
        heads = kv_heads * ulysses
    lengths = draw(st.lists(st.integers(degree, 13), min_size=1, max_size=3))
    layout = draw(st.sampled_from(["BSHD", "BHSD"]))
    masks = ["none", "causal", "keys", "rows", "heads", *(["samples"] if layout == "BSHD" else [])]
    return degree, Shape(
        streams=tuple((f"stream{i}", length) for i, length in enumerate(lengths)),
        batch=draw(st.integers(1, 2)),
        heads=heads,
        kv_heads=kv_heads,
        channels=draw(st.sampled_from([2, 4])),
        layout=layout,
        ulysses=ulysses,
        outer=outer,
        mask=draw(st.sampled_from(masks)),
        additive=draw(st.booleans()),
        balanced=outer is not None and draw(st.booleans()),
        inside=draw(st.booleans()),
    )


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(case=shapes())
def test_attention_is_that_of_one_process(pool: WorkerPool, case: tuple[int, Shape]) -> None:
    degree, shape = case
    for forward, backward in pool.run(attention_errors, shape, world_size=degree):
        assert forward <= EXACT
        assert backward <= EXACT


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("mask", ["causal", "keys", "rows", "heads"])
@pytest.mark.parametrize("outer", ["allgather", "ring"])
def test_ulysses_inside_an_outer_exchange(pool: WorkerPool, outer: str, mask: str, balanced: bool) -> None:
    """The only degrees of four ranks at which both axes have several, whatever the draws above were."""
    streams = (("text", 9), ("latent", 22))
    shape = Shape(streams, 2, 6, 2, 4, "BSHD", ulysses=2, outer=outer, mask=mask, additive=True, balanced=balanced)
    for forward, backward in pool.run(attention_errors, shape, world_size=4):
        assert forward <= EXACT
        assert backward <= EXACT


@pytest.mark.parametrize(
    ("degree", "ulysses", "heads", "kv_heads"),
    [(4, 4, 30, 30), (4, 4, 30, 5), (2, 2, 3, 3), (2, 2, 3, 1), (4, 2, 3, 1)],
)
def test_heads_that_the_degree_does_not_divide(
    pool: WorkerPool, degree: int, ulysses: int, heads: int, kv_heads: int
) -> None:
    outer = "ring" if ulysses < degree else None
    shape = Shape((("latent", 13),), 2, heads, kv_heads, 4, "BSHD", ulysses, outer, mask="heads", additive=True)
    for forward, backward in pool.run(attention_errors, shape, world_size=degree):
        assert forward <= EXACT
        assert backward <= EXACT


# Axes and placements of the query, and what the output is. Four ranks are all of tp 2 x cp 2, or of cp 4.
OVER_CP: tuple[tuple[str, ...], tuple[Placement, ...], str] = (("cp",), (Shard(1),), "('cp',) (Shard(dim=1),)")
OVER_TP: list[tuple[tuple[str, ...], tuple[Placement, ...], str]] = [
    (("tp",), (Shard(2),), "('tp',) (Shard(dim=2),)"),
    (("cp", "tp"), (Shard(1), Shard(2)), "('tp',) (Shard(dim=2),)"),
    (("cp", "tp"), (Shard(1), Shard(1)), "('tp',) (Shard(dim=1),)"),
    (("cp", "tp"), (Shard(1), Replicate()), "('tp',) (Replicate(),)"),
]


@pytest.mark.parametrize(
    ("axes", "placements", "kind", "cp", "ulysses", "outer"),
    [
        *(
            (*query, 2, ulysses, outer)
            for query in (OVER_CP, *OVER_TP)
            for ulysses, outer in ((2, None), (1, "ring"), (1, "allgather"))
        ),
        *((*OVER_CP, 4, 2, outer) for outer in ("ring", "allgather")),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_output_follows_a_dtensor_query(
    pool: WorkerPool,
    axes: tuple[str, ...],
    placements: tuple[Placement, ...],
    kind: str,
    cp: int,
    ulysses: int,
    outer: str | None,
    causal: bool,
) -> None:
    """Cut over cp alone, over a foreign axis (tp) alone, and over both, also where both cut the same dim."""
    arrival = Arrival(axes, placements, cp, ulysses, outer, causal)
    for forward, backward, found in pool.run(dtensor_errors, arrival, world_size=4):
        assert forward <= EXACT
        assert backward <= EXACT
        assert found == kind


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize(("lead", "tokens"), [(5, 13), (12, 9), (1, 7), (0, 8), (16, 1)])
def test_tokens_ahead_of_a_stream(pool: WorkerPool, lead: int, tokens: int, balanced: bool) -> None:
    """They end inside of a rank's part, or between two; ranks have nothing else, or none of them."""
    for degree in (2, 4):
        for forward, backward in pool.run(leading_tokens_errors, lead, tokens, balanced, world_size=degree):
            assert forward <= EXACT
            assert backward <= EXACT


@pytest.mark.parametrize("balanced", [False, True])
def test_cut_in_an_attention_function(pool: WorkerPool, balanced: bool) -> None:
    for same, other, number in pool.run(cut_errors, 21, 20, balanced, world_size=2):
        assert same == "same"
        assert other == (
            "Model: plan entry 'mask' has 20 tokens on dim 1, but stream 'latent' has 21 in this forward (degree 2)"
        )
        assert number == "Model: plan entry 'mask': expected a tensor to cut on dim 1, got int"


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_gather_in_mid_network(pool: WorkerPool, degree: int) -> None:
    for forward, backward in pool.run(gather_within_errors, world_size=degree):
        assert forward <= EXACT
        assert backward <= EXACT


@given(length=st.integers(0, 1000), degree=st.integers(1, 64))
def test_parts_cover_the_length_evenly(length: int, degree: int) -> None:
    sizes = part_sizes(length, degree)
    assert sum(sizes) == length
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(kv_heads=st.integers(1, 12), group=st.integers(1, 8), degree=st.integers(1, 16))
def test_every_query_head_reads_its_own_key_head(kv_heads: int, group: int, degree: int) -> None:
    heads = kv_heads * group
    parts = head_parts(heads, kv_heads, degree)
    assert sum(part.query_size for part in parts) == heads
    for part in parts:
        for i in range(part.query_size):
            wanted = (part.query_start + i) // group
            found = part.kv_index[i] if part.kv_index is not None else i // (part.query_size // part.kv_size)
            assert part.kv_start + found == wanted
            assert 0 <= found < part.kv_size


def test_key_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="6 query heads cannot share 4"):
        head_parts(6, 4, 2)
