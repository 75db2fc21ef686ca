"""What a plan says, as values: read by `plan_loader` from YAML or by `native_plan` from a class's own `_cp_plan`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from cpgen.diagnostics import Location

CONFIG = "self.config."


def short_hash(said: Any) -> str:
    """Of what a plan's YAML says: the same as long as that doesn't change."""
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


def is_config(count: str) -> bool:
    """Whether a count of tokens is an entry of the model's config, as forward reads it, and not a variable."""
    return count.startswith(CONFIG)


@dataclass(frozen=True)
class Probe:
    """A tiny configuration with inputs, on which `verify` runs the model."""

    name: str
    config: dict[str, Any]
    inputs: dict[str, Any]  # argument -> input spec (see cpgen/probes.py)
    before: tuple[str, ...] = ()  # methods called on both models first, such as fuse_qkv_projections
    places: dict[tuple[str | int, ...], Location] = field(default_factory=dict, compare=False)  # of keys, by path

    @property
    def meaning(self) -> str:
        """Hash of what it runs."""
        return short_hash([self.config, self.inputs, self.before])


@dataclass(frozen=True)
class Shard:
    """One value to cut. `path` leads into tuples, lists and dicts; "*" is every element.

    It is cut where the region begins, or behind the statement that calls module `after`, or ahead of the first loop
    over module list `before`, or as an argument of each call of module `argument_of`. `start` is the number of tokens
    that its stream has ahead of the value's first: a variable, or an entry of the config.
    """

    variable: str
    path: tuple[str | int, ...]
    dim: int
    ndim: int | None  # None: not checked
    streams: tuple[str, ...]
    optional: bool = False
    when: str | None = None
    after: str | None = None
    before: str | None = None
    argument_of: str | None = None
    location: Location | None = None
    start: str | None = None


@dataclass(frozen=True)
class Gather:
    """One value to put together again: right after the statement that calls module `after`, or the loop over module
    list `after`, or the statement that assigns it last."""

    variable: str
    path: tuple[str | int, ...]
    dim: int
    ndim: int | None
    stream: str
    after: str | None
    optional: bool = False
    cut_again: bool = False  # another model's region cuts it again, so ranks have gradients of their own
    location: Location | None = None


def as_written(entry: Shard | Gather) -> str:
    """Its variable and path as a plan has them: tables['image'][0]."""
    steps = (f"[{step}]" if isinstance(step, int) or step == "*" else f"['{step}']" for step in entry.path)
    return entry.variable + "".join(steps)


@dataclass(frozen=True)
class Prefix:
    """A host number of leading tokens, to become the number of those in this rank's part."""

    variable: str  # or an entry of the config
    stream: str
    location: Location | None = None


@dataclass(frozen=True)
class Refusal:
    """A forward that a bound model must not run, as its numbers would be wrong: one for which `when` holds."""

    when: str
    location: Location | None = None


@dataclass(frozen=True)
class Whole:
    """Lengths that must be the whole streams' between two statements of an attention function."""

    variables: tuple[tuple[str, tuple[str, ...]], ...]  # (variable, its streams)
    after: str | None  # behind the first assignment of this variable ...
    before: str | None  # ... or ahead of it
    until: str | None  # behind the last assignment of this variable they are local again
    location: Location | None = None


@dataclass(frozen=True)
class Site:
    """One attention call of a function: the `call`-th in source order."""

    call: int
    kind: str  # "self", "joint", "cross", "causal"
    streams: tuple[str, ...] = ()  # with `within`: all that are named there
    kv: tuple[str, ...] | None = None  # streams of keys and values where they are cut and differ
    when: str | None = None  # else: `otherwise` streams, or keys and values that every rank has
    otherwise: tuple[str, ...] | None = None
    layout: str | None = None  # None: by the function called
    within: tuple[tuple[str, tuple[str, ...]], ...] = ()  # (list of blocks, streams in it), where lists share the call
    cache: str | None = None  # variable with a KV cache, ahead of whose first use the exchange goes
    location: Location | None = None


