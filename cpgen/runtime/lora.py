"""LoRA adapters (peft): which of a model's tensors are theirs, and their file as diffusers' pipelines load it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .weight_files import write_tensors

LORA_FILE = "pytorch_lora_weights.safetensors"
# What of an adapter's config decides how strongly its tensors act.
SCALING = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")
_COMPONENT = "transformer"  # the pipelines' name of the model


@dataclass(frozen=True)
class Adapter:
    """An adapter of a model."""

    config: dict[str, Any]
    """peft's, as JSON has it: rank, alpha, target modules."""
    tensors: dict[str, str]
    """Names in a file, which don't say the adapter's, and in the model."""


def adapters_of(model: torch.nn.Module) -> dict[str, Adapter]:
    """The adapters that peft has put into `model`, by name. (peft itself is not needed to find them.)"""
    configs = getattr(model, "peft_config", None)
    if not configs:
        return {}
    names = list(model.state_dict())
    return {name: Adapter(_as_json(config.to_dict()), _tensors_of(name, names)) for name, config in configs.items()}


def _tensors_of(adapter: str, names: list[str]) -> dict[str, str]:
    """Those of `names` that are the LoRA tensors of `adapter`, by the names that peft gives them in files.

    In a model they are in dictionaries by adapter: to_q.lora_A.default.weight is to_q.lora_A.weight in a file.
    """
    found = {}
    for name in names:
        components = name.split(".")
        places = [i for i in range(1, len(components)) if components[i - 1].startswith("lora_")]
        if places and components[places[0]] == adapter:
            del components[places[0]]
            if components[places[0] - 1] == "lora_magnitude_vector":  # DoRA's: a parameter in older versions of peft
                del components[places[0] :]
            found[".".join(components)] = name
    return found


def frozen_base(model: torch.nn.Module) -> set[str]:
    """The parameters of a model with adapters that are neither theirs nor train; none without adapters."""
    return {name for name, parameter in _base(model).items() if not parameter.requires_grad}


def trained_base(model: torch.nn.Module) -> list[str]:
    """The parameters of a model with adapters that train and are not theirs; none without adapters."""
    return [name for name, parameter in _base(model).items() if parameter.requires_grad]


def _base(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    adapters = adapters_of(model)
    if not adapters:
        return {}
    own = {name for adapter in adapters.values() for name in adapter.tensors.values()}
    return {name: p for name, p in model.named_parameters(remove_duplicate=False) if name not in own}


def choose_adapter(adapters: dict[str, Adapter], name: str | None, where: str) -> tuple[str, Adapter]:
    """The adapter `name`, or the only one. Raises ValueError if there is none of the name, none, or a choice, or if it
    is not LoRA. `where` is what has the adapters."""
    present = ", ".join(adapters) or "none"
    if name is None and len(adapters) != 1:
        raise ValueError(f"{where} has not one adapter but: {present}" + ("; name one" if adapters else ""))
    name = next(iter(adapters)) if name is None else name
    if name not in adapters:
        raise ValueError(f"{where} has no adapter {name!r}; its adapters: {present}")
    kind = adapters[name].config.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"the adapter {name!r} can't be written as the LoRA weights that pipelines load: it is {kind}")
    return name, adapters[name]


def write_adapter(adapter: Adapter, tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write the file that diffusers' save_lora_weights would have written. `tensors` are by their names in the file,
    without the component. Raises OSError."""
    config = {f"{_COMPONENT}.{key}": value for key, value in adapter.config.items()}
    metadata = {"lora_adapter_metadata": json.dumps(config, indent=2, sort_keys=True)}
    write_tensors({f"{_COMPONENT}.{key}": tensor for key, tensor in tensors.items()}, path, metadata)


def _as_json(config: dict[str, Any]) -> dict[str, Any]:
    """Sets become sorted lists: JSON has none, and their order differs from process to process."""
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    result: dict[str, Any] = json.loads(json.dumps(plain))
    return result
