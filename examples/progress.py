"""What a run shows: a progress bar or lines, and a plot of its losses."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import matplotlib

matplotlib.use("Agg")  # it draws into files
import matplotlib.pyplot as plt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class LossHistory:
    """The loss of every step so far. In the `extra` of a checkpoint it survives a kill."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])

    def plot(self, path: Path) -> None:
        """Draw the losses, and their running mean, into the image file `path`."""
        mean, means = self.losses[0], []
        for loss in self.losses:
            mean += (loss - mean) / 20
            means.append(mean)
        steps = range(1, len(self.losses) + 1)
        figure, axes = plt.subplots(figsize=(7, 4))
        axes.plot(steps, self.losses, linewidth=0.5, label="loss")
        axes.plot(steps, means, label="running mean")
        axes.set_xlabel("step")
        axes.set_ylabel("mean squared error of the velocity")
        axes.legend()
        figure.savefig(path, dpi=120)
        plt.close(figure)


class Display:
    """Shows steps and messages: on a terminal a progress bar, else lines. Made with `quiet` it shows nothing."""

    def __init__(self, steps: int, *, quiet: bool) -> None:
        console = Console(quiet=quiet, highlight=False)
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, disable=quiet or not console.is_terminal)
        self._task = self._progress.add_task("train", total=steps, loss="-")

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def step(self, step: int, loss: float) -> None:
        if self._progress.disable:
            self.say(f"step {step} loss {loss:.6f}")
        self._progress.update(self._task, completed=step, loss=f"{loss:.4f}")

    def say(self, message: str) -> None:
        self._progress.console.print(message, soft_wrap=True)
