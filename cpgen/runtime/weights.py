"""Weights in diffusers' format: safetensors, index and config.json, written from and read into sharded models."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from .agreement import is_first_rank, on_every_rank, on_first_rank
from .data_parallel import kept_in_fp32
from .quiet import without_redistribution_remarks
from .weight_files import CONFIG, INDEX, SHARD, SINGLE, config_json, split_into_files, write_index, write_tensors

ModelT = TypeVar("ModelT", bound=torch.nn.Module)


def save_pretrained(
    model: torch.nn.Module,
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write `model` as diffusers' own save_pretrained does. Collective: rank 0 writes, the others send it their parts.

    Tensors are gathered one by one, and rank 0 holds one shard file's worth of them. `dtype` casts floating-point
    tensors, but for those that the class keeps in fp32. The files are staged and moved into place, the one that a
    loader looks for last, so a crash leaves no set that loads but is half written.
    Raises ValueError on every rank if `directory` can't be written.
    """
    directory = Path(directory)
    state = model.state_dict()
    dtypes = {name: _stored_dtype(model, name, tensor, dtype) for name, tensor in state.items()}
    sizes = {name: tensor.numel() * dtypes[name].itemsize for name, tensor in state.items()}
    files = split_into_files(sizes, max_shard_size)

    # Inside the directory if it is there, else beside it: either way one rename puts a file or the directory in place.
    staging = (directory if directory.is_dir() else directory.parent) / f".{directory.name}-{uuid.uuid4().hex}"
    with contextlib.ExitStack() as stack:
        if is_first_rank():
            stack.callback(shutil.rmtree, staging, ignore_errors=True)
        on_first_rank(partial(_make, staging), f"{directory} can't be written")
        for name, keys in files.items():
            tensors = {}
            for key in keys:
                tensor = _full(state[key])
                if is_first_rank():
                    tensors[key] = tensor.to("cpu", dtypes[key]).contiguous()
            write = partial(write_tensors, tensors, staging / name)
            on_first_rank(write, f"{directory / name} can't be written")

        def finish() -> None:
            (staging / CONFIG).write_text(config_json(model), encoding="utf-8")
            write_index(files, sizes, staging)
            _move_into_place(staging, directory)

        on_first_rank(finish, f"{directory} can't be written")


