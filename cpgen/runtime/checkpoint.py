"""Training checkpoints: one directory per step, complete when DCP's `.metadata` is in it."""

from __future__ import annotations

import contextlib
import os
import warnings
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from . import random_state
from .agreement import control_group, gather, on_every_rank, on_first_rank
from .checkpoint_content import (
    check_files,
    describe_model,
    rank_share,
    read_description,
    read_metadata,
    storage_entries,
    write_description,
)
from .checkpoint_writer import AsyncSave, quiet, reason, write, write_in_background
from .data_parallel import check_wrapped, free_gathered
from .lora import SCALING, adapters_of, frozen_base
from .mesh import data_rank, mesh_of
from .random_state import from_bytes, to_bytes
from .step_directory import abandon, find_step, make_room, step_path

__all__ = ["AsyncSave", "finish_pending", "load_checkpoint", "save_checkpoint"]

_pending: AsyncSave | None = None


def save_checkpoint(
    directory: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    extra: dict[str, Any] | None = None,
    keep: int | None = None,
    asynchronous: bool = False,
) -> AsyncSave | None:
    """Write `directory`/step_`step`. Collective; `directory` is one that every rank sees.

    Saved are the model under its own parameter names, the optimizer, the random state of every data rank, and `extra`:
    objects with state_dict and load_state_dict, or plain values. States that hold DTensors are saved sharded; others
    once if all data ranks have the same, else (a dataloader's position) once per data rank. Of a model with adapters
    the base's frozen parameters are left out.
    With `keep`, all but this and the latest others are deleted once this one is complete. With `asynchronous` the state
    is copied to host memory and written by a thread; the handle's `wait` ends it, and so does the next save or load.
    Raises ValueError on every rank if the directory can't be written, or if the asynchronous save before this one
    failed; training can go on, and save again. Also for an optimizer of other parameters than the model's.
    """
    global _pending
    if not isinstance(step, int) or isinstance(step, bool):
        raise ValueError(f"step={step!r} is not a whole number")
    if step < 0 or (keep is not None and keep < 1):
        raise ValueError(f"step={step} must not be negative, and keep={keep} must be at least 1 (or None: all)")
    _check_names(extra or {})
    _check_optimizer(model, optimizer)
    finish_pending()
    path = step_path(Path(directory), step)
    state = _saved_state(model, optimizer, extra or {})
    description = describe_model(model, state["model"])

    def begin() -> None:
        try:
            make_room(path)
            write_description(path, description)
        except OSError:
            with contextlib.suppress(OSError):
                abandon(path)
            raise

    on_first_rank(begin, f"the checkpoint {path} can't be written")
    on_every_rank(lambda: _check_shared(path))
    if not asynchronous:
        write(state, path, keep)
        return None
    _pending = write_in_background(state, path, keep)
    return _pending


