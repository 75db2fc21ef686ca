"""An attention site: one attention call in the source, and the exchange that lets it see whole sequences."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .binding import ATTRIBUTE, LIST, Binding, note_exchange
from .casting import as_attention_casts, in_one_dtype
from .collectives import all_gather, all_to_all
from .dtensors import Following, to_local
from .kernels import choose_kernel
from .masks import check_mask, four_dims, is_key_mask
from .parts import HeadPart, head_parts, segments
from .region import Region, checked
from .ring import ring_attention
from .rows import in_order, model_to_rank, pad_rows, rank_to_model

# For each layout: where batch, tokens, heads and channels are, and the way back from (tokens, batch, heads, channels).
_TO_ROWS = {"BSHD": (1, 0, 2, 3), "BHSD": (2, 0, 1, 3)}
_FROM_ROWS = {"BSHD": (1, 0, 2, 3), "BHSD": (1, 2, 0, 3)}


class AttentionSite:
    """The exchange around one attention call of a bound model.

    Between `seq_to_heads` and `heads_to_seq` (or after `gather_kv`, for keys and values) tokens stand in the order of
    the model that is not cut: the streams one after the other, as the source concatenates them. Under hybrid
    strategies that holds for the tokens of the ranks on the Ulysses axis, which the outer exchange then connects.
    """

    def __init__(
        self,
        binding: Binding,
        streams: tuple[str, ...],
        kv_streams: tuple[str, ...],
        layout: str,
        transposed: bool = False,
    ) -> None:
        self._binding = binding
        self._streams = streams
        self._kv_streams = kv_streams
        self._layout = layout  # in the call
        self._given = {"BSHD": "BHSD", "BHSD": "BSHD"}[layout] if transposed else layout  # ahead of it
        self._heads: list[HeadPart] = []
        self._region: Region | None = None
        self._traded = False
        self._follow: Following | None = None
        self._batch = 0

    def seq_to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Trade tokens for heads: from this rank's tokens with all heads to all tokens with this rank's heads.

        `query` is (B, S/P, H, D) or (B, H, S/P, D) as the site's layout says; `key` and `value` may have fewer heads.
        One all-to-all; sizes follow from the global lengths. Backward is the reverse all-to-all.
        """
        query, key, value = self._local(query, key, value)
        region = self._resolve(query, key, value)
        binding, axis = self._binding, self._binding.ulysses
        rows = [x.permute(_TO_ROWS[self._given]) for x in in_one_dtype(query, key, value)]
        of_key, of_value = (head_parts(rows[0].shape[2], x.shape[2], axis.degree) for x in rows[1:])
        self._heads = of_key
        self._traded = True
        mine = [self._heads[axis.rank], of_key[axis.rank], of_value[axis.rank]]

        send = [
            [_heads_of(x, i, part[i]).reshape(-1) for i, x in enumerate(rows)]
            for part in zip(of_key, of_key, of_value, strict=True)
        ]
        send_sizes = [sum(piece.numel() for piece in pieces) for pieces in send]
        parts = [region.ulysses_parts(s) for s in (self._streams, self._kv_streams, self._kv_streams)]
        counts = [mine[0].query_size, mine[1].kv_size, mine[2].kv_size]
        shapes = [
            [
                (_total(part[rank]), x.shape[1], count, x.shape[3])
                for x, part, count in zip(rows, parts, counts, strict=True)
            ]
            for rank in range(axis.degree)
        ]
        receive_sizes = [[_numel(shape) for shape in of_rank] for of_rank in shapes]
        flat = all_to_all(
            torch.cat([piece for pieces in send for piece in pieces]),
            [sum(sizes) for sizes in receive_sizes],
            send_sizes,
            axis.group,
        )
        received = torch.split(flat, [size for sizes in receive_sizes for size in sizes])
        whole = []
        for i in range(3):
            pieces = [received[rank * 3 + i].reshape(shapes[rank][i]) for rank in range(axis.degree)]
            whole.append(rank_to_model(pieces, parts[i], binding.balanced).permute(_FROM_ROWS[self._given]))
        for i in (1, 2):
            if mine[i].kv_index is not None:
                index = torch.tensor(mine[i].kv_index, device=query.device)
                whole[i] = whole[i].index_select(self._given.index("H"), index)
        return whole[0], whole[1], whole[2]

    def heads_to_seq(self, out: Tensor) -> Tensor:
        """The way back, for the attention's output: to this rank's tokens with all heads. One all-to-all."""
        region = self._resolved()
        self._traded = False
        binding, axis = self._binding, self._binding.ulysses
        rows = out.permute(_TO_ROWS[self._layout])
        parts = region.ulysses_parts(self._streams)
        total = sum(_total(part) for part in parts)
        mine = self._heads[axis.rank]
        if rows.shape[0] != total or rows.shape[2] != mine.query_size:
            raise ValueError(
                f"{binding.model_name}: the attention's output has shape {tuple(out.shape)} ({self._layout}), "
                f"expected {total} tokens and {mine.query_size} heads"
            )
        send = [piece.reshape(-1) for piece in model_to_rank(rows, parts, binding.balanced)]
        tokens = _total(parts[axis.rank])
        shapes = [(tokens, rows.shape[1], part.query_size, rows.shape[3]) for part in self._heads]
        receive_sizes = [_numel(shape) for shape in shapes]
        flat = all_to_all(torch.cat(send), receive_sizes, [piece.numel() for piece in send], axis.group)
        pieces = [
            piece.reshape(shape).transpose(0, 1)
            for piece, shape in zip(torch.split(flat, receive_sizes), shapes, strict=True)
        ]
        # Contiguous as (B, S, H, D), like the output of torch's fused kernels: what follows may use .view.
        joined = torch.cat(pieces, dim=2)
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
        packed = torch.cat([x.reshape(x.shape[0], -1) for x in rows], dim=1)
        whole = all_gather(pad_rows(packed, max(_total(part) for part in parts)), axis.degree, axis.group)
        ordered = in_order(whole, parts, self._binding.balanced)
        widths = [_numel(x.shape[1:]) for x in rows]
        out = [
            flat.reshape(-1, *x.shape[1:]).permute(_FROM_ROWS[self._given])
            for flat, x in zip(torch.split(ordered, widths, dim=1), rows, strict=True)
        ]
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

    def mask_heads(self, mask: Any) -> Any:
        """A mask over whole sequences, for the heads that this rank holds after `seq_to_heads`.

        `mask` is None or (B, S), (B, 1, 1, S), (B, 1, S, S), (B, H, S, S), bool or additive.
        Raises ValueError if it doesn't span the whole streams.
        """
        if mask is None:
            return None
        self._check_mask(mask)
        if mask.ndim < 3 or mask.shape[-3] == 1:
            return mask
        total = sum(part.query_size for part in self._heads)
        if mask.shape[-3] != total:
            raise ValueError(f"{self._binding.model_name}: mask {tuple(mask.shape)} does not fit {total} heads")
        mine = self._heads[self._binding.ulysses.rank]
        return mask.narrow(-3, mine.query_start, mine.query_size)

    def mask_rows(self, mask: Any) -> Any:
        """A mask over whole sequences, cut to the rows of this rank's queries (all columns stay)."""
        if mask is None:
            return None
        self._check_mask(mask)
        if is_key_mask(mask, self._layout, self._batch) or mask.shape[-2] == 1:
            return mask
        mine = self._resolved().positions(self._streams)[self._binding.outer.rank]
        return torch.cat([mask.narrow(-2, start, size) for start, size in mine], dim=-2)

    def shard(self, value: Any, name: str, *, dim: int, ndim: int, stream: str, optional: bool = False) -> Any:
        """This rank's part of a tensor over all tokens of `stream`, for its tokens ahead of or behind the call.

        As in `Region.shard`. Raises ValueError likewise.
        """
        if value is None and optional:
            return None
        cp = self._binding.cp
        size = checked(value, name, ndim, dim, self._binding.model_name).shape[dim]
        tokens = sum(size for _, size in segments(size, cp.degree, self._binding.balanced)[cp.rank])
        region = self._region or self._binding.region_of((stream,), tokens)
        return region.shard(value, name, dim=dim, ndim=ndim, stream=stream)

    def whole_length(self, length: int, *streams: str) -> int:
        """The tokens of `streams` on all ranks, given `length`, those of this rank."""
        region = self._region = self._binding.region_of(streams, length)
        self._check_length(length, region, streams)
        return sum(region.lengths[stream] for stream in streams)

    def local_length(self, length: int, *streams: str) -> int:
        """The tokens of `streams` on this rank, given `length`, those of all ranks: undoes `whole_length`."""
        region = self._resolved()
        assert length == sum(region.lengths[stream] for stream in streams)
        return sum(region.part_sizes(stream)[self._binding.cp.rank] for stream in streams)

    def _local(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The local tensors of those that are DTensors, which the output will be if the query is."""
        if self._traded:
            return query, key, value
        query, self._follow = to_local(query, self._binding, self._given)
        if self._follow is not None and self._given != self._layout:
            raise ValueError(
                f"{self._binding.model_name}: a DTensor query is transposed in the attention call; transpose it ahead"
            )
        key, value = (to_local(x, self._binding, self._given)[0] for x in (key, value))
        return query, key, value

    def _resolve(self, query: Tensor, key: Tensor, value: Tensor) -> Region:
        """The region of this call, whose lengths the tensors must have."""
        if self._traded:  # seq_to_heads has looked already
            return self._resolved()
        if {x.ndim for x in (query, key, value)} != {4}:
            shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
            raise ValueError(
                f"{self._binding.model_name}: query, key and value need 4 dims ({self._given}), got {shapes}"
            )
        dim = self._given.index("S")
        region = self._region = self._binding.region_of(self._streams, query.shape[dim])
        note_exchange(self._binding.latest.key)
        self._batch = query.shape[0]
        streams = (self._streams, self._kv_streams, self._kv_streams)
        for name, tensor, of in zip(("query", "key", "value"), (query, key, value), streams, strict=True):
            self._check_length(tensor.shape[dim], region, of, f"{name} {tuple(tensor.shape)}: ")
        return region

    def _resolved(self) -> Region:
        assert self._region is not None, "seq_to_heads, gather_kv or ring_attention comes first"
        return self._region

    def _check_length(self, length: int, region: Region, streams: tuple[str, ...], what: str = "") -> None:
        parts = [region.part_sizes(stream)[self._binding.cp.rank] for stream in streams]
        if length != sum(parts):
            expected = " + ".join(f"{s} {n} of {region.lengths[s]}" for s, n in zip(streams, parts, strict=True))
            raise ValueError(
                f"{self._binding.model_name}: {what}{length} tokens on this rank, but the plan says {expected}"
            )

    def _check_causal(self, mask: Any) -> None:
        if mask is not None:
            raise ValueError(f"{self._binding.model_name}: causal attention takes no mask beside is_causal")
        if self._streams != self._kv_streams:
            raise ValueError(f"{self._binding.model_name}: causal attention needs queries and keys of the same tokens")

    def _check_mask(self, mask: Any) -> None:
        lengths = self._resolved().lengths
        keys = sum(lengths[stream] for stream in self._kv_streams)
        queries = sum(lengths[stream] for stream in self._streams)
        # Where a rank holds one token, a size of 1 could be a local length.
        fewest = min(sum(sizes) for sizes in zip(*map(self._resolved().part_sizes, self._kv_streams), strict=True))
        check_mask(mask, queries, keys, fewest > 1, self._layout, self._batch, self._binding.model_name)


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
    if binding is None or not when:
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


def _heads_of(rows: Tensor, index: int, part: HeadPart) -> Tensor:
    if index == 0:
        return rows.narrow(2, part.query_start, part.query_size)
    return rows.narrow(2, part.kv_start, part.kv_size)


def _active_backend(attention: Callable[..., Any]) -> Any:
    """The backend that `attention` would choose by itself, if it is diffusers' dispatcher."""
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    if dispatch is None or attention is not dispatch.dispatch_attention_fn:
        return None
    return dispatch._AttentionBackendRegistry.get_active_backend()[0]


def _total(part: list[list[int]]) -> int:
    return sum(sum(sizes) for sizes in part)


def _numel(shape: tuple[int, ...] | torch.Size) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
