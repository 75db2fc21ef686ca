"""Tensor parallelism: what an emitted plan needs beside the styles of `torch.distributed.tensor.parallel`.

Ranks on the tp axis hold the same tokens. Of attention each has some heads, of a feed-forward some of the channels
between its two linear layers; what the plan does not name is computed by all of them alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from .binding import Axis
from .quiet import without_redistribution_remarks
from .sharded_modules import LinearOfConcat, RMSNormAcrossHeads, SeparateOutputs, share

__all__ = [
    "ConcatRowwise",
    "HeadNorm",
    "IfPresent",
    "LocalHeads",
    "NormAcrossHeads",
    "clip_grad_norm_",
    "fitting",
    "separate_outputs",
]


class LocalHeads(ParallelStyle):
    """For an attention module: each of `attributes`, a number of heads or of all heads' channels, becomes this rank's.

    Of its forward's arguments, `inputs` are what its column-wise layers read: they become replicated DTensors, so that
    gradients are added up over the ranks once, not for each of these layers. `masks` are cut where they are tensors
    (B, H, Sq, Sk) with every head, and `shared` is what all heads read, such as rotary tables: gradients of both are
    added up, too.
    """

    def __init__(
        self,
        *attributes: str,
        inputs: tuple[str, ...] = (),
        masks: tuple[str, ...] = (),
        shared: tuple[str, ...] = (),
    ) -> None:
        self.attributes = attributes
        self.inputs = inputs
        self.masks = masks
        self.shared = shared

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        hook = _AttentionArguments(module, self, getattr(module, self.attributes[0]), device_mesh)
        for name in self.attributes:
            setattr(module, name, getattr(module, name) // device_mesh.size())
        module.register_forward_pre_hook(hook, with_kwargs=True)
        return module


class HeadNorm(SequenceParallel):
    """For a norm over the channels of one head, on a tensor with local heads in `dim`: (B, S, H, D) or (B, H, S, D).

    Every rank has the weight; its gradient is the sum over the ranks' heads.
    """

    def __init__(self, *, dim: int) -> None:
        super().__init__(sequence_dim=dim, use_local_output=True)

    def _replicate_module_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        trained = {key: parameter.requires_grad for key, parameter in module.named_parameters(recurse=False)}
        super()._replicate_module_fn(name, module, device_mesh)
        for key, parameter in module.named_parameters(recurse=False):
            parameter.requires_grad_(trained[key])  # torch's makes all trainable


class NormAcrossHeads(ParallelStyle):
    """For an RMS norm over the channels of all heads: see `RMSNormAcrossHeads`."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if module.weight is not None:
            _distribute(module, "weight", device_mesh, Shard(0))
        return _become(module, RMSNormAcrossHeads, cpgen_tp=Axis.of(device_mesh))


class ConcatRowwise(ParallelStyle):
    """For a linear layer on a concatenation of the outputs of `parts`, linear layers that are each cut column-wise.

    Its weight is cut as `RowwiseParallel` cuts it, so checkpoints have the usual layout. In forward the ranks trade
    columns for those that belong to their channels: the weight travels, which is smaller than activations.
    """

    def __init__(self, *parts: str) -> None:
        self.parts = parts
        self._sizes: tuple[int, ...] = ()

    def sizes_in(self, block: nn.Module) -> tuple[int, ...]:
        """The channels of each part's whole output."""
        modules = [_submodule(block, part) for part in self.parts]
        self._sizes = tuple(module.out_features for module in modules if isinstance(module, nn.Linear))
        return self._sizes

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert self._sizes, "the plan did not go through fitting()"
        _distribute(module, "weight", device_mesh, Shard(1))
        if module.bias is not None:
            _distribute(module, "bias", device_mesh, Replicate())
        return _become(module, LinearOfConcat, cpgen_tp=Axis.of(device_mesh), cpgen_sizes=self._sizes)


class IfPresent(ParallelStyle):
    """Marks the entry of a plan for a module that some blocks do not have. `fitting` takes the mark off."""

    def __init__(self, style: ParallelStyle) -> None:
        self.style = style

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        raise AssertionError("the plan did not go through fitting()")


def fitting(
    plan: Mapping[str, ParallelStyle], block: nn.Module, model: nn.Module, mesh: DeviceMesh, source: str
) -> dict[str, ParallelStyle]:
    """`plan` as `parallelize_module` takes it: the entries for modules that `block` has, if all of them can be cut.

    Raises one ValueError that names the model, the block, each module with what is wrong with it, and `source`, the
    plan's file.
    """
    found: dict[str, ParallelStyle] = {}
    problems = []
    for path, entry in plan.items():
        style = entry.style if isinstance(entry, IfPresent) else entry
        module = _submodule(block, path)
        if module is not None:
            found[path] = style
            problems += [f"{path}: {problem}" for problem in _problems(style, module, block, mesh.size())]
        elif style is entry:
            problems.append(f"{path}: there is no such module")
    if problems:
        where = next((name for name, module in model.named_modules() if module is block), "a block")
        raise ValueError(
            f"{type(model).__name__}: {where} ({type(block).__name__}) can't be cut into {mesh.size()} parts on the tp "
            f"axis as {source} says:\n  " + "\n  ".join(problems)
        )
    return found


def separate_outputs(block: nn.Module) -> None:
    """Make `block` return copies where it returns several tensors, ahead of its compilation.

    torch compiles no graph with DTensor parameters of which two outputs are views of one tensor. A hook would not do:
    it is compiled as a graph of its own.
    """
    own = type(block)
    block.__class__ = type(own.__name__, (SeparateOutputs, own), {"__module__": own.__module__})


