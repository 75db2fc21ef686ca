"""Attention masks over whole sequences: how their shapes are read."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def is_key_mask(mask: Tensor, layout: str, batch: int) -> bool:
    """Whether `mask` is over keys alone: (S) or (B, S)."""
    # diffusers' dispatcher reads a 2-D mask as (B, S); torch's own function, used with BHSD, as (S, S).
    # Under (S, S) the dispatcher takes a 2-D mask for a key mask as well, where the first size is the batch's.
    return mask.ndim == 1 or (mask.ndim == 2 and layout == "BSHD" and mask.shape[0] == batch)


def four_dims(mask: Tensor | None, layout: str, batch: int) -> Tensor | None:
    """`mask` with dims for (B, H, Sq, Sk), as attention reads it."""
    if mask is None or mask.ndim == 4:
        return mask
    if mask.ndim == 2 and is_key_mask(mask, layout, batch):
        return mask[:, None, None, :]
    return mask[(None,) * (4 - mask.ndim)]


def check_mask(mask: Any, queries: int, keys: int, broadcasts: bool, layout: str, batch: int, model_name: str) -> None:
    """Raise ValueError if `mask` is no tensor, or does not span whole sequences of so many queries and keys.

    With `broadcasts` one column may stand for all keys.
    """
    if not isinstance(mask, Tensor):
        raise ValueError(f"{model_name}: a mask of type {type(mask).__name__} is not supported")
    columns = (1, keys) if broadcasts else (keys,)
    fits = mask.shape[-1] in columns and (is_key_mask(mask, layout, batch) or mask.shape[-2] in (1, queries))
    if not fits:
        raise ValueError(
            f"{model_name}: the attention mask has shape {tuple(mask.shape)}, but the whole sequence is {queries} "
            f"queries and {keys} keys: a mask must be built from global lengths"
        )
