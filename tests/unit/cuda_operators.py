"""What torch's CUDA operators of attention are, put in their place on CPU.

Written after torch 2.13's sources: the shapes and steps that they ask for, what they return, what they give for rows
without a key.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

INF = float("inf")


@contextlib.contextmanager
def cuda_operators() -> Iterator[None]:
    """Within, calls of the CUDA operators on CPU tensors run these."""
    library = torch.library.Library("aten", "IMPL")
    for name, forward, backward in [
        ("flash", flash, flash_backward),
        ("efficient", efficient, efficient_backward),
        ("cudnn", cudnn, cudnn_backward),
    ]:
        library.impl(f"_scaled_dot_product_{name}_attention", forward, "CPU")
        library.impl(f"_scaled_dot_product_{name}_attention_backward", backward, "CPU")
    try:
        yield
    finally:
        library._destroy()


def weights_of(query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Scores and log-sum-exp, for as many heads of key as of query."""
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) * scale
    if bias is not None:
        scores = scores + bias
    if causal:
        later = torch.arange(key.shape[2])[None, :] > torch.arange(query.shape[2])[:, None]
        scores = scores.masked_fill(later, -INF)
    return scores, torch.logsumexp(scores, -1)


def kernel_forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Computes in the type that accumulates, as kernels do. Rows without a key have nan."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores, lse = weights_of(query.to(wide), key.to(wide), None if bias is None else bias.to(wide), causal, scale)
    return torch.exp(scores - lse.unsqueeze(-1)) @ value.to(wide), lse


def kernel_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = query.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert lse.dtype == wide and {x.dtype for x in (grad, query, key, value, out)} == {dtype}
    grad, query, key, value, out = (x.to(wide) for x in (grad, query, key, value, out))
    scores, _ = weights_of(query, key, None if bias is None else bias.to(wide), causal, scale)
    weights = torch.exp(scores - lse.unsqueeze(-1))
    slopes = weights * (grad @ value.mT - (grad * out).sum(-1, keepdim=True)) * scale
    return (slopes @ key).to(dtype), (slopes.mT @ query).to(dtype), (weights.mT @ grad).to(dtype)


def check_inputs(*inputs: Tensor) -> None:
    query, key, value = inputs[:3]
    assert query.shape[1] == key.shape[1] == value.shape[1]
    assert all(x.shape[-1] % 8 == 0 and x.is_contiguous() for x in inputs)


def flash(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    check_inputs(query, key, value)
    assert dropout_p == 0 and not return_debug_mask
    out, lse = kernel_forward(query, key, value, None, is_causal, scale)
    none, seed = query.new_empty(0), torch.empty(2, dtype=torch.uint64)
    return out.to(query.dtype), lse, none, none, query.shape[2], key.shape[2], seed, none, none


def flash_backward(
    grad, query, key, value, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, seed, offset, *, scale=None
):
    check_inputs(query, key, value, grad, out)
    assert lse.is_contiguous() and lse.shape == query.shape[:3]
    assert cum_q is None and cum_k is None and (max_q, max_k) == (query.shape[2], key.shape[2]) and dropout_p == 0
    assert (seed.shape, seed.dtype, offset.shape, offset.dtype) == ((2,), torch.uint64, (), torch.uint64)
    return kernel_backward(grad, query, key, value, None, out, lse, is_causal, scale)


def check_efficient_bias(bias: Tensor | None, query: Tensor, key: Tensor) -> None:
    """The checks of kernel_forward.h and kernel_backward.h, which leave out the steps of dims of 1."""
    if bias is not None:
        assert bias.dtype == query.dtype and bias.shape == (*query.shape[:3], key.shape[2])
        assert key.shape[2] == 1 or bias.stride(3) == 1
        assert all(bias.shape[dim] == 1 or bias.stride(dim) % 8 == 0 for dim in range(3))
        # Whole vectors are read, also at a row's end.
        assert bias.untyped_storage().nbytes() % (16 * bias.element_size()) == 0


def efficient(query, key, value, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    check_inputs(query, key, value)
    check_efficient_bias(bias, query, key)
    assert compute_log_sumexp and dropout_p == 0
    out, lse = kernel_forward(query, key, value, bias, is_causal, scale)
    blind = lse == -INF  # are 0 and 0
    out, lse = out.masked_fill(blind.unsqueeze(-1), 0.0), lse.masked_fill(blind, 0.0)
    lse = torch.nn.functional.pad(lse, (0, math.ceil(query.shape[2] / 32) * 32 - query.shape[2]), value=INF)
    seed = torch.empty((), dtype=torch.int64)
    return out.to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2), lse, seed, seed.clone()


def efficient_backward(
    grad, query, key, value, bias, out, lse, seed, offset, dropout_p, grad_input_mask, is_causal=False, *, scale=None
):
    check_inputs(query, key, value)
    check_efficient_bias(bias, query, key)
    assert grad.transpose(1, 2).is_contiguous() and out.transpose(1, 2).is_contiguous()
    assert lse.is_contiguous() and lse.shape[2] % 32 == 0 and bool((lse[:, :, query.shape[2] :] == INF).all())
    assert dropout_p == 0 and grad_input_mask == [True, True, True, False]
    assert (seed.shape, seed.dtype, offset.shape, offset.dtype) == ((), torch.int64, (), torch.int64)
    lse = lse[:, :, : query.shape[2]]
    return *kernel_backward(grad, query, key, value, bias, out, lse, is_causal, scale), query.new_empty(0)


def check_cudnn_bias(bias: Tensor | None, query: Tensor, key: Tensor) -> None:
    if bias is not None:
        batch, heads, queries, _ = query.shape
        assert bias.shape in ((batch, 1, queries, key.shape[2]), (batch, heads, queries, key.shape[2]))
        assert bias.is_contiguous() and bias.dtype == query.dtype


def cudnn(
    query,
    key,
    value,
    bias,
    compute_log_sumexp,
    dropout_p=0.0,
    is_causal=False,
    return_debug_mask=False,
    *,
    scale=None,
):
    check_inputs(query, key, value)
    check_cudnn_bias(bias, query, key)
    assert compute_log_sumexp and dropout_p == 0 and not return_debug_mask
    out, lse = kernel_forward(query, key, value, bias, is_causal, scale)
    none, seed = query.new_empty(0), torch.empty((), dtype=torch.int64)
    lse = lse.unsqueeze(-1)
    return out.to(query.dtype), lse, none, none, query.shape[2], key.shape[2], seed, seed.clone(), none


def cudnn_backward(
    grad,
    query,
    key,
    value,
    out,
    lse,
    seed,
    offset,
    bias,
    cum_q,
    cum_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    *,
    scale=None,
):
    check_inputs(query, key, value, grad, out)
    check_cudnn_bias(bias, query, key)
    assert lse.is_contiguous() and lse.shape == (*query.shape[:3], 1)
    assert cum_q is None and cum_k is None and (max_q, max_k) == (query.shape[2], key.shape[2]) and dropout_p == 0
    assert (seed.shape, seed.dtype, offset.shape, offset.dtype) == ((), torch.int64, (), torch.int64)
    return kernel_backward(grad, query, key, value, bias, out, lse.squeeze(-1), is_causal, scale)
