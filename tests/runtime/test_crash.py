"""Jobs that are killed while they save: the latest complete checkpoint always loads, and nothing half-written does.

Kills happen before each file system call of a save in turn, inside writes, and at random times.
"""

from __future__ import annotations

import multiprocessing
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.preloaded import PRELOADED
from tests.runtime import crash_cases as cases
from tests.runtime.crash_cases import Plan

KILLED = {-9, -25}  # by SIGKILL, or by SIGXFSZ at a file's size limit


@pytest.fixture(scope="module")
def forks() -> ForkServerContext:
    assert not dist.is_initialized()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@pytest.fixture(scope="module")
def begun(forks: ForkServerContext, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with steps 1 and 2."""
    folder = tmp_path_factory.mktemp("begun")
    plan = Plan(str(folder / "runs"), str(folder / "journal"), saves=((1, 1.0), (2, 2.0)))
    assert finish(start(forks, plan)) == 0
    assert cases.check(folder / "runs", folder / "journal") == 2
    return folder


def start(forks: ForkServerContext, plan: Plan) -> Any:
    process = forks.Process(target=cases.save_until_killed, args=(plan,), daemon=True)
    process.start()
    return process


def finish(process: Any) -> int:
    process.join(60)
    assert process.exitcode is not None
    return int(process.exitcode)


def copies(begun: Path, folder: Path) -> Iterator[tuple[Path, Plan]]:
    """Fresh copies of the directory, with a plan to save step 3, and step 3 again."""
    number = 0
    while True:
        number += 1
        place = folder / str(number)
        shutil.copytree(begun, place)
        yield place, Plan(str(place / "runs"), str(place / "journal"), saves=((3, 3.0), (3, 3.5)))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_kill_before_each_file_system_call(forks, begun, tmp_path, asynchronous):
    fresh = copies(begun, tmp_path)
    place, plan = next(fresh)
    counting = replace(plan, asynchronous=asynchronous, count_only=True, journal=str(tmp_path / "calls"))
    assert finish(start(forks, counting)) == 0
    calls = int((tmp_path / "calls").read_text())
    assert calls > 30
    latest = set()
    for kill_at in range(1, calls + 1):
        place, plan = next(fresh)
        assert finish(start(forks, replace(plan, asynchronous=asynchronous, kill_at=kill_at))) == -9
        latest.add(cases.check(place / "runs", place / "journal"))
        # The job starts again: it saves over what is left, and leaves no remains behind.
        if kill_at % 8 == 0:
            assert finish(start(forks, replace(plan, saves=((4, 4.0), (5, 5.0))))) == 0
            assert cases.check(place / "runs", place / "journal") == 5
            assert sorted(path.name for path in (place / "runs").iterdir()) == ["step_4", "step_5"]
        shutil.rmtree(place)
    assert latest == {2, 3}


def test_a_kill_inside_a_write(forks, begun, tmp_path):
    fresh = copies(begun, tmp_path)
    for cut_at in (1, 4000, 5000, 100_000, 250_000):
        place, plan = next(fresh)
        assert finish(start(forks, replace(plan, cut_at=cut_at))) == -25
        assert cases.check(place / "runs", place / "journal") == 2


@pytest.mark.parametrize(("asynchronous", "kills"), [(False, 12), (True, 12)])
def test_kills_at_random_times(forks, tmp_path, asynchronous, kills):
    """One job, killed and started again in the same directory."""
    generator = random.Random(1 + asynchronous)
    journal, latest = tmp_path / "journal", 0
    for _ in range(kills):
        plan = Plan(str(tmp_path / "runs"), str(journal), first=latest + 1, asynchronous=asynchronous)
        process = start(forks, plan)
        wait_for_a_save(process, journal)
        time.sleep(generator.uniform(0, 0.15))
        process.kill()
        assert finish(process) == -9
        found = cases.check(tmp_path / "runs", journal)
        assert found > latest
        latest = found


@pytest.mark.parametrize("asynchronous", [False, True])
def test_two_ranks_killed_at_random_times(forks, tmp_path, asynchronous):
    """One rank goes first, and the other one a moment later, as when a launcher takes a job down."""
    generator = random.Random(3 + asynchronous)
    journal, latest = tmp_path / "journal", 0
    for number in range(6):
        plan = Plan(
            str(tmp_path / "runs"),
            str(journal),
            first=latest + 1,
            asynchronous=asynchronous,
            size=2,
            store=str(tmp_path / f"store-{number}"),
        )
        processes = [start(forks, replace(plan, rank=rank)) for rank in range(2)]
        wait_for_a_save(processes[0], journal)
        time.sleep(generator.uniform(0, 0.2))
        for process in generator.sample(processes, 2):
            process.kill()
            time.sleep(generator.choice([0, 0.03]))
        for process in processes:
            finish(process)
        found = cases.check(tmp_path / "runs", journal)
        assert found > latest
        latest = found


def wait_for_a_save(process: Any, journal: Path) -> None:
    """Until the process has begun to save: it reports one save more than the journal has."""
    before = journal.stat().st_size if journal.exists() else 0
    deadline = time.monotonic() + 60
    while not journal.exists() or journal.stat().st_size == before:
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.002)
