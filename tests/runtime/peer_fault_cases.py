"""What a user of an emitted package calls, on the workers: a short training, and what else others get wrong."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

from cpgen.plan import Probe
from cpgen.probes import build_inputs
from cpgen.runtime.data import ResumableLoader
from cpgen.runtime.mesh import data_rank, seed_everything
from cpgen.verify.float64 import to_float64

from .emitted import Emitted, gradients, inputs_of, loss_of, reference_and_model, worst
from .model_cases import averaged, run

SAMPLES, STEPS = 12, 3
Batch = dict[str, Tensor]


class Latents(Dataset[Batch]):
    """35 latent, 7 text and 3 context tokens a sample: even on no degree."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Batch:
        generator = torch.Generator().manual_seed(index)
        shapes = {"hidden_states": (4, 5, 7), "encoder_hidden_states": (7, 16), "context": (3, 16)}
        sample = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
        return {"index": torch.tensor(index), **sample}


@dataclass(frozen=True)
class Trained:
    """What a rank did: its data rank, and of each step the samples, noise, timesteps and loss; the weights after."""

    place: tuple[int, int]
    seen: list[list[int]]
    noise: list[Tensor]
    timesteps: list[Tensor]
    losses: list[float]
    weights: dict[str, Tensor]


def train(emitted: Emitted, axes: dict[str, int], options: dict[str, Any], exported: str | None = None) -> Trained:
    """Some steps as in docs/training.md. By SGD: Adam's steps would be the same with gradients of another scale."""
    _, model, package = reference_and_model(emitted, emitted.probe())
    mesh = package.build_mesh("cpu", **axes)
    model = package.parallelize(model, mesh, reduce_dtype=torch.float64, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = ResumableLoader(Latents(), mesh, batch_size=1, seed=5)
    seed_everything(1, mesh)
    done = Trained(data_rank(mesh), [], [], [], [], {})
    for _, batch in zip(range(STEPS), loader, strict=False):
        done.seen.append(batch["index"].tolist())
        done.noise.append(torch.randn(batch["hidden_states"].shape, dtype=torch.float64))
        done.timesteps.append(torch.rand(1, dtype=torch.float64))
        loss = denoising_loss(model, batch, done.noise[-1], done.timesteps[-1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        done.losses.append(loss.item())
    if exported is not None:
        package.save_pretrained(model, exported)
    done.weights.update({name: whole(p) for name, p in model.named_parameters()})
    return done


def accumulate(emitted: Emitted, axes: dict[str, int], options: dict[str, Any]) -> tuple[float, float, float]:
    """Two micro-batches, reduced after the second: errors of gradients, of their norm, and of clipped gradients."""
    reference, model, package = reference_and_model(emitted, emitted.probe())
    mesh = package.build_mesh("cpu", **axes)
    model = package.parallelize(model, mesh, reduce_dtype=torch.float64, **options)
    rank, size = data_rank(mesh)
    for micro in range(2):
        model.set_requires_gradient_sync(micro == 1)
        (loss_of(run(model, to_float64(build_inputs(emitted.probe(), 2 * rank + micro)))) / 2).backward()
    for seed in range(2 * size):
        (loss_of(run(reference, to_float64(build_inputs(emitted.probe(), seed)))) / (2 * size)).backward()
    expected = gradients(reference)
    error = worst(whole_gradients(model), expected)
    norms = [float(whole(torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5))) for each in (model, reference)]
    return error, abs(norms[0] - norms[1]) / norms[1], worst(whole_gradients(model), gradients(reference))


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def train_in_one_process(emitted: Emitted, ranks: list[Trained]) -> tuple[list[float], dict[str, Tensor]]:
    """(loss of each step, weights) of the unmodified class on what one rank of each data rank saw, averaged."""
    model, _, _ = reference_and_model(emitted, emitted.probe())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        each = []
        for rank in ranks:
            batch = torch.utils.data.default_collate([Latents()[index] for index in rank.seen[step]])
            each.append(denoising_loss(model, batch, rank.noise[step], rank.timesteps[step]))
        loss = torch.stack(each).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def denoising_loss(model: nn.Module, batch: Batch, noise: Tensor, timestep: Tensor) -> Tensor:
    inputs = {name: value for name, value in batch.items() if name != "index"}
    noisy = inputs.pop("hidden_states").lerp(noise, 0.5)
    return F.mse_loss(run(model, {"hidden_states": noisy, "timestep": timestep, **inputs}), noise)


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def held(emitted: Emitted, axes: dict[str, int]) -> tuple[list[str], int, int]:
    """(block lists with a block that is no FSDP unit, elements of parameters held here, elements of all)."""
    _, model, package = reference_and_model(emitted, emitted.probe())
    total = sum(p.numel() for p in model.parameters())
    model = package.parallelize(model, package.build_mesh("cpu", **axes))
    loose = [
        name
        for name, blocks in model.named_children()
        if isinstance(blocks, nn.ModuleList) and not all(isinstance(block, FSDPModule) for block in blocks)
    ]
    local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return loose, sum(p.numel() for p in local), total


def forward_and_backward(
    emitted: Emitted, probe: Probe, batches: tuple[int, ...] = (), return_dict: bool = False
) -> tuple[float, float]:
    """Errors of output and gradients, relative, of the bound model: forwards with batches of these sizes (None: the
    probe's), and then their backwards together, as of several micro-batches whose losses are added up."""
    reference, model, package = reference_and_model(emitted, probe)
    model = package.parallelize(model, package.build_mesh("cpu"), data_parallel="none")
    forward = 0.0
    totals = []
    for each in (reference, model):
        outputs = []
        for seed, size in enumerate(batches or (None,)):
            inputs = to_float64(build_inputs(resized(probe, size), seed))
            outputs.append(each(**inputs).sample if return_dict else run(each, inputs))
        totals.append(outputs)
        sum(loss_of(output) for output in outputs).backward()  # type: ignore[union-attr]
    for theirs, ours in zip(*totals, strict=True):
        assert ours.shape == theirs.shape
        forward = max(forward, float((ours - theirs).detach().abs().max() / theirs.detach().abs().max()))
    return forward, worst(averaged(gradients(model)), gradients(reference))


def resized(probe: Probe, batch: int | None) -> Probe:
    """`probe` with inputs of another batch size."""
    if batch is None:
        return probe

    def spec_of(spec: dict[str, Any]) -> dict[str, Any]:
        if "mask" in spec:
            return spec | {"mask": spec_of(spec["mask"])}
        return spec | {"shape": [batch, *spec["shape"][1:]]}

    return replace(probe, inputs={name: spec_of(dict(spec)) for name, spec in probe.inputs.items()})


def message_of_forward(emitted: Emitted) -> str:
    _, model, package = reference_and_model(emitted, emitted.probe())
    model = package.parallelize(model, package.build_mesh("cpu"), data_parallel="none")
    try:
        run(model, inputs_of(emitted.probe()))
    except ValueError as error:
        return str(error)
    return ""
