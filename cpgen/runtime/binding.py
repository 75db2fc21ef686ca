"""Binds a model to its context-parallel group. A model that is not bound computes what upstream's class computes."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh

from .mesh import axis_size, split_cp
from .region import LocalRegion, Region

ATTRIBUTE = "_cpgen_binding"  # set on every module of a bound model
LIST = "_cpgen_list"  # set on every module inside of the blocks: the name of their list
_LOCAL_REGION = LocalRegion()
_exchanged: set[str] = set()  # keys of the models whose attention has looked past this rank's tokens


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def note_exchange(key: str) -> bool:
    """Remember that attention of the models with `key` looks past this rank's tokens. While compiling, at the time of
    tracing: compiled code runs no Python, and setting an attribute is not traced inside of activation checkpointing."""
    _exchanged.add(key)
    return True


@dataclass(frozen=True)
class Axis:
    """This rank's place on an axis of the mesh. The group goes by name, so that a bound model can be copied."""

    group: str
    degree: int
    rank: int

    @classmethod
    def of(cls, mesh: DeviceMesh | None) -> Axis:
        """The axis of a 1-D mesh; None stands for this rank alone."""
        if mesh is None:
            return cls("", 1, 0)
        return cls(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())


class Latest:
    """The region of the latest forward: of a model, or of several that share modules."""

    def __init__(self) -> None:
        self.region: Region | None = None
        self.pinned = False
        self.key = uuid.uuid4().hex  # text: compiled code is made anew for another one
        self.seen: set[tuple[tuple[str, int], ...]] = set()  # lengths of the streams of all regions
        self.attending: set[type[torch.nn.Module]] = set()  # classes whose attention has run through a site


class Binding:
    """A model's place in its context-parallel group, and the region of its latest forward.

    Streams are cut over `cp`. For attention, neighbours on `ulysses` trade tokens for heads; what they hold together is
    exchanged over `outer`. `balanced` streams are cut in head-tail order (see `parts.segments`).
    """

    def __init__(
        self,
        model_name: str,
        cp: Axis,
        outer: Axis,
        ulysses: Axis,
        balanced: bool,
        blocks: tuple[torch.nn.Module, ...],
        processors: tuple[type, ...],
    ) -> None:
        assert cp.degree == outer.degree * ulysses.degree
        assert cp.rank == outer.rank * ulysses.degree + ulysses.rank, "Ulysses must be innermost"
        self.model_name = model_name
        self.cp = cp
        self.outer = outer
        self.ulysses = ulysses
        self.balanced = balanced
        self.latest = Latest()
        self.blocks = blocks
        self._processors = processors
        self._attention: list[torch.nn.Module] = []
        self._added: list[tuple[str, torch.nn.Module]] = []  # modules of the blocks that are not bound

    @property
    def exchanged(self) -> bool:
        """Whether an attention call has ever looked past this rank's tokens. Not of each forward: diffusers' caches may
        skip attention in some."""
        return self.latest.key in _exchanged

    @property
    def has_attention(self) -> bool:
        """Whether there are blocks at all: a model of no layers has nothing to exchange."""
        return any(True for blocks in self.blocks for _ in blocks.children())

    def check_attention(self) -> None:
        """Raise ValueError if a block's attention runs a processor, or is a module, without context-parallel calls."""
        if torch.compiler.is_compiling():
            # Walking all modules would be traced: look only at those that were there when the model was bound.
            for module in self._attention:
                self._check_processor(module)
            return
        self._attention = []
        self._added = []
        for block in self.blocks:
            for name, module in block.named_modules():
                binding = getattr(module, ATTRIBUTE, None)
                added = binding is None or binding.latest is not self.latest
                if callable(getattr(module, "processor", None)):
                    self._check_processor(module)
                    self._attention.append(module)
                    if added:
                        raise self._replaced(name)
                elif added:  # a wrapper or an adapter may be
                    self._added.append((name, module))

    def check_added(self) -> None:
        """Raise ValueError if a module that joined the blocks after parallelize attends: it saw local tokens only.

        Called behind the blocks: which modules without a processor attend is known when they have.
        """
        for name, module in self._added:
            if type(module) in self.latest.attending:
                raise self._replaced(name)

    def _replaced(self, name: str) -> ValueError:
        return ValueError(f"{self.model_name}: {name!r} was replaced after parallelize; call it after that")

    def _check_processor(self, module: torch.nn.Module) -> None:
        if not isinstance(module.processor, self._processors):
            raise ValueError(
                f"{self.model_name}: the attention processor {type(module.processor).__name__} has no context-parallel "
                f"calls, so each rank would attend to its own tokens only. Processors of this package: "
                f"{', '.join(sorted(processor.__name__ for processor in self._processors))}"
            )

    def share_with(self, other: Binding) -> None:
        """Run modules of `other`'s model. Raises ValueError if it is not cut over the same ranks in the same way."""
        ways = [(each.cp, each.outer, each.ulysses, each.balanced) for each in (self, other)]
        if ways[0] != ways[1]:
            raise ValueError(
                f"{self.model_name} has modules of a {other.model_name} that runs over other ranks, or in another way: "
                f"models that share modules must be parallelized on one mesh, with packages of one strategy"
            )
        self.latest = other.latest

    def region_of(self, streams: tuple[str, ...], tokens: int) -> Region:
        """The region that an attention call with `tokens` local tokens of `streams` belongs to.

        It is the latest one, except while backward recomputes a block that was not pinned (activation checkpointing
        from outside the model): then it is the one whose lengths fit, and an error if several do.
        """
        latest = self.latest
        if latest.region is None:
            raise ValueError(f"{self.model_name}: its attention ran outside the model's forward")
        if torch.compiler.is_compiling() or latest.pinned:
            return latest.region
        if torch._C._current_graph_task_id() == -1:
            if torch.is_grad_enabled():
                latest.seen.add(tuple(latest.region.lengths.items()))
            return latest.region
        fitting = {}
        for lengths in latest.seen:
            region = Region(self)
            region.lengths = dict(lengths)
            if sum(region.part_sizes(stream)[self.cp.rank] for stream in streams) == tokens:
                fitting[tuple(region.lengths[stream] for stream in streams)] = region
        if len(fitting) != 1:
            raise ValueError(
                f"{self.model_name}: backward recomputes a block with {tokens} local tokens, which fits "
                f"{len(fitting)} of the lengths seen; use model.enable_gradient_checkpointing(), which remembers them"
            )
        return fitting.popitem()[1]


