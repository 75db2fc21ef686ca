"""Queries, keys and values that arrive as DTensors: the exchange is of local tensors, its output follows the query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

if TYPE_CHECKING:
    from .binding import Binding


@dataclass(frozen=True)
class Following:
    """How an output that stands like a query's local tensor becomes a DTensor again.

    On the mesh of context parallelism it is cut like the query. On another mesh the axes of context parallelism are
    dropped: each of their ranks holds its own tokens, which is how a region holds them.
    """

    mesh: DeviceMesh
    inside: tuple[Placement, ...]  # while heads, not tokens, are cut over the other axes
    outside: tuple[Placement, ...]  # as the query came

    def wrap(self, out: Tensor) -> Tensor:
        wrapped = DTensor.from_local(out, self.mesh, self.inside, run_check=False)
        return wrapped if self.inside == self.outside else wrapped.redistribute(self.mesh, self.outside)


def to_local(tensor: Tensor, binding: Binding, layout: str) -> tuple[Tensor, Following | None]:
    """The local tensor of a query, key or value in `layout`, and how an output follows it; a plain tensor as it is.

    Over context parallelism's own axes tokens must be cut. Over others heads or samples may be; tokens that these cut
    as well are put together for the exchange (heads are cut instead) and cut again in the output.
    Raises ValueError for a DTensor whose tokens are whole over context parallelism's axes, or that holds partial sums.
    """
    if not isinstance(tensor, DTensor):
        return tensor, None
    mesh = tensor.device_mesh
    tokens, heads = layout.index("S"), layout.index("H")
    own = {binding.cp.group, binding.outer.group, binding.ulysses.group}
    is_cp = [mesh.get_group(axis).group_name in own for axis in range(mesh.ndim)]
    for axis, placement in enumerate(tensor.placements):
        if placement.is_partial() or (is_cp[axis] and placement != Shard(tokens)):
            names = mesh.mesh_dim_names or range(mesh.ndim)
            raise ValueError(
                f"{binding.model_name}: a DTensor of shape {tuple(tensor.shape)} is {placement} over the mesh axis "
                f"{names[axis]!r}, expected {'its tokens cut: ' if is_cp[axis] else 'no partial sums, such as '}"
                f"{Shard(tokens if is_cp[axis] else heads)}"
            )
    inside = tuple(
        Shard(heads) if placement == Shard(tokens) and not cp else placement
        for placement, cp in zip(tensor.placements, is_cp, strict=True)
    )
    local = tensor.redistribute(mesh, inside).to_local()
    if all(is_cp):
        return local, Following(mesh, inside, tensor.placements)
    kept = [axis for axis, cp in enumerate(is_cp) if not cp]
    if len(kept) < mesh.ndim:
        assert mesh.mesh_dim_names is not None, "a mesh of several axes has names for them"
        mesh = mesh[tuple(mesh.mesh_dim_names[axis] for axis in kept)]
    pick = tuple(inside[axis] for axis in kept), tuple(tensor.placements[axis] for axis in kept)
    return local, Following(mesh, *pick)
