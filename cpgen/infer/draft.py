"""A plan as YAML text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import yaml

from cpgen.plan import Plan, Shard, Site, Whole, as_written

ENTRIES = {"streams": "stream", "shards": "shard", "prefixes": "prefix", "gathers": "gather", "refusals": "refuse"}


def plan_text(plan: Plan, comment: str) -> str:
    """`plan` as the text of a plan file, under `comment`."""
    return "\n".join([*(f"# {line}".rstrip() for line in comment.splitlines()), *_lines(plan)]) + "\n"


def differences(found: Plan, written: Plan) -> set[str]:
    """What two plans say differently, as names of entries. Places and, where it means nothing, order are left aside.

    Attention functions that only `written` describes don't count: no probe may run them.
    """
    different = {
        name for name in ("model", "heads", "blocks", "begin") if getattr(found, name) != getattr(written, name)
    }
    if _wrapped(found) != _wrapped(written):
        different.add("wraps")
    for name, one in ENTRIES.items():
        ours, theirs = ({_placeless(each) for each in getattr(plan, name)} for plan in (found, written))
        different |= {f"{one} {getattr(each, 'variable', each)}" for each in ours ^ theirs}
    described = {function.owner: _placeless(function) for function in written.attention}
    different |= {
        f"attention {function.owner}"
        for function in found.attention
        if described.get(function.owner) != _placeless(function)
    }
    return different


def _wrapped(plan: Plan) -> tuple[str, str] | None:
    return (plan.wraps.attribute, plan.wraps.model) if plan.wraps else None


def _placeless(entry: Any) -> Any:
    if isinstance(entry, tuple):
        return tuple(_placeless(each) for each in entry)
    if not is_dataclass(entry) or isinstance(entry, type):
        return entry
    names = [each.name for each in fields(entry)]
    return replace(entry, **{name: None if name == "location" else _placeless(getattr(entry, name)) for name in names})


def _lines(plan: Plan) -> Iterator[str]:
    yield f"model: {plan.model}"
    if plan.diffusers:
        yield f'diffusers: "{plan.diffusers}"'
    if plan.wraps:
        yield f"wraps: {{list: {plan.wraps.attribute}, model: {plan.wraps.model}}}"
    if plan.heads:
        yield f"heads: {plan.heads}"
    yield f"blocks: [{', '.join(plan.blocks)}]"
    yield f"streams: [{', '.join(plan.streams)}]"
    yield from ("", "region:", f"  begin: {{before: {plan.begin}}}", "  shard:")
    for shard in plan.shards:
        yield f"    {as_written(shard)}: {_inline(_shard(shard))}"
    if plan.prefixes:
        yield "  prefix:"
        yield from (f"    {prefix.variable}: {prefix.stream}" for prefix in plan.prefixes)
    yield "  gather:"
    for gather in plan.gathers:
        after = {} if gather.after is None else {"after": gather.after}
        entry = {**after, "dim": gather.dim, "ndim": gather.ndim, "stream": gather.stream}
        entry |= {name: True for name in ("optional", "cut_again") if getattr(gather, name)}
        yield f"    {as_written(gather)}: {_inline(entry)}"
    yield from ("", "attention:")
    for function in plan.attention:
        yield f"  {function.owner}:"
        indent = "    "
        if function.whole:
            yield "    sites:"
            indent = "      "
        yield from (f"{indent}- {_inline(_site(site))}" for site in function.sites)
        if function.whole:
            yield "    whole:"
            yield from (f"      - {_inline(_whole(whole))}" for whole in function.whole)
    yield from ("", "probes:")
    for probe in plan.probes:
        yield f"  - name: {probe.name}"
        yield f"    config: {_inline(probe.config)}"
        if probe.before:
            yield f"    before: [{', '.join(probe.before)}]"
        yield "    inputs:"
        yield from (f"      {name}: {_inline(spec)}" for name, spec in probe.inputs.items())


def _shard(shard: Shard) -> dict[str, Any]:
    entry: dict[str, Any] = {"dim": shard.dim, "ndim": shard.ndim, "stream": _streams(shard.streams)}
    if shard.optional:
        entry["optional"] = True
    if shard.when:
        entry["when"] = shard.when
    return entry


def _site(site: Site) -> dict[str, Any]:
    entry: dict[str, Any] = {"call": site.call, "kind": site.kind}
    if site.within:
        return entry | {"stream": {name: _streams(streams) for name, streams in site.within}}
    for key, streams in (("stream", site.streams), ("kv", site.kv), ("otherwise", site.otherwise)):
        if streams:
            entry[key] = _streams(streams) if site.kind != "joint" or len(streams) > 1 else list(streams)
    if site.when:
        entry["when"] = site.when
    return entry


def _whole(whole: Whole) -> dict[str, Any]:
    entry: dict[str, Any] = {"variables": {name: _streams(streams) for name, streams in whole.variables}}
    places = {"after": whole.after, "before": whole.before, "until": whole.until}
    return entry | {key: value for key, value in places.items() if value is not None}


def _streams(streams: tuple[str, ...]) -> str | list[str]:
    return streams[0] if len(streams) == 1 else list(streams)


def _inline(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1_000_000)
    return text.removesuffix("\n").removesuffix("\n...")
