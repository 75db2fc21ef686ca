"""The example as a user starts it: torchrun, four processes; killed, resumed, stopped, at two degrees; then sampled."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import WanTransformer3DModel
from PIL import Image

from .emitted import ROOT, emit

TIMEOUT = 240  # seconds for one command
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
STEPS, SAVE_EVERY = 12, 4
TRAIN = (*TORCHRUN, f"{ROOT}/examples/train_wan.py", "--steps", f"{STEPS}", "--save-every", f"{SAVE_EVERY}")
TRAIN += ("--batch-size", "4")
SAMPLE = (f"{ROOT}/examples/sample_wan.py", "--steps", "6", "--directory")
ROUNDING = 1e-5  # of a loss, relative


@dataclass(frozen=True)
class Workspace:
    """Where the example was prepared: a directory with the packages of each degree, and one for the runs."""

    root: Path

    def run(self, cp: int, *arguments: str) -> str:
        """Run Python to its end where the package of that degree is; returns what it printed."""
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.root / f"cp{cp}",
            env=environment(),
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    @contextmanager
    def start(self, cp: int, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """Start torchrun; at the end, or when its time is over, it and its workers are killed if still there."""
        launcher = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.root / f"cp{cp}",
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        watchdog = threading.Timer(TIMEOUT, end_all, [launcher])
        watchdog.start()
        try:
            yield launcher
        finally:
            watchdog.cancel()
            end_all(launcher)
            launcher.communicate(timeout=TIMEOUT)

    def directory(self, name: str) -> Path:
        """The directory of the run `name`, with the components that prepare_wan.py wrote."""
        path = self.root / "runs" / name
        if not path.exists():
            shutil.copytree(self.root / "prepared" / "components", path / "components")
        return path

    def export(self, name: str) -> Path:
        target = self.directory(name) / "exported"
        self.run(2, "-m", "cpgen", "export", str(self.directory(name) / "checkpoints"), "--to", str(target))
        return target


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def workers_of(launcher: subprocess.Popen[str]) -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()]
    except OSError:  # it has ended
        return []


def end_all(launcher: subprocess.Popen[str]) -> None:
    workers = workers_of(launcher)
    launcher.kill()
    end(workers)


def end(workers: list[int]) -> None:
    for worker in filter(is_alive, workers):
        os.kill(worker, signal.SIGKILL)


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def lines_until(launcher: subprocess.Popen[str], start: str) -> list[str]:
    """What is printed, to the first line that begins with `start`."""
    assert launcher.stdout is not None
    lines = []
    for line in launcher.stdout:
        lines.append(line.rstrip("\n"))
        if line.startswith(start):
            return lines
    raise AssertionError(f"it ended before it printed {start!r}: {lines}")


def losses_in(lines: list[str]) -> dict[int, str]:
    """The losses as they were printed, by step."""
    return {int(words[1]): words[3] for line in lines if (words := line.split())[:1] == ["step"]}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    workspace = Workspace(tmp_path_factory.mktemp("example"))
    for cp in (2, 4):
        emit(workspace.root / f"cp{cp}" / "generated", "WanTransformer3DModel", cp)
    workspace.run(2, f"{ROOT}/examples/prepare_wan.py", "--directory", str(workspace.root / "prepared"))
    return workspace


@pytest.fixture(scope="module")
def whole(workspace: Workspace) -> dict[int, str]:
    """The losses of a run at cp 2 that nobody interrupts."""
    losses = losses_in(workspace.run(2, *TRAIN, "--directory", str(workspace.directory("whole"))).splitlines())
    assert list(losses) == list(range(1, STEPS + 1))
    assert len(set(losses.values())) == STEPS
    return losses


def test_killed_it_goes_on_with_the_same_losses_plot_and_weights(workspace: Workspace, whole: dict[int, str]) -> None:
    directory = workspace.directory("killed")
    command = (*TRAIN, "--directory", str(directory))
    with workspace.start(2, *command) as launcher:
        # The save of step 8 has begun, and waited for that of step 4.
        before = losses_in(lines_until(launcher, f"step {2 * SAVE_EVERY + 1} "))
        workers = workers_of(launcher)
        assert len(workers) == 4
        launcher.kill()
        deadline = time.monotonic() + 20
        while (alive := [*filter(is_alive, workers)]) and time.monotonic() < deadline:
            time.sleep(0.1)
        end(alive)
        assert not alive
    after = workspace.run(2, *command).splitlines()
    resumed = after[0]
    assert resumed in (f"resumed at step {SAVE_EVERY}", f"resumed at step {2 * SAVE_EVERY}")
    assert list(losses_in(after)) == list(range(int(resumed.split()[-1]) + 1, STEPS + 1))
    assert before | losses_in(after) == whole  # to the printed digits
    plots = [(workspace.directory(name) / "loss.png").read_bytes() for name in ("killed", "whole")]
    assert plots[0] == plots[1]
    states = [
        WanTransformer3DModel.from_pretrained(workspace.export(name)).state_dict() for name in ("killed", "whole")
    ]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[1])


def test_at_cp_4_it_goes_on_with_equal_losses_and_saves_when_it_is_told_to_stop(
    workspace: Workspace, whole: dict[int, str]
) -> None:
    directory = workspace.directory("degree")
    step = 2 * SAVE_EVERY
    shutil.copytree(workspace.directory("whole") / f"checkpoints/step_{step}", directory / f"checkpoints/step_{step}")
    with workspace.start(4, *TRAIN, "--directory", str(directory)) as launcher:
        lines = lines_until(launcher, f"step {step + 2} ")
        launcher.send_signal(signal.SIGTERM)
        lines += lines_until(launcher, "stopped after step ")
        launcher.wait(TIMEOUT)
    assert lines[0] == f"resumed at step {step}"
    losses = losses_in(lines)
    stopped = int(lines[-1].split()[-1])
    assert list(losses) == list(range(step + 1, stopped + 1))
    assert {number: float(loss) for number, loss in losses.items()} == pytest.approx(
        {number: float(whole[number]) for number in losses}, rel=ROUNDING
    )
    assert (directory / f"checkpoints/step_{stopped}/.metadata").exists()


@pytest.mark.usefixtures("whole")
def test_the_pipeline_samples_the_same_frames_from_the_emitted_class(workspace: Workspace) -> None:
    directory = workspace.directory("whole")
    if not (directory / "exported").exists():
        workspace.export("whole")
    frames = []
    for launch, how in (((), "one process"), (TORCHRUN, "context parallel")):
        said = workspace.run(4, *launch, *SAMPLE, str(directory))  # it exits with 1 if they are not equal
        assert said.startswith(f"{how}: frames differ by at most ")
        frames.append(np.asarray(Image.open(directory / "frames.png")).astype(int))
        (directory / "frames.png").unlink()
    assert frames[0].shape == (3 * 48, 5 * 48, 3)
    assert frames[0].std() > 10
    assert abs(frames[0] - frames[1]).max() <= 1  # rounded to 8 bits
