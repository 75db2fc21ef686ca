"""What an attention site knows of its tensors: the streams that they hold, whose lengths they and masks must have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .binding import Binding, note_exchange
from .dtensors import Following, to_local
from .masks import check_mask, is_key_mask
from .parts import HeadPart, segments
from .region import Region, checked


class Site:
    """One attention call of a bound model: masks, lengths and cuts for it, and the checks of what it is given."""

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
