"""Tensor parallelism on the workers: gradients, clipping, files, compilation, the parts that torch lacks, refusals."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partialmethod
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module

from cpgen.plan import Probe
from cpgen.probes import build_inputs
from cpgen.runtime.mesh import data_rank
from cpgen.runtime.tensor_parallel import ConcatRowwise, NormAcrossHeads, clip_grad_norm_, fitting
from cpgen.verify.float64 import AsFloat64, to_float64
from cpgen.verify.models import mesh_for

from .emitted import Emitted, gradients, inputs_of, loss_of, reference_and_model, worst
from .model_cases import run


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def parallel(emitted: Emitted, probe: Probe, **options: Any) -> tuple[nn.Module, nn.Module, DeviceMesh]:
    """The reference, the emitted model parallelized with `options`, and its mesh."""
    reference, model, package = reference_and_model(emitted, probe)
    mesh = mesh_for(package)
    return reference, package.parallelize(model, mesh, **options), mesh


def over_data_ranks(
    emitted: Emitted, probe: Probe, data_parallel: str, axes: dict[str, int]
) -> tuple[int, float, float, float]:
    """Other data on each data rank, in float64: the number of these, the error of gradients against their mean in one
    process, the norm's that `clip_grad_norm_` returns, and that of gradients once they are clipped.
    """
    with AsFloat64():
        reference, model, package = reference_and_model(emitted, probe)
        mesh = package.build_mesh("cpu", **axes) if axes else mesh_for(package)
        model = package.parallelize(model, mesh, data_parallel=data_parallel, reduce_dtype=torch.float64)
        rank, size = data_rank(mesh)
        loss_of(run(model, to_float64(build_inputs(probe, rank)))).backward()
        for seed in range(size):
            (loss_of(run(reference, to_float64(build_inputs(probe, seed)))) / size).backward()
    error = worst(whole_gradients(model), gradients(reference))
    norm, expected = (clip(each.parameters(), 1.0) for clip, each in zip(_CLIPS, (model, reference), strict=True))
    return size, error, float(abs(norm - expected) / expected), worst(whole_gradients(model), gradients(reference))


_CLIPS: tuple[Callable[..., Tensor], ...] = (clip_grad_norm_, torch.nn.utils.clip_grad_norm_)


def clipped_without_wrap(emitted: Emitted, probe: Probe, norm_type: float) -> tuple[float, float]:
    """Errors of norm and clipped gradients at cp 1 with data_parallel="none": plain tensors, DTensors, partial sums."""
    reference, model, _ = parallel(emitted, probe, data_parallel="none")
    for each in (reference, model):
        loss_of(run(each, inputs_of(probe))).backward()
    norm, expected = (clip(m.parameters(), 0.5, norm_type) for clip, m in zip(_CLIPS, (model, reference), strict=True))
    return float(abs(norm - expected) / expected), worst(whole_gradients(model), gradients(reference))


def compiled(emitted: Emitted, probe: Probe) -> tuple[float, float, int]:
    """Output and gradient errors of the whole model as one graph, and the number of graphs."""
    import torch._dynamo as dynamo
    import torch._dynamo.testing

    dynamo.reset()
    warnings.simplefilter("ignore")
    reference, model, _ = parallel(emitted, probe, data_parallel="none")
    counter = dynamo.testing.CompileCounterWithBackend("aot_eager")
    ours = run(torch.compile(model, fullgraph=True, backend=counter), inputs_of(probe))  # type: ignore[arg-type]
    theirs = run(reference, inputs_of(probe))
    loss_of(ours).backward()
    loss_of(theirs).backward()
    found = whole_gradients(model)
    for gradient in found.values():
        dist.all_reduce(gradient)
    found = {name: gradient / dist.get_world_size() for name, gradient in found.items()}
    return float((ours - theirs).detach().abs().max()), worst(found, gradients(reference)), counter.frame_count


def compiled_under_fsdp(emitted: Emitted, probe: Probe, compile: bool | str) -> tuple[float, float]:
    """Output and gradient errors under FSDP2 with `parallelize(compile=...)`."""
    import torch._dynamo as dynamo

    dynamo.reset()
    warnings.simplefilter("ignore")
    reference, model, package = reference_and_model(emitted, probe, torch.float32)
    with mock.patch.object(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager")):
        model = package.parallelize(model, mesh_for(package), compile=compile)
    ours, theirs = run(model, inputs_of(probe, torch.float32)), run(reference, inputs_of(probe, torch.float32))
    loss_of(ours).backward()
    loss_of(theirs).backward()
    return _relative(ours, theirs), worst(whole_gradients(model), gradients(reference))


def collectives(emitted: Emitted, probe: Probe) -> list[dict[str, int]]:
    """Collectives by name: in parallelize, in forward, and in backward."""
    _, model, package = reference_and_model(emitted, probe)
    mesh = mesh_for(package)
    with CommDebugMode() as cut:
        package.parallelize(model, mesh, data_parallel="none")
    with CommDebugMode() as forward:
        loss = loss_of(run(model, inputs_of(probe)))
    with CommDebugMode() as backward:
        loss.backward()
    counts = [each.get_comm_counts() for each in (cut, forward, backward)]
    return [{str(op).rpartition(".")[2]: n for op, n in of_pass.items() if n} for of_pass in counts]


def half_precision(emitted: Emitted, probe: Probe) -> tuple[float, float, set[torch.dtype]]:
    """Distance of the bf16 output under FSDP2 to float32's, and that of one process; dtypes of cut weights."""
    reference, model, package = reference_and_model(emitted, probe, torch.float32)
    model = package.parallelize(model, mesh_for(package), param_dtype=torch.bfloat16)
    seen = set()

    def note(module: nn.Module, *_: Any) -> None:
        seen.update(parameter.dtype for parameter in module.parameters(recurse=False))

    for module in model.modules():
        if isinstance(module, nn.Linear | nn.RMSNorm) and isinstance(module.weight, DTensor):
            module.register_forward_pre_hook(note)
    inputs = inputs_of(probe, torch.float32)
    ours, exact = run(model, inputs), run(reference, inputs)
    narrow = {name: value.to(torch.bfloat16) if "_states" in name else value for name, value in inputs.items()}
    theirs = run(reference.to(torch.bfloat16), narrow | {"pooled_projections": inputs["pooled_projections"].bfloat16()})
    return float((ours - exact).norm()), float((theirs - exact).norm()), seen


