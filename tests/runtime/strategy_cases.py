"""What the workers run for the tests of strategies."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from cpgen.plan import Probe
from cpgen.runtime.attention import AttentionSite, attention_site
from cpgen.runtime.binding import ATTRIBUTE
from cpgen.runtime.region import Region

from .emitted import Emitted, gradients, inputs_of, loss_of, reference_and_model, worst
from .exchange_cases import Traffic, binding
from .model_cases import run


def site_of(tokens: int, ulysses: int, layout: str = "BHSD", balanced: bool = False) -> tuple[AttentionSite, Region]:
    """A bound attention site over one stream of `tokens`, and its region."""
    b = binding(ulysses, balanced)
    module = torch.nn.Identity()
    setattr(module, ATTRIBUTE, b)
    region = b.latest.region = Region(b)
    region.lengths["latent"] = tokens
    site = attention_site(module, "latent", layout=layout)
    assert isinstance(site, AttentionSite)
    return site, region


def local_tokens(region: Region) -> int:
    return region.part_sizes("latent")[region.binding.cp.rank]


def on_mesh(
    emitted: Emitted, probe: Probe, shape: tuple[int, ...], names: tuple[str, ...], data_parallel: str
) -> float:
    """The worst output or gradient error, all in float64, of a model parallelized on a mesh that a user built."""
    reference, model, package = reference_and_model(emitted, probe)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    options: dict[str, Any] = {} if data_parallel == "none" else {"reduce_dtype": torch.float64}
    model = package.parallelize(model, mesh, data_parallel=data_parallel, **options)
    outputs = []
    for each in (reference, model):
        outputs.append(run(each, inputs_of(probe)))
        loss_of(outputs[-1]).backward()
    error = float((outputs[0] - outputs[1]).detach().abs().max())
    ours = gradients(model)
    for name, gradient in ours.items():
        if isinstance(gradient, DTensor):
            ours[name] = gradient.full_tensor()
        else:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
    return max(error, worst(ours, gradients(reference)))


def mesh_message(emitted: Emitted, probe: Probe, shape: tuple[int, ...], names: tuple[str, ...]) -> str:
    _, model, package = reference_and_model(emitted, probe)
    mesh: DeviceMesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    try:
        package.parallelize(model, mesh)
    except ValueError as error:
        return str(error)
    return ""


def message_of_weights(emitted: Emitted, probe: Probe, data_parallel: str, differ_by: int) -> str:
    """What parallelize says where groups of `differ_by` neighbouring ranks have weights of their own."""
    _, model, package = reference_and_model(emitted, probe)
    with torch.no_grad():
        next(model.parameters()).add_(dist.get_rank() // differ_by)
    try:
        package.parallelize(model, package.build_mesh("cpu"), data_parallel=data_parallel)
    except ValueError as error:
        return str(error)
    return ""


def grouped_traffic(heads: int, kv_heads: int, ulysses: int, outer: str | None) -> tuple[int, int]:
    """Bytes that this rank sends for an attention call of 8 tokens, batch 1, 2 channels, float32: there, and back."""
    site, region = site_of(8, ulysses)
    tokens = local_tokens(region)
    query, key, value = (torch.ones(1, h, tokens, 2) for h in (heads, kv_heads, kv_heads))
    with Traffic() as there:
        if ulysses > 1:
            query, key, value = site.seq_to_heads(query, key, value)
        if outer == "allgather":
            key, value = site.gather_kv(query, key, value)
        out = (site.ring_attention(_plain) if outer == "ring" else _plain)(query, key, value)
    with Traffic() as back:
        if ulysses > 1:
            site.heads_to_seq(out)
    return there.sent, back.sent


def _plain(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(
        query, key, value, *rest, enable_gqa=query.shape[1] != key.shape[1], **options
    )


class _Order(TorchDispatchMode):
    """The order of exchanges and attention, and the size of the largest tensor that came to be."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func._schema.name.rpartition("::")[2]
        if name == "all_to_all_single":
            self.events.append("send")
        elif name == "wait_tensor":
            self.events.append("wait")
        elif "attention" in name:
            self.events.append("attend")
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and not func.is_view:
                self.largest = max(self.largest, tensor.numel())
        return out


def ring_order(backward: bool) -> tuple[list[str], int, int]:
    """Events of ring attention over 64 tokens, the largest tensor in values, and how many a rank's keys have."""
    site, region = site_of(64, 1)
    tensors = [torch.ones(1, 2, local_tokens(region), 4, requires_grad=True) for _ in range(3)]
    with _Order() if not backward else nullcontext() as forward:  # type: ignore[attr-defined]
        out = site.ring_attention(_plain)(*tensors)
    if forward is not None:
        return forward.events, forward.largest, tensors[0].numel()
    with _Order() as order:
        out.sum().backward()
    return order.events, order.largest, tensors[0].numel()


