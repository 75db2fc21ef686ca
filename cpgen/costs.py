"""What an attention call costs a rank: collectives, bytes sent, memory for keys and values.

Arithmetic alone, without torch. What it describes is in cpgen/runtime/attention.py and ring.py; tests and
benchmarks/strategies.py count that and compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from cpgen.strategy import Strategy

ALL_TO_ALL, ALL_GATHER, REDUCE_SCATTER, RING_STEP = "all-to-all", "all-gather", "reduce-scatter", "ring step"
_FLOAT32 = 4  # bytes: gradients travel around a ring in float32 at least


@dataclass(frozen=True)
class Attention:
    """One attention call over whole sequences, before anything is cut. `itemsize` is the bytes of one value.

    `tokens` are those of all its streams; keys and values are of the same tokens as queries.
    """

    tokens: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int

    @property
    def size(self) -> int:
        """The bytes of the whole query: N = batch * tokens * heads * head_dim * itemsize."""
        return self.batch * self.tokens * self.heads * self.head_dim * self.itemsize


@dataclass(frozen=True)
class Pass:
    """A forward or a backward of one call: collectives by kind, and the bytes that a rank sends to others."""

    collectives: dict[str, int]
    sent: Fraction


@dataclass(frozen=True)
class Cost:
    """What one attention call costs a rank, in bytes.

    `kv_held` is what keys and values take while forward attends, `kv_kept` what of it stays for backward. Not in it:
    buffers of a collective that has ended, and what a kernel holds by itself.
    """

    forward: Pass
    backward: Pass
    kv_held: Fraction
    kv_kept: Fraction


@dataclass(frozen=True)
class HeadCount:
    """One rank's heads after the exchange of Ulysses: of queries; K/V heads that it is sent; those it then holds."""

    queries: int
    received: int
    held: int


def cost(strategy: Strategy, call: Attention) -> Cost:
    """The cost of `call` under `strategy`. Degree 1 sends nothing.

    Exact where tokens divide by twice the degree; else all-gathers send a little more, the padding. Where heads don't
    divide by the Ulysses degree, what is sent is the mean over ranks, and memory that of the rank with most heads.
    Raises ValueError as `head_counts` does.
    """
    inner = strategy.ulysses_degree
    outer = strategy.cp // inner
    ring = strategy.outer == "ring" and outer > 1
    counts = head_counts(call.heads, call.kv_heads, inner)
    # One head of one rank's tokens.
    piece = Fraction(call.batch * call.tokens * call.head_dim * call.itemsize, strategy.cp)

    # Of queries and output each head is on one rank; a head of keys or values goes to every rank that reads it.
    received = sum(count.received for count in counts)
    traded = piece * (2 * call.heads + 2 * received) * Fraction(inner - 1, inner)
    # Then a rank holds the tokens of `inner` ranks, of its heads: a block, which all ranks of the outer axis need.
    block = 2 * piece * sum(count.held for count in counts)
    passed = block * (outer - 1)
    gradients = passed * max(_FLOAT32, call.itemsize) / call.itemsize

    trades = {ALL_TO_ALL: 2} if inner > 1 else {}
    largest = 2 * piece * inner * max(count.held for count in counts)
    if ring:
        forward = Pass(trades | {RING_STEP: outer - 1}, traded + passed)
        backward = Pass(trades | {RING_STEP: 2 * (outer - 1)}, traded + passed + gradients)
        return Cost(forward, backward, 3 * largest, largest)  # its own block, the one at hand, the one to come
    if outer > 1:
        forward = Pass(trades | {ALL_GATHER: 1}, traded + passed)
        backward = Pass(trades | {REDUCE_SCATTER: 1}, traded + passed)
    else:
        forward = backward = Pass(trades, traded)
    return Cost(forward, backward, outer * largest, outer * largest)


def head_counts(heads: int, kv_heads: int, degree: int) -> list[HeadCount]:
    """How `cpgen.runtime.parts.head_parts`, which cannot be imported without torch, cuts heads over `degree` ranks.

    Raises ValueError if `kv_heads` does not divide `heads`, or for fewer heads than ranks.
    """
    if heads % kv_heads:
        raise ValueError(f"{heads} heads cannot share {kv_heads} heads of keys and values: they do not divide")
    if heads < degree:
        raise ValueError(f"{heads} heads are fewer than {degree} ranks")
    group = heads // kv_heads
    counts = []
    start = 0
    for rank in range(degree):
        size = heads // degree + (rank < heads % degree)
        read = [head // group for head in range(start, start + size)]
        received = read[-1] - read[0] + 1
        # Attention expects groups of one size. Where they are not, each query head gets a copy of its own.
        sizes = {read.count(head) for head in read}
        counts.append(HeadCount(size, received, received if len(sizes) == 1 else size))
        start += size
    return counts
