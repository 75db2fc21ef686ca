"""The files of weights in diffusers' format: their names, what goes into which, index and config.json."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule

STEM = "diffusion_pytorch_model"
SINGLE = f"{STEM}.safetensors"
INDEX = f"{STEM}.safetensors.index.json"
CONFIG = "config.json"
SHARD = re.compile(rf"{STEM}-\d{{5}}-of-\d{{5}}\.safetensors")
_UNITS = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3}


def split_into_files(sizes: dict[str, int], max_shard_size: int | str) -> dict[str, list[str]]:
    """File name -> names of its tensors, which have `sizes` in bytes. Raises ValueError for a size that is none."""
    shards = _split(sizes, _bytes(max_shard_size))
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"{STEM}-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, start=1)}


def write_tensors(tensors: dict[str, torch.Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write one safetensors file; `metadata` goes into its header. Raises OSError."""
    try:
        save_file(tensors, path, metadata={"format": "pt", **(metadata or {})})
    except SafetensorError as error:  # it wraps the system's errors
        raise OSError(str(error)) from error


def write_index(files: Mapping[str, list[str]], sizes: dict[str, int], directory: Path) -> list[str]:
    """Write the index that several files have; returns the names of what was written."""
    if SINGLE in files:
        return []
    weight_map = {key: file for file, keys in files.items() for key in keys}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return [INDEX]


def config_json(model: torch.nn.Module) -> str:
    """diffusers' config.json; of a class that keeps no config, such as a plain torch module, its name alone.

    `fully_shard` made the model's class a subclass of its own class, with another name.
    """
    own = next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))
    config = json.loads(model.to_json_string()) if hasattr(own, "to_json_string") else {}  # type: ignore[operator]
    config["_class_name"] = own.__name__
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def _bytes(size: int | str) -> int:
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(TB|GB|MB|KB)\s*", size, re.IGNORECASE)
        if match is None:
            raise ValueError(
                f"max_shard_size={size!r} is not a number of bytes or a text such as '5GB' (TB, GB, MB, KB)"
            )
        size = int(float(match[1]) * _UNITS[match[2].upper()])
    if size <= 0:
        raise ValueError(f"max_shard_size={size} is not a positive number of bytes")
    return size


def _split(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Names in files of at most `limit` bytes, filled in order; a larger tensor gets its own. As diffusers splits."""
    shards: list[list[str]] = []
    current: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if size > limit:
            shards.append([name])
            continue
        if filled + size > limit:
            shards.append(current)
            current, filled = [], 0
        current.append(name)
        filled += size
    return [*shards, current] if current else shards
