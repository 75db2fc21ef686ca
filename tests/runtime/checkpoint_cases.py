"""Functions on the workers for checkpoints: a run that is saved and resumed, and saves that fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.runtime.training_models import full, load, tiny_batch, tiny_loss, tiny_model


def optimizer_made_too_early(root: str, directory: str, call: str) -> None:
    package = load(root, "tiny_cp1")
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model = package.parallelize(model, package.build_mesh("cpu"))
    if call == "load":
        package.load_checkpoint(directory, model, optimizer)
    else:
        package.save_checkpoint(directory, model, optimizer, step=1)


class Position:
    """Stands for a dataloader: its state differs by data rank."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


class Average:
    """Stands for an EMA: sharded as the model is."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.weights)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = dict(state)


class Run:
    """A training run of the tiny model whose losses depend on all that a checkpoint must bring back."""

    def __init__(
        self, root: str, cp: int = 1, axes: dict[str, int] | None = None, seed: int = 0, **options: Any
    ) -> None:
        from cpgen.runtime.mesh import data_rank, seed_everything

        self.package = load(root, f"tiny_cp{cp}")
        self.mesh = self.package.build_mesh("cpu", **(axes or {}))
        seed_everything(seed, self.mesh)
        self.rank, _ = data_rank(self.mesh)
        self.model = self.package.parallelize(tiny_model(seed), self.mesh, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.position = Position(100 * self.rank)
        self.average = Average(self.model)
        self.extra: dict[str, Any] = {
            "schedule": self.schedule,
            "position": self.position,
            "average": self.average,
            "epoch": seed,
        }

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            hidden_states, timestep, target = tiny_batch(self.position.value)
            noise = torch.randn(hidden_states.shape)
            loss = F.mse_loss(self.model(hidden_states + noise, timestep), target)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.position.value += 1
            for name, parameter in self.model.named_parameters():
                self.average.weights[name] = self.average.weights[name].lerp(parameter.detach(), 0.1)
            losses.append(loss.item())
        return losses

    def save(self, directory: str, step: int, **options: Any) -> Any:
        return self.package.save_checkpoint(
            directory, self.model, self.optimizer, step=step, extra=self.extra, **options
        )

    def load(self, directory: str, step: int = -1) -> int | None:
        return self.package.load_checkpoint(directory, self.model, self.optimizer, step=step, extra=self.extra)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: full(tensor) for name, tensor in self.model.state_dict().items()}

    def everything(self) -> dict[str, torch.Tensor]:
        """Weights, averages and moments, by name."""
        content = self.weights()
        content |= {f"average.{name}": full(tensor) for name, tensor in self.average.weights.items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                content[f"{key}.{name}"] = full(value)
        return content


def resumed_losses(
    root: str, directory: str, cp: int, axes: dict[str, int], options: dict[str, Any], before: int, evaluate: bool
) -> tuple[list[float], list[float], int | None, dict[str, Any]]:
    """(losses of one run, of one resumed after `before` steps in a fresh state, loaded step, plain values)."""
    straight = Run(root, cp, axes, **options)
    expected = straight.train(before + 3)
    first = Run(root, cp, axes, **options)
    losses = first.train(before)
    if evaluate:
        with torch.no_grad():
            tiny_loss(first.model, 0)
    first.extra["epoch"] = 41
    first.save(directory, before)
    resumed = Run(root, cp, axes, seed=99, **options)
    step = resumed.load(directory)
    losses += resumed.train(3)
    return expected, losses, step, {"epoch": resumed.extra["epoch"], "position": resumed.position.value}


def saved_and_continued(root: str, directory: str) -> tuple[list[float], list[float]]:
    """Losses with and without a save before the first step."""
    expected = Run(root).train(3)
    saving = Run(root)
    saving.save(directory, 0)
    return expected, saving.train(3)


def save_run(
    root: str, directory: str, cp: int, axes: dict[str, int], steps: list[int], keep: int | None = None
) -> Any:
    """Save after each step number in `steps` (one training step each); the last content, gathered."""
    run = Run(root, cp, axes)
    for step in steps:
        run.train(1)
        run.save(directory, step, keep=keep)
    return run.everything()


def load_run(
    root: str, directory: str, cp: int, axes: dict[str, int], step: int = -1, without: tuple[str, ...] = ()
) -> Any:
    """(loaded step, content, gathered) in a run of other values."""
    run = Run(root, cp, axes, seed=99)
    for name in without:
        del run.extra[name]
    found = run.load(directory, step)
    return found, run.everything()


def failed_load(root: str, directory: str, step: int = -1, layers: int = 2) -> tuple[str, bool]:
    """(the error, whether model and optimizer are as before it)."""
    run = Run(root, seed=99)
    if layers != 2:
        run.model = run.package.parallelize(tiny_model(layers=layers), run.mesh)
        run.optimizer = torch.optim.AdamW(run.model.parameters())
    before = run.everything()
    try:
        run.load(directory, step)
    except ValueError as error:
        after = run.everything()
        same = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
        return str(error), same
    return "", False


def save_error(root: str, directory: str) -> str:
    try:
        Run(root).save(directory, 1)
    except ValueError as error:
        return str(error)
    return ""


def interrupted_save(root: str, directory: str) -> str:
    """The error of a save of step 3 with keep=1 when one rank's disk is full."""
    import torch.distributed as dist
    from torch.distributed.checkpoint import filesystem

    run = Run(root)
    write = filesystem._write_item

    def fail(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError("disk full")
        return write(*args, **kwargs)

    filesystem._write_item = fail
    try:
        run.save(directory, 3, keep=1)
    except ValueError as error:
        return str(error)
    finally:
        filesystem._write_item = write
    return ""


def asynchronous_saves(root: str, directory: str) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """(content when the first save began, what loading it gives, the steps there at the end) while training goes on."""
    import torch.distributed as dist

    run = Run(root, 2)
    run.train(1)
    handle = run.save(directory, 1, asynchronous=True, keep=2)
    before = {name: tensor.clone() for name, tensor in run.everything().items()}
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.zero_()
    run.train(1)
    run.save(directory, 2, asynchronous=True, keep=2)  # waits for the first
    assert handle.done()
    loaded = Run(root, 2, seed=99)
    loaded.load(directory, 1)
    content = loaded.everything()
    last = run.save(directory, 3, asynchronous=True, keep=2)
    last.wait()
    last.result()
    dist.barrier()
    return before, content, sorted(path.name for path in Path(directory).iterdir())


def single_process_checkpoint(root: str, directory: str) -> tuple[int | None, bool]:
    """Without a process group: the state of a plain model comes back."""
    package = load(root, "tiny_cp1")
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters())
    tiny_loss(model, 0).backward()
    optimizer.step()
    package.save_checkpoint(directory, model, optimizer, step=5)
    other = tiny_model(1)
    step = package.load_checkpoint(directory, other, torch.optim.AdamW(other.parameters()))
    return step, all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
