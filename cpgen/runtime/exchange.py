"""Exchanges of attention's tensors between ranks: tokens for heads, heads for tokens, and the tokens of all ranks.

Tensors are rows here: (tokens, batch, heads, channels). `parts` holds for each rank, stream and segment the number of
tokens; a whole sequence is in the order of the model, stream after stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .binding import Axis
from .collectives import all_gather, all_to_all
from .parts import HeadPart
from .rows import in_order, model_to_rank, pad_rows, rank_to_model

Parts = list[list[list[int]]]


def tokens_to_heads(
    rows: Sequence[Tensor], heads: Sequence[list[HeadPart]], parts: Sequence[Parts], axis: Axis, balanced: bool
) -> list[Tensor]:
    """Query, key and value of this rank's tokens and all heads -> of all tokens and this rank's heads.

    `heads` are the parts of keys' and of values' heads, `parts` those of each tensor's tokens. One all-to-all, which
    carries all three.
    """
    of_key, of_value = heads
    mine = [of_key[axis.rank], of_key[axis.rank], of_value[axis.rank]]
    send = [
        [_heads_of(x, i, part[i]).reshape(-1) for i, x in enumerate(rows)]
        for part in zip(of_key, of_key, of_value, strict=True)
    ]
    send_sizes = [sum(piece.numel() for piece in pieces) for pieces in send]
    counts = [mine[0].query_size, mine[1].kv_size, mine[2].kv_size]
    shapes = [
        [
            (tokens_of(part[rank]), x.shape[1], count, x.shape[3])
            for x, part, count in zip(rows, parts, counts, strict=True)
        ]
        for rank in range(axis.degree)
    ]
    receive_sizes = [[_numel(shape) for shape in of_rank] for of_rank in shapes]
    flat = all_to_all(
        torch.cat([piece for pieces in send for piece in pieces]),
        [sum(sizes) for sizes in receive_sizes],
        send_sizes,
        axis.group,
    )
    received = torch.split(flat, [size for sizes in receive_sizes for size in sizes])
    whole = []
    for i in range(3):
        pieces = [received[rank * 3 + i].reshape(shapes[rank][i]) for rank in range(axis.degree)]
        whole.append(rank_to_model(pieces, parts[i], balanced))
    for i in (1, 2):
        if mine[i].kv_index is not None:
            index = torch.tensor(mine[i].kv_index, device=flat.device)
            whole[i] = whole[i].index_select(2, index)
    return whole


def heads_to_tokens(rows: Tensor, heads: list[HeadPart], parts: Parts, axis: Axis, balanced: bool) -> Tensor:
    """Attention's output for all tokens and this rank's heads -> (batch, tokens, heads, channels) of this rank's tokens
    and all heads, contiguous like the output of torch's fused kernels: what follows may use .view. One all-to-all.
    """
    send = [piece.reshape(-1) for piece in model_to_rank(rows, parts, balanced)]
    tokens = tokens_of(parts[axis.rank])
    shapes = [(tokens, rows.shape[1], part.query_size, rows.shape[3]) for part in heads]
    receive_sizes = [_numel(shape) for shape in shapes]
    flat = all_to_all(torch.cat(send), receive_sizes, [piece.numel() for piece in send], axis.group)
    pieces = [
        piece.reshape(shape).transpose(0, 1)
        for piece, shape in zip(torch.split(flat, receive_sizes), shapes, strict=True)
    ]
    return torch.cat(pieces, dim=2)


def gather_tokens(rows: Sequence[Tensor], parts: Parts, axis: Axis, balanced: bool) -> list[Tensor]:
    """Tensors of this rank's tokens -> of all tokens. One all-gather, which carries all of them."""
    packed = torch.cat([x.reshape(x.shape[0], -1) for x in rows], dim=1)
    whole = all_gather(pad_rows(packed, max(tokens_of(part) for part in parts)), axis.degree, axis.group)
    ordered = in_order(whole, parts, balanced)
    widths = [_numel(x.shape[1:]) for x in rows]
    return [flat.reshape(-1, *x.shape[1:]) for flat, x in zip(torch.split(ordered, widths, dim=1), rows, strict=True)]


def tokens_of(part: list[list[int]]) -> int:
    """The tokens of one rank's part."""
    return sum(sum(sizes) for sizes in part)


def _heads_of(rows: Tensor, index: int, part: HeadPart) -> Tensor:
    if index == 0:
        return rows.narrow(2, part.query_start, part.query_size)
    return rows.narrow(2, part.kv_start, part.kv_size)


def _numel(shape: tuple[int, ...] | torch.Size) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
