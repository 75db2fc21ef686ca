"""Where load_pretrained reads from: safetensors in diffusers' layout, or a checkpoint of save_checkpoint."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from .agreement import on_every_rank
from .checkpoint_content import DESCRIPTION, rank_share, read_description
from .checkpoint_weights import CheckpointWeights, find_checkpoint
from .step_directory import METADATA, complete_steps
from .weight_files import CONFIG, INDEX, SINGLE


class WeightSource(Protocol):
    """Whole tensors on disk, of which each rank reads its parts."""

    path: Path
    config: dict[str, Any]
    """The model's, as in diffusers' config.json."""
    described_by: Path
    """The file that `config` is from."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The tensors by name."""

    def file_of(self, name: str) -> str:
        """What an error calls the file of a tensor."""

    def read(self, name: str, target: torch.Tensor) -> None:
        """Fill `target`, a tensor of the whole shape or a DTensor; values are cast to its dtype. Not collective.

        Raises ValueError if what is stored can't be read.
        """


def open_source(directory: Path) -> WeightSource:
    """What `directory` holds. Collective. Raises ValueError on every rank if that is neither weights nor a checkpoint,
    or files are missing, damaged, or another set than they say."""
    if not on_every_rank(partial(_is_checkpoint, directory)):
        return on_every_rank(partial(SafetensorsWeights, directory))
    checkpoint = on_every_rank(lambda: SavedModel(find_checkpoint(directory)))
    on_every_rank(checkpoint.check_share)
    return checkpoint


def _is_checkpoint(directory: Path) -> bool:
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory; load_pretrained reads a local one (download it first)")
    if (directory / INDEX).exists() or (directory / SINGLE).exists():
        return False
    return (directory / METADATA).is_file() or bool(complete_steps(directory))


class SavedModel(CheckpointWeights):
    """The model in a checkpoint, with its config."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError if the checkpoint is damaged, or does not say which model it holds."""
        super().__init__(path)
        description = read_description(path)
        if description is not None and description.adapters:
            raise ValueError(
                f"{path} is a checkpoint of adapters ({', '.join(description.adapters)}): load the base model's "
                f"weights with load_pretrained, add the adapters in its `prepare`, and then call load_checkpoint"
            )
        if description is not None:
            self.described_by = path / DESCRIPTION
            self.config = json.loads(description.config)
        elif (path / CONFIG).is_file():
            self.described_by = path / CONFIG
            self.config = read_config(self.described_by)
        else:
            raise ValueError(
                f"{path} does not say which model it holds: it was saved by an older cpgen, or not by save_checkpoint; "
                f"put the model's {CONFIG} into it, or write its weights as {SINGLE} with `cpgen export --config`"
            )

    def file_of(self, name: str) -> str:
        return self.path.name

    def check_share(self) -> None:
        """Check some tensors, other ones on each rank. Raises ValueError if what is stored is damaged."""
        for name in rank_share(list(self.tensors)):
            self.check(name)


@dataclass(frozen=True)
class _Stored:
    """A tensor in a safetensors file."""

    path: Path
    shape: tuple[int, ...]


class SafetensorsWeights:
    """A set of safetensors files with its config.json. Pickled weights (.bin) are never read."""

    def __init__(self, directory: Path) -> None:
        """Reads headers only. Raises ValueError that names the file if the set is not complete or not readable."""
        self.path = directory
        self._stored = _read_headers(directory)
        self.described_by = directory / CONFIG
        self.config = read_config(self.described_by)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: stored.shape for name, stored in self._stored.items()}

    def file_of(self, name: str) -> str:
        return self._stored[name].path.name

    def read(self, name: str, target: torch.Tensor) -> None:
        path = self._stored[name].path
        local, part = _local_part(target)
        if local.numel() == 0:
            return
        # The file is opened for each tensor: what was touched of its mapping counts as this process's memory.
        with _reading(path, name), safe_open(path, framework="pt") as file:
            # A scalar has no slices to take.
            local.copy_(file.get_slice(name)[part] if part else file.get_tensor(name))


def read_config(path: Path) -> dict[str, Any]:
    """diffusers' config.json. Raises ValueError if it can't be read or is none."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a diffusers config: it holds a {type(config).__name__}")
    return config


def _read_headers(directory: Path) -> dict[str, _Stored]:
    """Every tensor of the safetensors set in `directory`."""
    expected: dict[str, list[str]] = {}
    if (directory / INDEX).exists():
        for key, name in _read_index(directory / INDEX).items():
            expected.setdefault(name, []).append(key)
    elif (directory / SINGLE).exists():
        expected[SINGLE] = []
    else:
        pickled = sorted(path.name for path in directory.glob("*.bin"))
        note = f"; {', '.join(pickled)} is pickled, which is never read: convert it to safetensors" if pickled else ""
        raise ValueError(
            f"{directory} has neither {SINGLE} nor {INDEX}, and is no checkpoint (no {METADATA}, no complete step_N)"
            f"{note}"
        )
    stored: dict[str, _Stored] = {}
    for name, keys in expected.items():
        path = directory / name
        with _reading(path), safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is not a mapping
                stored[key] = _Stored(path, tuple(file.get_slice(key).get_shape()))
        absent = [key for key in keys if key not in stored or stored[key].path != path]
        if absent:
            raise ValueError(f"{path} lacks {', '.join(absent)}, which {INDEX} says it holds")
    return stored


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        named = all(Path(name).name == name and name.endswith(".safetensors") for name in weight_map.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not an index of safetensors files: {error}") from error
    if not named:
        raise ValueError(f"{path} names files that are not safetensors files in {path.parent}")
    return dict(weight_map)


def _local_part(target: torch.Tensor) -> tuple[torch.Tensor, tuple[slice, ...]]:
    """(what of `target` this rank holds, where in the whole tensor that is)."""
    shape: tuple[int, ...] = tuple(target.shape)
    offset: tuple[int, ...] = (0,) * len(shape)
    local = target
    if isinstance(target, DTensor):
        shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
        local = target.to_local()
    return local, tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


@contextlib.contextmanager
def _reading(path: Path, key: str | None = None) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        what = f"{key} of {path}" if key else str(path)
        raise ValueError(f"{what} can't be read; is it a whole safetensors file? {error}") from error
