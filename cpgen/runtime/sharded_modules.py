"""What a tensor-parallel module runs in place of its own forward, where torch has no style for it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .binding import Axis
from .collectives import all_to_all

_ops = torch.ops._c10d_functional


class RMSNormAcrossHeads(nn.RMSNorm):
    """An RMS norm over C channels, of which `x` (..., C / P) holds this rank's. The weight is a DTensor, cut likewise.

    Sums of squares are added up over the ranks: one number a token, forward and backward.
    """

    cpgen_tp: Axis

    def forward(self, x: Tensor) -> Tensor:
        axis = self.cpgen_tp
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # as torch's own computes
        squares = _SumOfShared.apply(wide.square().sum(-1, keepdim=True), axis.group)  # type: ignore[no-untyped-call]
        eps = torch.finfo(wide.dtype).eps if self.eps is None else self.eps
        out = wide * torch.rsqrt(squares / (x.shape[-1] * axis.degree) + eps)
        if self.weight is not None:
            out = out * local_part(self.weight)
        return out.to(x.dtype)


class LinearOfConcat(nn.Linear):
    """A linear layer on (..., C / P), which concatenates this rank's share of each part of the C input channels.

    The weight (out, C) is a DTensor whose columns are cut into contiguous runs, so most ranks store columns that others
    compute with: they are traded in each forward. Backward trades the gradients back.
    """

    cpgen_tp: Axis
    cpgen_sizes: tuple[int, ...]  # channels of the whole parts

    def forward(self, input: Tensor) -> Tensor:
        axis = self.cpgen_tp
        weight = columns_of_parts(local_part(self.weight), self.cpgen_sizes, axis)
        out: Tensor = _SumOfPartial.apply(F.linear(input, weight), axis.group)  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + local_part(self.bias)


class SeparateOutputs(nn.Module):
    """Ahead of a block's class: of a tuple that it returns, each tensor is a copy."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        if not isinstance(out, tuple):
            return out
        return tuple(item.clone() if isinstance(item, Tensor) else item for item in out)


def columns_of_parts(weight: Tensor, sizes: tuple[int, ...], axis: Axis) -> Tensor:
    """From this rank's run of columns (out, sum(sizes) / P) to its share of the columns of each part, in order.

    One all-to-all; each of `sizes` is a multiple of P. Backward is the exchange the other way.
    """
    rows, columns = weight.shape
    shares = [_shares(rank, sizes, axis.degree) for rank in range(axis.degree)]

    def runs(holder: int, rank: int) -> list[tuple[int, int]]:
        """The columns that `holder` stores and `rank` computes with, counted from the first that it stores."""
        first, end = holder * columns, (holder + 1) * columns
        cut = [(max(start, first) - first, min(stop, end) - first) for start, stop in shares[rank]]
        return [(start, stop) for start, stop in cut if start < stop]

    def count(holder: int, rank: int) -> int:
        return sum(stop - start for start, stop in runs(holder, rank)) * rows

    ranks = range(axis.degree)
    turned = weight.t()
    flat = all_to_all(
        torch.cat([turned[start:stop] for rank in ranks for start, stop in runs(axis.rank, rank)]).reshape(-1),
        [count(holder, axis.rank) for holder in ranks],
        [count(axis.rank, rank) for rank in ranks],
        axis.group,
    )
    # Holders ascend with their columns, as a rank's shares do: what came is in order.
    return flat.view(columns, rows).t()


def share(value: Any, axis: Axis) -> Any:
    """`value`, which every rank reads for its own heads: gradients of tensors in it are summed over the ranks."""
    if isinstance(value, Tensor):
        return _Shared.apply(value, axis.group) if value.requires_grad else value  # type: ignore[no-untyped-call]
    if type(value) in (tuple, list):
        return type(value)(share(item, axis) for item in value)
    if type(value) is dict:
        return {key: share(item, axis) for key, item in value.items()}
    return value


def local_part(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter that is cut over the tp axis. FSDP has gathered it over its own by then."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


def _shares(rank: int, sizes: tuple[int, ...], degree: int) -> list[tuple[int, int]]:
    """The (start, end) of a rank's share of each part, in the concatenation of whole parts."""
    found, offset = [], 0
    for size in sizes:
        share = size // degree
        found.append((offset + rank * share, offset + (rank + 1) * share))
        offset += size
    return found


class _Shared(torch.autograd.Function):
    """The value itself; its gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: str) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _ops.wait_tensor(_ops.all_reduce(grad.contiguous(), "sum", ctx.group)), None


class _SumOfPartial(torch.autograd.Function):
    """All-reduce of terms whose sum all ranks use alike: the gradient of a term is that of the sum."""

    @staticmethod
    def forward(ctx: Any, term: Tensor, group: str) -> Tensor:
        out: Tensor = _ops.wait_tensor(_ops.all_reduce(term.contiguous(), "sum", group))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _SumOfShared(torch.autograd.Function):
    """All-reduce of terms whose sum each rank uses for its own channels: the gradients of the sum add up as well."""

    @staticmethod
    def forward(ctx: Any, term: Tensor, group: str) -> Tensor:
        ctx.group = group
        out: Tensor = _ops.wait_tensor(_ops.all_reduce(term.contiguous(), "sum", group))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _ops.wait_tensor(_ops.all_reduce(grad.contiguous(), "sum", ctx.group)), None
