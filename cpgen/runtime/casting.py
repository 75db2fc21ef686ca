"""The dtype in which attention runs, under autocast as torch's own function would have it."""

from __future__ import annotations

import torch
from torch import Tensor


def in_one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """`tensors` as they are, or under autocast, where norms leave float32 behind, as attention will cast them."""
    if len({tensor.dtype for tensor in tensors}) == 1:
        return tensors
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        raise ValueError(f"query, key and value differ in dtype: {', '.join(str(t.dtype) for t in tensors)}")
    return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)


def as_attention_casts(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What attention casts its arguments to: under autocast its dtype, and an additive mask to the query's."""
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    else:
        query, key, value = in_one_dtype(query, key, value)
    return query, key, value, mask if mask is None or mask.dtype == torch.bool else mask.to(query.dtype)