def load_checkpoint(
    directory: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int = -1,
    extra: dict[str, Any] | None = None,
) -> int | None:
    """Load step `step`, or the latest complete one (-1), whatever mesh it was saved on. Collective.

    Returns the step, or None if -1 was asked for and there is none. Objects in `extra` get their state, plain values
    are replaced in the dict. Everything is checked before anything is changed: names, shapes, and checksums of every
    file. Gradients are dropped. Random state is restored if the number of data ranks is the same, else drawn anew from
    the saved one, with a warning. Raises ValueError on every rank if the step is absent or incomplete, or the
    checkpoint is damaged or another model's. Checkpoints hold pickled metadata: load only those that you trust.
    """
    extra = {} if extra is None else extra
    _check_names(extra)
    _check_optimizer(model, optimizer)
    finish_pending()
    found = on_first_rank(lambda: find_step(Path(directory), step), f"{directory} can't be read")
    if found is None:
        return None
    step, path = found
    metadata = on_every_rank(lambda: read_metadata(path))
    untouched = optimizer is None or not optimizer.state
    target = _target_state(model, optimizer, metadata)
    rank, size = _data_rank(model)
    try:
        on_every_rank(lambda: _check_adapters(path, model))
        on_every_rank(lambda: _check_content(path, metadata, target, extra, size))
        on_every_rank(lambda: check_files(path, rank_share(storage_entries(metadata))))
    except ValueError:
        if optimizer is not None and untouched:
            optimizer.state.clear()  # asking for the optimizer's layout filled it
        raise
    target["extra"] = {name: _extra_target(name, value, rank, metadata) for name, value in extra.items()}
    same_size = f"rng.{size - 1}" in metadata.state_dict_metadata and f"rng.{size}" not in metadata.state_dict_metadata
    target["rng"] = {str(rank) if same_size else "0": b""}
    if not same_size:
        warnings.warn(f"{path} was saved by another number of data ranks: random state is drawn anew", stacklevel=2)
    try:
        with quiet():
            load(target, checkpoint_id=path, process_group=control_group())
        # Not strict: an adapter's base is not in it, and a parameter that never had a gradient has no state.
        options = StateDictOptions(strict=False)
        set_model_state_dict(model, target["model"], options=options)
        if optimizer is not None:
            set_optimizer_state_dict(model, optimizer, target["optimizer"], options=options)
    except (CheckpointException, RuntimeError, KeyError) as error:
        raise ValueError(f"{path} was loaded in part only, do not use the model: {reason(error)}") from error
    for name, saved in target["extra"].items():
        state = saved["sharded"] if "sharded" in saved else from_bytes(next(iter(saved.values())))
        if isinstance(extra[name], Stateful):
            extra[name].load_state_dict(state)
        else:
            extra[name] = state
    if same_size:
        random_state.restore(from_bytes(target["rng"][str(rank)]))
    else:
        random_state.reseed_from(target["rng"]["0"], rank, size)
    return step


def _check_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    if optimizer is None:
        return
    free_gathered(model)  # after a forward some of its parameters are gathered ones
    own = set(model.parameters())
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = sum(parameter not in own for parameter in stepped)
    if foreign:
        raise ValueError(
            f"{foreign} of the optimizer's {len(stepped)} parameters are not the model's, so that its steps change "
            f"nothing there: parallelize replaces parameters, so make the optimizer after it, of model.parameters()"
        )


def _saved_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, extra: dict[str, Any]
) -> dict[str, Any]:
    """Everything that is saved, by the names it has in the checkpoint."""
    check_wrapped(model)
    rank, _ = _data_rank(model)
    state: dict[str, Any] = {"model": _model_state(model), "extra": {}}
    state["rng"] = {str(rank): to_bytes(random_state.capture())}
    if optimizer is not None:
        unused = not optimizer.state
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
        if unused:
            # torch filled it by a step of its own, which would count in Adam's bias correction.
            optimizer.state.clear()
            state["optimizer"]["state"] = {}
    blobs = {}
    for name, value in extra.items():
        content = value.state_dict() if isinstance(value, Stateful) else value
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves(content)):
            state["extra"][name] = {"sharded": content}
        else:
            blobs[name] = to_bytes(content)
    digests = gather({name: sha256(blob).hexdigest() for name, blob in blobs.items()})
    for name, blob in blobs.items():
        same = all(digest.get(name) == digests[0].get(name) for digest in digests)
        state["extra"][name] = {"all" if same else str(rank): blob}
    return state


def _model_state(model: torch.nn.Module) -> dict[str, Any]:
    """The model's state. The frozen base of adapters is left out: it is on disk already, and much larger."""
    frozen = frozen_base(model)
    return {name: tensor for name, tensor in get_model_state_dict(model).items() if name not in frozen}


def _target_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, metadata: Metadata
) -> dict[str, Any]:
    """Model and optimizer state to load into, without the optimizer state that the checkpoint does not have."""
    free_gathered(model)
    target: dict[str, Any] = {"model": _model_state(model)}
    if optimizer is not None:
        optimizer.zero_grad(set_to_none=True)  # with gradients, torch would not lay the optimizer's state out
        target["optimizer"] = get_optimizer_state_dict(model, optimizer)
        states = target["optimizer"]["state"]
        saved = {key for key in metadata.state_dict_metadata if key.startswith("optimizer.state.")}
        for name in list(states):
            if not any(f"optimizer.state.{name}.{key}" in saved for key in flatten_state_dict(states[name])[0]):
                del states[name]
    return target


