"""Weights in diffusers' format: safetensors, index and config.json, written from and read into sharded models."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from .agreement import is_first_rank, on_every_rank, on_first_rank
from .data_parallel import check_wrapped, kept_in_fp32
from .lora import LORA_FILE, adapters_of, choose_adapter, trained_base, write_adapter
from .meta import parameters_on_meta, prepare_on_meta
from .quiet import without_redistribution_remarks
from .weight_files import CONFIG, INDEX, SHARD, SINGLE, config_json, split_into_files, write_index, write_tensors
from .weight_sources import SavedModel, WeightSource, open_source

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
    tensors, but for those that the class keeps in fp32. A parameter of several names is written under each, since
    diffusers looks for each. The files are staged and moved into place, the one that a loader looks for last, so a
    crash leaves no set that loads but is half written.
    Raises ValueError on every rank if `directory` can't be written, or if the model has adapters.
    """
    directory = Path(directory)
    state = model.state_dict()
    if any("base_layer" in name.split(".") for name in state):
        raise ValueError(
            f"the model has peft's layers (adapters: {', '.join(adapters_of(model)) or 'none'}), under names that "
            f"plain diffusers does not know: write the adapters with save_lora, and fuse them in diffusers if need be"
        )
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
            tensors: dict[str, torch.Tensor] = {}
            for key in keys:
                tensor = _full(state[key])
                if is_first_rank():
                    tensors[key] = _apart(tensor.to("cpu", dtypes[key]).contiguous(), tensors)
            write = partial(write_tensors, tensors, staging / name)
            on_first_rank(write, f"{directory / name} can't be written")

        def finish() -> None:
            (staging / CONFIG).write_text(config_json(model), encoding="utf-8")
            write_index(files, sizes, staging)
            _move_into_place(staging, directory)

        on_first_rank(finish, f"{directory} can't be written")


def save_lora(model: torch.nn.Module, directory: str | os.PathLike[str], *, adapter_name: str | None = None) -> None:
    """Write an adapter of `model` as diffusers' save_lora_weights does. Collective: rank 0 writes.

    `adapter_name` is not needed if there is one adapter only. Nothing but its tensors is gathered. The file replaces an
    older one in `directory` once it is complete.
    Raises ValueError on every rank if there is no such adapter, if it is none that pipelines load, or if `directory`
    can't be written, or if adapters came into the model after it was wrapped.
    """
    path = Path(directory) / LORA_FILE
    check_wrapped(model)
    name, adapter = choose_adapter(adapters_of(model), adapter_name, "the model")
    state = model.state_dict()
    tensors = {}
    for key, own_name in adapter.tensors.items():
        tensor = _full(state[own_name])
        if is_first_rank():
            tensors[key] = tensor.to("cpu").contiguous()
    if (trained := trained_base(model)) and is_first_rank():
        warnings.warn(f"{path} holds the adapter {name!r} only; these train, too: {', '.join(trained)}", stacklevel=3)

    def write() -> None:
        staged = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_adapter(adapter, tensors, staged)
            staged.replace(path)
        finally:
            with contextlib.suppress(OSError):
                staged.unlink(missing_ok=True)

    on_first_rank(write, f"{path} can't be written")


