"""Rows of tokens (dim 0) between the order of the ranks that hold them and the order of the model."""

from __future__ import annotations

import torch
from torch import Tensor

from .parts import ascending


def pad_rows(rows: Tensor, size: int) -> Tensor:
    """`rows` with zeros appended on dim 0 up to `size`, contiguous: gloo and NCCL gather equal parts only."""
    missing = size - rows.shape[0]
    if missing:
        rows = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
    return rows.contiguous()


def in_order(whole: Tensor, parts: list[list[list[int]]], balanced: bool) -> Tensor:
    """Gathered rows, padded to equal parts on dim 0, in the order of the model without padding.

    `parts` holds for each rank, stream and segment the number of rows; the result is stream after stream.
    """
    sizes = [sum(sum(segments) for segments in of_rank) for of_rank in parts]
    width = max(sizes)
    if min(sizes) == width and len(parts[0]) == 1 and not balanced:
        return whole
    return rank_to_model([whole.narrow(0, rank * width, size) for rank, size in enumerate(sizes)], parts, balanced)


def rank_to_model(pieces: list[Tensor], parts: list[list[list[int]]], balanced: bool) -> Tensor:
    """What neighbouring ranks hold (rows on dim 0, `parts` as in `in_order`) in the order of the model."""
    split = [
        torch.split(piece, [size for stream in of_rank for size in stream])
        for piece, of_rank in zip(pieces, parts, strict=True)
    ]
    each = len(parts[0][0])
    order = ascending(len(parts), balanced)
    return torch.cat([split[rank][stream * each + i] for stream in range(len(parts[0])) for rank, i in order])


def model_to_rank(rows: Tensor, parts: list[list[list[int]]], balanced: bool) -> list[Tensor]:
    """The reverse of `rank_to_model`: for each rank its rows of every stream."""
    order = ascending(len(parts), balanced)
    streams = range(len(parts[0]))
    split = torch.split(rows, [parts[rank][stream][i] for stream in streams for rank, i in order])
    place = {(stream, rank, i): at for at, (stream, (rank, i)) in enumerate((s, o) for s in streams for o in order)}
    each = range(len(parts[0][0]))
    return [torch.cat([split[place[s, rank, i]] for s in streams for i in each]) for rank in range(len(parts))]