def causal_work(strategy: str, tokens: int, balanced: bool) -> int:
    """Scores that this rank's causal attention computes, forward: queries times keys of each call of a kernel."""
    site, region = site_of(tokens, 1, balanced=balanced)
    query, key, value = (torch.ones(1, 1, local_tokens(region), 2) for _ in range(3))

    class Scores(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if "attention" in func._schema.name:
                queries, keys = args[0].shape[2], args[1].shape[2]
                causal = args[4] if len(args) > 4 else (kwargs or {}).get("is_causal", False)
                Scores.count += queries * (queries + 1) // 2 if causal else queries * keys
            return func(*args, **(kwargs or {}))

    if strategy == "allgather":
        key, value = site.gather_kv(query, key, value)
    with Scores():
        attend = site.ring_attention(_plain) if strategy == "ring" else site.own_queries(_plain)
        attend(query, key, value, is_causal=True)
    return Scores.count


def ring_message(backend: str | None, active: str | None, options: dict[str, Any]) -> str:
    """The error that ring attention gives for a backend (or one that diffusers has active), or for an option."""
    from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend, dispatch_attention_fn

    site, region = site_of(8, 1, "BSHD")
    tensors = [torch.ones(1, local_tokens(region), 2, 4) for _ in range(3)]
    if active is not None:
        # Set as a user's environment would, whatever is installed here.
        context: Any = attention_backend(AttentionBackendName(active))
    else:
        context = nullcontext()
    try:
        with context:
            site.ring_attention(dispatch_attention_fn)(*tensors, backend=backend, **options)
    except ValueError as error:
        return str(error)
    return ""


def absorbed_row() -> tuple[float, float]:
    """Least and most of an average of ones, where two rows' masks hide every key by a large number; uneven parts."""
    site, region = site_of(7, 1)
    tokens = local_tokens(region)
    value = torch.ones(1, 1, tokens, 4)
    mask = torch.zeros(1, 1, 7, 7)
    mask[..., 0, :] = torch.finfo(torch.float32).min
    mask[..., -1, :] = -1e5
    out = site.ring_attention(_plain)(torch.zeros(1, 1, tokens, 4), torch.ones(1, 1, tokens, 4), value, attn_mask=mask)
    return float(out.min()), float(out.max())


@dataclass(frozen=True)
class Odd:
    """An attention call whose tensors are not alike: BHSD, `queries` and `keys` tokens of two streams."""

    queries: int
    keys: int
    batches: tuple[int, int, int] = (2, 2, 2)
    heads: tuple[int, int, int] = (4, 4, 4)


def odd_errors(odd: Odd, ulysses: int, outer: str | None) -> tuple[float, float]:
    """Output and gradient errors in float64 of cut keys from another stream than the queries, against one process."""
    b = binding(ulysses)
    module = torch.nn.Identity()
    setattr(module, ATTRIBUTE, b)
    region = b.latest.region = Region(b)
    generator = torch.Generator().manual_seed(0)
    lengths = (odd.queries, odd.keys, odd.keys)
    whole = [
        torch.randn(batch, heads, length, 4, generator=generator, dtype=torch.float64).requires_grad_()
        for batch, heads, length in zip(odd.batches, odd.heads, lengths, strict=True)
    ]
    expected = _broadcast_attention(*whole)
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    theirs = torch.autograd.grad((expected * weights).sum(), whole)
    streams = ("latent", "text", "text")
    query, key, value = (
        region.shard(x, "x", dim=2, ndim=4, stream=stream) for x, stream in zip(whole, streams, strict=True)
    )
    site = attention_site(module, "latent", kv=("text",), layout="BHSD")
    if ulysses > 1:
        query, key, value = site.seq_to_heads(query, key, value)
    if outer == "allgather":
        key, value = site.gather_kv(query, key, value)
    out = (site.ring_attention(_broadcast_attention) if outer == "ring" else _broadcast_attention)(query, key, value)
    if ulysses > 1:
        out = site.heads_to_seq(out)
    result = region.gather(out, "out", dim=2, ndim=4, stream="latent")
    ours = list(torch.autograd.grad((result * weights).sum(), whole))
    for gradient in ours:
        dist.all_reduce(gradient)
    difference = max(float((g / b.cp.degree - t).abs().max()) for g, t in zip(ours, theirs, strict=True))
    return float((result - expected).detach().abs().max()), difference


def _broadcast_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    heads = query.shape[1]
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    return (query @ key.transpose(-1, -2) / 2).softmax(-1) @ value


def refused_call(shapes: tuple[tuple[int, ...], ...], mask: tuple[int, ...] | None, method: str, tokens: int) -> str:
    """The error that a call with tensors of these shapes gives."""
    site, _ = site_of(tokens, 1 if method != "seq_to_heads" else dist.get_world_size())
    tensors = [torch.ones(shape) for shape in shapes]
    try:
        if method == "ring_attention":
            site.ring_attention(_plain)(*tensors, attn_mask=None if mask is None else torch.zeros(mask))
        else:
            getattr(site, method)(*tensors)
            site.mask_rows(None if mask is None else torch.zeros(mask))
    except ValueError as error:
        return str(error)
    return ""


def draws_in_attention(emitted: Emitted, probe: Probe, drops: bool) -> tuple[float, float, float, bool]:
    """Numbers drawn after two forwards in training, one drawn in attention by this rank, and whether the random state
    after the forwards is that before them."""
    _, model, package = reference_and_model(emitted, probe)
    model = package.parallelize(model, package.build_mesh("cpu"), data_parallel="none")
    model.train()
    drawn: list[float] = []

    def hook(*_: Any) -> None:
        if drops:
            drawn.append(float(torch.rand(1)))

    model.blocks[0].attn1.register_forward_hook(hook)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    run(model, inputs_of(probe))
    run(model, inputs_of(probe))
    if drops:
        assert drawn[0] != drawn[1], "both forwards drew the same"
    same = torch.equal(before, torch.get_rng_state())
    after = float(torch.rand(1))
    return after, float(torch.rand(1)), drawn[0] if drops else 0.0, same
