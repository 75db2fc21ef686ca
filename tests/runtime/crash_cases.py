"""Processes that save checkpoints until they are killed. Each is forked from a server that has torch imported."""

from __future__ import annotations

import os
import resource
import signal
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cpgen.runtime.checkpoint import load_checkpoint, save_checkpoint
from cpgen.runtime.step_directory import complete_steps

KEEP = 2
_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"}


@dataclass(frozen=True)
class Plan:
    """What a process does until it is killed."""

    directory: str
    journal: str  # a line for each save that has returned: step and value
    saves: tuple[tuple[int, float], ...] = ()  # step and value of each save; none: on and on from `first`
    first: int = 1
    asynchronous: bool = False
    kill_at: int | None = None  # the file system call before which it kills itself
    count_only: bool = False  # instead: write how many there are into the journal
    cut_at: int | None = None  # the size at which the kernel kills it while it writes a file
    rank: int = 0
    size: int = 1
    store: str = ""


def small_model(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """About 400 kB with the optimizer's state; everything in it is `value`."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    fill(model, optimizer, value)
    return model, optimizer


def fill(model: nn.Module, optimizer: torch.optim.Optimizer, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
            state = optimizer.state[parameter]
            state.setdefault("step", torch.zeros(()))
            for name in ("exp_avg", "exp_avg_sq"):
                state.setdefault(name, torch.zeros_like(parameter)).fill_(value)


def save_until_killed(plan: Plan) -> None:
    torch.set_num_threads(1)
    if plan.size > 1:
        store = dist.FileStore(plan.store, plan.size)
        options = {"rank": plan.rank, "world_size": plan.size, "timeout": timedelta(seconds=30)}
        dist.init_process_group("gloo", store=store, **options)
    model, optimizer = small_model(0.0)
    if plan.size > 1:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
    seen = _watch(plan)
    for step, value in plan.saves or _endless(plan.first):
        fill(model, optimizer, value)
        handle = save_checkpoint(
            plan.directory,
            model,
            optimizer,
            step=step,
            keep=KEEP,
            asynchronous=plan.asynchronous,
            extra={"value": value},
        )
        if handle is not None:
            fill(model, optimizer, -1.0)  # training goes on
            handle.wait()
        if plan.rank == 0 and not plan.count_only:
            _note(plan.journal, f"{step} {value}\n")
    if plan.count_only:
        _note(plan.journal, str(len(seen)))
    os._exit(0)


def _endless(first: int) -> Iterator[tuple[int, float]]:
    for step in count(first):
        yield step, float(step)
        if step % 3 == 0:
            yield step, step + 0.5  # the same step again


def _note(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, text.encode())
    os.close(descriptor)


def _watch(plan: Plan) -> list[str]:
    """Count the file system calls of the saves from here on, in every thread, and kill where the plan says."""
    seen: list[str] = []
    if plan.cut_at is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (plan.cut_at, plan.cut_at))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _EVENTS or (event == "open" and not str(arguments[0]).startswith(plan.directory)):
            return
        seen.append(event)
        if len(seen) == plan.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    if plan.kill_at is not None or plan.count_only:
        sys.addaudithook(hook)
    return seen


def check(directory: Path, journal: Path) -> int:
    """Every checkpoint that counts as complete loads whole, and none that was reported is missing. The latest step."""
    lines = journal.read_text().split("\n") if journal.exists() else []
    reported = [(int(step), float(value)) for step, value in (line.split() for line in lines if line)]
    complete = complete_steps(directory)
    for step in complete:
        _load(directory, step)
    assert len(complete) >= min(KEEP, len({step for step, _ in reported}))
    latest, value = _load(directory, -1)
    if reported:
        assert (latest, value) >= max(reported)
    return latest


def _load(directory: Path, step: int) -> tuple[int, float]:
    model, optimizer = small_model(-2.0)
    extra = {"value": -3.0}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* another number of data ranks")
        found = load_checkpoint(directory, model, optimizer, step=step, extra=extra)
    if found is None:
        return 0, 0.0
    value = extra["value"]
    assert int(value) == found
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        assert bool((parameter == value).all() and (state["exp_avg"] == value).all())
        assert bool((state["exp_avg_sq"] == value).all())
    return found, value
