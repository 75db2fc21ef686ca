"""Attention to one block of keys with its log-sum-exp, and that block's part of the gradients.

Attention to all keys is put together from blocks of keys by their log-sum-exps, which torch's public function does not
return. The operators behind it do, so they are called here. Dropout is not offered.

All tensors are (B, H, S, D). Key and value may have fewer heads than query where these divide: query head h reads head
h // (H // H_kv).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten
_INFINITY = float("inf")
_Gradients: TypeAlias = tuple[Tensor, Tensor, Tensor]  # of query, key and value

# For each type of device: diffusers' names of backends that give a log-sum-exp, and their kernels here.
# "native" is the first that takes the tensors.
_BACKENDS = {
    "cpu": {"_native_flash": "cpu_flash", "_native_math": "math"},
    "cuda": {
        "_native_flash": "cuda_flash",
        "_native_efficient": "cuda_efficient",
        "_native_cudnn": "cuda_cudnn",
        "_native_math": "math",
    },
}
_ELSEWHERE = {"_native_math": "math"}


class _Block(NamedTuple):
    """What an operator works on: key and value have a head for each of query's; bias is what to add to the scores."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    causal: bool
    scale: float


def choose_kernel(backend: str | None, query: Tensor, masked: bool) -> str:
    """The kernel for diffusers' attention backend (an enum member, its value, or None), by device, dtype and mask.

    Raises ValueError, naming the backends that work, if this one gives no log-sum-exp or does not take such tensors.
    """
    name = getattr(backend, "value", backend)
    kernels = _BACKENDS.get(query.device.type, _ELSEWHERE)
    working = [other for other, kernel in kernels.items() if _takes(kernel, query, masked)]
    if name is None or name == "native":
        return kernels[working[0]]
    if name in working:
        return kernels[name]
    tensors = f"{query.dtype}, head dim {query.shape[-1]}, {'with a' if masked else 'no'} mask"
    why = f"does not take {tensors}" if name in kernels else "gives no log-sum-exp of attention to a part of the keys"
    raise ValueError(
        f"attention backend {name!r} {why}, on {query.device.type}; backends that work here: "
        + ", ".join(["native", *working])
    )


