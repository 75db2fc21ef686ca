"""An attention site: one attention call in the source, and the exchange that lets it see whole sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .binding import ATTRIBUTE, Binding
from .collectives import all_gather, all_to_all
from .parts import HeadPart, head_parts
from .region import Region, pad_rows

# For each layout: where batch, tokens, heads and channels are, and the way back from (tokens, batch, heads, channels).
_TO_ROWS = {"BSHD": (1, 0, 2, 3), "BHSD": (2, 0, 1, 3)}
_FROM_ROWS = {"BSHD": (1, 0, 2, 3), "BHSD": (1, 2, 0, 3)}


class AttentionSite:
    """The exchange around one attention call of a bound model.

    Between `seq_to_heads` and `heads_to_seq` (or after `gather_kv`, for keys and values) tokens stand in the order of
    the model that is not cut: the streams one after the other, as the source concatenates them.
    """

    def __init__(self, binding: Binding, streams: tuple[str, ...], kv_streams: tuple[str, ...], layout: str) -> None:
        self._binding = binding
        self._streams = streams
        self._kv_streams = kv_streams
        self._layout = layout
        self._heads: list[HeadPart] = []
        self._region: Region | None = None
        self._batch = 0

    def seq_to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Trade tokens for heads: from this rank's tokens with all heads to all tokens with this rank's heads.

        `query` is (B, S/P, H, D) or (B, H, S/P, D) as the site's layout says; `key` and `value` may have fewer heads.
        One all-to-all; sizes follow from the global lengths. Backward is the reverse all-to-all.
        """
        region = self._resolve(query)
        self._check_tokens("key", key, region, self._kv_streams)
        self._check_tokens("value", value, region, self._kv_streams)
        binding = self._binding
        rows = [x.permute(_TO_ROWS[self._layout]) for x in _in_one_dtype(query, key, value)]
        self._heads = head_parts(rows[0].shape[2], rows[1].shape[2], binding.degree)
        mine = self._heads[binding.rank]

        send = [[_heads_of(x, i, part).reshape(-1) for i, x in enumerate(rows)] for part in self._heads]
        send_sizes = [sum(piece.numel() for piece in pieces) for pieces in send]
        parts = [self._stream_parts(region, s) for s in (self._streams, self._kv_streams, self._kv_streams)]
        counts = [mine.query_size, mine.kv_size, mine.kv_size]
        shapes = [
            [
                (sum(part[rank]), x.shape[1], count, x.shape[3])
                for x, part, count in zip(rows, parts, counts, strict=True)
            ]
            for rank in range(binding.degree)
        ]
        receive_sizes = [[_numel(shape) for shape in of_rank] for of_rank in shapes]
        flat = all_to_all(
            torch.cat([piece for pieces in send for piece in pieces]),
            [sum(sizes) for sizes in receive_sizes],
            send_sizes,
            binding.group,
        )
        received = torch.split(flat, [size for sizes in receive_sizes for size in sizes])
        whole = []
        for i in range(3):
            pieces = [received[rank * 3 + i].reshape(shapes[rank][i]) for rank in range(binding.degree)]
            whole.append(_by_stream(pieces, parts[i]).permute(_FROM_ROWS[self._layout]))
        if mine.kv_index is not None:
            index = torch.tensor(mine.kv_index, device=query.device)
            whole[1:] = [x.index_select(self._head_dim, index) for x in whole[1:]]
        return whole[0], whole[1], whole[2]

    def heads_to_seq(self, out: Tensor) -> Tensor:
        """The way back, for the attention's output: to this rank's tokens with all heads. One all-to-all."""
        region = self._resolved()
        binding = self._binding
        rows = out.permute(_TO_ROWS[self._layout])
        parts = self._stream_parts(region, self._streams)
        total = sum(sum(part) for part in parts)
        mine = self._heads[binding.rank]
        if rows.shape[0] != total or rows.shape[2] != mine.query_size:
            raise ValueError(
                f"{binding.model_name}: the attention's output has shape {tuple(out.shape)} ({self._layout}), "
                f"expected {total} tokens and {mine.query_size} heads"
            )
        send = [piece.reshape(-1) for piece in _by_rank(rows, parts)]
        tokens = sum(parts[binding.rank])
        shapes = [(tokens, rows.shape[1], part.query_size, rows.shape[3]) for part in self._heads]
        receive_sizes = [_numel(shape) for shape in shapes]
        flat = all_to_all(torch.cat(send), receive_sizes, [piece.numel() for piece in send], binding.group)
        pieces = [
            piece.reshape(shape).transpose(0, 1)
            for piece, shape in zip(torch.split(flat, receive_sizes), shapes, strict=True)
        ]
        # Contiguous as (B, S, H, D), like the output of torch's fused kernels: what follows may use .view.
        joined = torch.cat(pieces, dim=2)
        return joined if self._layout == "BSHD" else joined.transpose(1, 2)

    def gather_kv(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens, for this rank's queries. One all-gather; backward is a reduce-scatter.

        Shapes as in `seq_to_heads`; `query` is only looked at.
        """
        region = self._resolve(query)
        self._check_tokens("key", key, region, self._kv_streams)
        self._check_tokens("value", value, region, self._kv_streams)
        binding = self._binding
        rows = [x.permute(_TO_ROWS[self._layout]) for x in _in_one_dtype(key, value)]
        parts = self._stream_parts(region, self._kv_streams)
        sizes = [sum(part) for part in parts]
        packed = torch.cat([x.reshape(x.shape[0], -1) for x in rows], dim=1)
        whole = all_gather(pad_rows(packed, max(sizes)), binding.degree, binding.group)
        pieces = [whole.narrow(0, rank * max(sizes), size) for rank, size in enumerate(sizes)]
        ordered = _by_stream(pieces, parts) if len(self._kv_streams) > 1 or min(sizes) < max(sizes) else whole
        widths = [_numel(x.shape[1:]) for x in rows]
        out = [
            flat.reshape(-1, *x.shape[1:]).permute(_FROM_ROWS[self._layout])
            for flat, x in zip(torch.split(ordered, widths, dim=1), rows, strict=True)
        ]
        return out[0], out[1]

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
        mine = self._heads[self._binding.rank]
        return mask.narrow(-3, mine.query_start, mine.query_size)

    def mask_rows(self, mask: Any) -> Any:
        """A mask over whole sequences, cut to the rows of this rank's queries (all columns stay)."""
        if mask is None:
            return None
        self._check_mask(mask)
        if self._is_key_mask(mask) or mask.shape[-2] == 1:
            return mask
        return self._resolved().local_rows(mask, "attention mask", mask.ndim - 2, self._streams)

    def whole_length(self, length: int, *streams: str) -> int:
        """The tokens of `streams` on all ranks, given `length`, those of this rank."""
        region = self._region = self._binding.region_of(streams, length)
        self._check_length(length, region, streams)
        return sum(region.lengths[stream] for stream in streams)

    def local_length(self, length: int, *streams: str) -> int:
        """The tokens of `streams` on this rank, given `length`, those of all ranks: undoes `whole_length`."""
        region = self._resolved()
        assert length == sum(region.lengths[stream] for stream in streams)
        return sum(region.part_sizes(stream)[self._binding.rank] for stream in streams)

    @property
    def _head_dim(self) -> int:
        return self._layout.index("H")

    def _stream_parts(self, region: Region, streams: tuple[str, ...]) -> list[list[int]]:
        """For each rank, its number of tokens of each stream."""
        by_stream = [region.part_sizes(stream) for stream in streams]
        return [list(sizes) for sizes in zip(*by_stream, strict=True)]

    def _resolve(self, query: Tensor) -> Region:
        tokens = query.shape[self._layout.index("S")]
        region = self._binding.region_of(self._streams, tokens)
        if not torch.compiler.is_compiling():
            self._binding.exchanged = True
        self._batch = query.shape[0]
        self._check_tokens("query", query, region, self._streams)
        self._region = region
        return region

    def _resolved(self) -> Region:
        assert self._region is not None, "seq_to_heads or gather_kv comes first"
        return self._region

    def _check_tokens(self, name: str, tensor: Tensor, region: Region, streams: tuple[str, ...]) -> None:
        self._check_length(tensor.shape[self._layout.index("S")], region, streams, f"{name} {tuple(tensor.shape)}: ")

    def _check_length(self, length: int, region: Region, streams: tuple[str, ...], what: str = "") -> None:
        parts = [region.part_sizes(stream)[self._binding.rank] for stream in streams]
        if length != sum(parts):
            expected = " + ".join(f"{s} {n} of {region.lengths[s]}" for s, n in zip(streams, parts, strict=True))
            raise ValueError(
                f"{self._binding.model_name}: {what}{length} tokens on this rank, but the plan says {expected}"
            )

    def _is_key_mask(self, mask: Tensor) -> bool:
        # diffusers' dispatcher reads a 2-D mask as (B, S); torch's own function, used with BHSD, as (S, S).
        # Under (S, S) the dispatcher takes a 2-D mask for a key mask as well, where the first size is the batch's.
        return mask.ndim == 1 or (mask.ndim == 2 and self._layout == "BSHD" and mask.shape[0] == self._batch)

    def _check_mask(self, mask: Any) -> None:
        region = self._resolved()
        if not isinstance(mask, Tensor):
            raise ValueError(f"{self._binding.model_name}: a mask of type {type(mask).__name__} is not supported")
        keys = sum(region.lengths[stream] for stream in self._kv_streams)
        queries = sum(region.lengths[stream] for stream in self._streams)
        fits = mask.shape[-1] in (1, keys) and (self._is_key_mask(mask) or mask.shape[-2] in (1, queries))
        if not fits:
            raise ValueError(
                f"{self._binding.model_name}: the attention mask has shape {tuple(mask.shape)}, but the whole "
                f"sequence is {queries} queries and {keys} keys: a mask must be built from global lengths"
            )


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

    def whole_length(self, length: int, *streams: str) -> int:
        return length

    local_length = whole_length


LOCAL_ATTENTION = LocalAttention()


def attention_site(
    attention: torch.nn.Module,
    *streams: str,
    kv: tuple[str, ...] | None = None,
    layout: str = "BSHD",
    when: bool = True,
) -> AttentionSite | LocalAttention:
    """The exchange for an attention call inside `attention`, whose queries are `streams` one after the other.

    `kv` names the streams of keys and values where they differ. With `when` false the call is local: its keys and
    values are replicated. `layout` is that of query, key and value: "BSHD" or "BHSD".
    """
    binding = getattr(attention, ATTRIBUTE, None)
    if binding is None or not when:
        return LOCAL_ATTENTION
    return AttentionSite(binding, streams, streams if kv is None else kv, layout)


def _in_one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """`tensors` as they are, or under autocast, where norms leave float32 behind, as attention will cast them."""
    if len({tensor.dtype for tensor in tensors}) == 1:
        return tensors
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        raise ValueError(f"query, key and value differ in dtype: {', '.join(str(t.dtype) for t in tensors)}")
    return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)


def _heads_of(rows: Tensor, index: int, part: HeadPart) -> Tensor:
    if index == 0:
        return rows.narrow(2, part.query_start, part.query_size)
    return rows.narrow(2, part.kv_start, part.kv_size)


def _by_stream(pieces: list[Tensor], parts: list[list[int]]) -> Tensor:
    """Rank-major pieces, each holding one part of every stream, to whole streams one after the other (dim 0)."""
    split = [torch.split(piece, part) for piece, part in zip(pieces, parts, strict=True)]
    return torch.cat([of_rank[stream] for stream in range(len(parts[0])) for of_rank in split])


def _by_rank(rows: Tensor, parts: list[list[int]]) -> list[Tensor]:
    """The reverse: whole streams one after the other to one piece a rank."""
    streams = range(len(parts[0]))
    split = torch.split(rows, [part[stream] for stream in streams for part in parts])
    degree = len(parts)
    return [torch.cat([split[stream * degree + rank] for stream in streams]) for rank in range(degree)]


def _numel(shape: tuple[int, ...] | torch.Size) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
