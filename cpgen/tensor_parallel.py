"""Tensor parallelism on the generator's side: whether a request can have it, and the plan as code."""

from __future__ import annotations

import json

from cpgen.diagnostics import fail
from cpgen.plan import Plan, TensorParallel

# Where what an emitted plan names comes from: torch, or cpgen's runtime.
TORCH_STYLES = ("ColwiseParallel", "RowwiseParallel")
RUNTIME_STYLES = ("ConcatRowwise", "HeadNorm", "IfPresent", "LocalHeads", "NormAcrossHeads")

_INDENT = " " * 12  # of the entries in the template


def check_tensor_parallel(degree: int, plan: Plan, model: str, heads: int | None) -> None:
    """Raise CpgenError if the model can't be cut into `degree` parts. `heads` is its number of heads, where known."""
    if degree == 1:
        return
    if not plan.tensor_parallel:
        raise fail(
            "CP408",
            f"--tp {degree}: {plan.name} has no section tensor_parallel",
            note=f"it says which layers of {model} are cut column-wise and row-wise",
            help="write a plan file with one (docs/plans.md shows how) and pass --plan FILE, or leave --tp out",
        )
    if heads is not None and heads % degree:
        divisors = [n for n in range(1, heads + 1) if heads % n == 0]
        raise fail(
            "CP405",
            f"--tp {degree} does not fit {model}: it has {heads} attention heads",
            note="tensor parallelism gives each rank as many heads",
            help=f"a degree that divides {heads}: {', '.join(map(str, divisors))}",
        )


def tp_context(plan: Plan) -> dict[str, object]:
    """What the template of `_apply_tp` needs: for each module list its entries as (path, code), and names to import."""
    lists: dict[str, list[tuple[str, str]]] = {}
    for entry in plan.tensor_parallel:
        lists.setdefault(entry.blocks, []).append((entry.module, _code(entry)))
    code = " ".join(text for entries in lists.values() for _, text in entries)
    return {
        "tp_lists": lists,
        "torch_styles": [name for name in TORCH_STYLES if f"{name}(" in code],
        "runtime_styles": [name for name in RUNTIME_STYLES if f"{name}(" in code],
    }


def _code(entry: TensorParallel) -> str:
    """The entry's style as an expression, in the form that ruff gives it in a dict of `_apply_tp`."""
    if entry.style == "row" and entry.parts:
        code = _call("ConcatRowwise", *map(json.dumps, entry.parts))
    elif entry.style == "heads":
        given = {"inputs": entry.inputs, "masks": entry.masks, "shared": entry.shared}
        named = [f"{name}={_tuple(values)}" for name, values in given.items() if values]
        attributes = map(json.dumps, entry.attributes)
        code = _exploded("LocalHeads", *attributes, *named) if named else _call("LocalHeads", *attributes)
    elif entry.style == "head_norm":
        code = _call("HeadNorm", f"dim={entry.dim}")
    else:
        names = {"column": "ColwiseParallel", "row": "RowwiseParallel", "norm_across_heads": "NormAcrossHeads"}
        code = _call(names[entry.style])
    if not entry.optional:
        return code
    if "\n" in code:
        return f"IfPresent(\n{_INDENT}    " + code.replace("\n", "\n    ") + "\n" + _INDENT + ")"
    return _call("IfPresent", code)


def _call(name: str, *arguments: str) -> str:
    return f"{name}({', '.join(arguments)})"


def _exploded(name: str, *arguments: str) -> str:
    return f"{name}(\n" + "".join(f"{_INDENT}    {argument},\n" for argument in arguments) + _INDENT + ")"


def _tuple(values: tuple[str, ...]) -> str:
    return f"({', '.join(map(json.dumps, values))}{',' if len(values) == 1 else ''})"