def attend(
    kernel: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of `query` to these keys: out (B, H, Sq, D) in query's dtype, log-sum-exp (B, H, Sq).

    The log-sum-exp is natural, of scores after `scale` and mask; float32, or float64 for float64. A row that may see
    none of the keys has out 0 and log-sum-exp -inf. `mask` is None or 4-D, bool (True: may see) or additive, each dim
    1 or that of (B, H, Sq, Sk); a value too low for query's dtype counts as -inf. `causal` needs Sq == Sk and no mask.
    """
    _check(query, key, value, mask, causal)
    if query.numel() == 0 or key.numel() == 0:  # which the operators don't survive
        out = torch.zeros_like(query)
        return out, out.new_full(out.shape[:-1], -_INFINITY, dtype=_wide(query.dtype))
    block = _block(kernel, query, key, value, mask, causal, scale)
    out, lse = _FORWARD[kernel](block)
    if block.bias is None:
        return out, lse
    # What operators give for rows without a key differs: 0 and 0, or nan.
    blind = block.bias.amax(-1) == -_INFINITY
    return out.masked_fill(blind.unsqueeze(-1), 0.0), lse.masked_fill(blind, -_INFINITY)


def attend_backward(
    kernel: str,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """These keys' part of the gradients: (dq, dk, dv), shaped as query, key and value, in the dtype the kernel gives.

    `out` and `lse` are those of attention to the keys of all blocks: then P = exp(S - lse) are this block's columns of
    the whole softmax, and dS = P * (dP - rowsum(dO * O)) needs nothing else of the other blocks (FlashAttention,
    arXiv 2205.14135, appendix B). Parts of dq sum to the whole. The rest is as in `attend`. Rows where lse is -inf
    have no gradient.
    """
    _check(query, key, value, mask, causal)
    dtype = _computes_in(kernel, query.dtype)
    if query.numel() == 0 or key.numel() == 0:
        dq, dk, dv = (torch.zeros_like(tensor, dtype=dtype) for tensor in (query, key, value))
        return dq, dk, dv
    block = _block(kernel, query, key, value, mask, causal, scale)
    # exp(S - inf) is 0, where exp(-inf - -inf) is not a number. Operators take it as contiguous without a look.
    lse = lse.masked_fill(lse == -_INFINITY, _INFINITY).contiguous()
    dq, dk, dv = _BACKWARD[kernel](block, grad_out.to(dtype), out.to(dtype), lse)
    return dq, _sum_heads(dk, key.shape[1]), _sum_heads(dv, key.shape[1])


def mask_gradient(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, out: Tensor, lse: Tensor, scale: float
) -> Tensor:
    """The gradient of an additive `mask`, whose columns are these keys, in its shape; float32, or float64 for float64.

    It is dS before the scale. `out` and `lse` are those of attention to all keys, as in `attend_backward`. Plain
    operations, whatever the kernel: holds the scores of the block in memory.
    """
    block = _block("math", query, key, value, mask, False, scale)
    lse = lse.masked_fill(lse == -_INFINITY, _INFINITY)
    _, grad_scores = _math_weights(block, grad_out.to(lse.dtype), out.to(lse.dtype), lse)
    return grad_scores.sum_to_size(mask.shape)


def _takes(kernel: str, query: Tensor, masked: bool) -> bool:
    """Whether a kernel takes tensors like `query`, with or without a mask."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    if kernel == "cuda_flash":
        return half and not masked and query.shape[-1] <= 256
    if kernel == "cuda_efficient":
        return half or query.dtype == torch.float32
    return half or kernel != "cuda_cudnn"


def _check(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> None:
    assert key.shape == value.shape and query.shape[-1] == key.shape[-1] and query.shape[1] % key.shape[1] == 0
    assert mask is None or mask.ndim == 4
    assert not causal or (mask is None and query.shape[2] == key.shape[2])


def _block(
    kernel: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> _Block:
    heads = query.shape[1]
    bias = _additive(mask, _computes_in(kernel, query.dtype))
    return _Block(query, _each_head(key, heads), _each_head(value, heads), bias, causal, scale)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _computes_in(kernel: str, dtype: torch.dtype) -> torch.dtype:
    return _wide(dtype) if kernel == "math" else dtype


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """`mask` as something to add to scores, of the same shape."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask.logical_not(), -_INFINITY)
    return mask.to(dtype)


def _each_head(tensor: Tensor, heads: int) -> Tensor:
    """Key or value with a head for each of query's."""
    groups = heads // tensor.shape[1]
    return tensor if groups == 1 else tensor.repeat_interleave(groups, dim=1)


def _sum_heads(grad: Tensor, kv_heads: int) -> Tensor:
    """The way back for gradients: the sum over the query heads that read one head."""
    return grad if grad.shape[1] == kv_heads else grad.view(grad.shape[0], kv_heads, -1, *grad.shape[2:]).sum(2)


# Plain operations: any device, dtype and mask; holds all scores in memory.


def _math(block: _Block) -> tuple[Tensor, Tensor]:
    query, _, value, *_ = block
    with torch.autocast(query.device.type, enabled=False):
        scores = _scores(block)
        lse = torch.logsumexp(scores, -1)
        weights = torch.exp(scores - lse.unsqueeze(-1))
        return (weights @ value.to(scores.dtype)).to(query.dtype), lse


def _math_backward(block: _Block, grad_out: Tensor, out: Tensor, lse: Tensor) -> _Gradients:
    query, key = (tensor.to(grad_out.dtype) for tensor in block[:2])
    with torch.autocast(query.device.type, enabled=False):
        weights, grad_scores = _math_weights(block, grad_out, out, lse)
        grad_scores = grad_scores * block.scale
        return grad_scores @ key, grad_scores.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ grad_out


def _math_weights(block: _Block, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax's weights of these keys, and the gradient of the scores that they come from."""
    with torch.autocast(grad_out.device.type, enabled=False):
        weights = torch.exp(_scores(block) - lse.unsqueeze(-1))
        grad_weights = grad_out @ block.value.to(grad_out.dtype).transpose(-1, -2)
        return weights, weights * (grad_weights - (grad_out * out).sum(-1, keepdim=True))


def _scores(block: _Block) -> Tensor:
    query, key, _, bias, causal, scale = block
    dtype = _wide(query.dtype)
    scores = (query.to(dtype) * scale) @ key.to(dtype).transpose(-1, -2)
    if causal:
        bias = scores.new_full(scores.shape[-2:], -_INFINITY).triu(1)
    return scores if bias is None else scores + bias


# CPU. The operators read any layout of the mask, but take the values of a row to stand side by side, and key and value
# to have query's heads: both without a look.


def _cpu_flash(block: _Block) -> tuple[Tensor, Tensor]:
    query, key, value, bias, causal, scale = block
    query, key, value = (_dense_rows(tensor) for tensor in (query, key, value))
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=bias, scale=scale
    )
    return out, lse


def _cpu_flash_backward(block: _Block, grad_out: Tensor, out: Tensor, lse: Tensor) -> _Gradients:
    query, key, value, bias, causal, scale = block
    grad_out, query, key, value, out = (_dense_rows(tensor) for tensor in (grad_out, query, key, value, out))
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, lse, 0.0, causal, attn_mask=bias, scale=scale
    )
    return dq, dk, dv


def _dense_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


# CUDA. Called as torch.distributed.tensor.experimental._context_parallel calls the same operators, which makes keys
# and values contiguous because results were off without. Head dims are a multiple of 8: zeros change no score.


def _cuda_flash(block: _Block) -> tuple[Tensor, Tensor]:
    query, key, value, bias, causal, scale = block
    assert bias is None, "the flash operator takes no mask"
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(*_padded(query, key, value), 0.0, causal, scale=scale)
    return out.narrow(-1, 0, query.shape[-1]), lse


def _cuda_flash_backward(block: _Block, grad_out: Tensor, out: Tensor, lse: Tensor) -> _Gradients:
    query, key, value, bias, causal, scale = block
    assert bias is None, "the flash operator takes no mask"
    seed = torch.empty(2, dtype=torch.uint64, device=query.device)
    offset = torch.empty((), dtype=torch.uint64, device=query.device)
    grads = _aten._scaled_dot_product_flash_attention_backward(
        *_padded(grad_out, query, key, value, out),
        lse,
        None,  # cumulative lengths, for sequences of several lengths
        None,
        query.shape[2],
        key.shape[2],
        0.0,
        causal,
        seed,
        offset,
        scale=scale,
    )
    return _cut(grads, query.shape[-1])


def _cuda_efficient(block: _Block) -> tuple[Tensor, Tensor]:
    query, key, value, bias, causal, scale = block
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
        *_padded(query, key, value), _aligned(bias, query, key), True, 0.0, causal, scale=scale
    )
    return out.narrow(-1, 0, query.shape[-1]), lse.narrow(-1, 0, query.shape[2])


def _cuda_efficient_backward(block: _Block, grad_out: Tensor, out: Tensor, lse: Tensor) -> _Gradients:
    query, key, value, bias, causal, scale = block
    # The operator derives out's step from one token to the next from heads and head dim: they must lie as (B, S, H, D).
    grad_out, out = (tensor.transpose(1, 2) for tensor in _padded(grad_out.transpose(1, 2), out.transpose(1, 2)))
    *grads, _ = _aten._scaled_dot_product_efficient_attention_backward(
        grad_out,
        *_padded(query, key, value),
        _aligned(bias, query, key),
        out,
        F.pad(lse, (0, -query.shape[2] % 32), value=_INFINITY),  # as the forward operator pads it
        *_no_dropout(query),
        0.0,
        [True, True, True, False],
        causal,
        scale=scale,
    )
    return _cut(grads, query.shape[-1])


def _cuda_cudnn(block: _Block) -> tuple[Tensor, Tensor]:
    query, key, value, bias, causal, scale = block
    out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
        *_padded(query, key, value), _all_rows(bias, query, key), True, 0.0, causal, scale=scale
    )
    return out.narrow(-1, 0, query.shape[-1]), lse.squeeze(-1)


