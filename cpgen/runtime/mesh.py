"""The device mesh: its axes, the groups made from them, and which rank draws which data."""

from __future__ import annotations

import math
import random
import sys
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # outermost first: cp and tp peers are neighbours
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
    dp_replicate: int = 1,
    dp_shard: int = -1,
    pp: int = 1,
) -> DeviceMesh:
    """Lay the ranks of the process group out on the axes pp, dp_replicate, dp_shard, cp, tp.

    Axes of size 1 are kept. `mesh["dp"]`, `mesh["dp_cp"]` and `mesh["dp_shard_cp"]` are flattened axes. `dp_shard=-1`
    takes the ranks that the other axes leave; `device_type=None` is cuda if there is one, else cpu.

    Raises ValueError without a process group, or if the axes' product is not the world size.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "build_mesh needs a process group: call torch.distributed.init_process_group() first, in a process "
            "started by torchrun (torchrun --nproc-per-node N script.py)"
        )
    sizes = _axis_sizes(
        {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp}, dist.get_world_size()
    )
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device_type, tuple(sizes[axis] for axis in AXES), mesh_dim_names=AXES)
    for name, axes in _FLATTENED.items():
        mesh[axes]._flatten(name)
    return mesh


def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """The 1-D mesh `dp`, `dp_cp` or `dp_shard_cp` that `build_mesh` made."""
    return mesh[_FLATTENED[name]]._flatten(name)


def shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that `fully_shard` takes: `dp_shard_cp`, or `(dp_replicate, dp_shard_cp)` when there are replicas."""
    if mesh["dp_replicate"].size() == 1:
        return flattened(mesh, "dp_shard_cp")
    return DeviceMesh._concatenate([mesh["dp_replicate"], flattened(mesh, "dp_shard_cp")])


def replicate_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that `replicate` takes: `dp_cp`, every rank that holds the same parameters."""
    return flattened(mesh, "dp_cp")


def data_rank(mesh: DeviceMesh) -> tuple[int, int]:
    """(rank, size) to split data by: over dp_replicate and dp_shard. CP, TP and PP peers get the same rank."""
    dp = flattened(mesh, "dp")
    return dp.get_local_rank(), dp.size()


def seed_everything(seed: int, mesh: DeviceMesh) -> int:
    """Seed Python's random, torch and (if imported) numpy; returns the seed that this rank got.

    CP, TP and PP peers get the same seed, so that they draw the same noise and timesteps; data ranks get different
    ones, and no two (seed, data rank) pairs of one layout coincide.
    """
    rank, size = data_rank(mesh)
    own = (seed * size + rank) % 2**63
    random.seed(own)
    torch.manual_seed(own)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(own % 2**32)
    return own


def remember_mesh(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Note the mesh that `model` was parallelized on, for its checkpoints."""
    _meshes[model] = mesh


def mesh_of(model: torch.nn.Module) -> DeviceMesh | None:
    """The mesh that `model` was parallelized on, or None."""
    return _meshes.get(model)


def _axis_sizes(sizes: dict[str, int], world_size: int) -> dict[str, int]:
    for axis, size in sizes.items():
        if size < 1 and not (axis == "dp_shard" and size == -1):
            free = " (or -1: what the other axes leave)" if axis == "dp_shard" else ""
            raise ValueError(f"the mesh axis {axis} has size {size}; it must be a positive number{free}")
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
