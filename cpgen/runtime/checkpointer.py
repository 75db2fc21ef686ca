"""A run's checkpoints: when one is written, how many stay, and which is loaded."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from . import random_state
from .agreement import gather, is_first_rank, on_first_rank
from .checkpoint import finish_pending, load_checkpoint, save_checkpoint
from .mesh import axis_size, data_rank, mesh_of
from .step_directory import complete_steps, find_step

SaveCallback = Callable[[int, dict[str, Any]], None]


class Checkpointer:
    """Saves every `every` steps into `directory`, keeps the `keep` latest (None: all), and loads.

        checkpointer = Checkpointer("runs/wan/checkpoints", model, optimizer, every=500, keep=3, extra={"data": loader})
        start = checkpointer.load() or 0
        for step, batch in enumerate(batches, start=start + 1):
            ...
            checkpointer.save(step)
        checkpointer.save(step, force=True)
        checkpointer.close()

    All methods are collective. `extra` is that of `save_checkpoint`. With `asynchronous`, `save` returns when the state
    is copied to host memory, and a thread writes the copy. `on_save(step, state)` is called on rank 0 after each save,
    with the whole model in host memory by name; it is gathered only if there is a callback. The other ranks wait for it
    (no longer than the process group's timeout, or torch's default if that is longer). With `asynchronous` the step may
    not be complete by then.

    Two things are warned of, once each: later steps than the first one saved, since `load` would take those; and cp or
    tp peers whose random state differs when a checkpoint is written, since they may have trained on different noise.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        every: int,
        keep: int | None = None,
        extra: dict[str, Any] | None = None,
        asynchronous: bool = False,
        on_save: SaveCallback | None = None,
    ) -> None:
        """Raises ValueError if `every` or `keep` is not a number of at least 1."""
        if not _is_count(every) or not (keep is None or _is_count(keep)):
            raise ValueError(f"every={every!r} and keep={keep!r} must be at least 1 (keep=None keeps all)")
        self._directory = Path(directory)
        self._model = model
        self._optimizer = optimizer
        self._every = every
        self._keep = keep
        self._extra = {} if extra is None else extra
        self._asynchronous = asynchronous
        self._on_save = on_save
        self._checked_for_later = False
        self._warned_of_draws = False

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def save(self, step: int, *, force: bool = False) -> bool:
        """Save if `step` is a multiple of `every`, or with `force` in any case. Returns whether it did.

        Step 0 holds the model only: what training begins with. Raises ValueError on every rank if this save fails, or
        the asynchronous one before it did (this one is written all the same), or the callback raises. Training can go
        on after each of these.
        """
        if not force and step % self._every:
            return False
        failure = self._finish()
        self._warn_of_later_steps(step)
        self._warn_of_draws()
        whole = step > 0
        save_checkpoint(
            self._directory,
            self._model,
            self._optimizer if whole else None,
            step=step,
            extra=self._extra if whole else None,
            keep=self._keep,
            asynchronous=self._asynchronous,
        )
        self._call_back(step)
        if failure is not None:
            raise failure
        return True

    def load(self, step: int = -1) -> int | None:
        """Load `step`, or the latest complete one (-1; None if there is none). Returns the step.

        Of step 0 only the model is loaded: optimizer, `extra` and random state stay as they are. Otherwise as
        `load_checkpoint`, with the same errors.
        """
        finish_pending()
        found = on_first_rank(lambda: find_step(self._directory, step), f"{self._directory} can't be read")
        if found is None:
            return None
        number, _ = found
        if number > 0:
            return load_checkpoint(self._directory, self._model, self._optimizer, step=number, extra=self._extra)
        before = random_state.capture()
        load_checkpoint(self._directory, self._model, step=0)
        random_state.restore(before)
        return 0

    def wait(self) -> None:
        """Return once the asynchronous save that runs, if any, is complete. Raises ValueError if it failed."""
        finish_pending()

    def close(self) -> None:
        """The same as `wait`: call it before the process group goes."""
        finish_pending()

    def _finish(self) -> ValueError | None:
        try:
            finish_pending()
        except ValueError as error:
            return error
        return None

    def _warn_of_later_steps(self, step: int) -> None:
        if self._checked_for_later:
            return
        self._checked_for_later = True
        latest = on_first_rank(
            lambda: max(complete_steps(self._directory), default=0), f"{self._directory} can't be read"
        )
        if latest > step and is_first_rank():
            warnings.warn(
                f"{self._directory} has step {latest} already, and step {step} is saved now: load() will take the "
                f"later one. Use another directory, or move the later steps away",
                stacklevel=3,
            )

    def _warn_of_draws(self) -> None:
        """Ranks of one data rank must draw the same. (Stages of a pipeline may run other dropout.)"""
        mesh = mesh_of(self._model)
        if self._warned_of_draws or mesh is None or axis_size(mesh, "pp") > 1:
            return
        state = {name: sha256(random_state.to_bytes(each)).digest() for name, each in random_state.capture().items()}
        first: dict[int, dict[str, bytes]] = {}
        differing = {
            (rank, name)
            for (rank, _), found in gather((data_rank(mesh), state))
            for name, digest in first.setdefault(rank, found).items()
            if found.get(name) != digest
        }
        if differing:
            self._warned_of_draws = True
            generators = ", ".join(sorted({name for _, name in differing}))
            warnings.warn(
                f"cp or tp peers draw different random numbers (the generators of {generators}; data rank "
                f"{min(differing)[0]}): noise or timesteps from these differ within a group. Call seed_everything, and "
                f"draw on all ranks or on none: what only rank 0 draws, such as samples to look at, sets it apart",
                stacklevel=3,
            )

    def _call_back(self, step: int) -> None:
        callback = self._on_save
        if callback is None:
            return
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self._model, options=options)

        def call() -> None:
            try:
                callback(step, state)
            except Exception as error:
                raise ValueError(f"on_save failed at step {step}: {type(error).__name__}: {error}") from error

        on_first_rank(call if is_first_rank() else lambda: None, f"on_save failed at step {step}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value >= 1
