"""Operations that slide a window over dims: convolutions, pooling, unfolding.

On the few tokens of a probe a window with holes may find one token and nothing but padding: values don't show it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Window:
    """What an operation slides a window over: `tensor`, of which the window has several elements in each of `dims`."""

    tensor: Tensor
    dims: tuple[int, ...]


def window_of(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Window | None:
    """The window of a call of `operator`, an overload in torch.ops; None if there is none of more than one element."""
    names = [argument.name for argument in operator._schema.arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    tensor = given.get("input", given.get("self"))
    sizes = _sizes(operator._schema.name, given)
    if not sizes or not isinstance(tensor, Tensor):
        return None
    dims = tuple(dim % tensor.ndim for dim, size in sizes.items() if size > 1)
    return Window(tensor, dims) if dims else None


def _sizes(name: str, given: Mapping[str, Any]) -> dict[int, int]:
    """Dim of the tensor -> size of the window in it."""
    if name == "aten::unfold":
        return {given["dimension"]: given["size"]}
    if name == "aten::conv_tbc":  # (T, B, C)
        return {0: given["weight"].shape[0]}
    if name == "aten::convolution":
        kernel = list(given["weight"].shape[2:])
    elif name == "aten::im2col":
        kernel = list(given["kernel_size"])
    elif pool := re.fullmatch(r"aten::\w*(?:avg|max)_pool([123])d\w*", name):
        kernel = list(given.get("kernel_size", ()))  # none: adaptive pooling
        kernel *= int(pool[1]) if len(kernel) == 1 else 1
    else:
        return {}
    return dict(zip(range(-len(kernel), 0), kernel, strict=True))
