"""The model in a checkpoint of save_checkpoint, read tensor by tensor without a process group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from .checkpoint_content import check_files, read_metadata, storage_entries
from .checkpoint_writer import quiet, reason
from .step_directory import METADATA, find_step

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


class CheckpointWeights:
    """The tensors of the model in one step's directory. Its metadata is read once, and unpickled."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError if the metadata is damaged, or holds no model."""
        self.path = path
        metadata = read_metadata(path)
        self.tensors = _model_tensors(path, metadata)
        self._reader = _ReaderWithMetadata(path, metadata)
        self._entries: dict[str, list[tuple[Any, Any]]] = {}
        for entry in storage_entries(metadata, _PREFIX):
            self._entries.setdefault(entry[0].fqn.removeprefix(_PREFIX), []).append(entry)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(entry.size) for name, entry in self.tensors.items()}

    def saved_bytes(self, name: str) -> int:
        """The size of a tensor as it was saved."""
        entry = self.tensors[name]
        return entry.size.numel() * entry.properties.dtype.itemsize

    def check(self, name: str) -> None:
        """Raise ValueError if what is stored of a tensor is damaged. Reads all of it."""
        check_files(self.path, self._entries.get(name, []))

    def read(self, name: str, target: torch.Tensor) -> None:
        """Fill `target`, a tensor of the whole shape or a DTensor; values are cast to its dtype. Not collective.

        Raises ValueError if the tensor can't be read.
        """
        try:
            with quiet():
                load({_PREFIX + name: target}, storage_reader=self._reader, no_dist=True)
        except (CheckpointException, OSError, RuntimeError) as error:
            raise ValueError(f"{name} of {self.path} can't be read: {reason(error)}") from error


class _ReaderWithMetadata(FileSystemReader):
    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


def _model_tensors(path: Path, metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    found: dict[str, TensorStorageMetadata] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if key.startswith(_PREFIX):
            if not isinstance(entry, TensorStorageMetadata):
                raise ValueError(f"{key} of {path} is not a tensor: it has no place in safetensors")
            found[key.removeprefix(_PREFIX)] = entry
    if not found:
        raise ValueError(f"{path} holds no model: save_checkpoint did not write it (its names would begin with model.)")
    return found
