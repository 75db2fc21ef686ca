"""Running a float32 model in float64, casts inside it included, to tell rounding from error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


class AsFloat64(TorchFunctionMode):
    """Within it, whatever asks torch for float32 gets float64: `x.float()`, `x.to(torch.float32)`, `dtype=...`.

    Not in backward: torch turns a mode off for as long as one of its functions runs.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        return func(*map(_widen, args), **{key: _widen(value) for key, value in (kwargs or {}).items()})


def to_float64(value: Any) -> Any:
    """`value` with every float32 tensor in nested tuples, lists and dicts as a new float64 leaf."""
    if isinstance(value, Tensor) and value.dtype == torch.float32:
        return value.detach().double().requires_grad_(value.requires_grad)
    if isinstance(value, (tuple, list)):
        return type(value)(to_float64(item) for item in value)
    if isinstance(value, dict):
        return {key: to_float64(item) for key, item in value.items()}
    return value


def _widen(value: Any) -> Any:
    return _WIDER.get(value, value) if isinstance(value, torch.dtype) else value