def bind_context_parallel(
    model: torch.nn.Module,
    mesh: DeviceMesh,
    *,
    ulysses_degree: int,
    load_balance: bool,
    blocks: Iterable[torch.nn.Module],
    heads: int | None,
    processors: tuple[type, ...],
) -> None:
    """Make `model` run context-parallel over the cp axis of `mesh` from its next forward on. Degree 1 changes nothing.

    The cp axis may be one, or two: cp_outer and cp_ulysses. `blocks` are the modules that run inside the region; each
    attention module in them must use one of `processors`. With `load_balance` streams are cut in head-tail order.
    Raises ValueError if `heads` is smaller than `ulysses_degree`, or if a processor is not one of those.
    """
    if heads is not None:
        check_heads(
            type(model).__name__,
            heads,
            ulysses_degree,
            " on each rank of the tp axis" if axis_size(mesh, "tp") > 1 else "",
        )
    cp, outer, ulysses = (Axis.of(axis) for axis in split_cp(mesh, ulysses_degree))
    if cp.degree == 1:
        return
    binding = Binding(type(model).__name__, cp, outer, ulysses, load_balance, tuple(blocks), tuple(processors))
    if getattr(model, ATTRIBUTE, None) is None:  # else it is bound anew, and all of it
        for module in model.modules():
            if (other := getattr(module, ATTRIBUTE, None)) is not None and other.latest is not binding.latest:
                binding.share_with(other)
    for module in model.modules():
        setattr(module, ATTRIBUTE, binding)
    names = {module: name for name, module in model.named_modules()}
    for block_list in binding.blocks:
        for module in block_list.modules():
            setattr(module, LIST, names[block_list])
    binding.check_attention()


def check_heads(model_name: str, heads: int, ulysses_degree: int, where: str = "") -> None:
    """Raise ValueError if ulysses cannot give every rank a head."""
    if heads < ulysses_degree:
        raise ValueError(
            f"{model_name} has {heads} attention heads{where}: ulysses gives every rank at least one, so its degree is "
            f"at most {heads}, not {ulysses_degree}. Emit with a --ulysses-degree that fits, or with "
            f"--strategy allgather or ring for degrees past the number of heads"
        )


def use_processors(block_lists: Iterable[torch.nn.Module], *processors: type) -> None:
    """Replace the attention processors of diffusers inside of the blocks by this package's of the same name."""
    by_name = {processor.__name__: processor for processor in processors}
    for blocks in block_lists:
        for module in blocks.modules():
            processor = getattr(module, "processor", None)
            if type(processor).__module__.startswith("diffusers.") and type(processor).__name__ in by_name:
                module.set_processor(by_name[type(processor).__name__]())  # type: ignore[operator]


def begin_region(model: torch.nn.Module) -> Region | LocalRegion:
    """Start the region of one forward of `model`."""
    binding: Binding | None = getattr(model, ATTRIBUTE, None)
    if binding is None:
        return _LOCAL_REGION
    binding.check_attention()
    region = Region(binding)
    binding.latest.region = region
    if not torch.compiler.is_compiling() and model.training:
        region.fork_rng()
    return region


def refuse_enable_parallelism(self: torch.nn.Module, *args: Any, **kwargs: Any) -> NoReturn:
    """Stands in for diffusers' method of this name in emitted classes. Raises ValueError."""
    raise ValueError(
        f"{type(self).__name__} was emitted by cpgen with its context parallelism written into the source; diffusers' "
        f"hooks would cut its inputs a second time. Use parallelize(model, mesh) of its package instead"
    )
