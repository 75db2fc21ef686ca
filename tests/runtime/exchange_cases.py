"""Attention through the runtime against plain attention, on the workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from cpgen.costs import ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER, RING_STEP
from cpgen.runtime.attention import attention_site
from cpgen.runtime.binding import ATTRIBUTE, Axis, Binding
from cpgen.runtime.mesh import split_cp
from cpgen.runtime.region import Region

_latest: list[Any] = []  # the world's group, the mesh over it, and axes for each degree of Ulysses


@dataclass(frozen=True)
class Shape:
    """Streams with their lengths, in the order of the source; sizes of the attention call."""

    streams: tuple[tuple[str, int], ...]
    batch: int
    heads: int
    kv_heads: int
    channels: int
    layout: str
    ulysses: int  # its degree: 1 for none
    outer: str | None  # allgather, ring
    mask: str  # none, causal, keys, samples (BSHD), rows, heads
    additive: bool = False
    balanced: bool = False
    inside: bool = False  # of the call, as where several stand in one statement


def binding(ulysses: int, balanced: bool = False) -> Binding:
    """A binding over the whole world. The mesh is kept for as long as its group lives: names of groups come again."""
    world = dist.group.WORLD
    if not _latest or _latest[0] is not world:
        _latest[:] = [world, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",)), {}]
    _, mesh, known = _latest
    if ulysses not in known:
        known[ulysses] = [Axis.of(axis) for axis in split_cp(mesh, ulysses)]
    return Binding("Model", *known[ulysses], balanced, (), ())


def attention_errors(shape: Shape) -> tuple[float, float]:
    """max|output - plain| and the largest max|gradient - plain| over queries, keys and values, in float64."""
    b = binding(shape.ulysses, shape.balanced)
    module = torch.nn.Identity()
    setattr(module, ATTRIBUTE, b)
    region = b.latest.region = Region(b)
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    counts = (shape.heads, shape.kv_heads, shape.kv_heads)
    whole = {s: [random(shape.batch, n, h, shape.channels).requires_grad_() for h in counts] for s, n in shape.streams}
    leaves = [tensor for tensors in whole.values() for tensor in tensors]
    total = sum(n for _, n in shape.streams)
    mask = _mask(shape, total, generator)
    if mask is not None and shape.additive:
        leaves.append(mask.requires_grad_())
    causal = shape.mask == "causal"
    weights = random(shape.batch, total, shape.heads, shape.channels)

    joined = [torch.cat([whole[s][i] for s, _ in shape.streams], dim=1) for i in range(3)]
    plain = _attend_bshd(*joined, mask, is_causal=causal)
    plain_gradients = torch.autograd.grad((plain * weights).sum(), leaves)

    local = {s: [region.shard(x, s, dim=1, ndim=4, stream=s) for x in tensors] for s, tensors in whole.items()}
    query, key, value = (torch.cat([local[s][i] for s, _ in shape.streams], dim=1) for i in range(3))
    attend = _attend_bshd
    if shape.layout == "BHSD":
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        attend = _attend_bhsd
    site = attention_site(module, *(s for s, _ in shape.streams), layout=shape.layout)
    # What the emitted code does: see cpgen/surgery/attention_edits.py.
    if shape.inside:
        attend = site.gathering_kv(attend) if shape.outer == "allgather" else attend
        attend = site.ring_attention(attend) if shape.outer == "ring" else attend
        attend = site.trading_heads(attend) if shape.ulysses > 1 else attend
        out = attend(query, key, value, attn_mask=mask, is_causal=causal)
    else:
        out = _exchanged_around(shape, site, attend, query, key, value, mask)
    if shape.layout == "BHSD":
        out = out.transpose(1, 2)
    parts = out.split([local[s][0].shape[1] for s, _ in shape.streams], dim=1)
    gathered = [
        region.gather(part, s, dim=1, ndim=4, stream=s) for part, (s, _) in zip(parts, shape.streams, strict=True)
    ]
    result = torch.cat(gathered, dim=1)
    ours = list(torch.autograd.grad((result * weights).sum(), leaves))
    for gradient in ours:
        dist.all_reduce(gradient)
    difference = max(float((g / b.cp.degree - p).abs().max()) for g, p in zip(ours, plain_gradients, strict=True))
    return float((result - plain).detach().abs().max()), difference


def _exchanged_around(
    shape: Shape, site: Any, attend: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Tensor:
    causal = shape.mask == "causal"
    if shape.ulysses > 1:
        query, key, value = site.seq_to_heads(query, key, value)
        mask = site.mask_heads(mask)
    if shape.outer == "allgather":
        key, value = site.gather_kv(query, key, value)
        mask = site.mask_rows(mask)
        attend = site.own_queries(attend) if causal else attend
    elif shape.outer == "ring":
        attend = site.ring_attention(attend)
    out = attend(query, key, value, attn_mask=mask, is_causal=causal)
    return site.heads_to_seq(out) if shape.ulysses > 1 else out


def _attend_bhsd(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
) -> Tensor:
    gqa = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa=gqa)


def _attend_bshd(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **options: Any
) -> Tensor:
    """As diffusers' dispatcher: a mask of two dims is over samples and keys."""
    mask = attn_mask[:, None, None] if attn_mask is not None and attn_mask.ndim == 2 else attn_mask
    return _attend_bhsd(*(x.transpose(1, 2) for x in (query, key, value)), mask, *rest, **options).transpose(1, 2)


