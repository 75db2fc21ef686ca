"""A checkpoint's model written as diffusers weights, by one process without a process group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from .checkpoint_content import DESCRIPTION, ModelDescription
from .checkpoint_weights import CheckpointWeights
from .lora import LORA_FILE, choose_adapter, write_adapter
from .weight_files import CONFIG, split_into_files, write_index, write_tensors


def export_weights(
    checkpoint: CheckpointWeights,
    directory: Path,
    description: ModelDescription,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    on_tensor: Callable[[int], None] | None = None,
) -> list[str]:
    """Write the model in `checkpoint` into the empty `directory`; returns the files' names.

    `dtype` casts floating-point tensors, but for those that the class keeps in fp32. One output file's worth of tensors
    is in memory, and the largest of a tensor's parts in the checkpoint. `on_tensor` is called after each, with its
    bytes there. Raises ValueError if the checkpoint is damaged or `description` is not of its model, OSError if it
    can't write.
    """
    names = _ordered_names(checkpoint, description)
    if any("base_layer" in name.split(".") for name in names):
        raise ValueError(
            f"{checkpoint.path} holds peft's layers without their adapters, under names that plain diffusers does not "
            f"know: save a checkpoint before delete_adapters, or after unload_lora on a model that is not wrapped"
        )
    saved = {name: checkpoint.tensors[name] for name in names}
    dtypes = {name: _stored_dtype(description, name, entry.properties.dtype, dtype) for name, entry in saved.items()}
    sizes = {name: entry.size.numel() * dtypes[name].itemsize for name, entry in saved.items()}
    files = split_into_files(sizes, max_shard_size)
    for file, keys in files.items():
        tensors = {}
        for key in keys:
            tensors[key] = _read(checkpoint, key, dtypes[key])
            if on_tensor is not None:
                on_tensor(checkpoint.saved_bytes(key))
        write_tensors(tensors, directory / file)
    index = write_index(files, sizes, directory)
    (directory / CONFIG).write_text(description.config, encoding="utf-8")
    return [CONFIG, *files, *index]


def export_adapter(
    checkpoint: CheckpointWeights,
    directory: Path,
    description: ModelDescription,
    *,
    dtype: torch.dtype | None = None,
    on_tensor: Callable[[int], None] | None = None,
) -> list[str]:
    """Write the only adapter in `checkpoint` as diffusers' save_lora_weights does into the empty `directory`.

    Returns the file's name. `dtype` casts the adapter. Raises ValueError if there are several adapters, it is one that
    pipelines don't load, or other parameters trained with it; otherwise as `export_weights`.
    """
    _ordered_names(checkpoint, description)
    name, adapter = choose_adapter(description.adapters, None, f"{checkpoint.path} can't be exported: it")
    if description.trained_base:
        raise ValueError(
            f"{checkpoint.path} can't be exported as the adapter {name!r}, since these trained, too: "
            f"{', '.join(description.trained_base)}; load it, and write the adapter alone with save_lora"
        )
    tensors = {}
    for key, own_name in adapter.tensors.items():
        tensors[key] = _read(checkpoint, own_name, dtype or checkpoint.tensors[own_name].properties.dtype)
        if on_tensor is not None:
            on_tensor(checkpoint.saved_bytes(own_name))
    write_adapter(adapter, tensors, directory / LORA_FILE)
    return [LORA_FILE]


def _read(checkpoint: CheckpointWeights, name: str, dtype: torch.dtype) -> torch.Tensor:
    checkpoint.check(name)
    tensor = torch.empty(checkpoint.tensors[name].size, dtype=dtype)
    checkpoint.read(name, tensor)
    return tensor


def _ordered_names(checkpoint: CheckpointWeights, description: ModelDescription) -> list[str]:
    """The tensors in the model's order."""
    if not description.tensors:
        return list(checkpoint.tensors)
    if set(description.tensors) != checkpoint.tensors.keys():
        raise ValueError(f"{checkpoint.path / DESCRIPTION} names other tensors than the checkpoint holds")
    return list(description.tensors)


def _stored_dtype(
    description: ModelDescription, name: str, saved: torch.dtype, wanted: torch.dtype | None
) -> torch.dtype:
    if wanted is None or not saved.is_floating_point:
        return saved
    return torch.float32 if description.keeps_in_fp32(name) else wanted
