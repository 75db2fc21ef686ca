"""How tokens and heads are cut into one part a rank. Pure arithmetic on sizes that the host knows."""

from __future__ import annotations

from dataclasses import dataclass


def part_sizes(length: int, degree: int) -> list[int]:
    """Sizes of the `degree` contiguous parts of `length` items: equal, or one larger on the first ranks."""
    quotient, remainder = length // degree, length % degree  # not divmod: torch.compile cannot trace it on sizes
    return [quotient + 1 if rank < remainder else quotient for rank in range(degree)]


def segments(length: int, degree: int, balanced: bool) -> list[list[tuple[int, int]]]:
    """For each rank the (start, size) of what it holds of a stream of `length` tokens, in ascending order.

    One contiguous part a rank; or, `balanced` for causal attention, two chunks of 2 * degree, rank r's being r and
    2 * degree - 1 - r (head-tail order): early tokens attend to few others, late ones to many.
    """
    sizes = part_sizes(length, 2 * degree if balanced else degree)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    chunks = list(zip(starts, sizes, strict=True))
    if not balanced:
        return [[chunk] for chunk in chunks]
    return [[chunks[rank], chunks[2 * degree - 1 - rank]] for rank in range(degree)]


def ascending(ranks: int, balanced: bool) -> list[tuple[int, int]]:
    """The (rank, segment) pairs of `ranks` neighbours in the order of the model: heads up, then tails down."""
    tails = [(rank, 1) for rank in reversed(range(ranks))] if balanced else []
    return [*((rank, 0) for rank in range(ranks)), *tails]


@dataclass(frozen=True)
class HeadPart:
    """The query heads of one rank and the key/value heads they read (grouped-query attention shares the latter)."""

    query_start: int
    query_size: int
    kv_start: int
    kv_size: int
    # For each query head of this part, its key/value head counted from kv_start; None where torch's own rule for
    # grouped queries (equal groups in order) gives the same.
    kv_index: tuple[int, ...] | None


def head_parts(query_heads: int, kv_heads: int, degree: int) -> list[HeadPart]:
    """Cut `query_heads` over the ranks; key/value heads that several ranks read are sent to each of them.

    Raises ValueError if `kv_heads` does not divide `query_heads`.
    """
    if query_heads % kv_heads:
        raise ValueError(f"{query_heads} query heads cannot share {kv_heads} key/value heads: they do not divide")
    group = query_heads // kv_heads
    parts = []
    start = 0
    for size in part_sizes(query_heads, degree):
        kv_start = start // group
        kv_size = (start + size - 1) // group + 1 - kv_start if size else 0
        index = tuple(head // group - kv_start for head in range(start, start + size))
        regular = kv_size > 0 and size % kv_size == 0 and index == tuple(i // (size // kv_size) for i in range(size))
        parts.append(HeadPart(start, size, kv_start, kv_size, None if regular else index))
        start += size
    return parts
