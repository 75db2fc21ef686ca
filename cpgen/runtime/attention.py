"""An attention site: one attention call in the source, and the exchange that lets it see whole sequences."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .binding import ATTRIBUTE, LIST, check_heads
from .casting import as_attention_casts, in_one_dtype
from .dtensors import to_local
from .exchange import gather_tokens, heads_to_tokens, tokens_of, tokens_to_heads
from .kernels import choose_kernel
from .masks import four_dims
from .parts import head_parts
from .ring import ring_attention
from .site import Site

# For each layout: where batch, tokens, heads and channels are, and the way back from (tokens, batch, heads, channels).
_TO_ROWS = {"BSHD": (1, 0, 2, 3), "BHSD": (2, 0, 1, 3)}
_FROM_ROWS = {"BSHD": (1, 0, 2, 3), "BHSD": (1, 2, 0, 3)}


class AttentionSite(Site):
    """The exchange around one attention call of a bound model.

    Between `seq_to_heads` and `heads_to_seq` (or after `gather_kv`, for keys and values) tokens stand in the order of
    the model that is not cut: the streams one after the other, as the source concatenates them. Under hybrid
    strategies that holds for the tokens of the ranks on the Ulysses axis, which the outer exchange then connects.
    """

    def seq_to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Trade tokens for heads: from this rank's tokens with all heads to all tokens with this rank's heads.

        `query` is (B, S/P, H, D) or (B, H, S/P, D) as the site's layout says; `key` and `value` may have fewer heads.
        One all-to-all; sizes follow from the global lengths. Backward is the reverse all-to-all.
        """
        query, key, value = self._local(query, key, value)
        region = self._resolve(query, key, value)
        binding, axis = self._binding, self._binding.ulysses
        rows = [x.permute(_TO_ROWS[self._given]) for x in in_one_dtype(query, key, value)]
        check_heads(binding.model_name, rows[0].shape[2], axis.degree)  # a plan need not say where their number is
        heads = [head_parts(rows[0].shape[2], x.shape[2], axis.degree) for x in rows[1:]]
        self._heads = heads[0]
        self._traded = True
        parts = [region.ulysses_parts(s) for s in (self._streams, self._kv_streams, self._kv_streams)]
        traded = tokens_to_heads(rows, heads, parts, axis, binding.balanced)
        whole = [x.permute(_FROM_ROWS[self._given]) for x in traded]
        return whole[0], whole[1], whole[2]

    def heads_to_seq(self, out: Tensor) -> Tensor:
        """The way back, for the attention's output: to this rank's tokens with all heads. One all-to-all."""
        region = self._resolved()
        self._traded = False
        binding, axis = self._binding, self._binding.ulysses
        rows = out.permute(_TO_ROWS[self._layout])
        parts = region.ulysses_parts(self._streams)
        total = sum(tokens_of(part) for part in parts)
        mine = self._heads[axis.rank]
        if rows.shape[0] != total or rows.shape[2] != mine.query_size:
            raise ValueError(
                f"{binding.model_name}: the attention's output has shape {tuple(out.shape)} ({self._layout}), "
                f"expected {total} tokens and {mine.query_size} heads"
            )
        joined = heads_to_tokens(rows, self._heads, parts, axis, binding.balanced)
        joined = joined if self._layout == "BSHD" else joined.transpose(1, 2)
        return joined if self._follow is None else self._follow.wrap(joined)

    def gather_kv(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens, for this rank's queries. One all-gather; backward is a reduce-scatter.

        Shapes as in `seq_to_heads`; `query` is only looked at. Of DTensors it gives the local tensors' keys and values,
        for attention through `own_queries`.
        """
        query, key, value = self._local(query, key, value)
        region = self._resolve(query, key, value)
        axis = self._binding.outer
        rows = [x.permute(_TO_ROWS[self._given]) for x in in_one_dtype(key, value)]
        parts = [[[size for _, size in runs] for runs in of_rank] for of_rank in region.outer_runs(self._kv_streams)]
        gathered = gather_tokens(rows, parts, axis, self._binding.balanced)
        out = [x.permute(_FROM_ROWS[self._given]) for x in gathered]
        return out[0], out[1]

    def own_queries(self, attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`attention`, to be called with this rank's queries and whole keys and values, after `gather_kv`.

        Causal attention is called for each run of neighbouring queries, with the keys up to the last of them and a
        mask: the work of one call is the run's length times the number of those keys. The output follows a DTensor
        query.
        """
        return partial(self._own_queries, attention)

    def ring_attention(self, attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """What takes the place of `attention`: this rank's queries see all keys and values, which travel around.

        Called with the arguments of `attention`, where `attn_mask` is over whole sequences. Runs on those of torch's
        kernels that give a log-sum-exp, as `backend` says (else the one that `attention` would use). Raises ValueError
        for a backend without one, or dropout.
        """
        return partial(self._ring_attention, attention)

    def trading_heads(self, attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`attention` between `seq_to_heads` and `heads_to_seq`, for calls that read tensors in common: each exchanges
        its own. `attn_mask` is over whole sequences.
        """
        return partial(self._trading_heads, attention)

    def gathering_kv(self, attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`attention` behind `gather_kv`, for calls that read tensors in common. `attn_mask` is over whole sequences;
        causal attention as in `own_queries`."""
        return partial(self._gathering_kv, attention)

    def _trading_heads(
        self,
        attention: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *rest: Any,
        **options: Any,
    ) -> Tensor:
        query, key, value = self.seq_to_heads(query, key, value)
        return self.heads_to_seq(attention(query, key, value, self.mask_heads(attn_mask), *rest, **options))

    def _gathering_kv(
        self,
        attention: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *rest: Any,
        **options: Any,
    ) -> Tensor:
        key, value = self.gather_kv(query, key, value)
        return self._own_queries(attention, query, key, value, self.mask_rows(attn_mask), *rest, **options)

    def _own_queries(
        self,
        attention: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *rest: Any,
        **options: Any,
    ) -> Tensor:
        follow = None
        if not self._traded:  # else its output goes back through heads_to_seq
            query, follow = to_local(query, self._binding, self._layout)
        if is_causal:
            out = self._causal_runs(attention, query, key, value, attn_mask, dropout_p, *rest, **options)
        else:
            out = attention(query, key, value, attn_mask, dropout_p, False, *rest, **options)
        return out if follow is None else follow.wrap(out)

    def _causal_runs(
        self,
        attention: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        dropout_p: float,
        *rest: Any,
        **options: Any,
    ) -> Tensor:
        self._check_causal(attn_mask)
        dim = self._layout.index("S")
        outputs = []
        at = 0
        for start, size in self._resolved().positions(self._streams)[self._binding.outer.rank]:
            if size == 0:
                continue
            end = start + size
            keys = torch.arange(end, device=query.device)
            mask = (keys[start:, None] >= keys)[None, None]
            run = (query.narrow(dim, at, size), key.narrow(dim, 0, end), value.narrow(dim, 0, end))
            outputs.append(attention(*run, mask, dropout_p, False, *rest, **options))
            at += size
        return torch.cat(outputs, dim=dim)

    def _ring_attention(
        self,
        attention: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        attention_kwargs: dict[str, Any] | None = None,
        *,
        backend: Any = None,
        parallel_config: Any = None,
    ) -> Tensor:
        query, key, value = self._local(query, key, value)
        self._resolve(query, key, value)
        heads, channels = self._layout.index("H"), query.shape[-1]
        if key.shape[heads] != value.shape[heads] or {key.shape[-1], value.shape[-1]} != {channels}:
            raise ValueError(
                f"{self._binding.model_name}: ring attention needs keys and values of one number of heads and the "
                f"query's channels, got {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}; use ulysses"
            )
        if is_causal:
            self._check_causal(attn_mask)
        if dropout_p or attention_kwargs or parallel_config is not None:
            given = "dropout_p" if dropout_p else "attention_kwargs" if attention_kwargs else "parallel_config"
            raise ValueError(f"{self._binding.model_name}: ring attention does not take {given}; use ulysses")
        del enable_gqa  # seen from the shapes
        mask = four_dims(self.mask_rows(attn_mask), self._layout, self._batch)
        positions = self._resolved().positions(self._kv_streams)
        mine = sum(size for _, size in positions[self._binding.outer.rank])
        if key.shape[self._layout.index("S")] != mine:
            raise ValueError(
                f"{self._binding.model_name}: ring attention got {key.shape[self._layout.index('S')]} keys where this "
                f"rank's tokens are {mine}: keys out of a cache don't travel; use ulysses or allgather"
            )
        query, key, value = _of_one_batch(query, key, value)
        query, key, value, mask = as_attention_casts(query, key, value, mask)
        if self._layout == "BSHD":
            query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out = ring_attention(
            query,
            key,
            value,
            mask,
            positions,
            self._binding.outer,
            choose_kernel(_active_backend(attention) if backend is None else backend, query, mask is not None),
            is_causal,
            query.shape[-1] ** -0.5 if scale is None else scale,
        )
        # Contiguous as (B, S, H, D), like the output of torch's fused kernels: what follows may use .view.
        out = out.transpose(1, 2).contiguous()
        out = out if self._layout == "BSHD" else out.transpose(1, 2)
        return out if self._follow is None or self._traded else self._follow.wrap(out)


class LocalAttention:
    """What a site is for attention that needs no exchange: not bound, degree 1, or keys that every rank has."""

    def seq_to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return query, key, value

    def heads_to_seq(self, out: Tensor) -> Tensor:
        return out

    def gather_kv(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key, value

    def mask_heads(self, mask: Any) -> Any:
        return mask

    mask_rows = mask_heads

    def ring_attention(self, attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return attention

    own_queries = trading_heads = gathering_kv = ring_attention

    def shard(self, value: Any, name: str, **_: Any) -> Any:
        return value

    def whole_length(self, length: int, *streams: str) -> int:
        return length

    local_length = whole_length


LOCAL_ATTENTION = LocalAttention()


def attention_site(
    attention: torch.nn.Module,
    *streams: str,
    kv: tuple[str, ...] | None = None,
    layout: str = "BSHD",
    transposed: bool = False,
    when: bool = True,
    within: dict[str, tuple[str, ...]] | None = None,
) -> AttentionSite | LocalAttention:
    """The exchange for an attention call inside `attention`, whose queries are `streams` one after the other.

    `kv` names the streams of keys and values where they differ. With `when` false the call is local: its keys and
    values are replicated. `layout` is that of query, key and value in the call: "BSHD" or "BHSD"; `transposed` if ahead
    of the call, where they are exchanged, they have the other one. `within` gives the streams by the list of blocks
    that `attention` is in, where several lists share the call; outside of all lists it is local.
    Raises ValueError for a list that is not in it.
    """
    binding = getattr(attention, ATTRIBUTE, None)
    if binding is None:
        return LOCAL_ATTENTION
    if not torch.compiler.is_compiling():
        binding.latest.attending.add(type(attention))
    if not when:
        return LOCAL_ATTENTION
    if within is not None:
        blocks = getattr(attention, LIST, None)
        if blocks is None:
            return LOCAL_ATTENTION
        if blocks not in within:
            raise ValueError(
                f"{binding.model_name}: attention in {blocks} runs a processor for those in {', '.join(within)} only"
            )
        streams = within[blocks]
    return AttentionSite(binding, streams, streams if kv is None else kv, layout, transposed)


def _of_one_batch(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Attention broadcasts a batch of 1; the operators behind it do not look."""
    batch = max(tensor.shape[0] for tensor in tensors)
    return tuple(tensor.expand(batch, -1, -1, -1) for tensor in tensors)


def _active_backend(attention: Callable[..., Any]) -> Any:
    """The backend that `attention` would choose by itself, if it is diffusers' dispatcher."""
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    if dispatch is None or attention is not dispatch.dispatch_attention_fn:
        return None
    return dispatch._AttentionBackendRegistry.get_active_backend()[0]
