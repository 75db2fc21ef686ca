"""One attention call under a strategy, on a worker: what it sends and holds, what it computes, how long it takes.

The calls around attention are those that cpgen emits (cpgen/surgery/attention_edits.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cpgen.costs import Attention
from cpgen.runtime.attention import AttentionSite, attention_site
from cpgen.runtime.binding import ATTRIBUTE
from cpgen.runtime.region import Region
from cpgen.strategy import Strategy
from tests.runtime.exchange_cases import Traffic, binding

_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_MARK = 7.0
_RELEASE = 0.1  # seconds: threads of gloo let go of what they have sent a little after the collective has ended


@dataclass(frozen=True)
class Counts:
    """What one rank did: collectives by kind and bytes sent in each pass, bytes of keys and values that it held."""

    forward: dict[str, int]
    sent: Fraction | int
    backward: dict[str, int]
    sent_back: Fraction | int
    kv_held: Fraction | int
    kv_kept: Fraction | int


def counted(strategies: list[Strategy], call: Attention) -> list[Counts]:
    """What this rank sends and holds for `call` (float32) under each strategy."""
    return [_counted(strategy, call) for strategy in strategies]


def score_entries(strategies: list[Strategy], call: Attention) -> list[int]:
    """How many attention scores this rank computes for a causal `call` under each strategy."""
    found = []
    for strategy in strategies:
        site, tokens = _site(strategy, call)
        with _Scores() as scores:
            _attention(strategy, site, _random(tokens, call), causal=True)
        found.append(scores.entries)
    return found


@dataclass(frozen=True)
class Times:
    """Seconds of one call on one rank: by the clock, and of CPU (all threads of the process)."""

    forward: float
    both: float
    forward_cpu: float
    both_cpu: float


def timed(strategies: list[Strategy], call: Attention, rounds: int) -> list[list[Times]]:
    """This rank's times of `call`, for forward and for forward with backward: a list of rounds for each strategy.

    Strategies take turns, so that what else the machine does meets all of them.
    """
    found: list[list[Times]] = [[] for _ in strategies]
    for number in range(rounds + 1):
        for strategy, times in zip(strategies, found, strict=True):
            measured = _timed(strategy, call)
            if number:  # the first one warms up
                times.append(measured)
    return found


def _timed(strategy: Strategy, call: Attention) -> Times:
    site, tokens = _site(strategy, call)
    tensors = _random(tokens, call)
    dist.barrier()
    clock, cpu = time.perf_counter(), time.process_time()
    out = _attention(strategy, site, tensors)
    forward, forward_cpu = time.perf_counter() - clock, time.process_time() - cpu
    out.backward(torch.ones_like(out))
    return Times(forward, time.perf_counter() - clock, forward_cpu, time.process_time() - cpu)


def _site(strategy: Strategy, call: Attention) -> tuple[AttentionSite, int]:
    """A site of a model that is bound to the whole world, and the tokens of this rank."""
    bound = binding(strategy.ulysses_degree, strategy.load_balance)
    bound.latest.region = Region(bound)
    bound.latest.region.lengths["latent"] = call.tokens
    module = torch.nn.Identity()
    setattr(module, ATTRIBUTE, bound)
    site = attention_site(module, "latent")
    assert isinstance(site, AttentionSite)
    return site, bound.latest.region.part_sizes("latent")[bound.cp.rank]


def _attention(strategy: Strategy, site: AttentionSite, tensors: list[Tensor], causal: bool = False) -> Tensor:
    """Attention to (B, S, H, D) query, key and value, which are taken out of `tensors`: nothing else holds them."""
    query, key, value = tensors
    tensors.clear()
    exchange = strategy.exchange
    attend: Any = _attend
    if exchange.ulysses:
        query, key, value = site.seq_to_heads(query, key, value)
    if exchange.outer == "allgather":
        key, value = site.gather_kv(query, key, value)
        attend = site.own_queries(attend) if causal else attend
    elif exchange.outer == "ring":
        attend = site.ring_attention(attend)
    out: Tensor = attend(query, key, value, is_causal=causal)
    return site.heads_to_seq(out) if exchange.ulysses else out


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
) -> Tensor:
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal).transpose(1, 2)


def _random(tokens: int, call: Attention) -> list[Tensor]:
    sizes = (call.batch, tokens, call.heads, call.head_dim)
    return [torch.randn(sizes, requires_grad=True) for _ in range(3)]


def _counted(strategy: Strategy, call: Attention) -> Counts:
    site, tokens = _site(strategy, call)
    tensors = _random(tokens, call)
    with Traffic() as forward:
        out = _attention(strategy, site, tensors)
    with Traffic() as backward:
        out.backward(torch.ones_like(out))
    held, kept = _kv_memory(strategy, call)
    return Counts(forward.calls, forward.sent, backward.calls, backward.sent, held, kept)


def _kv_memory(strategy: Strategy, call: Attention) -> tuple[int, int]:
    """The bytes of keys and values that are alive in forward when a kernel starts, at most, and after forward."""
    site, tokens = _site(strategy, call)
    sizes = (call.batch, tokens, call.heads, call.head_dim)
    tensors = [torch.zeros(sizes, requires_grad=True), torch.full(sizes, _MARK), torch.zeros(sizes)]
    with _Keys(tensors[1]) as keys:
        out = _attention(strategy, site, tensors)
    kept = keys.count()
    del out
    return 2 * keys.most * call.itemsize, 2 * kept * call.itemsize


class _Keys(TorchDispatchMode):
    """Counts copies of key's values in memory. They are marked: queries and values are zeros, and so is all else."""

    def __init__(self, key: Tensor) -> None:
        super().__init__()
        self.most = 0
        self._storages: dict[int, StorageWeakRef] = {}
        self._in_flight: list[Tensor] = []
        self._watch(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is _KERNEL:
            # What is on its way takes memory already. Wait for it, to see what it is.
            for tensor in self._in_flight:
                torch.ops._c10d_functional.wait_tensor(tensor)
            time.sleep(_RELEASE)
            self.most = max(self.most, self.count())
        out = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional":
            self._in_flight = [] if "wait_tensor" in func._schema.name else [out]
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._watch(tensor)
        return out

    def count(self) -> int:
        """The number of marked values in all tensors that are alive."""
        found = 0
        for reference in self._storages.values():
            if not reference.expired():
                storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
                found += int((torch.tensor([]).set_(storage) == _MARK).sum())  # type: ignore[call-overload]
        return found

    def _watch(self, tensor: Tensor) -> None:
        if tensor.dtype == torch.float32:
            reference = StorageWeakRef(tensor.untyped_storage())
            self._storages[reference.cdata] = reference


class _Scores(TorchDispatchMode):
    """Counts the scores that kernels compute: queries times keys, of a causal square the half with its diagonal."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert "scaled_dot_product" not in str(func) or func is _KERNEL, func
        if func is _KERNEL:
            batch, heads, queries, _ = args[0].shape
            keys = args[1].shape[2]
            causal = args[4] if len(args) > 4 else (kwargs or {}).get("is_causal", False)
            assert not causal or queries == keys
            self.entries += batch * heads * (queries * (queries + 1) // 2 if causal else queries * keys)
        return func(*args, **(kwargs or {}))
