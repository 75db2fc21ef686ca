"""The device mesh: its axes, the groups made from them, and which rank draws which data."""

from __future__ import annotations

import math
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .random_state import seed_process

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # outermost first: cp and tp peers are neighbours
# What the cp axis is made of under the hybrid strategy, Ulysses innermost: its all-to-all sends the most messages.
CP_AXES = ("cp_outer", "cp_ulysses")
_FLATTENED = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_shard_cp": ("dp_shard", "cp"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
}

_meshes: WeakKeyDictionary[torch.nn.Module, DeviceMesh] = WeakKeyDictionary()


def build_mesh(
    device_type: str | None = None,
    *,
    cp: int,
    tp: int,
    ulysses: int | None = None,
    dp_replicate: int = 1,
    dp_shard: int = -1,
    pp: int = 1,
) -> DeviceMesh:
    """Lay the ranks of the process group out on the axes pp, dp_replicate, dp_shard, cp, tp.

    With `ulysses`, a divisor of `cp`, there are the two axes cp_outer and cp_ulysses in the place of cp. Axes of size 1
    are kept. `mesh["dp"]`, `mesh["dp_cp"]` and `mesh["dp_shard_cp"]` are flattened axes. `dp_shard=-1` takes the ranks
    that the other axes leave; `device_type=None` is cuda if there is one, else cpu.

    Raises ValueError without a process group, if the axes' product is not the world size, or for a size that can't be.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "build_mesh needs a process group: call torch.distributed.init_process_group() first, in a process "
            "started by torchrun (torchrun --nproc-per-node N script.py)"
        )
    sizes = _axis_sizes(
        {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp}, dist.get_world_size()
    )
    if ulysses is not None:
        if not _is_whole(ulysses) or ulysses < 1 or cp % ulysses:
            raise ValueError(f"the Ulysses degree is {ulysses!r}; it must be a whole number that divides cp size {cp}")
        at = list(sizes).index("cp")
        split = {"cp_outer": cp // ulysses, "cp_ulysses": ulysses}
        sizes = dict([*list(sizes.items())[:at], *split.items(), *list(sizes.items())[at + 1 :]])
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for name in (*_FLATTENED, "cp"):
        flattened(mesh, name)
    return mesh


def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh | None:
    """The 1-D mesh of an axis, or of `dp`, `dp_cp` or `dp_shard_cp`: of those of its axes that `mesh` has, or None."""
    names = mesh.mesh_dim_names or ()
    wanted = [part for axis in _FLATTENED.get(name, (name,)) for part in (CP_AXES if axis == "cp" else ()) + (axis,)]
    present = tuple(axis for axis in names if axis in wanted)  # a user's mesh may have another order
    if len(present) > 1:
        return mesh[present]._flatten(name)
    return mesh[present[0]] if present else None


def axis_size(mesh: DeviceMesh, name: str) -> int:
    """The number of ranks on an axis (see `flattened`); 1 where the mesh does not have it."""
    axis = flattened(mesh, name)
    return 1 if axis is None else axis.size()


def split_cp(mesh: DeviceMesh, ulysses: int) -> tuple[DeviceMesh | None, DeviceMesh | None, DeviceMesh | None]:
    """The 1-D meshes (cp, outer, ulysses) of context parallelism; None for those of one rank.

    The cp axis may be one axis or the two that `build_mesh` makes. Raises ValueError if these have other sizes,
    or another order.
    """
    cp = flattened(mesh, "cp")
    if cp is None or cp.size() == 1:
        return None, None, None
    if ulysses in (1, cp.size()):
        return (cp, cp, None) if ulysses == 1 else (cp, None, cp)
    names = mesh.mesh_dim_names or ()
    if set(CP_AXES) <= set(names):
        if names.index("cp_outer") > names.index("cp_ulysses"):
            raise ValueError(f"the mesh has axes {names}: cp_ulysses must come behind cp_outer")
        outer, inner = (mesh[axis] for axis in CP_AXES)
        if inner.size() != ulysses:
            raise ValueError(f"the mesh has cp_ulysses size {inner.size()}, but the Ulysses degree is {ulysses}")
        return cp, outer, inner
    if cp.size() % ulysses:
        raise ValueError(f"the mesh has cp size {cp.size()}, which the Ulysses degree {ulysses} does not divide")
    both = cp._unflatten(0, (cp.size() // ulysses, ulysses), CP_AXES)
    return cp, both["cp_outer"], both["cp_ulysses"]


def shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that `fully_shard` takes: `dp_shard_cp`, or `(dp_replicate, dp_shard_cp)` when there are replicas.

    Raises ValueError if `mesh` has none of these axes.
    """
    shard = _required(mesh, "dp_shard_cp")
    return shard if axis_size(mesh, "dp_replicate") == 1 else DeviceMesh._concatenate([mesh["dp_replicate"], shard])


