"""The directory of a run's checkpoints: which steps are there, complete, replaced or superfluous."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

METADATA = ".metadata"  # DCP writes it last: a checkpoint without it is incomplete
_STEP = re.compile(r"step_(\d+)(\.replaced)?")


def step_path(directory: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written."""
    return directory / f"step_{step}"


def complete_steps(directory: Path) -> dict[int, Path]:
    """The complete checkpoints, by step. While a step is saved again, it is the old one."""
    steps: dict[int, Path] = {}
    for path in sorted(directory.glob("step_*"), reverse=True):  # step_1 after step_1.replaced
        if (match := _STEP.fullmatch(path.name)) and (path / METADATA).is_file():
            steps[int(match[1])] = path
    return steps


def find_step(directory: Path, step: int) -> tuple[int, Path] | None:
    """The complete checkpoint of `step`, or the latest one (-1; None if there is none).

    Raises ValueError if `step` is absent or incomplete.
    """
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is not a directory")
    steps = complete_steps(directory)
    if step == -1:
        return max(steps.items(), default=None)
    if step not in steps:
        state = "incomplete" if step_path(directory, step).exists() else "not there"
        there = ", ".join(map(str, sorted(steps))) or "none"
        raise ValueError(f"step {step} in {directory} is {state}; complete steps: {there}")
    return step, steps[step]


def make_room(path: Path) -> None:
    """Make `path` an empty directory. A complete checkpoint there steps aside until the new one is complete."""
    if (path / METADATA).is_file():
        _delete(_replaced(path))
        path.rename(_replaced(path))
    _delete(path)
    path.mkdir(parents=True)


def prune(path: Path, keep: int | None) -> None:
    """Delete what the complete checkpoint `path` makes superfluous: replaced ones whose successor is complete, and with
    `keep` all earlier ones but the `keep - 1` latest, and remains of saves that were killed earlier. Later ones are
    another run's, or what a run went back from: they stay."""
    steps = complete_steps(path.parent)
    for step in steps:
        if steps[step] == step_path(path.parent, step):
            _delete(_replaced(steps[step]))
    if keep is None:
        return
    own = int(path.name.removeprefix("step_"))
    for step in sorted((step for step in steps if step < own), reverse=True)[keep - 1 :]:
        _delete(steps[step])
    for remains in path.parent.glob("step_*"):
        match = _STEP.fullmatch(remains.name)
        if match and int(match[1]) < own and not (remains / METADATA).is_file():
            _delete(remains)


def abandon(path: Path) -> None:
    """Undo `make_room` after a save of `path` failed: its files go, and the checkpoint that stepped aside is back."""
    _delete(path)
    if _replaced(path).is_dir():
        _replaced(path).rename(path)


def write_durably(path: Path, text: str) -> None:
    """Write a file that is on the disk when this returns."""
    path.write_text(text, encoding="utf-8")
    sync_file(path)


def sync_file(path: Path) -> None:
    """Return when the content of `path` is on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Return when the names in `path` are on the disk, where the file system can say so."""
    with contextlib.suppress(OSError):
        sync_file(path)


def _replaced(path: Path) -> Path:
    return path.with_name(f"{path.name}.replaced")


def _delete(path: Path) -> None:
    (path / METADATA).unlink(missing_ok=True)  # first: half deleted, it must not look complete
    if path.exists():
        shutil.rmtree(path)
