"""Training of adapters on the workers, and in one process with plain diffusers and peft."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from diffusers.training_utils import cast_training_params
from peft import LoraConfig
from torch import Tensor, nn

from cpgen.probes import build_inputs
from cpgen.verify.models import load_package, randomise
from tests.runtime.emitted import Emitted
from tests.runtime.training_models import full

TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "proj_out"]  # the last one is outside the blocks


def config(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 3, "lora_alpha": 5, "target_modules": TARGETS, **options})


def add(model: Any, seed: int = 5, **options: Any) -> None:
    torch.manual_seed(seed)
    model.add_adapter(config(**options))


def add_random(model: Any) -> None:
    """Without zeros in B, so that A has a gradient from the first step."""
    add(model, init_lora_weights=False)


def add_stronger(model: Any) -> None:
    add(model, lora_alpha=50)


def add_wide(model: Any) -> None:
    add_random(model)
    cast_training_params(model, torch.float32)


def add_two(model: Any) -> None:
    add(model)
    model.add_adapter(config(r=2), "second")


def add_and_train_a_bias(model: Any) -> None:
    add(model)
    model.proj_out.base_layer.bias.requires_grad_()


def add_after_another_seed(model: Any) -> None:
    import torch.distributed as dist

    add(model, seed=dist.get_rank())


@dataclass(frozen=True)
class Published:
    """Adds an adapter from a file."""

    directory: str

    def __call__(self, model: Any) -> None:
        model.load_lora_adapter(self.directory, adapter_name="default", use_safetensors=True)


@dataclass(frozen=True)
class AddWith:
    """Adds an adapter with options of its config."""

    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, model: Any) -> None:
        add(model, **self.options)


Prepare = Callable[[Any], None]


def save_base(emitted: Emitted, directory: str) -> None:
    model = WanTransformer3DModel(**emitted.probe().config)
    randomise(model, 0)
    model.save_pretrained(directory)


def batch(emitted: Emitted, index: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    inputs: dict[str, Any] = build_inputs(emitted.probe(), index)
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def loss_of(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    output: Tensor = model(**inputs, return_dict=False)[0]
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(7))
    return (output.float() * weights).square().mean()


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@dataclass
class Trained:
    losses: list[list[float]]
    """By step, of each data rank's sample."""
    gradients: dict[str, Tensor]
    """Of the first step."""
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    """State dicts."""
    output: Tensor
    """Of sample 0, after training."""


def one_process(
    emitted: Emitted, base: str, prepare: Prepare, samples: int, steps: int, dtype: torch.dtype | None = None
) -> Trained:
    """Plain diffusers and peft, trained on the mean over as many samples as there would be data ranks."""
    model = WanTransformer3DModel.from_pretrained(base, torch_dtype=dtype)
    prepare(model)
    optimizer = torch.optim.AdamW(trainable(model).values(), lr=0.01)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    losses, gradients = [], {}
    for step in range(steps):
        each = [loss_of(model, batch(emitted, step * samples + i, dtype or torch.float32)) for i in range(samples)]
        (sum(each) / samples).backward()
        gradients = gradients or {name: p.grad.clone() for name, p in trainable(model).items()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in each])
    with torch.no_grad():
        output = model(**batch(emitted, 0, dtype or torch.float32), return_dict=False)[0]
    return Trained(losses, gradients, before, model.state_dict(), output)


class Run:
    """A training run of adapters on the workers."""

    def __init__(
        self, emitted: Emitted, base: str, prepare: Prepare, axes: dict[str, int], whole: bool = False, **options: Any
    ) -> None:
        """With `whole` the adapters are added to a whole model, before parallelize."""
        from cpgen.runtime.mesh import data_rank

        self.emitted = emitted
        self.package = load_package(emitted.directory, emitted.name)
        mesh = self.package.build_mesh("cpu", **axes)
        self.rank, self.size = data_rank(mesh)
        self.dtype = options.get("dtype") or torch.float32
        if whole:
            model = self.package.WanTransformer3DModel.from_pretrained(base)
            prepare(model)
            self.model = self.package.parallelize(model, mesh, **options)
        else:
            self.model = self.package.load_pretrained(base, mesh, prepare=prepare, **options)
        self.optimizer = torch.optim.AdamW(trainable(self.model).values(), lr=0.01)
        self.gradients: dict[str, Tensor] = {}

    def train(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            loss = loss_of(self.model, batch(self.emitted, step * self.size + self.rank, self.dtype))
            loss.backward()
            self.gradients = self.gradients or {name: full(p.grad) for name, p in trainable(self.model).items()}
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, Tensor]:
        return {name: full(tensor) for name, tensor in self.model.state_dict().items()}


def train(
    emitted: Emitted,
    base: str,
    prepare: Prepare,
    axes: dict[str, int],
    steps: int,
    options: dict[str, Any],
    directory: str | None = None,
) -> tuple[int, list[float], Trained]:
    """(data rank, its losses, the rest). With `directory`, the adapter is saved there at the end."""
    run = Run(emitted, base, prepare, axes, **options)
    before = run.state()
    losses = run.train(0, steps)
    if directory is not None:
        run.package.save_lora(run.model, directory)
    with torch.no_grad():
        output = run.model(**batch(emitted, 0, run.dtype), return_dict=False)[0]
    return run.rank, losses, Trained([], run.gradients, before, run.state(), output)


def resume(emitted: Emitted, base: str, directory: str, axes: dict[str, int], options: dict[str, Any]) -> list[float]:
    """Losses of steps 2 and 3, after a checkpoint that was saved after step 1 (or on any mesh: see `save`)."""
    run = Run(emitted, base, add, axes, **options)
    with torch.no_grad():
        for parameter in trainable(run.model).values():
            parameter.fill_(0.5)  # not what the checkpoint holds
    assert run.package.load_checkpoint(directory, run.model, run.optimizer) == 2
    return run.train(2, 4)


def save(emitted: Emitted, base: str, prepare: Prepare, axes: dict[str, int], directory: str) -> list[float]:
    """Save after two steps, as checkpoint and as adapter, and train two more; all losses."""
    run = Run(emitted, base, prepare, axes)
    losses = run.train(0, 2)
    run.package.save_checkpoint(f"{directory}/checkpoints", run.model, run.optimizer, step=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what trains besides
        run.package.save_lora(run.model, f"{directory}/lora", adapter_name="default")
    return losses + run.train(2, 4)


def error_of(emitted: Emitted, base: str, prepare: Prepare, what: str, argument: str) -> str:
    """The error of load_pretrained with `prepare`, or of what is done with its model."""
    try:
        run = Run(emitted, base, prepare, {}, data_parallel="ddp")
        if what == "save_lora":
            run.package.save_lora(run.model, argument)
        elif what == "save_lora second":
            run.package.save_lora(run.model, argument, adapter_name="third")
        elif what == "save_pretrained":
            run.package.save_pretrained(run.model, argument)
        elif what == "load_checkpoint":
            run.package.load_checkpoint(argument, run.model)
    except ValueError as error:
        return str(error)
    return ""


def nothing(model: Any) -> None:
    """No adapter."""


def raises(model: Any) -> None:
    raise KeyError("mine")


def warning_of_save(emitted: Emitted, base: str, directory: str) -> list[str]:
    """What save_lora warns of when a bias trains besides the adapter."""
    run = Run(emitted, base, add_and_train_a_bias, {})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.package.save_lora(run.model, directory)
    return [str(warning.message) for warning in caught if "train, too" in str(warning.message)]
