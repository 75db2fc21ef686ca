"""A pool of local gloo workers: started once, it runs many cases, each on the first `world_size` ranks."""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

COLLECTIVE_TIMEOUT = timedelta(seconds=60)
PRELOADED = ("cpgen.verify.preloaded",)  # modules that the workers share, imported once: torch takes seconds
_RUNS_PER_GROUP = 10  # a case's device mesh leaves groups behind, with threads: they go with the group they came from
_MAX_THREADS = 250  # of a worker; each gloo group that a case leaves behind has ten, and they slow all that follows
_GRACE_SECONDS = 3.0  # how long the other ranks may take to fail by themselves once one has


class WorkerError(RuntimeError):
    """A case raised on at least one rank. `failures` maps rank to (exception type name, message, traceback text)."""

    def __init__(self, failures: dict[int, tuple[str, str, str]]) -> None:
        self.failures = failures
        rank, (kind, message, _) = min(failures.items())
        super().__init__(f"rank {rank}: {kind}: {message}")


@dataclass
class _Worker:
    process: BaseProcess
    connection: multiprocessing.connection.Connection


class WorkerPool:
    """`size` processes with one torch thread each, joined in a gloo group of the size that a case asks for.

    On Linux they are forked from a server that has imported `preload`; the first pool of a process decides on that.
    """

    def __init__(self, size: int, *, case_timeout: float = 300.0, preload: Sequence[str] = PRELOADED) -> None:
        self._size = size
        self._case_timeout = case_timeout
        self._preload = list(preload)
        self._workers: list[_Worker] = []
        self._directory = tempfile.TemporaryDirectory(prefix="cpgen-pool-")
        self._generation = 0
        self._runs_in_group = 0
        self._world_size = 0

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any, world_size: int | None = None) -> list[Any]:
        """Call `function(*args)` on ranks 0..world_size-1 inside an initialised process group.

        `function` is a module-level function and `args` can be pickled. Returns the results by rank.
        Raises `WorkerError` if any rank raises, dies or exceeds the time limit.
        """
        world_size = self._size if world_size is None else world_size
        if not 1 <= world_size <= self._size:
            raise ValueError(f"world_size {world_size} is not in 1..{self._size}")
        if any(_threads(worker.process) > _MAX_THREADS for worker in self._workers):
            self.close()
        self._start()
        if world_size != self._world_size or self._runs_in_group == _RUNS_PER_GROUP:
            self._generation += 1
            self._world_size = world_size
            self._runs_in_group = 0
        self._runs_in_group += 1
        store = str(Path(self._directory.name) / f"store-{self._generation}")
        active = self._workers[:world_size]
        for rank, worker in enumerate(self._workers):
            work = (function, args) if rank < world_size else None
            worker.connection.send((store, world_size, work))
        return self._collect(active)

    def close(self) -> None:
        for worker in self._workers:
            if worker.process.is_alive():
                worker.process.terminate()
        for worker in self._workers:
            worker.process.join(timeout=10)
            worker.connection.close()
        self._workers = []
        self._world_size = 0

    def _start(self) -> None:
        if self._workers:
            return
        if sys.platform == "linux":
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(self._preload)
        else:  # elsewhere a fork of a process with such libraries may crash, or there is none
            context = multiprocessing.get_context("spawn")
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_worker_main, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours))

    def _collect(self, active: list[_Worker]) -> list[Any]:
        results: list[Any] = [None] * len(active)
        failures: dict[int, tuple[str, str, str]] = {}
        waiting = {worker.connection: rank for rank, worker in enumerate(active)}
        deadline = time.monotonic() + self._case_timeout
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, multiprocessing.connection.Connection)
                rank = waiting.pop(connection)
                try:
                    ok, payload = connection.recv()
                except EOFError:
                    ok, payload = False, ("WorkerDied", f"the process of rank {rank} ended", "")
                if ok:
                    results[rank] = payload
                else:
                    failures[rank] = payload
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if waiting and not failures:
            timeout = ("TimeoutError", f"no result after {self._case_timeout:.0f} s", "")
            failures = dict.fromkeys(waiting.values(), timeout)
        if failures:
            # A failed rank may leave its group inside a collective: never use that group again.
            self._world_size = 0
            if waiting or any(not worker.process.is_alive() for worker in active):
                self.close()
            raise WorkerError(failures)
        return results


def _threads(process: BaseProcess) -> int:
    try:
        return sum(1 for _ in Path(f"/proc/{process.pid}/task").iterdir())
    except OSError:  # not Linux, or it has ended
        return 0


def _forget_groups() -> None:
    # A new mesh compares equal to the old one, so DTensor would look up plans that name groups which are gone.
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def _worker_main(rank: int, connection: multiprocessing.connection.Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    joined: tuple[str, int] | None = None
    while True:
        try:
            store, world_size, work = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            if (store, world_size) != joined:
                if dist.is_initialized():
                    dist.destroy_process_group()
                    gc.collect()  # meshes and models refer to each other, and hold the groups of a mesh alive
                    _forget_groups()
                joined = (store, world_size)
                if rank < world_size:
                    dist.init_process_group(
                        "gloo",
                        store=dist.FileStore(store, world_size),  # type: ignore[attr-defined]
                        rank=rank,
                        world_size=world_size,
                        timeout=COLLECTIVE_TIMEOUT,
                    )
            if work is not None:
                function, args = work
                connection.send((True, function(*args)))
        except BaseException as error:
            connection.send((False, (type(error).__name__, str(error), traceback.format_exc())))