def _check_shared(path: Path) -> None:
    if not path.is_dir():
        raise ValueError(f"rank 0 made {path}, but not every rank sees it; use a directory that all hosts share")


def _check_adapters(path: Path, model: torch.nn.Module) -> None:
    description = read_description(path)
    if description is None:
        return
    saved, present = description.adapters, adapters_of(model)
    if saved.keys() != present.keys():
        raise ValueError(
            f"{path} was saved with the adapters {sorted(saved)}, the model has {sorted(present)}: add them before "
            f"parallelize (add_adapter, or load_pretrained's prepare)"
        )
    for name, adapter in saved.items():
        theirs, ours = ({key: each.config.get(key) for key in SCALING} for each in (adapter, present[name]))
        if theirs != ours:
            raise ValueError(f"the adapter {name!r} of {path} was made with {theirs}, the model's with {ours}")


def _check_content(
    path: Path, metadata: Metadata, target: dict[str, Any], extra: dict[str, Any], data_ranks: int
) -> None:
    """Raise one ValueError with everything in which the checkpoint differs from what is to be loaded."""
    stored = metadata.state_dict_metadata
    wanted = flatten_state_dict(target)[0]
    problems = [f"missing: {key}" for key in wanted.keys() - stored.keys()]
    problems += [f"unexpected: {key}" for key in stored.keys() - wanted.keys() if key.startswith("model.")]
    for key in wanted.keys() & stored.keys():
        value, entry = wanted[key], stored[key]
        if isinstance(value, torch.Tensor) != isinstance(entry, TensorStorageMetadata):
            problems.append(f"kind of {key}: a tensor on one side, another object on the other")
        elif isinstance(entry, TensorStorageMetadata) and tuple(entry.size) != tuple(value.shape):
            problems.append(f"shape of {key}: {list(entry.size)} in the checkpoint, {list(value.shape)} in the model")
    for name in extra:
        kinds = _extra_kinds(name, metadata)
        if not kinds:
            problems.append(f"missing in extra: {name}")
        elif kinds.isdisjoint({"all", "sharded"}) and len(kinds) != data_ranks:
            problems.append(
                f"extra {name} differs by data rank and was saved by {len(kinds)} of them, now there are {data_ranks}: "
                f"leave it out of extra"
            )
    if problems:
        raise ValueError(f"{path} does not fit what it is loaded into:\n  " + "\n  ".join(sorted(problems)))


def _extra_kinds(name: str, metadata: Metadata) -> set[str]:
    """How the extra `name` was saved: {"all"}, {"sharded"}, or its data ranks. Empty if it is not there."""
    keys = (key.split(".") for key in metadata.state_dict_metadata if key.startswith(f"extra.{name}."))
    return {parts[2] for parts in keys}


def _extra_target(name: str, value: Any, rank: int, metadata: Metadata) -> dict[str, Any]:
    kinds = _extra_kinds(name, metadata)
    if "sharded" in kinds:
        return {"sharded": value.state_dict() if isinstance(value, Stateful) else value}
    return {"all" if "all" in kinds else str(rank): b""}


def _check_names(extra: dict[str, Any]) -> None:
    bad = [name for name in extra if not isinstance(name, str) or not name or "." in name]
    if bad:
        raise ValueError(f"names in extra are texts without a dot, not {', '.join(map(repr, bad))}")


def _data_rank(model: torch.nn.Module) -> tuple[int, int]:
    if (mesh := mesh_of(model)) is not None:
        return data_rank(mesh)
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def finish_pending() -> None:
    """Wait for the asynchronous save that runs, if any. Raises ValueError on every rank if it failed."""
    global _pending
    if _pending is None:
        return
    try:
        _pending.wait()
    finally:
        if _pending.done():  # not if the wait was interrupted
            _pending = None
