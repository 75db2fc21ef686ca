"""The training example as a user starts it: torchrun, four processes at cp 2, resumed, exported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel

from .emitted import ROOT, emit


def train(folder: Path, steps: int, directory: str) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command += [
        str(ROOT / "examples/train_wan.py"),
        "--steps",
        str(steps),
        "--save-every",
        "2",
        "--directory",
        directory,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [line for line in done.stdout.splitlines() if line.startswith(("step", "resumed"))]


def test_it_trains_resumes_to_the_same_losses_and_exports(tmp_path: Path) -> None:
    emit(tmp_path / "generated", "WanTransformer3DModel", 2)
    first = train(tmp_path, 4, "interrupted")
    second = train(tmp_path, 6, "interrupted")
    whole = train(tmp_path, 6, "whole")
    assert second[0] == "resumed at step 4"
    assert first + second[1:] == whole  # to the printed digits
    assert len({line.rpartition(" ")[2] for line in whole}) == 6
    models = [WanTransformer3DModel.from_pretrained(tmp_path / name / "exported") for name in ("interrupted", "whole")]
    states = [model.state_dict() for model in models]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[1])