def load_pretrained(
    model_class: type[ModelT],
    directory: str | os.PathLike[str],
    mesh: DeviceMesh,
    parallelize: Callable[..., ModelT],
    *,
    dtype: torch.dtype | None = None,
    prepare: Callable[[ModelT], object] | None = None,
    **options: Any,
) -> ModelT:
    """Build `model_class` from a local directory, wrapped by `parallelize(model, mesh, **options)`. Collective.

    `directory` is one of diffusers (safetensors and config.json) or a checkpoint of save_checkpoint: a run's directory,
    of which the latest complete step counts, or one step's. Of a checkpoint only the model is read.
    No rank holds the whole model: parameters are built without storage, and each rank then reads its parts. `dtype` is
    what parameters are stored in, but for those that the class keeps in fp32; None is what the class builds. Names
    that are one parameter in the class stay one; the files may hold it under each of the names, or under one.
    `prepare(model)` is called before the model is wrapped, on every rank, to add adapters: `model.add_adapter(config)`
    or `model.load_lora_adapter(file)`. The model has no weights then, but adapters get their values from it.
    The model is in eval mode, as after from_pretrained.
    Raises ValueError on every rank if keys are missing, unexpected or of another shape (all are listed), if a file is
    missing or damaged, a checkpoint holds another class, `prepare` fails, or the class has no from_config. Pickled
    weights (.bin) are never read.
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype={dtype!r} is not a torch.dtype, such as torch.bfloat16")
    if not hasattr(model_class, "from_config"):
        raise ValueError(
            f"{model_class.__name__} has no from_config, as classes with diffusers' ConfigMixin have, so it cannot be "
            f"built from files: build it, parallelize it, and read a checkpoint into it with load_checkpoint"
        )
    source = open_source(Path(directory))
    model = on_every_rank(partial(_build_on_meta, model_class, source))
    _cast_parameters(model, dtype)
    names = on_every_rank(partial(_names_in_files, model, source))
    if prepare is not None:
        on_every_rank(partial(prepare_on_meta, model, prepare))
    stored = {name: names[tensor] for name, tensor in model.state_dict(keep_vars=True).items() if tensor in names}
    model = parallelize(model, mesh, **options)
    device = torch.device("cpu") if options.get("cpu_offload") else _device(mesh)
    _allocate(model, stored, dtype, device)
    on_every_rank(partial(_read, model, source, stored))
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):  # an adapter's, with "none"
            parameter.data = parameter.data.to(device)
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffer.to(_device(mesh))
    assert not any(parameter.is_meta for parameter in model.parameters())
    return model.eval()


def _build_on_meta(model_class: type[ModelT], source: WeightSource) -> ModelT:
    saved_class = source.config.get("_class_name", model_class.__name__)
    if isinstance(source, SavedModel) and saved_class != model_class.__name__:
        raise ValueError(f"{source.path} is a checkpoint of {saved_class}, not of {model_class.__name__}")
    with parameters_on_meta():
        model: ModelT = model_class.from_config(source.config)  # type: ignore[attr-defined]
    return model


def _names_in_files(model: torch.nn.Module, source: WeightSource) -> dict[torch.Tensor, list[str]]:
    """What each tensor of the model's state is called in the files: several names if the class has it under several.

    Raises one ValueError with all keys that are missing, unexpected, or of another shape.
    """
    shapes = source.shapes
    names: dict[torch.Tensor, list[str]] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        names.setdefault(tensor, []).append(name)
    present = {tensor: [name for name in shared if name in shapes] for tensor, shared in names.items()}
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    problems = [f"missing: {' or '.join(names[tensor])}" for tensor, found in present.items() if not found]
    problems += [
        f"unexpected: {name}"
        for name in shapes.keys() - state.keys()
        if not any(re.search(pattern, name) for pattern in ignored)
    ]
    problems += [
        f"shape of {name}: {list(shapes[name])} in {source.file_of(name)}, {list(tensor.shape)} in the model"
        for name, tensor in state.items()
        if name in shapes and shapes[name] != tuple(tensor.shape)
    ]
    if problems:
        raise ValueError(
            f"{source.path} does not hold the weights of {type(model).__name__} as {source.described_by.name} "
            f"describes it:\n  " + "\n  ".join(sorted(problems))
        )
    return present


def _cast_parameters(model: torch.nn.Module, dtype: torch.dtype | None) -> None:
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(_stored_dtype(model, name, parameter, dtype))


def _allocate(
    model: torch.nn.Module, stored: dict[str, list[str]], dtype: torch.dtype | None, device: torch.device
) -> None:
    """Give what is `stored` of the wrapped `model` memory for this rank's parts."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    state = model.state_dict(keep_vars=True)
    for name in stored:
        target = state[name]
        if target not in made:
            # Persistent buffers are cast too, as diffusers does; parameters have their dtype already.
            empty = _empty_like(target, _stored_dtype(model, name, target, dtype), device)
            is_parameter = isinstance(target, torch.nn.Parameter)
            made[target] = torch.nn.Parameter(empty, target.requires_grad) if is_parameter else empty
        module, _, key = name.rpartition(".")
        model.get_submodule(module).load_state_dict({key: made[target]}, strict=False, assign=True)


def _read(model: torch.nn.Module, source: WeightSource, stored: dict[str, list[str]]) -> None:
    """Fill what `_allocate` made. In place: FSDP has padded parts of uneven size in memory of its own."""
    state = model.state_dict()
    for name, (first, *others) in stored.items():
        tensor = state[name]
        source.read(first, tensor)
        for other in others:
            same = torch.empty_like(tensor)
            source.read(other, same)
            if not torch.equal(_local(tensor), _local(same)):
                raise ValueError(f"{first} and {other} are one parameter in the class, but two in {source.path}")


def _empty_like(target: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if not isinstance(target, DTensor):
        return torch.empty(target.shape, dtype=dtype, device=device)
    shape, _ = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    return DTensor.from_local(
        torch.empty(shape, dtype=dtype, device=device),
        target.device_mesh,
        target.placements,
        run_check=False,
        shape=target.shape,
        stride=target.stride(),
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _apart(tensor: torch.Tensor, others: dict[str, torch.Tensor]) -> torch.Tensor:
    """`tensor`, or a copy if one of `others` is the same memory: safetensors has no tensors of two names."""
    address = tensor.untyped_storage().data_ptr()
    shared = any(other.untyped_storage().data_ptr() == address for other in others.values())
    return tensor.clone() if shared else tensor


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
