"""Ring attention: keys and values travel around the ranks block by block, and each rank attends to one at a time.

A block's attention comes with its log-sum-exp, by which partial results merge (as FlashAttention's do over blocks of
keys). Beside its own keys and values a rank holds two blocks, the one at hand and the one that arrives; for backward it
keeps its own only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .binding import Axis
from .kernels import attend, attend_backward, mask_gradient

_ops = torch.ops._c10d_functional

Runs = list[tuple[int, int]]


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    positions: list[Runs],
    axis: Axis,
    kernel: str,
    causal: bool,
    scale: float,
) -> Tensor:
    """Attention of this rank's queries (B, H, Sq, D) to the keys and values (B, Hkv, Sk, D) of all ranks on `axis`.

    `positions` holds for each rank the (start, size) runs of its keys in the whole sequence. `mask` is None or 4-D,
    broadcastable to (B, H, Sq, S), bool or additive; its columns are in the order of the whole sequence. `causal` goes
    by position. Sends keys and values P - 1 times, in backward once more so, and their gradients as often, in float32.
    A row whose mask hides every key by some large negative number is computed as if that number were 0.
    """
    if mask is not None and mask.dtype != torch.bool:
        # Softmax does not see a shift of a row. Without it the log-sum-exp of a row of large negative numbers, whose
        # digits are all the mask's, would not hold the number of keys.
        most = mask.detach().amax(dim=-1, keepdim=True)
        mask = mask - torch.where(most.isfinite(), most, 0)
    out: Tensor = _Ring.apply(query, key, value, mask, positions, axis, kernel, causal, scale)  # type: ignore[no-untyped-call]
    return out


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        positions: list[Runs],
        axis: Axis,
        kernel: str,
        causal: bool,
        scale: float,
    ) -> Tensor:
        exact = torch.float64 if query.dtype == torch.float64 else torch.float32
        whole = torch.zeros(query.shape, dtype=exact, device=query.device)
        lse = torch.full(query.shape[:-1], float("-inf"), dtype=exact, device=query.device)
        counts = [sum(size for _, size in runs) for runs in positions]
        block = _pack(key, value)
        with torch.autocast(query.device.type, enabled=False):
            for step in range(axis.degree):
                source = (axis.rank - step) % axis.degree
                # The next block travels while this one computes.
                coming = _pass_on(block, counts, source, axis) if step + 1 < axis.degree else block
                keys, values = _unpack(block, key, counts[source])
                columns = None if mask is None else _columns(mask, positions[source])
                for rows, cols, square in _pieces(query.shape[2], positions, axis.rank, source, causal):
                    part, part_lse = attend(kernel, *_cut(query, keys, values, columns, rows, cols), square, scale)
                    _merge(whole, lse, part, part_lse, rows)
                block = _ops.wait_tensor(coming) if step + 1 < axis.degree else coming
        out = whole.to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, out, lse)
        ctx.options = positions, axis, kernel, causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, out, lse = ctx.saved_tensors
        positions, axis, kernel, causal, scale = ctx.options
        counts = [sum(size for _, size in runs) for runs in positions]
        query_grad = torch.zeros(query.shape, dtype=lse.dtype, device=query.device)
        wants_mask = mask is not None and ctx.needs_input_grad[3]
        mask_grad = torch.zeros(mask.shape, dtype=lse.dtype, device=query.device) if wants_mask else None
        block = _pack(key, value)
        own = travelling = block  # gradients of keys and values: of this rank's block, and of the block at hand
        with torch.autocast(query.device.type, enabled=False):
            for step in range(axis.degree):
                source = (axis.rank - step) % axis.degree
                coming = _pass_on(block, counts, source, axis) if step + 1 < axis.degree else block
                keys, values = _unpack(block, key, counts[source])
                columns = None if mask is None else _columns(mask, positions[source])
                found = torch.zeros(2, *keys.shape, dtype=lse.dtype, device=query.device)
                for rows, cols, square in _pieces(query.shape[2], positions, axis.rank, source, causal):
                    arguments = _cut(query, keys, values, columns, rows, cols)
                    grads = attend_backward(
                        kernel,
                        grad.narrow(2, *rows),
                        *arguments,
                        out.narrow(2, *rows),
                        lse.narrow(2, *rows),
                        square,
                        scale,
                    )
                    query_grad.narrow(2, *rows).add_(grads[0])
                    found[0].narrow(2, *cols).add_(grads[1])
                    found[1].narrow(2, *cols).add_(grads[2])
                if mask_grad is not None:
                    assert columns is not None
                    part = mask_gradient(grad, query, keys, values, columns, out, lse, scale)
                    _add_columns(mask_grad, part, positions[source])
                flat = found.reshape(-1)
                if step == 0:
                    own = flat
                else:
                    # What the ranks before this one found for the block came behind it; at the last step it goes home.
                    travelling = flat if step == 1 else flat + _ops.wait_tensor(travelling)
                    travelling = _pass_on(travelling, counts, source, axis)
                block = _ops.wait_tensor(coming) if step + 1 < axis.degree else coming
            own = own + _ops.wait_tensor(travelling)
        key_grad, value_grad = own.reshape(2, *key.shape)
        grads = (query_grad.to(query.dtype), key_grad.to(key.dtype), value_grad.to(value.dtype))
        return (*grads, None if mask_grad is None else mask_grad.to(mask.dtype), None, None, None, None, None)


def _pack(key: Tensor, value: Tensor) -> Tensor:
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def _unpack(block: Tensor, like: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    keys, values = block.reshape(2, like.shape[0], like.shape[1], tokens, like.shape[3]).unbind()
    return keys, values


def _pass_on(block: Tensor, counts: list[int], source: int, axis: Axis) -> Tensor:
    """Start to send `block`, which is `source`'s, to the next rank, and to receive from the one before. Not waited for.

    An all-to-all in which a rank has one sender and one receiver: nothing travels between others.
    """
    degree = axis.degree
    before = (source - 1) % degree
    size = block.numel()
    send = [size if rank == (axis.rank + 1) % degree else 0 for rank in range(degree)]
    coming = size // counts[source] * counts[before]
    receive = [coming if rank == (axis.rank - 1) % degree else 0 for rank in range(degree)]
    out: Tensor = _ops.all_to_all_single(block, receive, send, axis.group)
    return out


Span = tuple[int, int]  # (start, size)


def _pieces(rows: int, positions: list[Runs], rank: int, source: int, causal: bool) -> list[tuple[Span, Span, bool]]:
    """What of `source`'s block the `rows` queries of `rank` see: (rows, columns, whether causal within), local."""
    columns = sum(size for _, size in positions[source])
    if not causal or rank == source:
        return [((0, rows), (0, columns), causal)]
    found: list[tuple[Span, Span, bool]] = []
    at = 0
    for start, size in positions[rank]:
        # Parts of different ranks don't overlap, and are in ascending order: what comes before begins the block.
        seen = sum(other_size for other, other_size in positions[source] if other < start)
        if size and seen:
            found.append(((at, size), (0, seen), False))
        at += size
    return found


