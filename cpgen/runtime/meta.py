"""Models whose parameters have no storage yet: building one, and adding to it before it is wrapped."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Parameters made inside have no storage; buffers and plain tensors (rope tables) are real and keep their values.

    Each is allocated for a moment, but its memory is never touched: the initialisers run on what replaced it.
    """
    register = torch.nn.Module.register_parameter

    def register_on_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            module._parameters[name] = torch.nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    torch.nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def prepare_on_meta(model: torch.nn.Module, prepare: Callable[[Any], object]) -> None:
    """Call `prepare(model)`, which may add parameters (adapters) to a model on meta. Those that it adds are real.

    While it runs, the model's parameters are on CPU, with the memory of one element each and without a value (NaN):
    peft would otherwise move its adapters to meta, and lose what they were initialised to.
    Raises ValueError if it fails, or leaves a parameter without a value.
    """
    weights = list(model.parameters())
    for weight in weights:
        nothing = torch.full((), float("nan"), dtype=weight.dtype).expand(weight.shape)
        torch.utils.swap_tensors(weight, torch.nn.Parameter(nothing, weight.requires_grad))  # type: ignore[no-untyped-call]
    try:
        prepare(model)
    except Exception as error:  # the user's own, and what peft raises when it computes with weights that are not there
        raise ValueError(f"prepare failed: {type(error).__name__}: {error}; {_NEEDS_WEIGHTS}") from error
    for weight in weights:
        empty = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        torch.utils.swap_tensors(weight, torch.nn.Parameter(empty, weight.requires_grad))  # type: ignore[no-untyped-call]
    known = set(weights)
    added = {name: parameter for name, parameter in model.named_parameters() if parameter not in known}
    bad = [name for name, parameter in added.items() if parameter.is_meta or not parameter.isfinite().all()]
    if bad:
        raise ValueError(f"prepare left parameters without a value: {', '.join(bad)}; {_NEEDS_WEIGHTS}")


_NEEDS_WEIGHTS = (
    "when it is called the model has no weights yet, so adapters that are initialised from them (init_lora_weights="
    '"pissa" and the like, DoRA, modules_to_save) must be added to a whole model, before parallelize'
)
