"""The directory of a run's checkpoints: which steps are there, complete, replaced or superfluous."""

from __future__ import annotations

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
    """Delete what the complete checkpoint `path` makes superfluous: the one it replaced, and with `keep` all but it and
    the `keep - 1` latest others, and remains of saves that were killed earlier."""
    _delete(_replaced(path))
    if keep is None:
        return
    own = int(path.name.removeprefix("step_"))
    steps = complete_steps(path.parent)
    for step in sorted(steps.keys() - {own}, reverse=True)[keep - 1 :]:
        _delete(steps[step])
    for remains in path.parent.glob("step_*"):
        match = _STEP.fullmatch(remains.name)
        if match and int(match[1]) < own and not (remains / METADATA).is_file():
            _delete(remains)


def _replaced(path: Path) -> Path:
    return path.with_name(f"{path.name}.replaced")


def _delete(path: Path) -> None:
    (path / METADATA).unlink(missing_ok=True)  # first: half deleted, it must not look complete
    if path.exists():
        shutil.rmtree(path)
