"""The collectives of context parallelism, with the gradients that its convention asks for.

The convention: with true gradient g and P ranks, a sharded tensor's local gradient is P * g_local, and the gradients
of a replicated tensor sum to P * g over the ranks. The mean that FSDP2 or DDP take is then g, with no factor.

Functional collectives are used because torch.compile can trace them without a graph break.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives
from torch import Tensor

_ops = torch.ops._c10d_functional


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flat: Tensor, receive: list[int], send: list[int], group: str) -> Tensor:
        ctx.receive, ctx.send, ctx.group = receive, send, group
        out: Tensor = _ops.wait_tensor(_ops.all_to_all_single(flat, receive, send, group))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        out = _ops.wait_tensor(_ops.all_to_all_single(grad.contiguous(), ctx.send, ctx.receive, ctx.group))
        return out, None, None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, degree: int, group: str) -> Tensor:
        ctx.degree, ctx.group = degree, group
        out: Tensor = _ops.wait_tensor(_ops.all_gather_into_tensor(part, degree, group))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        out = _ops.wait_tensor(_ops.reduce_scatter_tensor(grad.contiguous(), "sum", ctx.degree, ctx.group))
        return out, None, None


class _AllGatherReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, degree: int, rank: int, group: str) -> Tensor:
        ctx.degree, ctx.rank = degree, rank
        out: Tensor = _ops.wait_tensor(_ops.all_gather_into_tensor(part, degree, group))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        size = grad.shape[0] // ctx.degree
        return grad.narrow(0, ctx.rank * size, size) * ctx.degree, None, None, None


def all_to_all(flat: Tensor, receive: list[int], send: list[int], group: str) -> Tensor:
    """Exchange pieces of a 1-D tensor: `send[i]` elements go to rank i, `receive[i]` come from it.

    Backward is the exchange the other way.
    """
    return _AllToAll.apply(flat, receive, send, group)  # type: ignore[no-any-return,no-untyped-call]


def all_gather(part: Tensor, degree: int, group: str) -> Tensor:
    """Concatenate equal parts on dim 0. Backward: reduce-scatter (sum), right wherever the result is used."""
    return _AllGather.apply(part, degree, group)  # type: ignore[no-any-return,no-untyped-call]


def all_gather_replicated(part: Tensor, degree: int, rank: int, group: str) -> Tensor:
    """As `all_gather`, for a result from which every rank computes the same: backward needs no communication.

    The incoming gradient is then g on every rank, so the sum of a reduce-scatter would be P * g_local: taken locally.
    """
    return _AllGatherReplicated.apply(part, degree, rank, group)  # type: ignore[no-any-return,no-untyped-call]
