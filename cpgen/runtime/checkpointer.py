"""A run's checkpoints: when one is written, how many stay, and which is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from . import random_state
from .agreement import is_first_rank, on_first_rank
from .checkpoint import finish_pending, load_checkpoint, save_checkpoint
from .step_directory import find_step

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
    (no longer than the process group's timeout). With `asynchronous` the step may not be complete by then.
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
        """Raises ValueError if `every` or `keep` is below 1."""
        if every < 1 or (keep is not None and keep < 1):
            raise ValueError(f"every={every} and keep={keep} must be at least 1 (keep=None keeps all)")
        self._directory = Path(directory)
        self._model = model
        self._optimizer = optimizer
        self._every = every
        self._keep = keep
        self._extra = {} if extra is None else extra
        self._asynchronous = asynchronous
        self._on_save = on_save

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