def load_pretrained(
    model_class: type[ModelT],
    directory: str | os.PathLike[str],
    mesh: DeviceMesh,
    parallelize: Callable[..., ModelT],
    *,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> ModelT:
    """Build `model_class` from a local diffusers directory, wrapped by `parallelize(model, mesh, **options)`.

    No rank holds the whole model: parameters are built without storage, and each rank then reads its slices of the
    safetensors files. `dtype` is what parameters are stored in, but for those that the class keeps in fp32; None is
    what the class builds. The model is in eval mode, as after from_pretrained.
    Raises ValueError on every rank if keys are missing, unexpected or of another shape (all are listed), or if a file
    is missing or damaged. Pickled weights (.bin) are never read.
    """
    directory = Path(directory)
    files = on_every_rank(partial(_key_files, directory))
    model = on_every_rank(partial(_build_on_meta, model_class, directory))
    _cast_parameters(model, dtype)
    on_every_rank(partial(_check_keys, model, files, directory))
    model = parallelize(model, mesh, **options)
    device = torch.device("cpu") if options.get("cpu_offload") else _device(mesh)

    def read() -> dict[str, torch.Tensor]:
        # Persistent buffers are cast too, as diffusers does; parameters have their dtype already.
        return {
            name: _read(files[name], name, target, _stored_dtype(model, name, target, dtype), device)
            for name, target in model.state_dict().items()
        }

    state = on_every_rank(read)
    model.load_state_dict(state, strict=True, assign=True)
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffer.to(_device(mesh))
    assert not any(parameter.is_meta for parameter in model.parameters())
    return model.eval()


@dataclass(frozen=True)
class _Stored:
    """A tensor in a safetensors file."""

    path: Path
    shape: tuple[int, ...]


def _key_files(directory: Path) -> dict[str, _Stored]:
    """Every tensor of the safetensors set in `directory`. Reads headers only; raises ValueError naming the file."""
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory; load_pretrained reads a local one (download it first)")
    expected: dict[str, list[str]] = {}
    if (directory / INDEX).exists():
        for key, name in _read_index(directory / INDEX).items():
            expected.setdefault(name, []).append(key)
    elif (directory / SINGLE).exists():
        expected[SINGLE] = []
    else:
        pickled = sorted(path.name for path in directory.glob("*.bin"))
        note = f"; {', '.join(pickled)} is pickled, which is never read: convert it to safetensors" if pickled else ""
        raise ValueError(f"{directory} has neither {SINGLE} nor {INDEX}{note}")
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


def _build_on_meta(model_class: type[ModelT], directory: Path) -> ModelT:
    path = directory / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a diffusers config: it holds a {type(config).__name__}")
    with _parameters_on_meta():
        model: ModelT = model_class.from_config(config)  # type: ignore[attr-defined]
    return model


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
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


def _cast_parameters(model: torch.nn.Module, dtype: torch.dtype | None) -> None:
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(_stored_dtype(model, name, parameter, dtype))


def _check_keys(model: torch.nn.Module, files: dict[str, _Stored], directory: Path) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    problems = [f"missing: {name}" for name in wanted.keys() - files.keys()]
    problems += [
        f"unexpected: {name}"
        for name in files.keys() - wanted.keys()
        if not any(re.search(pattern, name) for pattern in ignored)
    ]
    problems += [
        f"shape of {name}: {list(files[name].shape)} in {files[name].path.name}, {list(shape)} in the model"
        for name, shape in wanted.items()
        if name in files and files[name].shape != shape
    ]
    if problems:
        raise ValueError(
            f"{directory} does not hold the weights of {type(model).__name__} as {CONFIG} describes it:\n  "
            + "\n  ".join(sorted(problems))
        )


def _read(stored: _Stored, name: str, target: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """This rank's part of the tensor `name`, shaped and placed as `target`."""
    shape: tuple[int, ...] = tuple(target.shape)
    offset: tuple[int, ...] = (0,) * len(shape)
    if isinstance(target, DTensor):
        shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    if 0 in shape:
        local = torch.empty(shape, dtype=dtype, device=device)
    else:
        with _reading(stored.path, name), safe_open(stored.path, framework="pt") as file:
            part = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
            # A scalar has no slices to take.
            local = (file.get_slice(name)[part] if part else file.get_tensor(name)).to(device, dtype)
    if not isinstance(target, DTensor):
        return local
    return DTensor.from_local(
        local.contiguous(),
        target.device_mesh,
        target.placements,
        run_check=False,
        shape=target.shape,
        stride=target.stride(),
    )


@contextlib.contextmanager
def _reading(path: Path, key: str | None = None) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        what = f"{key} of {path}" if key else str(path)
        raise ValueError(f"{what} can't be read; is it a whole safetensors file? {error}") from error


def _full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor. Collective for a DTensor."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        # Offloaded parts are in host memory, but the mesh may communicate between devices only.
        moved = tensor.to(_device(tensor.device_mesh))
        assert isinstance(moved, DTensor)
        with without_redistribution_remarks():
            tensor = moved.full_tensor()
    return tensor


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def _stored_dtype(model: torch.nn.Module, name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of `tensor` in a model or file of `dtype` (None: as it is)."""
    if dtype is None or not tensor.is_floating_point():
        return tensor.dtype
    return torch.float32 if kept_in_fp32(model, name) else dtype


def _make(directory: Path) -> None:
    directory.mkdir(parents=True)


def _move_into_place(staging: Path, directory: Path) -> None:
    if staging.parent != directory:
        directory.parent.mkdir(parents=True, exist_ok=True)
        staging.rename(directory)
        return
    # What a loader looks for first goes first and comes last.
    for name in (INDEX, SINGLE):
        (directory / name).unlink(missing_ok=True)
    for path in directory.iterdir():
        if SHARD.fullmatch(path.name):
            path.unlink()
    for path in sorted(staging.iterdir(), key=lambda path: (path.name in (INDEX, SINGLE), path.name)):
        path.replace(directory / path.name)
