"""A checkpoint's model written as diffusers weights, by one process without a process group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from .checkpoint_content import DESCRIPTION, ModelDescription, check_files, read_metadata, storage_entries
from .checkpoint_writer import quiet, reason
from .step_directory import METADATA, find_step
from .weight_files import CONFIG, split_into_files, write_index, write_tensors

_PREFIX = "model."


def find_checkpoint(checkpoint: Path, step: int = -1) -> Path:
    """The directory of a step: `checkpoint` itself, or what a run's directory `checkpoint` has of it (-1: the latest).

    Raises ValueError if there is none, or it is incomplete.
    """
    if not checkpoint.exists():
        raise ValueError(f"{checkpoint} is not there")
    if (checkpoint / METADATA).is_file():
        if step != -1:
            raise ValueError(f"{checkpoint} is the checkpoint of one step: step {step} can't be chosen in it")
        return checkpoint
    found = find_step(checkpoint, step)
    if found is None:
        raise ValueError(f"{checkpoint} holds no complete checkpoint (step_N with {METADATA} in it)")
    return found[1]


def export_weights(
    checkpoint: Path,
    directory: Path,
    description: ModelDescription,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    on_tensor: Callable[[int], None] | None = None,
) -> list[str]:
    """Write the model in the step directory `checkpoint` into the empty `directory`; returns the files' names.

    `dtype` casts floating-point tensors, but for those that the class keeps in fp32. One output file's worth of tensors
    is in memory, and one tensor as the checkpoint holds it. `on_tensor` is called after each, with its bytes there.
    Raises ValueError if the checkpoint is damaged or `description` is not of its model, OSError if it can't write.
    """
    metadata = read_metadata(checkpoint)
    stored = _stored_tensors(checkpoint, metadata, description)
    dtypes = {name: _stored_dtype(description, name, entry.properties.dtype, dtype) for name, entry in stored.items()}
    sizes = {name: entry.size.numel() * dtypes[name].itemsize for name, entry in stored.items()}
    files = split_into_files(sizes, max_shard_size)
    reader = _Tensors(checkpoint, metadata)
    for file, keys in files.items():
        tensors = {}
        for key in keys:
            tensors[key] = reader.read(key, stored[key]).to(dtypes[key])
            if on_tensor is not None:
                on_tensor(_saved_bytes(stored[key]))
        write_tensors(tensors, directory / file)
    index = write_index(files, sizes, directory)
    (directory / CONFIG).write_text(description.config, encoding="utf-8")
    return [CONFIG, *files, *index]


def model_bytes(checkpoint: Path) -> int:
    """How many bytes of the model there are to read. Raises ValueError if the checkpoint is damaged."""
    entries = read_metadata(checkpoint).state_dict_metadata.items()
    return sum(_saved_bytes(entry) for key, entry in entries if key.startswith(_PREFIX))


class _Tensors:
    """Reads single tensors of a checkpoint, with its metadata read once."""

    def __init__(self, checkpoint: Path, metadata: Metadata) -> None:
        self._checkpoint = checkpoint
        self._reader = _ReaderWithMetadata(checkpoint, metadata)
        self._entries: dict[str, list[tuple[Any, Any]]] = {}
        for entry in storage_entries(metadata, _PREFIX):
            self._entries.setdefault(entry[0].fqn, []).append(entry)

    def read(self, name: str, entry: TensorStorageMetadata) -> torch.Tensor:
        """The whole tensor. Raises ValueError if a part of it is damaged."""
        check_files(self._checkpoint, self._entries.get(_PREFIX + name, []))
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        try:
            with quiet():
                load({_PREFIX + name: tensor}, storage_reader=self._reader, no_dist=True)
        except (CheckpointException, OSError, RuntimeError) as error:
            raise ValueError(f"{name} of {self._checkpoint} can't be read: {reason(error)}") from error
        return tensor


class _ReaderWithMetadata(FileSystemReader):
    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


def _stored_tensors(
    checkpoint: Path, metadata: Metadata, description: ModelDescription
) -> dict[str, TensorStorageMetadata]:
    """The model's tensors in the checkpoint, by name, in the model's order."""
    found: dict[str, TensorStorageMetadata] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if key.startswith(_PREFIX):
            if not isinstance(entry, TensorStorageMetadata):
                raise ValueError(f"{key} of {checkpoint} is not a tensor: it has no place in safetensors")
            found[key.removeprefix(_PREFIX)] = entry
    if not found:
        raise ValueError(f"{checkpoint} holds no model: save_checkpoint did not write it")
    if not description.tensors:
        return found
    if set(description.tensors) != found.keys():
        raise ValueError(f"{checkpoint / DESCRIPTION} names other tensors than the checkpoint holds")
    return {name: found[name] for name in description.tensors}


def _saved_bytes(entry: object) -> int:
    return entry.size.numel() * entry.properties.dtype.itemsize if isinstance(entry, TensorStorageMetadata) else 0


def _stored_dtype(
    description: ModelDescription, name: str, saved: torch.dtype, wanted: torch.dtype | None
) -> torch.dtype:
    if wanted is None or not saved.is_floating_point:
        return saved
    return torch.float32 if description.keeps_in_fp32(name) else wanted