def kept_settings(emitted: Emitted, probe: Probe) -> tuple[float, bool, float]:
    """Half of the parameters frozen: gradient error of the others, whether the frozen ones stayed so, and the distance
    of a deep copy's output."""
    reference, model, package = reference_and_model(emitted, probe)
    for each in (reference, model):
        for i, parameter in enumerate(each.parameters()):
            parameter.requires_grad_(i % 2 == 0)
    model = package.parallelize(model, mesh_for(package), data_parallel="none")
    ours = run(copy.deepcopy(model), inputs_of(probe))
    output = run(model, inputs_of(probe))
    loss_of(output).backward()
    loss_of(run(reference, inputs_of(probe))).backward()
    frozen = {name for name, parameter in reference.named_parameters() if not parameter.requires_grad}
    same = frozen == {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return worst(whole_gradients(model), gradients(reference)), same, float((ours - output).detach().abs().max())


# Files


def held(emitted: Emitted, probe: Probe) -> tuple[dict[str, int], dict[str, int]]:
    """Elements of each parameter on this rank, and of the whole one, at data_parallel="none"."""
    reference, model, _ = parallel(emitted, probe, data_parallel="none")
    local = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    stored = {name: p.untyped_storage().nbytes() // p.element_size() for name, p in local.items()}
    return stored, {name: p.numel() for name, p in reference.named_parameters()}


def trained(emitted: Emitted, probe: Probe, directory: str, data_parallel: str) -> dict[str, Tensor]:
    """Two steps of AdamW, then a checkpoint and an export. Returns the whole parameters."""
    _, model, package = reference_and_model(emitted, probe, torch.float32)
    model = package.parallelize(model, mesh_for(package), data_parallel=data_parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        step(model, optimizer, probe)
    package.save_checkpoint(f"{directory}/checkpoints", model, optimizer, step=2)
    package.save_pretrained(model, f"{directory}/exported")
    return {name: whole(p).detach().clone() for name, p in model.named_parameters()}


@dataclass(frozen=True)
class Resumed:
    """Whole parameters as the checkpoint gave them, and one step later; those of the export, and its output."""

    loaded: dict[str, Tensor]
    later: dict[str, Tensor]
    exported: dict[str, Tensor]
    output: Tensor


def resumed(emitted: Emitted, probe: Probe, directory: str, data_parallel: str) -> Resumed:
    """What `trained` wrote, read by `emitted`."""
    _, model, package = reference_and_model(emitted, probe, torch.float32)
    mesh = mesh_for(package)
    model = package.parallelize(model, mesh, data_parallel=data_parallel)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    assert package.load_checkpoint(f"{directory}/checkpoints", model, optimizer) == 2
    loaded = {name: whole(p).detach().clone() for name, p in model.named_parameters()}
    step(model, optimizer, probe)
    later = {name: whole(p).detach().clone() for name, p in model.named_parameters()}
    exported = package.load_pretrained(f"{directory}/exported", mesh, data_parallel=data_parallel)
    output = run(exported, inputs_of(probe, torch.float32)).detach()
    return Resumed(loaded, later, {name: whole(p).detach() for name, p in exported.named_parameters()}, output)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, probe: Probe) -> None:
    loss_of(run(model, inputs_of(probe, torch.float32))).backward()
    optimizer.step()
    optimizer.zero_grad()


# The parts that torch lacks


def norm_across_heads(dtype: torch.dtype, affine: bool, eps: float | None) -> tuple[float, float, float]:
    """Errors of output, input's gradient and weight's gradient against torch.nn.RMSNorm, relative to the largest."""
    size = dist.get_world_size()
    torch.manual_seed(0)
    plain = nn.RMSNorm(6 * size, eps=eps, elementwise_affine=affine, dtype=dtype)
    if affine:
        nn.init.normal_(plain.weight)
    cut = parallelize_module(copy.deepcopy(plain), _mesh(), NormAcrossHeads(), src_data_rank=None)
    # One token is tiny, so that eps counts, and one rank's channels are larger than the others'.
    x = torch.randn(2, 3, 6 * size, dtype=dtype)
    x[0, 0] *= 1e-3
    x[..., :6] *= 10
    x = x.requires_grad_()
    weights = torch.randn(2, 3, 6 * size, dtype=dtype)
    expected = plain(x)
    (expected * weights).sum().backward()
    local = _mine(x.detach()).clone().requires_grad_()
    out = cut(local)
    assert out.dtype == expected.dtype
    (out * _mine(weights)).sum().backward()
    errors = [_relative(out, _mine(expected)), _relative(local.grad, _mine(x.grad))]
    return errors[0], errors[1], _relative(whole(cut.weight.grad), plain.weight.grad) if affine else 0.0


def linear_of_concat(sizes: tuple[int, ...], bias: bool) -> tuple[float, float, float]:
    """Errors in float64 of output, input's gradient and weight's (and bias's) gradient against torch.nn.Linear."""
    block = nn.ModuleDict({f"part{i}": nn.Linear(3, size, dtype=torch.float64) for i, size in enumerate(sizes)})
    torch.manual_seed(0)
    block["out"] = nn.Linear(sum(sizes), 5, bias=bias, dtype=torch.float64)
    plain = copy.deepcopy(block["out"])
    plan = fitting({"out": ConcatRowwise(*list(block)[:-1])}, block, block, _mesh(), "a plan")
    parallelize_module(block, _mesh(), plan, src_data_rank=None)
    x = torch.randn(2, 3, sum(sizes), dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, 3, 5, dtype=torch.float64)
    expected = plain(x)
    (expected * weights).sum().backward()

    def mine(whole_parts: Tensor) -> Tensor:
        return torch.cat([_mine(part) for part in whole_parts.split(sizes, dim=-1)], dim=-1)

    local = mine(x.detach()).requires_grad_()
    out = block["out"](local)
    (out * weights).sum().backward()
    pairs = [(whole(p.grad), q.grad) for p, q in zip(block["out"].parameters(), plain.parameters(), strict=True)]
    assert torch.equal(whole(block["out"].weight), plain.weight)  # the layout of checkpoints
    return _relative(out, expected), _relative(local.grad, mine(x.grad)), max(_relative(p, q) for p, q in pairs)


def _mesh() -> DeviceMesh:
    return mesh_for(SimpleNamespace(build_mesh=lambda _: init_device_mesh("cpu", (dist.get_world_size(),))))


def _mine(tensor: Tensor) -> Tensor:
    return tensor.chunk(dist.get_world_size(), dim=-1)[dist.get_rank()]


def _relative(ours: Tensor | None, theirs: Tensor | None) -> float:
    assert ours is not None and theirs is not None and ours.shape == theirs.shape
    return float((ours.double() - theirs.double()).detach().abs().max() / theirs.detach().double().abs().max())


# What is refused


def refusal(emitted: Emitted, probe: Probe, what: str) -> str:
    """The message of the ValueError that parallelize, or the first forward, raises."""
    _, model, package = reference_and_model(emitted, probe)
    try:
        if what == "lora":
            from peft import LoraConfig

            model.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
        elif what == "quantised":
            model.blocks[0].ffn.net[2].weight.__class__ = _Quantised
        model = package.parallelize(model, mesh_for(package), data_parallel="none")
        if what == "twice":
            package.parallelize(model, mesh_for(package), data_parallel="none")
        elif what == "image prompt":
            processors = importlib.import_module(f"{emitted.name}.transformer_flux")
            model.transformer_blocks[0].attn.set_processor(processors.FluxIPAdapterAttnProcessor(64, 8))
        run(model, inputs_of(probe))
    except ValueError as error:
        return str(error)
    return ""


class _Quantised(nn.Parameter):
    pass