def _cuda_cudnn_backward(block: _Block, grad_out: Tensor, out: Tensor, lse: Tensor) -> _Gradients:
    query, key, value, bias, causal, scale = block
    grads = _aten._scaled_dot_product_cudnn_attention_backward(
        *_padded(grad_out, query, key, value, out),
        lse.unsqueeze(-1),
        *_no_dropout(query),
        _all_rows(bias, query, key),
        None,  # cumulative lengths, for sequences of several lengths
        None,
        query.shape[2],
        key.shape[2],
        0.0,
        causal,
        scale=scale,
    )
    return _cut(grads, query.shape[-1])


def _padded(*tensors: Tensor) -> list[Tensor]:
    width = -tensors[0].shape[-1] % 8
    return [(F.pad(tensor, (0, width)) if width else tensor).contiguous() for tensor in tensors]


def _cut(grads: Any, head_dim: int) -> _Gradients:
    dq, dk, dv = (grad.narrow(-1, 0, head_dim) for grad in grads)
    return dq, dk, dv


def _aligned(bias: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """`bias` as a view (B, H, Sq, Sk) whose rows begin at multiples of 16 values; dims of 1 take no memory."""
    if bias is None:
        return None
    keys = key.shape[2]
    rows = F.pad(bias.expand(*bias.shape[:-1], keys).contiguous(), (0, -keys % 16))
    return rows.narrow(-1, 0, keys).expand(*query.shape[:-1], keys)


def _all_rows(bias: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """`bias` as (B, 1 or H, Sq, Sk), to which the cuDNN operator would expand it, but written out."""
    if bias is None:
        return None
    return bias.expand(query.shape[0], -1, query.shape[2], key.shape[2]).contiguous()


def _no_dropout(query: Tensor) -> list[Tensor]:
    """Seed and offset of random numbers that are not drawn."""
    return [torch.zeros((), dtype=torch.int64, device=query.device) for _ in range(2)]


_FORWARD: dict[str, Callable[[_Block], tuple[Tensor, Tensor]]] = {
    "math": _math,
    "cpu_flash": _cpu_flash,
    "cuda_flash": _cuda_flash,
    "cuda_efficient": _cuda_efficient,
    "cuda_cudnn": _cuda_cudnn,
}
_BACKWARD: dict[str, Callable[[_Block, Tensor, Tensor, Tensor], _Gradients]] = {
    "math": _math_backward,
    "cpu_flash": _cpu_flash_backward,
    "cuda_flash": _cuda_flash_backward,
    "cuda_efficient": _cuda_efficient_backward,
    "cuda_cudnn": _cuda_cudnn_backward,
}
