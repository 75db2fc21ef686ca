"""What torch is asked for in a run: attention calls, for which something else stands in, and every operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LEAVING = {getattr(Tensor, name): f"Tensor.{name}" for name in ("tolist", "numpy", "__array__")}  # unseen by dispatch
DROPPING = (functional.dropout, functional.dropout1d, functional.dropout2d, functional.alpha_dropout)


class StandIn(TorchFunctionMode):
    """Gives back the query in place of attention, drops nothing, and reports attention and values that leave torch."""

    def __init__(self, report: Callable[[Tensor, Tensor], None], leaves: Callable[[str, Tensor], None]) -> None:
        super().__init__()
        self._report = report
        self._leaves = leaves

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in LEAVING:
            self._leaves(LEAVING[func], args[0])
        if func in DROPPING:
            return args[0] if args else kwargs["input"]
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        given = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
        query, key, value = given["query"], given["key"], given["value"]
        self._report(query, key)
        size = value.shape[-1]
        repeats = -(-size // query.shape[-1])
        return torch.cat([query] * repeats, dim=-1)[..., :size].to(value.dtype).contiguous()


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports every operation: its name, its tensors, the tensors that it gives, and all that it gives as tensors."""

    def __init__(self, report: Callable[[str, list[Tensor], list[Tensor], tuple[Tensor, ...]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._report = report

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if "empty" in name and isinstance(result, Tensor):
            result.zero_()  # what was in memory before is no value of the class's
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        tensors = tuple(
            output if isinstance(output, Tensor) else torch.tensor(output)
            for output in outputs
            if isinstance(output, (Tensor, bool, int, float))
        )
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        self._report(name, inputs, [output for output in outputs if isinstance(output, Tensor)], tensors)
        return result
