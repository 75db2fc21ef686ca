"""A model and its ControlNets on the workers, all bound to one mesh: residuals go from regions into another region."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from cpgen.plan import Probe
from cpgen.verify.models import build_model, load_package, load_reference, mesh_for, randomise

from .emitted import Emitted, gradients, inputs_of, loss_of, worst
from .model_cases import averaged, full_gradients

DTYPE = torch.float64


@dataclass(frozen=True)
class Pair:
    """A model with its ControlNet. `takes` are the model's arguments for what the ControlNet returns."""

    model: str
    model_probe: str
    controlnet: str
    takes: tuple[str, ...]
    wrapper: str  # diffusers' class that adds up the residuals of several
    modes: bool = False  # the wrapper takes a kind of control for each

    def residuals(self, returned: Any) -> dict[str, Any]:
        # QwenImage's returns its list alone, the others a tuple of lists.
        lists = returned if isinstance(returned[0], (list, tuple)) else (returned,)
        return {name: list(samples) for name, samples in zip(self.takes, lists, strict=True)}


FLUX = Pair(
    "FluxTransformer2DModel",
    "joint",
    "FluxControlNetModel",
    ("controlnet_block_samples", "controlnet_single_block_samples"),
    "FluxMultiControlNetModel",
    modes=True,
)
SD3 = Pair(
    "SD3Transformer2DModel",
    "controlnet-and-skipped-layers",
    "SD3ControlNetModel",
    ("block_controlnet_hidden_states",),
    "SD3MultiControlNetModel",
)
QWEN = Pair(
    "QwenImageTransformer2DModel",
    "text-to-image",
    "QwenImageControlNetModel",
    ("controlnet_block_samples",),
    "QwenImageMultiControlNetModel",
)
HUNYUAN = Pair(
    "HunyuanDiT2DModel",
    "controlnet",
    "HunyuanDiT2DControlNetModel",
    ("controlnet_block_samples",),
    "HunyuanDiT2DMultiControlNetModel",
)


def together(pair: Pair, model: Emitted, controlnet: Emitted, data_parallel: str) -> tuple[float, float]:
    """Output and gradient errors of a model that is fed by its ControlNet, against both of diffusers."""
    net_probe = controlnet.probe()
    model_probe = _fitted(model.probe(pair.model_probe), net_probe)
    packages = [load_package(each.directory, each.name) for each in (model, controlnet)]
    theirs, ours = [], []
    for emitted, probe, package in zip((model, controlnet), (model_probe, net_probe), packages, strict=True):
        reference, bound = _both(emitted, probe, package, data_parallel)
        theirs.append(reference)
        ours.append(bound)
    inputs = inputs_of(net_probe)
    return _compare(pair, ours, theirs, inputs, _shared(model_probe, inputs), data_parallel)


def several(pair: Pair, model: Emitted, controlnet: Emitted, count: int, hints: int) -> tuple[float, float]:
    """The same for diffusers' wrapper around `count` ControlNets, which get `hints` control images."""
    net_probe = controlnet.probe()
    model_probe = _fitted(model.probe(pair.model_probe), net_probe)
    package, net_package = (load_package(each.directory, each.name) for each in (model, controlnet))
    wrapper = getattr(importlib.import_module(controlnet.reference.source), pair.wrapper)
    nets = [_both(controlnet, net_probe, net_package, "none", seed) for seed in range(count)]
    theirs, ours = _both(model, model_probe, package, "none")
    inputs = inputs_of(net_probe)
    shared = _shared(model_probe, inputs)
    hint = inputs["controlnet_cond"]
    inputs["controlnet_cond"] = [hint.detach() * (1 - 0.3 * i) for i in range(hints)]
    inputs["conditioning_scale"] = [0.7 - 0.2 * i for i in range(hints)]
    if pair.modes:
        inputs["controlnet_mode"] = [torch.full((hint.shape[0],), -1) for _ in range(hints)]
    references, bound = ([wrapper(list(each))] for each in zip(*nets, strict=True))
    return _compare(pair, [ours, *bound], [theirs, *references], inputs, shared, "none")


def saved(emitted: Emitted, directory: str) -> tuple[bool, bool, list[str]]:
    """Of an emitted wrapper: a checkpoint comes back, diffusers reads one of its models, and what it refuses."""
    package = load_package(emitted.directory, emitted.name)
    reference, model = _both(emitted, emitted.probe(), package, "fsdp")
    package.save_checkpoint(f"{directory}/checkpoints", model, step=3)
    expected = reference.state_dict()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    step = package.load_checkpoint(f"{directory}/checkpoints", model)
    state = {name: value.full_tensor() for name, value in model.state_dict().items()}
    restored = step == 3 and all(torch.equal(state[name], value) for name, value in expected.items())
    package.save_pretrained(model.nets[1], f"{directory}/net")
    net = type(reference.nets[1]).from_pretrained(f"{directory}/net", torch_dtype=DTYPE)  # type: ignore[index, union-attr]
    equal = all(torch.equal(net.state_dict()[name], value) for name, value in reference.nets[1].state_dict().items())  # type: ignore[index, union-attr]
    messages = []
    for refused in (
        lambda: package.save_pretrained(model, f"{directory}/whole"),
        lambda: package.load_pretrained(f"{directory}/net", mesh_for(package)),
    ):
        try:
            refused()
        except ValueError as error:
            messages.append(str(error))
    return restored, equal, messages


def _both(
    emitted: Emitted, probe: Probe, package: Any, data_parallel: str, seed: int = 0
) -> tuple[nn.Module, nn.Module]:
    """diffusers' model, and the emitted one with the same weights on the mesh that all of a degree share."""
    reference = build_model(load_reference(emitted.reference), probe, 0, DTYPE)
    randomise(reference, seed)
    model = build_model(getattr(package, emitted.reference.class_name), probe, 0, DTYPE)
    model.load_state_dict(reference.state_dict(), strict=True)
    options = {} if data_parallel == "none" else {"reduce_dtype": DTYPE}
    return reference, package.parallelize(model, mesh_for(package), data_parallel=data_parallel, **options)


def _fitted(model: Probe, controlnet: Probe) -> Probe:
    """The model's probe with the ControlNet's widths."""
    common = {k: v for k, v in controlnet.config.items() if k in model.config and k != "num_layers"}
    return replace(model, config=model.config | common)


def _shared(model: Probe, inputs: dict[str, Any]) -> dict[str, Any]:
    """What both get, and what is the model's alone."""
    return {name: inputs.get(name, value) for name, value in inputs_of(model).items()}


def _compare(
    pair: Pair,
    ours: list[nn.Module],
    theirs: list[nn.Module],
    inputs: dict[str, Any],
    shared: dict[str, Any],
    data_parallel: str,
) -> tuple[float, float]:
    outputs = []
    for model, controlnet in (ours, theirs):
        residuals = pair.residuals(controlnet(**inputs, return_dict=False))
        out: Tensor = model(**shared | residuals, return_dict=False)[0]
        loss_of(out).backward()
        outputs.append(out.detach())
    backward = 0.0
    for bound, reference in zip(ours, theirs, strict=True):
        expected = gradients(reference)
        assert any(bool(gradient.any()) for gradient in expected.values())
        found = averaged(gradients(bound)) if data_parallel == "none" else full_gradients(bound, expected)
        backward = max(backward, worst(found, expected))
    return float((outputs[0] - outputs[1]).abs().max() / outputs[1].abs().max()), backward