@dataclass(frozen=True)
class AttentionFunction:
    """The sites in one function: a processor's `__call__`, or a module's `forward`."""

    owner: str  # class name, in the model's file or in one it imports from
    sites: tuple[Site, ...]
    whole: tuple[Whole, ...] = ()
    shards: tuple[Shard, ...] = ()  # what the calls read whole, and the code behind them by this rank's tokens
    location: Location | None = None


@dataclass(frozen=True)
class TensorParallel:
    """How one submodule of the blocks in a list is cut over the tp axis.

    Styles: "column" and "row" of linear layers; "heads" of an attention module; "head_norm" of a norm over one head's
    channels, "norm_across_heads" of an RMS norm over all heads'.
    """

    blocks: str
    module: str  # path inside the block, such as attn.to_out.0
    style: str
    optional: bool = False  # some blocks don't have it
    parts: tuple[str, ...] = ()  # of row: the column-wise layers whose outputs its input concatenates
    attributes: tuple[str, ...] = ()  # of heads: numbers of heads, or of all heads' channels
    inputs: tuple[str, ...] = ()  # of heads: arguments that the module's column-wise layers read
    masks: tuple[str, ...] = ()  # of heads: arguments that may be masks with a dim for heads
    shared: tuple[str, ...] = ()  # of heads: arguments that every head reads, such as rotary tables
    dim: int | None = None  # of head_norm: where the heads are
    location: Location | None = None


@dataclass(frozen=True)
class Wraps:
    """The model holds a list of models, to whose class, in the same file, blocks, region and heads belong."""

    attribute: str
    model: str
    location: Location | None = None
    plan: str | None = None  # the name of that class's plan, if this one takes from it what it leaves out


@dataclass(frozen=True)
class Variant:
    """What a plan says on some versions of diffusers: another value for each key in `replaces`."""

    diffusers: str  # version specifier
    replaces: tuple[str, ...]
    plan: Plan  # the whole plan, with them replaced


@dataclass(frozen=True)
class Plan:
    """A whole plan. Every name in it is a valid identifier, every condition in the grammar of `conditions`."""

    model: str
    diffusers: str | None  # version specifier it was proven on
    heads: str | None  # config key with the number of query heads
    blocks: tuple[str, ...]  # module lists; dotted where they are in a ModuleDict
    streams: tuple[str, ...]
    begin: str | None  # the region begins ahead of the first loop over this module list; None: with forward
    shards: tuple[Shard, ...]
    prefixes: tuple[Prefix, ...]
    gathers: tuple[Gather, ...]
    attention: tuple[AttentionFunction, ...]
    refusals: tuple[Refusal, ...] = ()
    requires: tuple[str, ...] = ()  # packages that the class needs beside those of diffusers itself
    outside: tuple[str, ...] = ()  # what attends only before or after the region, or is not called in a bound model
    tensor_parallel: tuple[TensorParallel, ...] = ()
    wraps: Wraps | None = None
    probes: tuple[Probe, ...] = ()
    blocks_location: Location | None = None
    begin_location: Location | None = None
    diffusers_location: Location | None = None
    heads_location: Location | None = None
    outside_location: Location | None = None
    name: str = ""  # as shown in messages and headers, e.g. plans/wan.yaml
    sha256: str = ""  # of its text, and of that of the plan that it takes from
    meaning: str = ""  # hash of what it says of the source: all but the version range, the probes and variants
    variants: tuple[Variant, ...] = ()

    def on(self, version: str) -> Plan:
        """What it says on this version of diffusers: the first variant whose range has it, or else itself."""
        found = next((variant.plan for variant in self.variants if in_range(version, variant.diffusers)), self)
        return replace(found, variants=self.variants)


def in_range(version: str, specifier: str) -> bool:
    """Whether a version is in a range such as ">=0.42,<0.43". False for one that is no version, such as "unknown"."""
    try:
        return SpecifierSet(specifier).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False
