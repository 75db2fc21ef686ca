"""What a checkpoint directory holds: DCP's metadata and files, and a description of the model for `cpgen export`."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from .agreement import control_group
from .lora import Adapter, adapters_of, trained_base
from .step_directory import METADATA, write_durably
from .weight_files import config_json

ItemT = TypeVar("ItemT")

DESCRIPTION = "model.json"  # beside DCP's files; written before they are complete


@dataclass(frozen=True)
class ModelDescription:
    """What an export needs of the model besides its tensors."""

    config: str  # the text of diffusers' config.json
    kept_in_fp32: tuple[str, ...]  # components of names whose tensors no dtype changes
    tensors: tuple[str, ...]  # all names that are saved, in the model's order
    adapters: dict[str, Adapter] = field(default_factory=dict)  # by name; the base's frozen weights are not saved then
    trained_base: tuple[str, ...] = ()  # parameters that train besides adapters

    def keeps_in_fp32(self, name: str) -> bool:
        return any(component in self.kept_in_fp32 for component in name.split("."))


def describe_model(model: torch.nn.Module, tensors: Iterable[str]) -> ModelDescription | None:
    """The description of a diffusers model that is saved with `tensors`; None for another module."""
    if not hasattr(model, "to_json_string"):
        return None
    kept = getattr(model, "_keep_in_fp32_modules", None) or ()
    return ModelDescription(
        config_json(model),
        (kept,) if isinstance(kept, str) else tuple(kept),
        tuple(tensors),
        adapters_of(model),
        tuple(trained_base(model)),
    )


def write_description(path: Path, description: ModelDescription | None) -> None:
    """Put `description` into the checkpoint directory `path`. Raises OSError."""
    if description is not None:
        content = {**asdict(description), "config": json.loads(description.config)}
        write_durably(path / DESCRIPTION, json.dumps(content, indent=1) + "\n")


def read_description(path: Path) -> ModelDescription | None:
    """The description in the checkpoint directory `path`; None if it has none. Raises ValueError if it is damaged."""
    file = path / DESCRIPTION
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{file} can't be read: {error}") from error
    try:
        content: dict[str, Any] = json.loads(text)
        if not isinstance(content["config"], dict):
            raise TypeError("config is not an object")
        names = [content["kept_in_fp32"], content["tensors"], content.get("trained_base", [])]
        if not all(isinstance(part, list) and all(isinstance(name, str) for name in part) for part in names):
            raise TypeError("kept_in_fp32, tensors or trained_base is no list of names")
        adapters = {name: Adapter(**adapter) for name, adapter in content.get("adapters", {}).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is damaged or not a checkpoint's: {error!r}") from error
    config = json.dumps(content["config"], indent=2, sort_keys=True) + "\n"
    return ModelDescription(config, tuple(names[0]), tuple(names[1]), adapters, tuple(names[2]))


def read_metadata(path: Path) -> Metadata:
    """DCP's metadata of the checkpoint directory `path`. It is unpickled. Raises ValueError if it is damaged."""
    try:
        metadata = FileSystemReader(path).read_metadata()
        assert isinstance(metadata.state_dict_metadata, dict) and isinstance(metadata.storage_data, dict)
    except Exception as error:  # unpickling what is no pickle raises anything
        raise ValueError(f"{path / METADATA} is damaged or not a checkpoint's: {error}") from error
    return metadata


def storage_entries(metadata: Metadata, prefix: str = "") -> list[tuple[Any, Any]]:
    """(index, place) of all that is stored under names that begin with `prefix`, file by file."""
    entries = [item for item in metadata.storage_data.items() if item[0].fqn.startswith(prefix)]
    return sorted(entries, key=lambda item: (item[1].relative_path, item[1].offset))


def rank_share(items: Sequence[ItemT]) -> Sequence[ItemT]:
    """What this rank checks of `items`: together the ranks check all."""
    group = control_group()
    return items if group is None else items[dist.get_rank(group) :: dist.get_world_size(group)]


def check_files(path: Path, entries: Sequence[tuple[Any, Any]]) -> None:
    """Raise ValueError if one of these `storage_entries` is cut short or its checksum is wrong."""
    for index, place in entries:
        file = path / place.relative_path
        try:
            with file.open("rb") as stream:
                stream.seek(place.offset)
                data = stream.read(place.length)
            broken = len(data) < place.length or zipfile.ZipFile(io.BytesIO(data)).testzip()
        except (OSError, zipfile.BadZipFile, NotImplementedError) as error:
            raise ValueError(f"{file} is damaged at {index.fqn}: {error}") from error
        if broken:
            raise ValueError(f"{file} is damaged at {index.fqn}: it is cut short or its checksum is wrong")
