"""A run of the project's small model, emitted for some degree, whose global batch is the same on every mesh."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from cpgen.runtime.checkpointer import Checkpointer
from cpgen.runtime.data import ResumableLoader
from cpgen.runtime.mesh import data_rank
from cpgen.verify.models import build_model, load_package, randomise

from .emitted import Emitted
from .training_models import full

GLOBAL_BATCH = 4


class Samples(Dataset[dict[str, Tensor]]):
    """Each is the same wherever it is read; its noise and timestep are drawn anew each time, in `__getitem__`."""

    def __len__(self) -> int:
        return 16  # an epoch ends in mid-run

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(100 + index)
        sample = {
            "hidden_states": torch.randn(4, 3, 5, generator=generator, dtype=torch.float64),
            "encoder_hidden_states": torch.randn(7, 16, generator=generator, dtype=torch.float64),
            "context": torch.randn(3, 16, generator=generator, dtype=torch.float64),
        }
        return {**sample, "noise": torch.randn(4, 3, 5, dtype=torch.float64), "timestep": torch.rand(())}


class Run:
    """In float64, so that rounding is far below what a wrong sample or moment would change."""

    def __init__(self, emitted: Emitted, axes: dict[str, int] | None, directory: str, seed: int = 0) -> None:
        package = load_package(emitted.directory, emitted.name)
        model = build_model(getattr(package, emitted.reference.class_name), emitted.probe(), 0, torch.float64)
        randomise(model, seed)
        mesh = None if axes is None else package.build_mesh("cpu", **axes)
        self.size = 1
        if mesh is not None:
            model = package.parallelize(model, mesh, reduce_dtype=torch.float64)
            _, self.size = data_rank(mesh)
        self.model = model.train()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.loader = ResumableLoader(Samples(), mesh, batch_size=GLOBAL_BATCH // self.size, seed=3)
        self.checkpointer = Checkpointer(
            directory, model, self.optimizer, every=1, extra={"data": self.loader, "schedule": self.schedule}
        )

    def train(self, steps: int) -> list[float]:
        """The loss of each step, averaged over data ranks."""
        losses = []
        while len(losses) < steps:
            for batch in self.loader:
                losses.append(self._step(batch))
                if len(losses) == steps:
                    break
        return losses

    def _step(self, batch: dict[str, Tensor]) -> float:
        noise, timestep = batch.pop("noise"), batch.pop("timestep")
        noisy = torch.lerp(batch.pop("hidden_states"), noise, 0.5)
        predicted = self.model(noisy, timestep=timestep, **batch, return_dict=False)[0]
        loss = F.mse_loss(predicted, noise)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        losses: list[Any] = [loss.item()]
        if dist.is_initialized():
            losses = [None] * dist.get_world_size()
            dist.all_gather_object(losses, loss.item())
        return float(sum(losses) / len(losses))

    def everything(self) -> dict[str, Tensor]:
        """Weights and moments, gathered, by name."""
        content = {name: full(tensor) for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                content[f"{key}.{name}"] = full(value)
        return content


def straight_run(
    emitted: Emitted, axes: dict[str, int], directory: str, before: int, after: int
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """A run that saves after `before` steps: its losses after that, and everything then and at its end."""
    run = Run(emitted, axes, directory)
    run.train(before)
    run.checkpointer.save(before)
    then = run.everything()
    return run.train(after), then, run.everything()


def resumed_run(
    emitted: Emitted, axes: dict[str, int] | None, directory: str, after: int
) -> tuple[int | None, list[float], dict[str, Tensor], dict[str, Tensor]]:
    """(step, losses after it, everything after the load, at the end) of a run that began with other weights."""
    run = Run(emitted, axes, directory, seed=9)
    step = run.checkpointer.load()
    then = run.everything()
    return step, run.train(after), then, run.everything()
