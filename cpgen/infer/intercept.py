"""What torch is asked for in a run: attention calls, for which something else stands in, and every operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cpgen.infer.windows import Window, window_of

_LEAVING = ("tolist", "numpy", "__array__", "__dlpack__")  # dispatch does not see them
LEAVING = {getattr(Tensor, name): f"Tensor.{name}" for name in _LEAVING}
INDEXING = torch.ops.aten.index.Tensor  # has the tag below, but gives other sizes for bools only
_DECIDING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
DROPPING = (functional.dropout, functional.dropout1d, functional.dropout2d, functional.alpha_dropout)


@dataclass(frozen=True)
class Operation:
    """One operation: its tensors, the tensors that it gives, and all that it gives as tensors.

    `decides` says whether it hands Python a value, or a shape: what runs next may depend on the values that it gets.
    """

    name: str
    inputs: Sequence[Tensor]
    results: Sequence[Tensor]
    outputs: tuple[Tensor, ...]
    decides: bool
    window: Window | None = None


class StandIn(TorchFunctionMode):
    """Gives back the query in place of attention, drops nothing, and reports attention and values that leave torch."""

    def __init__(self, report: Callable[[Tensor, Tensor, Tensor], None], leaves: Callable[[Operation], None]) -> None:
        super().__init__()
        self._report = report
        self._leaves = leaves

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in LEAVING:
            self._leaves(Operation(LEAVING[func], [args[0]], [], (args[0].detach(),), decides=True))
        if func in DROPPING:
            return args[0] if args else kwargs["input"]
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        given = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
        query, key, value = given["query"], given["key"], given["value"]
        self._report(query, key, value)
        size = value.shape[-1]
        repeats = -(-size // query.shape[-1])
        return torch.cat([query] * repeats, dim=-1)[..., :size].to(value.dtype).contiguous()


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports every operation."""

    def __init__(self, report: Callable[[Operation], None]) -> None:
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
        results = [output for output in outputs if isinstance(output, Tensor)]
        numbers = any(isinstance(output, (bool, int, float)) for output in outputs)
        decides = numbers or (func is not INDEXING and not _DECIDING.isdisjoint(func.tags))
        self._report(Operation(name, inputs, results, tensors, decides, window_of(func, args, kwargs or {})))
        return result
