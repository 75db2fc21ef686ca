"""What the checkpointer tests run on the workers."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem

from cpgen.runtime import random_state, step_directory
from cpgen.runtime.checkpointer import Checkpointer
from cpgen.runtime.mesh import data_rank
from tests.runtime.checkpoint_cases import Run


def checkpointer(run: Run, directory: str, **options: Any) -> Checkpointer:
    return Checkpointer(directory, run.model, run.optimizer, extra=run.extra, **options)


def steps_in(directory: str) -> list[int]:
    return sorted(step_directory.complete_steps(Path(directory)))


def scheduled_saves(root: str, directory: str, asynchronous: bool) -> tuple[list[bool], list[int], int | None, bool]:
    """(what each of steps 0..7 and a forced 7 returned, the steps there, the latest loaded, whether it was restored)"""
    run = Run(root, 2)
    saver = checkpointer(run, directory, every=2, keep=3, asynchronous=asynchronous)
    saved = []
    for step in range(8):
        saved.append(saver.save(step))
        run.train(1)
    before = run.everything()
    saved.append(saver.save(7, force=True))
    saver.close()
    dist.barrier()
    steps = steps_in(directory)
    other = Run(root, 2, seed=99)
    latest = checkpointer(other, directory, every=1).load()
    after = other.everything()
    return saved, steps, latest, all(torch.equal(before[name], after[name]) for name in before)


def step_zero(root: str, directory: str) -> dict[str, Any]:
    """Step 0 after a training step: the model is restored, and nothing else is."""
    run = Run(root, 2)
    run.train(1)
    weights = run.weights()
    with checkpointer(run, directory, every=1) as saver:
        saver.save(0)
    other = Run(root, 2, seed=99)
    other.train(2)
    before = other.everything()
    draws = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    step = checkpointer(other, directory, every=1).load()
    after = other.everything()
    unchanged = [name for name in before if torch.equal(before[name], after[name])]
    return {
        "step": step,
        "keys": sorted(read_keys(directory, 0)),
        "model": all(torch.equal(after[name], tensor) for name, tensor in weights.items()),
        "others": set(before) - set(weights) == set(unchanged) - set(weights),
        "position": other.position.value - 100 * other.rank,
        "draws": torch.equal(draws[0], torch.get_rng_state())
        and draws[1] == random.getstate()
        and draws[2] == np.random.get_state()[1].tolist(),
    }


def read_keys(directory: str, step: int) -> set[str]:
    from cpgen.runtime.checkpoint_content import read_metadata

    return {key.partition(".")[0] for key in read_metadata(Path(directory) / f"step_{step}").state_dict_metadata}


def callbacks(
    root: str, directory: str, asynchronous: bool, fails: bool
) -> tuple[list[tuple[int, bool]], str, list[int]]:
    """(step and whether the state was the whole model, for each call; the error; the steps there)"""
    run = Run(root, 2)
    calls: list[tuple[int, bool]] = []

    def note(step: int, state: dict[str, Any]) -> None:
        kinds = {type(tensor) for tensor in state.values()}
        whole = kinds == {torch.Tensor} and all(torch.equal(state[name], tensor) for name, tensor in expected.items())
        calls.append((step, whole and state.keys() == expected.keys()))
        if fails:
            raise RuntimeError("no room in the bucket")

    saver = checkpointer(run, directory, every=2, asynchronous=asynchronous, on_save=note)
    error = ""
    for step in range(1, 5):
        run.train(1)
        expected = run.weights()
        try:
            saver.save(step)
        except ValueError as raised:
            error = str(raised)
    saver.close()
    dist.barrier()
    return calls, error, steps_in(directory)


# --- disks that fail ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def trouble(kind: str, directory: str) -> Iterator[None]:
    """Makes saves into `directory` fail. The kernel does it, but for `refused`."""
    if kind == "full":  # directory is on a small file system: leave less room than a checkpoint takes
        if dist.get_rank() == 0:
            used = sum(file.stat().st_size for file in Path(directory).rglob("*") if file.is_file())
            free = os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize
            (Path(directory).parent / "filler").write_bytes(b"x" * (free - used // 2))
        dist.barrier()
        yield
        dist.barrier()
        if dist.get_rank() == 0:
            (Path(directory).parent / "filler").unlink()
        dist.barrier()
    elif kind == "read-only":
        _remount(directory, "ro")
        yield
        _remount(directory, "rw")
    elif kind == "limit":  # one rank can't write files of more than so many bytes; Python ignores the signal
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        yield
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    else:
        real = step_directory.Path.mkdir

        def refuse(path: Path, *arguments: Any, **options: Any) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

        step_directory.Path.mkdir = refuse  # type: ignore[assignment, method-assign]
        yield
        step_directory.Path.mkdir = real  # type: ignore[method-assign]


def _remount(directory: str, mode: str) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        subprocess.run(["mount", "-o", f"remount,{mode}", str(Path(directory).parent)], check=True)
    dist.barrier()


def survived(root: str, directory: str, elsewhere: str, kind: str, asynchronous: bool) -> dict[str, Any]:
    """A run whose save of step 2 fails, and that goes on."""
    expected = Run(root, 2).train(5)
    run = Run(root, 2)
    saver = checkpointer(run, directory, every=1, keep=1, asynchronous=asynchronous)
    losses = run.train(1)
    saver.save(1)
    saver.wait()
    losses += run.train(1)
    error = ""
    with trouble(kind, directory):
        try:
            saver.save(2)
            saver.wait()
        except ValueError as raised:
            error = str(raised)
        losses += run.train(1)
        dist.barrier()
        there = sorted(path.name for path in Path(directory).iterdir())
        # The process group's own store is a file, to which a new mesh would add.
        first = None if kind == "limit" else loaded_by_another_run(root, directory)
    first = first or loaded_by_another_run(root, directory)
    other = checkpointer(run, elsewhere, every=1, asynchronous=asynchronous)
    other.save(3)
    other.close()
    losses += run.train(1)
    saver.save(4)  # the disk has room again
    saver.close()
    resumed = Run(root, 2, seed=99)
    found = checkpointer(resumed, elsewhere, every=1).load()
    return {
        "error": error,
        "same": losses == expected[:4] and resumed.train(2) == expected[3:],
        "there": there,
        "loaded": (first, found),
        "steps": steps_in(directory),
    }


def loaded_by_another_run(root: str, directory: str) -> int | None:
    drawn = random_state.capture()
    step = checkpointer(Run(root, 2, seed=98), directory, every=1).load()
    random_state.restore(drawn)
    return step


def failure_shown_at_the_next_save(root: str, directory: str) -> tuple[str, list[int]]:
    """An asynchronous save fails and nobody waits for it: the next save says so, and is written."""
    run = Run(root, 2)
    saver = checkpointer(run, directory, every=1, asynchronous=True)
    write = filesystem._write_item

    def fail(*arguments: Any, **options: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*arguments, **options)

    filesystem._write_item = fail
    saver.save(1)
    with contextlib.suppress(BaseException):
        while not _pending().done():
            time.sleep(0.01)
    dist.barrier()
    filesystem._write_item = write
    error = ""
    try:
        saver.save(2)
    except ValueError as raised:
        error = str(raised)
    saver.close()
    dist.barrier()
    return error, steps_in(directory)


def _pending() -> Any:
    from cpgen.runtime import checkpoint

    return checkpoint._pending


# --- in the background -------------------------------------------------------------------------------------------


def training_while_a_write_is_blocked(root: str, directory: str, blocked: list[int]) -> dict[str, Any]:
    """Training steps, and an export of weights, while the ranks `blocked` are held up in the writing thread."""
    expected = Run(root, 2).train(4)
    run = Run(root, 2)
    saver = checkpointer(run, directory, every=1, keep=1, asynchronous=True)
    losses = run.train(1)
    saver.save(1)
    saver.wait()
    saved = run.everything()
    go_on, reached = threading.Event(), threading.Event()
    threads: set[str] = set()
    write = filesystem._write_item

    def wait(*arguments: Any, **options: Any) -> Any:
        threads.add(threading.current_thread().name)
        if dist.get_rank() in blocked:
            reached.set()
            assert go_on.wait(60)
        return write(*arguments, **options)

    filesystem._write_item = wait
    try:
        saver.save(2)
        if dist.get_rank() in blocked:
            assert reached.wait(60)
        losses += run.train(3)
        run.package.save_pretrained(run.model, f"{directory}-exported")  # messages of its own between the hosts
        dist.barrier()
        during = (_pending().done(), steps_in(directory))
    finally:
        go_on.set()
        filesystem._write_item = write
    saver.close()
    dist.barrier()
    other = Run(root, 2, seed=99)
    step = checkpointer(other, directory, every=1).load()
    content = other.everything()
    return {
        "same": losses == expected,
        "during": during,
        "after": steps_in(directory),
        "restored": step == 2 and all(torch.equal(saved[name], content[name]) for name in saved),
        "main_thread": threading.main_thread().name in threads,
    }


# --- random state ------------------------------------------------------------------------------------------------


def draws_after_loading(root: str, directory: str, cp: int, axes: dict[str, int]) -> tuple[tuple[int, int], Any, Any]:
    """(data rank, what is drawn after a load, what the run drew when it began)"""
    run = Run(root, cp, axes)
    del run.extra["position"]
    first = draw()
    run.load(directory)
    return data_rank(run.mesh), draw(), first


def warned_of_draws(root: str, directory: str, cp: int, who: list[int]) -> tuple[list[str], list[str]]:
    """Warnings of two saves after the ranks `who` have drawn numbers that the others have not."""
    run = Run(root, cp)
    saver = checkpointer(run, directory, every=1)
    run.train(1)
    if dist.get_rank() in who:
        draw()
    found: list[list[str]] = []
    for step in (1, 2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            saver.save(step)
        found.append([str(each.message) for each in caught if "draw different" in str(each.message)])
    return found[0], found[1]


def save_for_draws(root: str, directory: str, cp: int) -> Any:
    run = Run(root, cp)
    del run.extra["position"]
    draw()
    run.save(directory, 1)
    return draw()


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())
