"""What the emitted `parallelize` needs around FSDP2 and DDP: checks, and the precision of every parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from .mesh import axis_size, flattened, remember_mesh

__all__ = [
    "Precision",
    "buckets",
    "cast_inputs",
    "check_request",
    "check_wrapped",
    "free_after_no_grad",
    "free_gathered",
    "kept_in_fp32",
    "offload_policy",
    "replicate",
    "reshard",
]

MODES = ("fsdp", "ddp", "none")
_HEEDED_BY = {
    "param_dtype": ("fsdp", "ddp"),
    "output_dtype": ("fsdp", "ddp"),
    "cpu_offload": ("fsdp", "ddp"),
    "reshard_after_forward": ("fsdp",),
    "bucket_cap_mb": ("ddp",),
}
# Inputs that a half-precision diffusers model takes in fp32: rounded to bf16, timestep 999 would be 1000 and
# position 257 would be 256.
_FP32_INPUTS = ("timestep", "sigma", "guidance", "rotary", "freqs", "_ids", "coords")


def check_request(
    model: torch.nn.Module,
    model_class: type[torch.nn.Module],
    mesh: DeviceMesh,
    *,
    cp: int,
    tp: int,
    data_parallel: str,
    compile: bool | str,
    reduce_dtype: torch.dtype | None,
    **options: Any,
) -> None:
    """Raise ValueError if `parallelize` was called with what it can't do, or with weights that differ from rank to
    rank; otherwise remember the model's mesh. Collective.

    `options` are those that not every way of data parallelism heeds; None and False mean that they were not given.
    """
    if not isinstance(model, model_class):
        raise ValueError(
            f"this package parallelizes {model_class.__module__}.{model_class.__name__}, not "
            f"{type(model).__module__}.{type(model).__name__}; build the model from this package's class"
        )
    if isinstance(model, FSDPModule):
        raise ValueError("the model is parallelized already; call parallelize once, on a plain model")
    if data_parallel not in MODES:
        raise ValueError(f"data_parallel={data_parallel!r} is not one of {', '.join(map(repr, MODES))}")
    _check_options(data_parallel, reduce_dtype, options)
    if not (isinstance(compile, bool) or compile == "model"):
        raise ValueError(f'compile={compile!r} is none of False, True (each block) and "model" (all of it)')
    if compile == "model" and cp > 1 and any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in model.modules()):
        raise ValueError(
            'compile="model" with dropout would let context-parallel ranks draw unequally much, and other noise from '
            "then on; use compile=True"
        )
    for axis, degree in (("cp", cp), ("tp", tp)):
        size = axis_size(mesh, axis)
        if flattened(mesh, axis) is None and degree > 1:
            raise ValueError(f"the mesh has no axis {axis!r} (it has {mesh.mesh_dim_names}); make it with build_mesh")
        if size != degree:
            raise ValueError(
                f"the mesh has {axis} size {size}, but this package was emitted for {axis} degree {degree} "
                f"({axis.upper()}_DEGREE); make the mesh with its build_mesh, or emit again with --{axis} {size}"
            )
    for axis in ("cp" if data_parallel == "none" else "dp_cp", "tp"):
        _check_same_weights(model, mesh, axis)
    remember_mesh(model, mesh)
    if data_parallel != "none":
        for name in ("add_adapter", "load_lora_adapter"):
            setattr(model, name, _refuse_late_adapter)


def _refuse_late_adapter(*args: Any, **kwargs: Any) -> NoReturn:
    """Stands in for diffusers' methods of a wrapped model: nothing would reduce what comes later. Raises ValueError."""
    raise ValueError(
        "adapters are added before parallelize, or in load_pretrained's prepare: nothing would reduce the gradients of "
        "parameters that come into a wrapped model"
    )


def free_gathered(model: torch.nn.Module) -> None:
    """Free gathered parameters: after a forward some still are, and the optimizer knows only the sharded ones."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def free_after_no_grad(model: torch.nn.Module) -> None:
    """Free what a forward without gradients gathered: kept for a backward that does not come, it would be used again by
    the next forward, stale, after the optimizer has stepped the sharded parameters."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def free(module: torch.nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            free_gathered(module)

    model.register_forward_hook(free)


def check_wrapped(model: torch.nn.Module) -> None:
    """Free gathered parameters; raise ValueError if others train in a wrapped model: they came into it later."""
    free_gathered(model)
    if not isinstance(model, FSDPModule):
        return
    late = [name for name, p in model.named_parameters() if p.requires_grad and not isinstance(p, DTensor)]
    if late:
        raise ValueError(
            f"{len(late)} parameters came into the model after parallelize, such as {late[0]}: nothing has reduced "
            f"their gradients, so each rank trained others. Add adapters before parallelize, or in load_pretrained's "
            f"prepare"
        )


