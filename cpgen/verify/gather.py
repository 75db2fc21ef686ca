"""Whole tensors from the shards of many, by one collective: one for each takes longer than the model's own work."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` with every DTensor as a whole, plain tensor. All ranks call this together, with the same names."""
    rows: dict[tuple[DeviceMesh, torch.dtype], dict[str, DTensor]] = {}
    found = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            found[name] = tensor
        elif tensor.placements == (Shard(0),):  # as FSDP's; with tensor parallelism there are two axes
            rows.setdefault((tensor.device_mesh, tensor.dtype), {})[name] = tensor
        else:
            found[name] = tensor.full_tensor()
    for (mesh, _), shards in rows.items():
        found |= _gathered(mesh, shards)
    return {name: found[name] for name in tensors}


def _gathered(mesh: DeviceMesh, shards: dict[str, DTensor]) -> dict[str, Tensor]:
    """A rank holds a shard's next ceil(rows / ranks) rows, or what is left of them: all send as many."""
    ranks = mesh.size()
    sizes = [-(-shard.shape[0] // ranks) * math.prod(shard.shape[1:]) for shard in shards.values()]
    parts = []
    for shard, size in zip(shards.values(), sizes, strict=True):
        local = shard.to_local().flatten()
        parts.append(torch.nn.functional.pad(local, (0, size - local.numel())))
    packed = torch.cat(parts)
    received = packed.new_empty(ranks * packed.numel())
    dist.all_gather_into_tensor(received, packed, group=mesh.get_group())
    return {
        name: part.flatten()[: shard.numel()].view(shard.shape)
        for (name, shard), part in zip(shards.items(), torch.split(received.view(ranks, -1), sizes, dim=1), strict=True)
    }
