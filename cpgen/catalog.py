"""What there is: the models of the installed diffusers with their plans, and a plan in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cpgen import resources
from cpgen.diagnostics import CpgenError
from cpgen.disk import read_package
from cpgen.drift import find_packages
from cpgen.native_plan import has_native_plan, native_plan
from cpgen.plan import Plan, Shard, as_written
from cpgen.plan_files import read_plan
from cpgen.proofs import last_proven, read_proofs
from cpgen.source import SourceTree, exported_models
from cpgen.strategy import EXCHANGES, STRATEGIES
from cpgen.surgery.operate import operate
from cpgen.target import find_target, snake_case

_FAMILIES = ("diffusers.models.transformers.", "diffusers.models.controlnets.")


def catalog(out: Path) -> list[dict[str, Any]]:
    """One row a transformer or ControlNet class that diffusers exports.

    `state` is "emitted" if its package is in `out`, else "plan", "own plan" (the class has a _cp_plan) or "no plan".
    `diffusers` is the range that the plan says, `proven` the newest version of it that a recorded proof is for.
    """
    tree = SourceTree()
    plans = resources.shipped_plans()
    proofs = read_proofs()
    emitted = {name for name in find_packages(out) if _is_whole(out / name)}
    rows = []
    for model, module in sorted(exported_models(tree).items()):
        if not module.startswith(_FAMILIES):
            continue
        plan = read_plan(plans[model], f"plans/{plans[model].name}") if model in plans else None
        state = "plan" if plan else "no plan"
        if plan is None and _has_own(model, module, tree):
            state = "own plan"
        if snake_case(model) in emitted:
            state = "emitted"
        rows.append(
            {
                "model": model,
                "plan": f"plans/{plans[model].name}" if plan else None,
                "streams": list(plan.streams) if plan else [],
                "strategies": list(STRATEGIES) if state != "no plan" else [],
                "probes": [probe.name for probe in plan.probes] if plan else [],
                "diffusers": plan.diffusers if plan else None,
                "proven": last_proven(plan, proofs) if plan else None,
                "state": state,
            }
        )
    return rows


def as_table(rows: list[dict[str, Any]]) -> str:
    """The rows of `catalog` in columns, one line a model."""
    titles = ("model", "plan", "streams", "strategies", "probes", "proven", "state")
    table = [titles, *(tuple(_cell(row, title) for title in titles) for row in rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
    lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)) for cells in table]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def describe(plan: Plan) -> str:
    """A plan in words, one line an entry."""
    lines = [f"{plan.model}  ({plan.name}, diffusers {plan.diffusers or 'any'})"]
    for variant in plan.variants:
        lines.append(f"variant     on diffusers {variant.diffusers} it has another {', '.join(variant.replaces)}")
    if plan.requires:
        lines.append(f"requires    {', '.join(plan.requires)}")
    if plan.wraps:
        source = f", from {plan.wraps.plan}" if plan.wraps.plan else ""
        theirs = f"all that follows is theirs{source}"
        lines.append(f"wraps       {plan.wraps.attribute}, a list of {plan.wraps.model}: {theirs}")
    lines.append(f"blocks      {', '.join(plan.blocks)}")
    lines.append(f"streams     {', '.join(plan.streams)}")
    lines.append(f"region      begins {f'ahead of {plan.begin}' if plan.begin else 'with forward'}")
    for refusal in plan.refusals:
        lines.append(f"  refused   when {refusal.when}")
    for shard in plan.shards:
        lines.append(
            f"  cut       {as_written(shard)}: dim {shard.dim} of {shard.ndim}, {' + '.join(shard.streams)}"
            + _when(shard)
            + (f", without the stream's first {shard.start}" if shard.start else "")
            + (f", where {shard.after} gives it" if shard.after else "")
            + (f", ahead of {shard.before}" if shard.before else "")
        )
    for prefix in plan.prefixes:
        lines.append(f"  count     {prefix.variable}: leading tokens of {prefix.stream}")
    for gather in plan.gathers:
        place = f"behind {gather.after}" if gather.after else "where it is assigned last"
        lines.append(
            f"  gather    {as_written(gather)}: dim {gather.dim}, {gather.stream}, {place}"
            + (", may be None" if gather.optional else "")
            + (", cut again by another model" if gather.cut_again else "")
        )
    for function in plan.attention:
        lines.append(f"attention   {function.owner}")
        for site in function.sites:
            text = f"  call {site.call}    {site.kind}"
            if site.within:
                text += "".join(f", in {blocks} over {' + '.join(streams)}" for blocks, streams in site.within)
            elif site.streams:
                text += f" over {' + '.join(site.streams)}"
            if site.kv:
                text += f", keys of {' + '.join(site.kv)}"
            if site.when:
                other = " + ".join(site.otherwise) if site.otherwise else "replicated keys, local"
                text += f" when {site.when}, else {other}"
            if site.cache:
                text += f", exchanged ahead of {site.cache}"
            lines.append(text)
        for whole in function.whole:
            for name, streams in whole.variables:
                lines.append(f"  whole     {name}: the length of all of {' + '.join(streams)}")
        for shard in function.shards:
            lines.append(
                f"  cut       {shard.variable}: dim {shard.dim} of {shard.ndim}, {shard.streams[0]}, behind it"
            )
    for name in plan.outside:
        lines.append(f"outside     {name}")
    for name in dict.fromkeys(entry.blocks for entry in plan.tensor_parallel):
        lines.append(f"tensor      {name}")
        of_list = [entry for entry in plan.tensor_parallel if entry.blocks == name]
        for style in dict.fromkeys(entry.style for entry in of_list):
            modules = [f"{e.module}{' (if there)' if e.optional else ''}" for e in of_list if e.style == style]
            lines.append(f"  {style:17} {', '.join(modules)}")
    for probe in plan.probes:
        lines.append(f"probe       {probe.name}")
    return "\n".join(lines) + "\n"


def _cell(row: dict[str, Any], title: str) -> str:
    value = row[title]
    if title == "probes":
        return str(len(value)) if value else "-"
    return (", ".join(value) if isinstance(value, list) else value) or "-"


def _when(shard: Shard) -> str:
    text = f", when {shard.when}" if shard.when else ""
    return text + (", may be None" if shard.optional else "")


def _is_whole(folder: Path) -> bool:
    """Whether every file of the package is there: a repository may leave out those made from upstream's source."""
    manifest = read_package(folder).manifest
    return manifest is not None and all((folder / name).is_file() for name in manifest["outputs"])


def _has_own(model: str, module: str, tree: SourceTree) -> bool:
    """Whether the class has a _cp_plan that can be emitted."""
    source = tree.find(module)
    if source is None or "_cp_plan" not in source.text:  # most: don't parse them
        return False
    try:
        target = find_target(model, tree)
        if not has_native_plan(target):
            return False
        for exchange in EXCHANGES:
            operate(target, native_plan(target, tree), exchange, "cpgen.runtime", tree)
    except CpgenError:
        return False
    return True
