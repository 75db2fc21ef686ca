"""Costs by formula, against the table of the docs and against a simulation of who sends what to whom."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpgen.comparison import choices
from cpgen.costs import Attention, cost, head_counts
from cpgen.runtime.parts import head_parts, segments
from cpgen.strategy import Strategy, resolve


def call(tokens: int = 64, heads: int = 8, kv_heads: int | None = None, itemsize: int = 4) -> Attention:
    return Attention(tokens, 2, heads, kv_heads or heads, 16, itemsize)


def in_n(strategy: Strategy, attention: Attention) -> tuple[Fraction, Fraction, Fraction, Fraction]:
    """Sent in forward and in backward, held, and kept for backward, in units of N."""
    found = cost(strategy, attention)
    values = (found.forward.sent, found.backward.sent, found.kv_held, found.kv_kept)
    return tuple(value / attention.size for value in values)  # type: ignore[return-value]


# The formulas of docs/strategies.md


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_formulas(cp: int) -> None:
    passed = Fraction(2 * (cp - 1), cp)
    traded = Fraction(4 * (cp - 1), cp**2)
    whole = Fraction(2)
    assert in_n(resolve("ulysses", cp, None, None, False, 8), call()) == (traded, traded, whole / cp, whole / cp)
    assert in_n(resolve("allgather", cp, None, None, False, 8), call()) == (passed, passed, whole, whole)
    ring = resolve("ring", cp, None, None, False, 8)
    assert in_n(ring, call()) == (passed, 2 * passed, 3 * whole / cp, whole / cp)


@pytest.mark.parametrize(("cp", "inner"), [(4, 2), (8, 2), (8, 4)])
def test_formulas_of_hybrid(cp: int, inner: int) -> None:
    outer = cp // inner
    sent = Fraction(4 * (inner - 1), inner * cp) + Fraction(2 * (outer - 1), cp)
    gather = resolve("hybrid", cp, inner, "allgather", False, 8)
    assert in_n(gather, call()) == (sent, sent, Fraction(2, inner), Fraction(2, inner))
    ring = resolve("hybrid", cp, inner, "ring", False, 8)
    assert in_n(ring, call()) == (sent, sent + Fraction(2 * (outer - 1), cp), Fraction(6, cp), Fraction(2, cp))


def test_gradients_go_around_a_ring_in_float32() -> None:
    ring = resolve("ring", 4, None, None, False, 8)
    passed = Fraction(2 * 3, 4)
    for itemsize, factor in ((2, 2), (4, 1), (8, 1)):
        assert in_n(ring, call(itemsize=itemsize))[:2] == (passed, passed * (1 + factor))


def test_collectives() -> None:
    def collectives(name: str, inner: int | None = None, outer: str | None = None) -> list[dict[str, int]]:
        found = cost(resolve(name, 8, inner, outer, False, 8), call())
        return [found.forward.collectives, found.backward.collectives]

    trades = {"all-to-all": 2}
    assert collectives("ulysses") == [trades, trades]
    assert collectives("allgather") == [{"all-gather": 1}, {"reduce-scatter": 1}]
    assert collectives("ring") == [{"ring step": 7}, {"ring step": 14}]
    assert collectives("hybrid", 2, "allgather") == [trades | {"all-gather": 1}, trades | {"reduce-scatter": 1}]
    assert collectives("hybrid", 2, "ring") == [trades | {"ring step": 3}, trades | {"ring step": 6}]


@pytest.mark.parametrize("name", ["ulysses", "allgather", "ring", "hybrid"])
def test_one_rank_sends_nothing(name: str) -> None:
    found = cost(resolve(name, 1, None, None, False, 8), call())
    for each in (found.forward, found.backward):
        assert (each.collectives, each.sent) == ({}, 0)
    assert found.kv_held == found.kv_kept == 2 * call().size


@pytest.mark.parametrize("inner", [1, 4])
def test_hybrid_at_its_ends_costs_what_the_plain_strategy_does(inner: int) -> None:
    plain = resolve("ulysses" if inner == 4 else "ring", 4, None, None, False, 8)
    assert cost(resolve("hybrid", 4, inner, "ring", False, 8), call()) == cost(plain, call())


def test_grouped_queries_send_heads_of_keys_only_to_their_readers() -> None:
    ulysses = resolve("ulysses", 4, None, None, False, 8)
    few, many = call(kv_heads=1), call(kv_heads=8)
    # One head of keys that all four ranks read, in place of two on each.
    assert in_n(ulysses, few)[0] == Fraction(2 * 3, 16) + Fraction(2 * 3, 4 * 8)
    assert in_n(ulysses, few)[0] < in_n(ulysses, many)[0]
    assert in_n(resolve("allgather", 4, None, None, False, 8), few)[0] == Fraction(2 * 3, 4) / 8


# Heads


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 12))
def test_heads_are_cut_as_the_runtime_cuts_them(kv_heads: int, group: int, degree: int) -> None:
    heads = kv_heads * group
    if heads < degree:
        with pytest.raises(ValueError, match="fewer than"):
            head_counts(heads, kv_heads, degree)
        return
    for ours, theirs in zip(head_counts(heads, kv_heads, degree), head_parts(heads, kv_heads, degree), strict=True):
        held = theirs.kv_size if theirs.kv_index is None else theirs.query_size
        assert (ours.queries, ours.received, ours.held) == (theirs.query_size, theirs.kv_size, held)


def test_heads_that_cannot_be_shared() -> None:
    with pytest.raises(ValueError, match="do not divide"):
        head_counts(6, 4, 2)


# Who sends what to whom, head by head and token by token


@dataclass(frozen=True)
class Simulated:
    """For each rank: bytes sent in forward and in backward, and of keys and values that it attends to."""

    forward: list[int]
    backward: list[int]
    whole: list[int]


def simulated(strategy: Strategy, attention: Attention) -> Simulated:
    cp, inner = strategy.cp, strategy.ulysses_degree
    size = attention.batch * attention.head_dim * attention.itemsize  # of one head of one token
    wide = attention.batch * attention.head_dim * max(4, attention.itemsize)
    tokens = [sum(n for _, n in of_rank) for of_rank in segments(attention.tokens, cp, False)]
    parts = head_parts(attention.heads, attention.kv_heads, inner)
    forward, backward = [0] * cp, [0] * cp
    blocks = []  # heads times tokens of keys on each rank, once tokens were traded
    for rank in range(cp):
        first = rank // inner * inner
        mine = parts[rank - first]
        for other in range(first, first + inner):
            if other == rank:
                continue
            theirs = parts[other - first]
            group = attention.heads // attention.kv_heads
            read = {h // group for h in range(theirs.query_start, theirs.query_start + theirs.query_size)}
            there = tokens[rank] * (theirs.query_size + 2 * len(read)) * size
            back = tokens[other] * mine.query_size * size
            forward[rank] += there + back
            backward[other] += there + back  # gradients go the other way
        held = mine.kv_size if mine.kv_index is None else mine.query_size
        blocks.append(held * sum(tokens[first : first + inner]))
    for rank in range(cp if strategy.outer else 0):
        for step in range(1, cp // inner):
            # The block of `owner` comes to `rank`: from itself, or around the ring from the rank before this one.
            owner, before = (rank - step * inner) % cp, (rank - inner) % cp
            if strategy.outer == "ring":
                forward[before] += 2 * blocks[owner] * size
                backward[before] += 2 * blocks[owner] * size
                backward[rank] += 2 * blocks[owner] * wide  # its gradient goes on, home at last
            else:
                forward[owner] += 2 * blocks[owner] * size
                backward[rank] += 2 * blocks[owner] * size  # this rank's share of the owner's gradient
    outer_ranks = [[(rank + step * inner) % cp for step in range(cp // inner)] for rank in range(cp)]
    return Simulated(forward, backward, [2 * sum(blocks[r] for r in ranks) * size for ranks in outer_ranks])


@pytest.mark.parametrize("cp", [2, 4, 6])
@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 12), (12, 4), (12, 2), (12, 1), (7, 7)])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_simulation(cp: int, heads: int, kv_heads: int, itemsize: int) -> None:
    attention = call(24, heads, kv_heads, itemsize)
    for strategy in choices(cp):
        found, ranks = cost(strategy, attention), simulated(strategy, attention)
        for each, of_ranks in ((found.forward, ranks.forward), (found.backward, ranks.backward)):
            assert Fraction(sum(of_ranks), cp) == each.sent, strategy
            if heads % strategy.ulysses_degree == 0 and kv_heads in (12, 1):
                assert set(of_ranks) == {each.sent}, strategy
        if strategy.outer != "ring":
            assert max(ranks.whole) == found.kv_held, strategy