def clip_grad_norm_(
    parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """As torch.nn.utils.clip_grad_norm_, for parameters on several meshes, which that one refuses. Collective.

    Returns the norm of all gradients before clipping, a plain tensor that is the same on every rank. For gradients that
    were averaged over data and cp ranks, as those of FSDP2 and DDP.
    """
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            groups.setdefault(mesh, []).append(parameter)
    if not groups:
        return torch.tensor(0.0)
    norms = [_total_norm(group, norm_type) for group in groups.values()]
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0]) for norm in norms]), norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(f"the norm of all gradients is {float(total)}, so they can't be clipped")
    for group in groups.values():
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def _total_norm(parameters: list[nn.Parameter], norm_type: float) -> Tensor:
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm: Tensor = torch.nn.utils.get_total_norm(grads, norm_type)
    with without_redistribution_remarks():
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


class _AttentionArguments:
    """A forward pre-hook on an attention module: what its local heads meet of values that every rank has."""

    def __init__(self, module: nn.Module, style: LocalHeads, heads: int, mesh: DeviceMesh) -> None:
        self._inputs = style.inputs
        self._masks = style.masks
        self._shared = style.shared
        self._heads = heads
        self._mesh = mesh
        self._axis = Axis.of(mesh)
        self._names = list(signature(module.forward).parameters)

    def __deepcopy__(self, memo: dict[int, Any]) -> _AttentionArguments:
        return self  # nothing in it changes, and a mesh can't be copied

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(getattr(module, "processor", None), nn.Module):
            raise ValueError(
                f"the attention processor {type(module.processor).__name__} has weights of its own, which tensor "
                f"parallelism does not cut: emit with --tp 1 for adapters of this kind"
            )
        named = [self._prepared(name, value) for name, value in zip(self._names, args, strict=False)]
        return (*named, *args[len(named) :]), {name: self._prepared(name, value) for name, value in kwargs.items()}

    def _prepared(self, name: str, value: Any) -> Any:
        if name in self._inputs and isinstance(value, Tensor):
            return DTensor.from_local(value, self._mesh, [Replicate()], run_check=False)
        if name in self._masks and isinstance(value, Tensor):
            return self._cut(share(value, self._axis))
        return share(value, self._axis) if name in self._shared else value

    def _cut(self, mask: Tensor) -> Tensor:
        if mask.ndim != 4 or mask.shape[1] == 1:
            return mask
        if mask.shape[1] != self._heads:
            raise ValueError(f"a mask of shape {tuple(mask.shape)} does not fit {self._heads} attention heads")
        count = self._heads // self._axis.degree
        return mask.narrow(1, self._axis.rank * count, count)


def _problems(style: ParallelStyle, module: nn.Module, block: nn.Module, degree: int) -> Iterator[str]:
    """Why `style` can't cut `module`, a part of `block`, into `degree` parts."""
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        yield "it is cut already: call parallelize once, on a plain model"
        return
    if getattr(module, "fused_projections", False):
        yield "its projections are fused into one weight: call unfuse_qkv_projections() first"
    sizes: dict[str, Any] = {}
    if isinstance(style, LocalHeads):
        sizes = {name: getattr(module, name, None) for name in style.attributes}
    elif isinstance(style, NormAcrossHeads):
        if type(module) is not nn.RMSNorm or len(module.normalized_shape) != 1:
            yield f"{_described(module)} is not a torch.nn.RMSNorm over one dim"
            return
        sizes = {"normalized_shape": module.normalized_shape[0]}
    elif isinstance(style, ColwiseParallel | RowwiseParallel | ConcatRowwise):
        if type(module) is not nn.Linear or type(module.weight) is not nn.Parameter:
            yield f"{_described(module)} is not a plain torch.nn.Linear (unload adapters, and do not quantise it)"
            return
        sizes = {"out_features": module.out_features}
        if not isinstance(style, ColwiseParallel):
            sizes = {"in_features": module.in_features}
        if isinstance(style, ConcatRowwise):
            parts = style.sizes_in(block)
            if len(parts) != len(style.parts) or sum(parts) != module.in_features:
                yield f"its {module.in_features} input channels are not those of {', '.join(style.parts)}: {parts}"
            sizes = dict(zip(style.parts, parts, strict=False))
    for name, size in sizes.items():
        if type(size) is not int:
            yield f"its {name} is {size!r}, not a whole number"
        elif size % degree:
            yield f"its {name} is {size}, which {degree} does not divide"


def _described(module: nn.Module) -> str:
    weight = getattr(module, "weight", None)
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    return kind if weight is None or type(weight) is nn.Parameter else f"{kind} with a {type(weight).__qualname__}"


def _submodule(block: nn.Module, path: str) -> nn.Module | None:
    try:
        return block.get_submodule(path)
    except AttributeError:  # also where it is None
        return None


def _distribute(module: nn.Module, name: str, mesh: DeviceMesh, placement: Shard | Replicate) -> None:
    """Cut a parameter that every rank has whole (or on meta), without communication."""
    parameter = module.get_parameter(name)
    cut = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))


def _become(module: nn.Module, kind: type[nn.Module], **attributes: Any) -> nn.Module:
    """Give `module` the forward of `kind`, a subclass of its class. A class and plain attributes survive deepcopy."""
    module.__class__ = kind
    for name, value in attributes.items():
        setattr(module, name, value)
    return module