def replicate_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that `replicate` takes: `dp_cp`, every rank that holds the same parameters.

    Raises ValueError if `mesh` has none of its axes.
    """
    return _required(mesh, "dp_cp")


def _required(mesh: DeviceMesh, name: str) -> DeviceMesh:
    _refuse_other_axes(mesh)
    found = flattened(mesh, name)
    if found is None:
        raise ValueError(f"the mesh has none of the axes {', '.join(_FLATTENED[name])}: it has {mesh.mesh_dim_names}")
    return found


def data_rank(mesh: DeviceMesh) -> tuple[int, int]:
    """(rank, size) to split data by: over dp_replicate and dp_shard. CP, TP and PP peers get the same rank.

    Raises ValueError if `mesh` has an axis of another name.
    """
    _refuse_other_axes(mesh)
    dp = flattened(mesh, "dp")
    return (0, 1) if dp is None else (dp.get_local_rank(), dp.size())


def seed_everything(seed: int, mesh: DeviceMesh) -> int:
    """Seed Python's random, torch and (if installed) numpy; returns the seed that this rank got.

    CP, TP and PP peers get the same seed, so that they draw the same noise and timesteps; data ranks get different
    ones, and no two (seed, data rank) pairs of one layout coincide. Raises ValueError if `seed` is not a whole number,
    or as `data_rank`.
    """
    if not _is_whole(seed):
        raise ValueError(f"seed={seed!r} is not a whole number")
    rank, size = data_rank(mesh)
    own = (seed * size + rank) % 2**63
    seed_process(own)
    return own


def remember_mesh(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Note the mesh that `model` was parallelized on, for its checkpoints."""
    _meshes[model] = mesh


def mesh_of(model: torch.nn.Module) -> DeviceMesh | None:
    """The mesh that `model` was parallelized on, or None."""
    return _meshes.get(model)


def _refuse_other_axes(mesh: DeviceMesh) -> None:
    """Raise ValueError if ranks differ on an axis of another name than `AXES`: whether they share data is not known.

    Were it taken for an axis of peers, they would all train on the same data, with gradients of their own.
    """
    names = mesh.mesh_dim_names or ("(without a name)",) * len(mesh.shape)
    known = (*AXES, *CP_AXES)
    others = [name for name, size in zip(names, mesh.shape, strict=True) if size > 1 and name not in known]
    if others:
        raise ValueError(
            f"the mesh has the axis {', '.join(others)}, and nothing says which data and weights its ranks share: make "
            f"the mesh with build_mesh, or name its axes {', '.join(AXES)} (those that it has)"
        )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _axis_sizes(sizes: dict[str, int], world_size: int) -> dict[str, int]:
    for axis, size in sizes.items():
        if not _is_whole(size) or (size < 1 and not (axis == "dp_shard" and size == -1)):
            free = " (or -1: what the other axes leave)" if axis == "dp_shard" else ""
            raise ValueError(f"the mesh axis {axis} has size {size!r}; it must be a positive whole number{free}")
    others = math.prod(size for axis, size in sizes.items() if axis != "dp_shard")
    if sizes["dp_shard"] == -1 and world_size % others == 0:
        sizes = {**sizes, "dp_shard": world_size // others}
    if math.prod(sizes.values()) != world_size:
        product = " x ".join(f"{axis} {'?' if size == -1 else size}" for axis, size in sizes.items())
        if sizes["dp_shard"] == -1:
            why = f"{world_size} is not a multiple of {others}; start so many processes, or emit for another degree"
        else:
            why = f"the product is {math.prod(sizes.values())}"
        raise ValueError(f"a world size of {world_size} does not factor into {product}: {why}")
    return sizes
