"""How long a save holds up training: a synchronous one, an asynchronous one, and the bare copy of the same state.

    python -m benchmarks.checkpoints [--megabytes 256] [--directory DIR]

One process. The state is a model and two moments for each of its parameters, `--megabytes` together. Last, how long a
training step takes while the state is being written, beside one without.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cpgen.runtime.checkpoint import save_checkpoint

RUNS = 5
WIDTH = 1024


def build(megabytes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    layers = max(1, round(megabytes * 2**20 / (3 * 4 * WIDTH * WIDTH)))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def seconds(action: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--directory", type=Path)
    options = parser.parse_args()
    model, optimizer = build(options.megabytes)
    times: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        times.setdefault(name, []).append(value)

    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        step = 0
        for _ in range(RUNS):
            state = [list(model.parameters()), optimizer.state_dict()]
            note("copy of the state", seconds(lambda state=state: copy.deepcopy(state)))  # type: ignore[misc]
            for asynchronous in (False, True):
                step += 1
                begin = time.perf_counter()
                handle = save_checkpoint(folder, model, optimizer, step=step, keep=1, asynchronous=asynchronous)
                note("asynchronous save returns" if asynchronous else "synchronous save", time.perf_counter() - begin)
                if handle is None:
                    continue
                while not handle.done():
                    note("training step during the write", seconds(lambda: train(model, optimizer)))
                handle.wait()
                note("asynchronous save is complete", time.perf_counter() - begin)
            note("training step", seconds(lambda: train(model, optimizer)))
    for name, values in times.items():
        print(f"{name:32} {statistics.median(values):7.3f} s (median of {len(values)}, worst {max(values):.3f} s)")


if __name__ == "__main__":
    main()
