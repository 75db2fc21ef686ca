"""Functions that the tests of data parallelism, precision and meshes run on the workers."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import nn

from tests.runtime.training_models import (
    full_gradients,
    load,
    tiny_loss,
    tiny_model,
    wan_batch,
    wan_loss,
    wan_model,
)


def single_process_gradients(kind: str, size: int) -> dict[str, torch.Tensor]:
    """Gradients of the loss averaged over data samples 0..size-1."""
    model, loss = (tiny_model(), tiny_loss) if kind == "tiny" else (wan_model(), wan_loss)
    (sum(loss(model, index) for index in range(size)) / size).backward()
    return full_gradients(model)


def half_precision_reference(directory: str) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.dtype]]:
    """(output, gradients, dtypes) of diffusers' own bf16 model. Timestep 999 stays fp32: bf16 would round it."""
    model = WanTransformer3DModel.from_pretrained(directory, torch_dtype=torch.bfloat16)
    batch = {name: tensor if name == "timestep" else tensor.bfloat16() for name, tensor in wan_batch(0).items()}
    output = model(**batch, return_dict=False)[0]
    output.float().square().mean().backward()
    return output.detach(), full_gradients(model), {name: p.dtype for name, p in model.named_parameters()}


def data_parallel_gradients(
    root: str, kind: str, cp: int, axes: dict[str, int], options: dict[str, Any]
) -> tuple[int, dict[str, torch.Tensor]]:
    """(data ranks, full gradients) after each data rank's backward on its own sample."""
    from cpgen.runtime.mesh import data_rank

    package = load(root, f"{kind}_cp{cp}")
    mesh = package.build_mesh("cpu", **axes)
    model, loss = (tiny_model(), tiny_loss) if kind == "tiny" else (wan_model(), wan_loss)
    if options.pop("checkpointing", False):
        model.enable_gradient_checkpointing()
    model = package.parallelize(model, mesh, **options)
    rank, size = data_rank(mesh)
    loss(model, rank).backward()
    return size, full_gradients(model)


# --- mixed precision ---------------------------------------------------------------------------------------------


def compute_dtypes(
    root: str, data_parallel: str, reduce_dtype: torch.dtype | None
) -> tuple[dict[str, torch.dtype], torch.Tensor, dict[str, torch.Tensor]]:
    """(dtype that each Wan parameter had while its module ran, output, gradients) with param_dtype bf16 at cp 2."""
    package = load(root, "wan_cp2")
    model = wan_model()
    names = {id(module): name for name, module in model.named_modules()}
    seen: dict[str, torch.dtype] = {}

    def note(module: nn.Module, *_: Any) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            seen[f"{names[id(module)]}.{name}".lstrip(".")] = parameter.dtype

    model = package.parallelize(
        model,
        package.build_mesh("cpu"),
        data_parallel=data_parallel,
        param_dtype=torch.bfloat16,
        reduce_dtype=reduce_dtype,
    )
    for module in model.modules():
        module.register_forward_pre_hook(note)  # after FSDP's own hook, which gathers
    output = model(**wan_batch(0), return_dict=False)[0]
    output.float().square().mean().backward()
    return seen, output.detach(), full_gradients(model)


def cpu_dtype_of_output(root: str) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Dtypes of a bf16 model's output with output_dtype fp32: as a tuple, as diffusers' output, and without it."""
    package = load(root, "wan_cp1")
    options = {"param_dtype": torch.bfloat16}
    model = package.parallelize(wan_model(), package.build_mesh("cpu"), output_dtype=torch.float32, **options)
    plain = package.parallelize(wan_model(), package.build_mesh("cpu"), **options)
    batch = wan_batch(0)
    return model(**batch, return_dict=False)[0].dtype, model(**batch).sample.dtype, plain(**batch).sample.dtype


def gathered_after_forward(root: str, axes: dict[str, int], requested: bool | None) -> list[bool]:
    """Whether the blocks of the tiny model (three, in two lists) and its root are gathered after a forward."""
    from torch.distributed.tensor import DTensor

    package = load(root, "tiny_cp1")
    model = package.parallelize(tiny_model(), package.build_mesh("cpu", **axes), reshard_after_forward=requested)
    tiny_loss(model, 0)
    first = [next(block.parameters()) for blocks in package_blocks(model) for block in blocks]
    return [not isinstance(parameter, DTensor) for parameter in [*first, model.proj_in.weight]]


def package_blocks(model: nn.Module) -> list[nn.ModuleList]:
    return [model.transformer_blocks, model.single_transformer_blocks]


def mixed_parameters_on_one_module(root: str) -> None:
    from cpgen.runtime.data_parallel import Precision, replicate

    model = tiny_model()
    model.transformer_blocks[0].norm_scale = nn.Parameter(torch.ones(10))
    type(model)._keep_in_fp32_modules, kept = ["norm_scale"], type(model)._keep_in_fp32_modules
    try:
        Precision.of(model, torch.bfloat16, None).separate(model.transformer_blocks[0], replicate)
    finally:
        type(model)._keep_in_fp32_modules = kept


def dtypes_in_one_unit(root: str, frozen: bool) -> None:
    """parallelize a model of which one parameter is narrower: frozen it may be."""
    package = load(root, "tiny_cp1")
    model = tiny_model()
    gate = model.transformer_blocks[0].gate
    model.transformer_blocks[0].gate = nn.Parameter(gate.detach().bfloat16(), requires_grad=not frozen)
    tiny_loss(package.parallelize(model, package.build_mesh("cpu")), 0).backward()


def parallelize_error(root: str, package: str, model: str, options: dict[str, Any]) -> None:
    """Call parallelize on a mesh of cp 1; the caller expects it to raise."""
    module = load(root, package)
    mesh = load(root, "tiny_cp1").build_mesh("cpu")
    built = {"tiny": tiny_model, "wan": wan_model}[model]()
    if options.pop("twice", False):
        built = module.parallelize(built, mesh)
    module.parallelize(built, mesh, **options)


# --- mesh --------------------------------------------------------------------------------------------------------


def mesh_ranks(axes: dict[str, int]) -> dict[str, Any]:
    """This rank's groups, data rank and the numbers it draws."""
    import random

    import torch.distributed as dist

    from cpgen.runtime.mesh import build_mesh, data_rank, seed_everything

    mesh = build_mesh("cpu", **axes)
    groups = {name: dist.get_process_group_ranks(mesh[name].get_group()) for name in ("cp", "dp", "dp_cp")}
    seed_everything(7, mesh)
    return {"groups": groups, "data": data_rank(mesh), "draw": (torch.rand(1).item(), random.random())}