def _columns(mask: Tensor, runs: Runs) -> Tensor:
    if mask.shape[-1] == 1:
        return mask
    return torch.cat([mask.narrow(-1, start, size) for start, size in runs], dim=-1)


def _add_columns(mask_grad: Tensor, part: Tensor, runs: Runs) -> None:
    """Undo `_columns` for a gradient: add it where its columns are, in place."""
    if mask_grad.shape[-1] == 1:
        mask_grad.add_(part)
        return
    for (start, size), piece in zip(runs, torch.split(part, [size for _, size in runs], dim=-1), strict=True):
        mask_grad.narrow(-1, start, size).add_(piece)


def _cut(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, rows: Span, columns: Span
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    # Masks and causal pieces exclude each other, so a mask is never cut.
    return query.narrow(2, *rows), keys.narrow(2, *columns), values.narrow(2, *columns), mask


def _merge(whole: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, rows: Span) -> None:
    """Add a block's result to the rows that have it, in place: each weighs as much as its keys."""
    out, old = whole.narrow(2, *rows), lse.narrow(2, *rows)
    new = torch.logaddexp(old, part_lse)
    # A row that has seen no key yet has -inf in both.
    reference = torch.where(new == float("-inf"), 0, new)
    kept, added = ((each - reference).exp().unsqueeze(-1) for each in (old, part_lse))
    out.copy_(out * kept + part * added)
    old.copy_(new)