def _check_options(data_parallel: str, reduce_dtype: torch.dtype | None, options: dict[str, Any]) -> None:
    dtypes = {"reduce_dtype": reduce_dtype} | {n: options[n] for n in ("param_dtype", "output_dtype")}
    for name, value in dtypes.items():
        if value is not None and not isinstance(value, torch.dtype):
            raise ValueError(f"{name}={value!r} is not a torch.dtype, such as torch.bfloat16")
    if not isinstance(options["cpu_offload"], bool):
        raise ValueError(f"cpu_offload={options['cpu_offload']!r} is neither True nor False")
    ignored = {n: _HEEDED_BY[n] for n, value in options.items() if value and data_parallel not in _HEEDED_BY[n]}
    if ignored:
        heeding = "; ".join(f"{name} is for {' and '.join(map(repr, modes))}" for name, modes in ignored.items())
        note = ", which only binds context parallelism: cast and move the model yourself"
        raise ValueError(
            f"data_parallel={data_parallel!r} would ignore {', '.join(ignored)}{note * (data_parallel == 'none')} "
            f"({heeding})"
        )
    cap = options["bucket_cap_mb"]
    if cap is not None and not (isinstance(cap, int | float) and cap > 0):
        raise ValueError(f"bucket_cap_mb={cap!r} is not a number of megabytes above 0")


def _check_same_weights(model: torch.nn.Module, mesh: DeviceMesh, name: str) -> None:
    """Raise ValueError on every rank of an axis if their weights differ: each would train a part of another model.

    Looks at some values of each parameter, enough to tell models that were drawn at random by themselves.
    """
    axis = flattened(mesh, name)
    plain = {n: p.detach() for n, p in model.named_parameters() if not isinstance(p, DTensor)}
    weights = {n: p for n, p in plain.items() if not p.is_meta and p.numel()}
    if axis is None or axis.size() == 1 or not weights:
        return
    sums = [p.reshape(-1)[:: max(1, p.numel() // 16)].double().sum() for p in weights.values()]
    seen = torch.stack([value.to(mesh.device_type) for value in sums]).view(torch.int64)
    least, most = seen.clone(), seen.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN, axis.get_group())
    dist.all_reduce(most, dist.ReduceOp.MAX, axis.get_group())
    if not torch.equal(least, most):
        differs = next(n for n, same in zip(weights, (least == most).tolist(), strict=True) if not same)
        raise ValueError(
            f"the ranks of the mesh axis {name!r} hold different weights, at {differs}: load the same on all of them, "
            f"or build the model under one seed (torch.manual_seed) and call seed_everything after that"
        )


def offload_policy(cpu_offload: bool) -> OffloadPolicy:
    """FSDP's policy that keeps parameters, gradients and optimizer state in host memory, or the one that doesn't."""
    if not cpu_offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=torch.cuda.is_available())


def reshard(mesh: DeviceMesh, *, last: bool, requested: bool | int | None) -> bool | int:
    """Whether a unit frees its gathered parameters after forward: as requested, else unless backward begins with it.

    Under pipeline parallelism several micro-batches run forward before the first backward, so nothing is freed.
    """
    if requested is not None:
        return requested
    return axis_size(mesh, "pp") == 1 and not last


def buckets(
    blocks: Sequence[torch.nn.Module], policies: Sequence[MixedPrecisionPolicy], cap_mb: float | None
) -> Iterator[tuple[list[torch.nn.Module], MixedPrecisionPolicy]]:
    """Join consecutive blocks of one policy whose gradients take up to `cap_mb` MiB together: they are all-reduced at
    once. A larger block is a bucket of its own, as is every block without a cap."""
    bucket: list[torch.nn.Module] = []
    of_bucket: MixedPrecisionPolicy | None = None
    filled = 0.0
    for block, policy in zip(blocks, policies, strict=True):
        parameters = [p for _, p in _unwrapped_parameters(block) if p.requires_grad]
        size = sum(p.numel() * (policy.reduce_dtype or policy.param_dtype or p.dtype).itemsize for p in parameters)
        if of_bucket is not None and (cap_mb is None or policy != of_bucket or filled + size > cap_mb * 2**20):
            yield bucket, of_bucket
            bucket, filled = [], 0.0
        bucket.append(block)
        of_bucket, filled = policy, filled + size
    if of_bucket is not None:
        yield bucket, of_bucket


def kept_in_fp32(model: torch.nn.Module, name: str) -> bool:
    """Whether the class keeps the parameter or buffer `name` in fp32: a component of its name is listed, as diffusers
    reads `_keep_in_fp32_modules`."""
    kept = getattr(model, "_keep_in_fp32_modules", None) or ()
    kept = (kept,) if isinstance(kept, str) else kept
    return any(component in kept for component in name.split("."))


@dataclass(frozen=True)
class Precision:
    """Computation dtype of every parameter of a model.

    `main` holds for all parameters but those with an id in `kept_ids`, which compute in fp32. It casts nothing but
    parameters: a half-precision diffusers model runs its own casts, and a cast at each block's border would round rope
    tables and modulation that the class computes in fp32. Inputs are cast once, at the model's border.
    """

    main: MixedPrecisionPolicy
    kept: MixedPrecisionPolicy
    kept_ids: frozenset[int]

    @classmethod
    def of(cls, model: torch.nn.Module, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None) -> Precision:
        """Precision of `model`, which is not wrapped yet. With `param_dtype` None parameters compute as they are."""
        main = MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False)
        kept = MixedPrecisionPolicy(torch.float32, reduce_dtype, cast_forward_inputs=False)
        dtypes = {p.dtype if param_dtype is None else param_dtype for p in model.parameters() if p.is_floating_point()}
        wide = dtypes <= {torch.float32, torch.float64}  # none is narrower than what parameters are kept in
        names = () if wide else (name for name, _ in model.named_parameters())
        kept_ids = frozenset(id(model.get_parameter(name)) for name in names if kept_in_fp32(model, name))
        return cls(main, kept, kept_ids)

    def separate(self, module: torch.nn.Module, wrap: Callable[..., Any], **options: Any) -> MixedPrecisionPolicy:
        """Give parts of `module` a unit of their own so that the rest has one precision; returns the rest's policy.

        `wrap` is `fully_shard` or `replicate`, `options` are its options. A unit has one precision, so where a module
        holds both, either the fp32 submodules or (when an fp32 parameter sits on `module` itself) the others are
        grouped into a second unit. Raises ValueError if neither works.
        """
        own = dict(_unwrapped_parameters(module))
        kept = {name for name, parameter in own.items() if id(parameter) in self.kept_ids}
        for unit in (kept, own.keys() - kept):
            _check_one_dtype(module, {name: own[name] for name in unit if own[name].requires_grad})
        if not kept:
            return self.main
        if len(kept) == len(own):
            return self.kept
        for names, unit_policy, rest_policy in (
            (kept, self.kept, self.main),
            (own.keys() - kept, self.main, self.kept),
        ):
            submodules = _covering_submodules(module, set(names), set(own))
            if submodules is not None:
                wrap(submodules, mp_policy=unit_policy, **options)
                return rest_policy
        raise ValueError(
            f"{type(module).__name__} holds parameters that stay in fp32 ({', '.join(sorted(kept))}) and others "
            f"directly on the same modules, which FSDP can't hold in two precisions; pass param_dtype=None"
        )


