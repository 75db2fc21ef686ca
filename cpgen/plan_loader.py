"""YAML to `Plan`: every name checked, every finding with its line."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from typing import Any

from cpgen.conditions import GRAMMAR, ConditionError, parse_condition
from cpgen.diagnostics import CpgenError, Finding, did_you_mean
from cpgen.plan import (
    CONFIG,
    AttentionFunction,
    Gather,
    Plan,
    Prefix,
    Probe,
    Refusal,
    Shard,
    Site,
    Variant,
    Whole,
    Wraps,
    short_hash,
)
from cpgen.plan_cuts import meeting_entries
from cpgen.plan_probes import ProbeReader
from cpgen.plan_reader import is_name
from cpgen.plan_tensor_parallel import TensorParallelReader
from cpgen.plan_variants import VariantReader
from cpgen.plan_wraps import PlansOf, Said, completed, find_wrapped
from cpgen.yamldoc import Path, YamlDocument, parse_yaml

KINDS = ("self", "joint", "cross", "causal")
LAYOUTS = ("BSHD", "BHSD")
_MAX_NDIM = 8
_VARIABLE = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<path>(\[(\*|-?\d+|'[A-Za-z0-9_.]+')\])*)")
_STEP = re.compile(r"\[(\*|-?\d+|'[A-Za-z0-9_.]+')\]")


def load_plan(text: str, name: str, plans_of: PlansOf = lambda model: []) -> Plan:
    """Read a plan from YAML. `name` is shown in messages and headers; `plans_of` finds the plans of a class that it
    wraps. Raises CpgenError with all findings."""
    document = parse_yaml(text, name)
    own, findings = _said(document)
    found = find_wrapped(document, plans_of)
    if found is None:
        return _plan(own, findings, text)
    wrapped_text, wrapped = found
    said, of_wrapped = _said(wrapped)
    _plan(said, of_wrapped, wrapped_text)  # raises for what is wrong in it
    plan = _plan(list(completed(own, said)), findings, text + wrapped_text)
    assert plan.wraps is not None
    return replace(plan, wraps=replace(plan.wraps, plan=wrapped.name))


def _said(document: YamlDocument) -> tuple[list[Said], list[Finding]]:
    """What it says on the versions of each variant, and then on all others."""
    reader = _Reader(document)
    variants = [Said(range_, keys, document.overlaid(path, keys)) for path, range_, keys in reader.variants()]
    return [*variants, Said(None, (), document)], reader.findings


def _plan(said: list[Said], findings: list[Finding], text: str) -> Plan:
    """The plan, of which `findings` are known. `text` is all that was read. Raises CpgenError."""
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    variants = []
    for each in said:
        reader = _Reader(each.document)
        variants.append(Variant(each.diffusers or "", each.replaces, reader.plan(sha256)))
        findings = findings + reader.findings
    if findings:
        places = {f: (f.location.file, f.location.line, f.location.column) for f in findings if f.location}
        raise CpgenError(sorted(findings, key=lambda finding: places.get(finding, ("", 0, 0))))
    return replace(variants[-1].plan, variants=tuple(variants[:-1]))


def _meaning(root: dict[str, Any]) -> str:
    said = {key: value for key, value in root.items() if key not in ("diffusers", "probes", "variants")}
    return short_hash(said)


def load_probes(text: str, name: str) -> tuple[Probe, ...]:
    """The probes of a plan file, or of a file that has nothing else. Raises CpgenError with all findings."""
    document = parse_yaml(text, name)
    reader = _Reader(document)
    probes = reader.only_probes()
    if reader.findings:
        raise CpgenError(reader.findings)
    return probes


class _Reader(TensorParallelReader, VariantReader, ProbeReader):
    def __init__(self, document: YamlDocument) -> None:
        super().__init__(document)
        self._streams: tuple[str, ...] = ()
        self._blocks: tuple[str, ...] = ()

    def plan(self, sha256: str) -> Plan:
        root = self._mapping(
            (),
            required=("model", "blocks", "streams", "region", "attention"),
            optional=("diffusers", "requires", "wraps", "heads", "outside", "tensor_parallel", "probes", "variants"),
        )
        self._streams = self._names(root, ("streams",))
        blocks = self._blocks = self._names(root, ("blocks",), dotted=True)
        for key in ("blocks", "streams"):
            if root.get(key) == []:
                self._find("CP105", f"an empty list of {key}", (key,))
        region = self._mapping(("region",), required=("begin", "shard", "gather"), optional=("prefix", "refuse"))
        begin = self._mapping(("region", "begin"), required=("before",))
        plan = Plan(
            model=self._name(root, ("model",)),
            diffusers=self._specifier(root, ("diffusers",)),
            heads=self._name(root, ("heads",)) if "heads" in root else None,
            blocks=blocks,
            streams=self._streams,
            begin=self._name(begin, ("region", "begin", "before")),
            shards=self._each(region, ("region", "shard"), self._shard),
            prefixes=self._each(region, ("region", "prefix"), self._prefix),
            gathers=self._each(region, ("region", "gather"), self._gather),
            attention=self._each(root, ("attention",), self._function),
            refusals=tuple(map(self._refusal, self._items(region, ("region", "refuse")))),
            requires=self._names(root, ("requires",)),
            outside=self._names(root, ("outside",)),
            tensor_parallel=self._tensor_parallel(root, blocks),
            wraps=self._wraps(("wraps",)) if "wraps" in root else None,
            probes=self._probes(root),
            blocks_location=self._document.at(("blocks",)),
            begin_location=self._document.at(("region", "begin", "before")),
            outside_location=self._document.at(("outside",)) if "outside" in root else None,
            diffusers_location=self._document.at(("diffusers",)) if "diffusers" in root else None,
            heads_location=self._document.at(("heads",)) if "heads" in root else None,
            name=self._document.name,
            sha256=sha256,
            meaning=_meaning(root),
        )
        if not self.findings:  # what is misspelt is missing elsewhere: say it once
            self.findings += meeting_entries(plan)
            self._check_together(plan)
        return plan

    def _check_together(self, plan: Plan) -> None:
        """Entries that are fine by themselves, but not beside each other."""
        for i, name in enumerate(plan.outside):
            if name in [entry.owner for entry in plan.attention]:
                self._find("CP105", f"{name} is described under 'attention': it is not outside", ("outside", i))
        for prefix in plan.prefixes:
            if prefix.variable in [shard.variable for shard in plan.shards]:
                message = f"'{prefix.variable}' is cut as a tensor: it is no number of tokens"
                self._find("CP105", message, ("region", "prefix", prefix.variable), key=True)
        cut = {stream for shard in plan.shards for stream in shard.streams}
        for i, stream in enumerate(plan.streams):
            if stream not in cut:
                note = "a sequence of which every rank keeps all is no stream"
                self._find("CP105", f"nothing in 'shard' cuts stream '{stream}'", ("streams", i), note=note)

    def only_probes(self) -> tuple[Probe, ...]:
        if not isinstance(self._document.value, dict) or "probes" not in self._document.value:
            self._find("CP107", "a file of probes is a mapping with a key 'probes'", ())
            return ()
        return self._probes(self._document.value)

    # Entries

    def _wraps(self, path: Path) -> Wraps:
        entry = self._mapping(path, required=("list", "model"))
        if self._exists(("tensor_parallel",)):
            self._find("CP105", "tensor parallelism of wrapped models is not possible", path, key=True)
        attribute, model = self._name(entry, (*path, "list")), self._name(entry, (*path, "model"))
        if model and model == self._value(("model",)):
            self._find("CP105", f"{model} cannot be in a list of its own", (*path, "model"))
        return Wraps(attribute, model, self._document.key(path))

    def _shard(self, path: Path) -> Shard:
        entry = self._mapping(
            path, required=("dim", "ndim", "stream"), optional=("optional", "when", "after", "before", "start")
        )
        if "after" in entry and "before" in entry:
            self._find("CP105", "'after' and 'before' say two places", path, key=True)
        variable, steps = self._variable(path)
        dim, ndim = self._dims(entry, path)
        streams = self._stream_list(entry, (*path, "stream"))
        if "start" in entry and len(streams) > 1:
            self._find("CP105", "'start' counts tokens of one stream", (*path, "start"), key=True)
        return Shard(
            variable,
            steps,
            dim,
            ndim,
            streams,
            self._typed(entry, (*path, "optional"), bool, False),
            self._condition(entry, (*path, "when"), variable),
            self._name(entry, (*path, "after")) if "after" in entry else None,
            self._name(entry, (*path, "before")) if "before" in entry else None,
            start=self._count(entry["start"], (*path, "start")) if "start" in entry else None,
            location=self._document.key(path),
        )

    def _shard_behind_calls(self, path: Path) -> Shard:
        entry = self._mapping(path, required=("dim", "ndim", "stream"), optional=("optional",))
        if not is_name(path[-1]):
            self._find("CP105", f"'{path[-1]}' is not a variable's name", path, key=True)
        dim, ndim = self._dims(entry, path)
        streams = self._stream_list(entry, (*path, "stream"))
        if len(streams) > 1:
            self._find("CP105", "a value in an attention function is cut along one stream", (*path, "stream"))
        optional = self._typed(entry, (*path, "optional"), bool, False)
        return Shard(str(path[-1]), (), dim, ndim, streams, optional, location=self._document.key(path))

    def _gather(self, path: Path) -> Gather:
        entry = self._mapping(path, required=("dim", "ndim", "stream"), optional=("after", "optional", "cut_again"))
        variable, steps = self._variable(path)
        dim, ndim = self._dims(entry, path)
        streams = self._stream_list(entry, (*path, "stream"))
        if len(streams) > 1:
            self._find("CP105", "gather takes one stream", (*path, "stream"))
        return Gather(
            variable,
            steps,
            dim,
            ndim,
            streams[0] if streams else "",
            self._name(entry, (*path, "after")) if "after" in entry else None,
            self._typed(entry, (*path, "optional"), bool, False),
            self._typed(entry, (*path, "cut_again"), bool, False),
            self._document.key(path),
        )

    def _prefix(self, path: Path) -> Prefix:
        variable = self._count(path[-1], path, key=True)
        stream = self._stream_list({path[-1]: self._value(path)}, path)
        if len(stream) > 1:
            self._find("CP105", "leading tokens are those of one stream", path)
        return Prefix(variable, stream[0] if stream else "", self._document.key(path))

    def _items(self, parent: dict[str, Any], path: Path) -> list[Path]:
        return [(*path, i) for i in self._indices(parent.get(str(path[-1]), []), path)]

    def _refusal(self, path: Path) -> Refusal:
        entry = self._mapping(path, required=("when",))
        return Refusal(self._condition(entry, (*path, "when"), None) or "", self._document.at(path))

    def _function(self, path: Path) -> AttentionFunction:
        owner = str(path[-1])
        if not is_name(owner):
            self._find("CP105", f"'{owner}' is not a class name", path, key=True)
        whole: tuple[Whole, ...] = ()
        shards: tuple[Shard, ...] = ()
        sites_path = path
        if isinstance(self._value(path), dict):
            entry = self._mapping(path, required=("sites",), optional=("whole", "shard"))
            sites_path = (*path, "sites")
            whole = tuple(
                self._whole((*path, "whole", i)) for i in self._indices(entry.get("whole", []), (*path, "whole"))
            )
            shards = self._each(entry, (*path, "shard"), self._shard_behind_calls)
        sites = tuple(self._site((*sites_path, i)) for i in self._indices(self._value(sites_path), sites_path))
        calls = [site.call for site in sites]
        for i, call in enumerate(calls):
            if call in calls[:i]:
                self._find("CP105", f"call {call} is described twice", (*sites_path, i))
        return AttentionFunction(owner, sites, whole, shards, self._document.key(path))

    def _site(self, path: Path) -> Site:
        entry = self._mapping(
            path, required=("call", "kind"), optional=("stream", "kv", "when", "otherwise", "layout", "cache")
        )
        kind = self._choice(entry, (*path, "kind"), KINDS)
        by_list = isinstance(entry.get("stream"), dict)
        within = self._within((*path, "stream")) if by_list else ()
        if by_list:
            streams = tuple(dict.fromkeys(name for _, names in within for name in names))
        else:
            streams = self._stream_list(entry, (*path, "stream")) if "stream" in entry else ()
        if within and ("when" in entry or "kv" in entry):
            self._find("CP105", "streams by list of blocks take neither 'when' nor 'kv'", (*path, "stream"), key=True)
        if kind == "cross" and "stream" in entry and "kv" not in entry:
            self._find("CP105", "cross-attention on replicated keys takes no stream", (*path, "stream"), key=True)
        if "kv" in entry and kind in KINDS and kind != "cross":
            self._find(
                "CP105", f"a {kind} site takes no kv: where keys differ it is a cross site", (*path, "kv"), key=True
            )
        if not streams and not by_list and (kind != "cross" or "kv" in entry):
            self._find("CP107", f"a {kind} site{' with kv' if kind == 'cross' else ''} names its stream", path)
        if "cache" in entry and kind not in ("self", "joint"):
            self._find("CP105", f"a {kind} site takes no cache: self and joint ones do", (*path, "cache"), key=True)
        if "otherwise" in entry and "when" not in entry:
            self._find("CP107", "'otherwise' needs a 'when'", (*path, "otherwise"), key=True)
        elif "otherwise" in entry and _listed(entry["otherwise"]) == _listed(entry.get("stream")):
            self._find("CP105", "'otherwise' says what 'stream' does", (*path, "otherwise"), key=True)
        if kind == "joint" and max((len(names) for _, names in within), default=len(streams)) == 1:
            message = "a joint site names its streams in the order in which they are concatenated"
            self._find("CP105", message, (*path, "stream"))
        return Site(
            call=self._typed(entry, (*path, "call"), int, 0, lambda v: 0 <= v < 100),
            kind=kind,
            streams=streams,
            kv=self._stream_list(entry, (*path, "kv")) if "kv" in entry else None,
            when=self._condition(entry, (*path, "when"), None),
            otherwise=self._stream_list(entry, (*path, "otherwise")) if "otherwise" in entry else None,
            layout=self._choice(entry, (*path, "layout"), LAYOUTS) if "layout" in entry else None,
            within=within,
            cache=self._name(entry, (*path, "cache")) if "cache" in entry else None,
            location=self._document.at(path),
        )

    def _within(self, path: Path) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Streams of a call by the list of blocks that it runs in."""
        by_list = self._mapping(path, any_key=True)
        if not by_list:
            self._find("CP105", "an empty mapping: list of blocks -> streams", path)
        for name in by_list:
            if name not in self._blocks:
                hint, note = did_you_mean(str(name), self._blocks), f"blocks of this plan: {', '.join(self._blocks)}"
                self._find(
                    "CP105", f"'{name}' is none of the plan's blocks", (*path, name), key=True, hint=hint, note=note
                )
        return tuple((str(name), self._stream_list(by_list, (*path, name))) for name in by_list)

    def _whole(self, path: Path) -> Whole:
        entry = self._mapping(path, required=("variables",), optional=("after", "before", "until"))
        variables = self._mapping((*path, "variables"), any_key=True)
        if variables == {} and isinstance(entry.get("variables"), dict):
            self._find("CP105", "an empty mapping: variable -> streams", (*path, "variables"))
        if ("after" in entry) == ("before" in entry):
            self._find("CP107", "one of 'after' and 'before' says where the lengths become whole", path)
        pairs = []
        for variable in variables:
            if not is_name(variable):
                self._find("CP105", f"'{variable}' is not a variable's name", (*path, "variables", variable), key=True)
            pairs.append((variable, self._stream_list(variables, (*path, "variables", variable), repeated=True)))
        after, before, until = (
            self._name(entry, (*path, key)) if key in entry else None for key in ("after", "before", "until")
        )
        return Whole(tuple(pairs), after, before, until, self._document.at(path))

    # Values
    def _stream_list(self, parent: dict[Any, Any], path: Path, *, repeated: bool = False) -> tuple[str, ...]:
        value = parent.get(path[-1])
        if path[-1] not in parent:
            return ()
        names = value if isinstance(value, list) else [value]
        if not names:
            self._find("CP105", "an empty list of streams", path)
        for i, name in enumerate(names):
            if name not in self._streams:
                hint = did_you_mean(str(name), self._streams)
                note = f"streams of this plan: {', '.join(self._streams) or 'none'}"
                self._find("CP105", f"unknown stream {name!r}", path, hint=hint, note=note)
            elif name in names[:i] and not repeated:
                self._find("CP105", f"stream '{name}' is named twice", (*path, i))
        return tuple(str(name) for name in names)

    def _variable(self, path: Path) -> tuple[str, tuple[str | int, ...]]:
        text = str(path[-1])
        match = _VARIABLE.fullmatch(text)
        if match is None or not is_name(match["name"]) or match["name"] == "self":
            note = "a variable, and a path into it such as [0], [*] or ['key']"
            self._find("CP105", f"'{text}' is not a variable", path, key=True, note=note)
            return "", ()
        return match["name"], tuple(self._step(step) for step in _STEP.findall(match["path"]))

    @staticmethod
    def _step(step: str) -> str | int:
        if step == "*":
            return step
        return step[1:-1] if step.startswith("'") else int(step)

    def _count(self, value: Any, path: Path, *, key: bool = False) -> str:
        """A host number of tokens: a variable, or an entry of the config."""
        if not isinstance(value, str) or value == "self" or not is_name(value.removeprefix(CONFIG)):
            note = f"a variable, or an entry of the config as forward reads it: {CONFIG}NAME"
            self._find("CP105", f"{value!r} is not a number of tokens", path, key=key, note=note)
        return str(value)

    def _dims(self, entry: dict[str, Any], path: Path) -> tuple[int, int]:
        ndim = self._typed(entry, (*path, "ndim"), int, 0, lambda v: 1 <= v <= _MAX_NDIM)
        dim = self._typed(entry, (*path, "dim"), int, 0)
        if "dim" in entry and ndim and not 0 <= dim < ndim:
            self._find(
                "CP105", f"dim {dim} cannot be: a tensor of ndim {ndim} has dims 0 to {ndim - 1}", (*path, "dim")
            )
        return dim, ndim

    def _condition(self, entry: dict[str, Any], path: Path, subject: str | None) -> str | None:
        if path[-1] not in entry:
            return None
        value = entry[str(path[-1])]
        try:
            if not isinstance(value, str):
                raise ConditionError(f"{value!r} is not text")
            code, names = parse_condition(value, subject)
            if not names:
                raise ConditionError(f"{value!r} reads no variable, so it is always the same")
            return code
        except ConditionError as error:
            self._find("CP109", f"not a condition: {error}", path, note=f"allowed: {GRAMMAR}")
            return None


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value
