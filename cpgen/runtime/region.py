"""A region: the part of one forward in which streams are cut across ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .collectives import all_gather, all_gather_replicated
from .parts import segments
from .rows import in_order, pad_rows

if TYPE_CHECKING:
    from .binding import Binding

Streams = str | tuple[str, ...]


class Region:
    """One forward of a bound model. Holds the length of each stream before it was cut."""

    def __init__(self, binding: Binding) -> None:
        self.binding = binding
        self.lengths: dict[str, int] = {}
        self._outer_rng: list[Tensor] | None = None
        self._inner_rng: list[Tensor] = []

    def fork_rng(self) -> None:
        """Draw random numbers of this rank's own until the region ends (for dropout).

        Ranks hold unequal parts, so they draw unequally much. What follows the region, such as the next step's noise,
        must still be the same on all of them; and as without a region, if nothing was drawn in it.
        """
        self._outer_rng = _rng_states()
        seed = int(torch.randint(2**62, (1,)))
        torch.manual_seed(seed + self.binding.cp.rank)
        self._inner_rng = _rng_states()

    def refuse(self, condition: str, holds: bool) -> None:
        """Raise ValueError if `condition`, under which this forward would compute wrong numbers, `holds`."""
        if holds:
            self._join_rng()
            raise ValueError(
                f"{self.binding.model_name}: a forward with `{condition}` is not possible under context parallelism: "
                f"its plan refuses it, as each rank would compute wrong numbers. Use a model that is not parallelized"
            )

    def shard(
        self,
        value: Any,
        name: str,
        *path: str | int,
        dim: int,
        ndim: int | None,
        stream: Streams,
        optional: bool = False,
        start: int = 0,
        when: bool = True,
    ) -> Any:
        """This rank's part of `value` along `dim`, in a new container where `path` leads into one.

        `value` is a tensor of `ndim` dims, or a nested tuple, list or dict in which `path` (indices, keys, "*" for
        every element) leads to such tensors. `stream` names the tokens that `dim` counts; a tuple means several
        streams one after the other. The first tensor of a stream sets its length, the others must agree. A stream
        whose values are all None (`optional`) has no tokens in this forward. A tensor that lacks the first `start`
        tokens of its stream is cut where those that have them are: a part of it may be empty.
        Backward: the gradient is padded with zeros, without communication.

        Raises ValueError if a tensor is missing (unless `optional`), has another ndim, another length, or fewer
        tokens than ranks.
        """
        if not when:
            return value

        def apply(part: Any, label: str) -> Any:
            return self._shard(part, label, dim, ndim, stream, optional, start)

        if torch.compiler.is_compiling():
            return self._at(value, name, path, apply)
        try:
            return self._at(value, name, path, apply)
        except ValueError:
            self._join_rng()  # the caller may skip this batch: what it draws next must be the same on all ranks
            raise

    def gather(
        self,
        value: Any,
        name: str,
        *path: str | int,
        dim: int,
        ndim: int | None,
        stream: str,
        optional: bool = False,
        cut_again: bool = False,
    ) -> Any:
        """Put a stream's parts together along `dim`, at an exit: all that follows is the same on every rank.

        One all-gather a tensor; backward takes the local part times the degree, without communication. That needs the
        same gradient on every rank: where another region cuts the result again (`cut_again`) each has its own tokens'
        only, and backward is a reduce-scatter (sum). None stays None if `optional`.
        """
        if value is None and optional:
            return None
        whole = self._at(value, name, path, lambda x, label: self._gather(x, label, dim, ndim, stream, not cut_again))
        self._end()
        return whole

    def gather_within(self, value: Any, name: str, *path: str | int, dim: int, ndim: int | None, stream: str) -> Any:
        """Put a stream's parts together in mid-network, ahead of an operation that needs all tokens.

        One all-gather a tensor; backward is a reduce-scatter (sum).
        """
        return self._at(value, name, path, lambda x, label: self._gather(x, label, dim, ndim, stream, False))

    def local_prefix(self, count: int, stream: str) -> int:
        """How many of the first `count` tokens of `stream` are in this rank's part, which they begin."""
        mine = self.segments(stream)[self.binding.cp.rank]
        return sum(min(max(count - start, 0), size) for start, size in mine)

    def pin(self, block: Callable[..., Any]) -> Callable[..., Any]:
        """`block`, to be called with this region's lengths even when backward recomputes it after another forward."""
        if torch.compiler.is_compiling():
            return block  # a compiled backward runs no Python: the lengths are in the graph
        return _Pinned(self, block)

    def segments(self, stream: str) -> list[list[tuple[int, int]]]:
        """For each rank the (start, size) of what it holds of `stream`, ascending."""
        if stream not in self.lengths:
            raise ValueError(
                f"{self.binding.model_name}: stream {stream!r} is used before anything of it was cut; "
                f"cut so far: {sorted(self.lengths) or 'nothing'}"
            )
        return segments(self.lengths[stream], self.binding.cp.degree, self.binding.balanced)

    def part_sizes(self, stream: str) -> list[int]:
        """The number of tokens of `stream` on each rank."""
        return [sum(size for _, size in of_rank) for of_rank in self.segments(stream)]

    def ulysses_parts(self, streams: tuple[str, ...]) -> list[list[list[int]]]:
        """For each rank of this one's Ulysses group, each stream, each segment: the number of tokens."""
        axis = self.binding.ulysses
        first = self.binding.outer.rank * axis.degree
        of_streams = [self.segments(stream)[first : first + axis.degree] for stream in streams]
        return [[[size for _, size in ranks[i]] for ranks in of_streams] for i in range(axis.degree)]

    def outer_runs(self, streams: tuple[str, ...]) -> list[list[list[tuple[int, int]]]]:
        """For each rank of the outer axis and each stream the (start, size) of what its Ulysses group holds."""
        inner = self.binding.ulysses.degree
        found = []
        for rank in range(self.binding.outer.degree):
            groups = [self.segments(stream)[rank * inner : (rank + 1) * inner] for stream in streams]
            # Heads ascend with the rank, tails descend: each makes one run.
            ends = [(group[0], group[-1]) for group in groups]
            sizes = [[sum(of_rank[i][1] for of_rank in group) for i in range(len(group[0]))] for group in groups]
            starts = [[first[0][0], *(start for start, _ in last[1:])] for first, last in ends]
            found.append([list(zip(*pair, strict=True)) for pair in zip(starts, sizes, strict=True)])
        return found

    def positions(self, streams: tuple[str, ...]) -> list[list[tuple[int, int]]]:
        """`outer_runs` counted in the sequence that `streams` make one after the other."""
        offsets = [sum(self.lengths[stream] for stream in streams[:i]) for i in range(len(streams))]
        return [
            [(offset + start, size) for offset, runs in zip(offsets, of_rank, strict=True) for start, size in runs]
            for of_rank in self.outer_runs(streams)
        ]

    def _at(self, value: Any, label: str, path: tuple[str | int, ...], apply: Callable[[Any, str], Any]) -> Any:
        if not path or value is None:
            return apply(value, label)
        step, rest = path[0], path[1:]
        if isinstance(value, dict):
            if step != "*" and step not in value:
                raise ValueError(f"{self.binding.model_name}: plan entry {label!r}: no key {step!r} in {list(value)}")
            return {k: self._at(v, f"{label}[{k!r}]", rest, apply) if step in ("*", k) else v for k, v in value.items()}
        if not isinstance(value, (tuple, list)):
            raise ValueError(
                f"{self.binding.model_name}: plan entry {label!r}: expected a tuple, list or dict to take "
                f"[{step}] of, got {_describe(value)}"
            )
        if step != "*" and not (isinstance(step, int) and -len(value) <= step < len(value)):
            raise ValueError(f"{self.binding.model_name}: plan entry {label!r}: no element [{step}] in {len(value)}")
        chosen = range(len(value)) if step == "*" else (step % len(value),)
        items = [self._at(v, f"{label}[{i}]", rest, apply) if i in chosen else v for i, v in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items

    def _shard(
        self, value: Any, label: str, dim: int, ndim: int | None, stream: Streams, optional: bool, start: int
    ) -> Any:
        if value is None and optional:
            if isinstance(stream, str):
                self.lengths.setdefault(stream, 0)  # attention over several streams goes on without this one
            return None
        tensor = checked(value, label, ndim, dim, self.binding.model_name)
        size = tensor.shape[dim]
        if isinstance(stream, str):
            self._register(stream, start + size, f"{label} with {start} ahead" if start else label, dim)
            stream = (stream,)
        return self.local_rows(tensor, label, dim, stream, start)

    def local_rows(self, tensor: Tensor, label: str, dim: int, streams: tuple[str, ...], start: int = 0) -> Tensor:
        """This rank's part of each of `streams`, which lie one after the other on `dim`, without the first `start`
        tokens: a copy, contiguous."""
        total = sum(self.lengths[stream] for stream in streams) - start
        if tensor.shape[dim] != total:
            lengths = " + ".join(f"{s} {self.lengths[s]}" for s in streams)
            raise ValueError(
                f"{self.binding.model_name}: plan entry {label!r} has {tensor.shape[dim]} tokens on dim {dim}, "
                f"but {lengths} = {total}: shape {tuple(tensor.shape)}"
            )
        # A plan names several streams where the source concatenates them: the dim is their sum.
        pieces = []
        offset = -start
        for stream in streams:
            for at, size in self.segments(stream)[self.binding.cp.rank]:
                first, end = max(offset + at, 0), max(offset + at + size, 0)
                pieces.append(tensor.narrow(dim, first, end - first))
            offset += self.lengths[stream]
        return torch.cat(pieces, dim=dim) if len(pieces) > 1 else pieces[0].contiguous()

    def _register(self, stream: str, size: int, label: str, dim: int) -> None:
        degree = self.binding.cp.degree
        if 0 < size < degree:  # none at all: no rank has any, and attention goes on without this stream
            raise ValueError(
                f"{self.binding.model_name}: plan entry {label!r}: stream {stream!r} has {size} tokens on dim {dim}, "
                f"fewer than the context-parallel degree {degree}; every rank needs at least one"
            )
        known = self.lengths[stream] = self.lengths.get(stream) or size
        if known != size:
            raise ValueError(
                f"{self.binding.model_name}: plan entry {label!r} has {size} tokens on dim {dim}, but stream "
                f"{stream!r} has {known} in this forward (degree {degree})"
            )

    def _gather(self, value: Any, label: str, dim: int, ndim: int | None, stream: str, replicated: bool) -> Tensor:
        binding = self.binding
        tensor = checked(value, label, ndim, dim, binding.model_name)
        cp = binding.cp
        sizes = self.part_sizes(stream)
        if tensor.shape[dim] != sizes[cp.rank]:
            raise ValueError(
                f"{binding.model_name}: plan entry {label!r} has {tensor.shape[dim]} tokens on dim {dim}, but this "
                f"rank's part of stream {stream!r} is {sizes[cp.rank]} of {self.lengths[stream]}: nothing cut it, "
                f"or something changed its length"
            )
        rows = pad_rows(tensor.movedim(dim, 0), max(sizes))
        if replicated:
            whole = all_gather_replicated(rows, cp.degree, cp.rank, cp.group)
        else:
            whole = all_gather(rows, cp.degree, cp.group)
        parts = [[[size for _, size in of_rank]] for of_rank in self.segments(stream)]
        return in_order(whole, parts, binding.balanced).movedim(0, dim).contiguous()

    def _end(self) -> None:
        if torch.compiler.is_compiling():
            return
        if not self.binding.exchanged and self.binding.has_attention:
            raise ValueError(
                f"{self.binding.model_name}: no attention call exchanged tokens in this forward, so each rank attended "
                f"to its own part only. Its attention is in none of the functions that the plan describes"
            )
        self.binding.check_added()
        self._join_rng()

    def _join_rng(self) -> None:
        """Draw the same as the other ranks again."""
        if self._outer_rng is not None:
            drawn = any(not torch.equal(a, b) for a, b in zip(self._inner_rng, _rng_states(), strict=False))
            _set_rng_states(self._outer_rng)
            self._outer_rng = None
            if drawn:
                torch.randint(2**62, (1,))  # so that the next region draws others


def checked(value: Any, label: str, ndim: int | None, dim: int, model_name: str) -> Tensor:
    """`value`, if it is a tensor of `ndim` dims (None: any that have `dim`). Else raises ValueError."""
    if not isinstance(value, Tensor):
        raise ValueError(
            f"{model_name}: plan entry {label!r}: expected a tensor to cut on dim {dim}, got {_describe(value)}"
        )
    if (value.ndim <= dim) if ndim is None else (value.ndim != ndim):
        raise ValueError(
            f"{model_name}: plan entry {label!r} says ndim {ndim}, cut on dim {dim}, but the tensor has {value.ndim}: "
            f"shape {tuple(value.shape)}"
        )
    return value


def _rng_states() -> list[Tensor]:
    on_gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *on_gpu]


def _set_rng_states(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


class _Pinned:
    def __init__(self, region: Region, block: Callable[..., Any]) -> None:
        self._region = region
        self._block = block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        latest = self._region.binding.latest
        outer = latest.region, latest.pinned
        latest.region, latest.pinned = self._region, True
        try:
            return self._block(*args, **kwargs)
        finally:
            latest.region, latest.pinned = outer


class LocalRegion:
    """What `begin_region` gives for a model that is not bound, or bound with degree 1: changes nothing."""

    def shard(self, value: Any, name: str, *path: str | int, **_: Any) -> Any:
        return value

    gather = gather_within = shard

    def refuse(self, condition: str, holds: bool) -> None:
        pass

    def local_prefix(self, count: int, stream: str) -> int:
        return count

    def pin(self, block: Callable[..., Any]) -> Callable[..., Any]:
        return block


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