def _check_one_dtype(module: torch.nn.Module, trained: dict[str, torch.nn.Parameter]) -> None:
    of_dtypes = {parameter.dtype: name for name, parameter in trained.items()}
    if len(of_dtypes) > 1:
        found = ", ".join(f"{name} in {dtype}" for dtype, name in of_dtypes.items())
        raise ValueError(
            f"{type(module).__name__} trains parameters of several dtypes ({found}), which FSDP can't hold in one "
            f"unit: store all that train, adapters too, in one dtype, and pass param_dtype to compute in another"
        )


def cast_inputs(model: torch.nn.Module, dtype: torch.dtype | None) -> None:
    """Cast floating-point inputs of `model`'s forward to `dtype`, but for times, positions and rope tables."""
    if dtype is None:
        return
    names = list(signature(model.forward).parameters)

    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        cast_args = [_cast(name, value, dtype) for name, value in zip(names, args, strict=False)]
        return (*cast_args, *args[len(cast_args) :]), {
            name: _cast(name, value, dtype) for name, value in kwargs.items()
        }

    model.register_forward_pre_hook(hook, with_kwargs=True)


def _cast(name: str, value: Any, dtype: torch.dtype) -> Any:
    if any(part in name for part in _FP32_INPUTS):
        return value
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_cast(name, item, dtype) for item in value)
    if type(value) is dict:
        return {key: _cast(str(key), item, dtype) for key, item in value.items()}
    return value


def _unwrapped_parameters(module: torch.nn.Module, prefix: str = "") -> Iterable[tuple[str, torch.nn.Parameter]]:
    """Parameters below `module` by relative name, without those that a unit has already."""
    for name, parameter in module.named_parameters(recurse=False):
        yield prefix + name, parameter
    for name, child in module.named_children():
        if not isinstance(child, FSDPModule):
            yield from _unwrapped_parameters(child, f"{prefix}{name}.")


def _covering_submodules(
    module: torch.nn.Module, names: set[str], own: set[str], prefix: str = ""
) -> list[torch.nn.Module] | None:
    """The largest submodules of `module` that hold the parameters `names` and no others of `own`, or None."""
    if any(prefix + name in names for name, _ in module.named_parameters(recurse=False)):
        return None
    found: list[torch.nn.Module] = []
    for name, child in module.named_children():
        start = f"{prefix}{name}."
        below = {key for key in own if key.startswith(start)}
        wanted = below & names
        if not wanted:
            continue
        if wanted == below and not isinstance(
            child, torch.nn.ModuleList | torch.nn.ModuleDict
        ):  # these have no forward
            found.append(child)
            continue
        deeper = _covering_submodules(child, names, own, start)
        if deeper is None:
            return None
        found.extend(deeper)
    return found