def _mask(shape: Shape, total: int, generator: torch.Generator) -> Tensor | None:
    sizes = {
        "keys": (shape.batch, 1, 1, total),
        "samples": (shape.batch, total),
        "rows": (shape.batch, 1, total, total),
        "heads": (shape.batch, shape.heads, total, total),
    }
    if shape.mask not in sizes:
        return None
    keep = torch.rand(*sizes[shape.mask], generator=generator) < 0.6
    keep[..., 0] = True
    if not shape.additive:
        return keep
    return torch.where(keep, torch.randn(keep.shape, generator=generator, dtype=torch.float64), float("-inf"))


class Traffic(TorchDispatchMode):
    """Counts collectives, by the names of cpgen.costs, and the bytes that this rank sends to others."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}
        self.sent = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        namespace, name = func.namespace, func._schema.name.rpartition("::")[2]
        if namespace == "_c10d_functional" and name != "wait_tensor":
            group = _resolve_process_group(args[-1])
            peers, rank = group.size(), group.rank()
            size = args[0].element_size()
            if name == "all_to_all_single":
                send = args[2]
                self.sent += (sum(send) - send[rank]) * size
                # In a ring each rank has one neighbour to send to.
                kind = RING_STEP if sum(count > 0 for count in send) == 1 < peers else ALL_TO_ALL
            elif name == "all_gather_into_tensor":
                self.sent += args[0].numel() * (peers - 1) * size
                kind = ALL_GATHER
            elif name == "reduce_scatter_tensor":
                self.sent += args[0].numel() * (peers - 1) // peers * size
                kind = REDUCE_SCATTER
            else:
                raise AssertionError(f"an unexpected collective: {name}")
            self.calls[kind] = self.calls.get(kind, 0) + 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Arrival:
    """How query, key and value arrive: as DTensors on `axes` of a mesh (dp 1, cp, tp 2) with `placements`."""

    axes: tuple[str, ...]
    placements: tuple[Placement, ...]
    cp: int
    ulysses: int
    outer: str | None
    causal: bool = False


def dtensor_errors(arrival: Arrival) -> tuple[float, float, str]:
    """Output and gradient errors of BSHD attention over DTensors, and what kind of tensor the output was."""
    mesh = init_device_mesh("cpu", (arrival.cp, dist.get_world_size() // arrival.cp), mesh_dim_names=("cp", "tp"))
    axes = (Axis.of(axis) for axis in split_cp(mesh, arrival.ulysses))
    b = Binding("Model", *axes, False, (), ())
    module = torch.nn.Identity()
    setattr(module, ATTRIBUTE, b)
    region = b.latest.region = Region(b)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(2, 8, 4, 4, generator=generator, dtype=torch.float64) for _ in range(4)]
    leaves, weights = [x.requires_grad_() for x in whole[:3]], whole[3].detach()
    plain = _attend_bshd(*leaves, is_causal=arrival.causal)
    theirs = torch.autograd.grad((plain * weights).sum(), leaves)

    # From whole tensors on every rank to the placements; their gradients are P * g over cp, as a region's are.
    tp = mesh["tp"]
    heads = slice(2 * tp.get_local_rank(), 2 * tp.get_local_rank() + 2)
    on = mesh[arrival.axes] if len(arrival.axes) > 1 else mesh[arrival.axes[0]]
    ours = [x.detach().clone().requires_grad_() for x in leaves]
    parts = [region.shard(x, "x", dim=1, ndim=4, stream="latent") for x in ours]
    if "tp" in arrival.axes:
        at_heads = tuple(Shard(2) if axis == "tp" else Shard(1) for axis in arrival.axes)
        parts = [DTensor.from_local(x[:, :, heads], on, at_heads, run_check=False) for x in parts]
        parts = [x.redistribute(on, arrival.placements) for x in parts]
    else:
        parts = [DTensor.from_local(x, on, arrival.placements, run_check=False) for x in parts]
    site = attention_site(module, "latent")
    query, key, value = parts
    attend = _attend_bshd
    if arrival.ulysses > 1:
        query, key, value = site.seq_to_heads(query, key, value)
    if arrival.outer == "allgather":
        key, value = site.gather_kv(query, key, value)
        attend = site.own_queries(attend)
    elif arrival.outer == "ring":
        attend = site.ring_attention(attend)
    out = attend(query, key, value, is_causal=arrival.causal)
    if arrival.ulysses > 1:
        out = site.heads_to_seq(out)
    assert isinstance(out, DTensor)
    kind = f"{out.device_mesh.mesh_dim_names} {out.placements}"
    out = out.redistribute(
        placements=[Shard(2) if name == "tp" else Shard(1) for name in out.device_mesh.mesh_dim_names or ()]
    ).to_local()
    mine = heads if "tp" in arrival.axes else slice(None)
    result = region.gather(out, "x", dim=1, ndim=4, stream="latent")
    forward = float((result - plain[:, :, mine]).detach().abs().max())
    gradients = list(torch.autograd.grad((result * weights[:, :, mine]).sum(), ours))
    for gradient in gradients:
        dist.all_reduce(gradient, group=mesh["cp"].get_group())
    # Over tp each rank has its own heads' gradients, or the same ones.
    difference = max(
        float((g / arrival.cp - p)[:, :, mine].abs().max()) for g, p in zip(gradients, theirs, strict=True)
    )
    return forward, difference, kind


def leading_tokens_errors(lead: int, tokens: int, balanced: bool) -> tuple[float, float]:
    """`lead` tokens ahead of a stream, to whose others something is added that lacks them: cut, added, gathered."""
    b = binding(1, balanced)
    region = b.latest.region = Region(b)
    generator = torch.Generator().manual_seed(0)
    x, added, weights = (
        torch.randn(2, n, 3, generator=generator, dtype=torch.float64).requires_grad_()
        for n in (lead + tokens, tokens, lead + tokens)
    )
    plain = torch.cat([x[:, :lead], x[:, lead:] + added], dim=1)
    theirs = torch.autograd.grad((plain * weights).sum(), [x, added])
    part = region.shard(x, "x", dim=1, ndim=3, stream="latent")
    others = region.shard(added, "added", dim=1, ndim=3, stream="latent", start=lead)
    mine = region.local_prefix(lead, "latent")
    part = torch.cat([part[:, :mine], part[:, mine:] + others], dim=1)
    out = region.gather(part, "x", dim=1, ndim=3, stream="latent")
    ours = list(torch.autograd.grad((out * weights).sum(), [x, added]))
    for gradient in ours:
        dist.all_reduce(gradient)
    difference = max(float((g / b.cp.degree - p).abs().max()) for g, p in zip(ours, theirs, strict=True))
    return float((out - plain).detach().abs().max()), difference


def cut_errors(tokens: int, other: int, balanced: bool) -> tuple[str, str, str]:
    """What a site's `shard` gives in a region of `tokens` tokens: for a whole tensor, beside that of the region itself;
    for one of `other` tokens; for a number."""
    b = binding(1, balanced)
    module = torch.nn.Identity()
    setattr(module, ATTRIBUTE, b)
    region = b.latest.region = Region(b)
    x = torch.randn(2, tokens, generator=torch.Generator().manual_seed(0))
    expected = region.shard(x, "x", dim=1, ndim=2, stream="latent")

    def shard(value: Any) -> Any:
        try:
            return attention_site(module, "latent").shard(value, "mask", dim=1, ndim=2, stream="latent")
        except ValueError as error:
            return str(error)

    assert attention_site(module, "latent").shard(None, "m", dim=1, ndim=2, stream="latent", optional=True) is None
    same = "same" if torch.equal(shard(x), expected) else "another"
    return same, shard(torch.zeros(2, other)), shard(7)


def gather_within_errors() -> tuple[float, float]:
    """A mean over all tokens in mid-network: gather_within, the operation, and cut again."""
    b = binding(1)
    region = b.latest.region = Region(b)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 7, 3, generator=generator, dtype=torch.float64).requires_grad_()
    scale = torch.randn(3, generator=generator, dtype=torch.float64).requires_grad_()
    weights = torch.randn(2, 7, 3, generator=generator, dtype=torch.float64)

    def mix(tokens: Tensor) -> Tensor:
        return tokens * tokens.mean(dim=1, keepdim=True).sigmoid() * scale

    plain = mix(x * scale)
    theirs = torch.autograd.grad((plain * weights).sum(), [x, scale])
    part = region.shard(x, "x", dim=1, ndim=3, stream="latent") * scale
    whole = region.gather_within(part, "x", dim=1, ndim=3, stream="latent")
    part = region.shard(mix(whole), "x", dim=1, ndim=3, stream="latent")
    out = region.gather(part, "x", dim=1, ndim=3, stream="latent")
    ours = list(torch.autograd.grad((out * weights).sum(), [x, scale]))
    for gradient in ours:
        dist.all_reduce(gradient)
    difference = max(float((g / b.cp.degree - p).abs().max()) for g, p in zip(ours, theirs, strict=True))
    return float((out - plain).detach().abs().max()), difference
