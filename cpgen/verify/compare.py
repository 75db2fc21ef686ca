"""Outputs and gradients of one run, and how far they are from the reference's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cpgen.verify.case import TOLERANCE, Deviation

FLOOR = 1e-5  # a gradient whose norm is below this part of the largest one's is compared with that


@dataclass(frozen=True)
class Gradients:
    """By name. A parameter or input that got no gradient has zeros."""

    parameters: dict[str, Tensor]
    inputs: dict[str, Tensor]


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors in nested tuples, lists, dicts and dataclasses, in order. Diffusers' outputs are dicts."""
    if isinstance(value, Tensor):
        yield name or "output", value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from named_tensors(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from named_tensors(item, f"{name}[{index}]")
    elif hasattr(value, "__dataclass_fields__"):
        yield from named_tensors({field: getattr(value, field) for field in value.__dataclass_fields__}, name)


def compare_outputs(outputs: list[Tensor], reference: dict[str, Tensor]) -> tuple[list[Deviation], list[str]]:
    """Deviations by output tensor; and messages about what can't be compared (number, shape or dtype differs)."""
    if len(outputs) != len(reference):
        return [], [
            f"number of output tensors: {len(outputs)}, the reference's: {len(reference)} ({', '.join(reference)})"
        ]
    deviations, problems = [], []
    for out, (name, ref) in zip(outputs, reference.items(), strict=True):
        if out.shape != ref.shape or out.dtype != ref.dtype:
            problems.append(
                f"output {name!r} is {_describe(out)}, the reference's is {_describe(ref)}"
                + (": never gathered?" if out.ndim == ref.ndim and out.numel() < ref.numel() else "")
            )
        else:
            out, ref = out.double(), ref.double()
            deviations.append(Deviation(name, _max_abs(out - ref), _max_abs(ref)))
    return deviations, problems


def compare_gradients(gradients: dict[str, Tensor], reference: dict[str, Tensor]) -> list[Deviation]:
    """Deviations by name; both have the same names and shapes."""
    norms = {name: _norm(ref) for name, ref in reference.items()}
    floor = FLOOR * max(norms.values(), default=0.0)
    return [
        Deviation(name, _norm(gradients[name].double() - ref.double()), max(norms[name], floor))
        for name, ref in reference.items()
    ]


def may_be_rounding(wrong: list[Deviation], reference: dict[str, Tensor]) -> bool:
    """Whether the gradients that are not `ok` all differ by so little, beside the largest gradient, that only a run in
    float64 can tell rounding from error."""
    largest = max(_norm(ref) for ref in reference.values())
    return all(deviation.difference <= TOLERANCE * largest for deviation in wrong)


def explain_output(out: Tensor, ref: Tensor, deviation: Deviation) -> str:
    """The sentence for an output that is not `ok`."""
    where = ""
    wrong = (out.double() - ref.double()).abs() > TOLERANCE * deviation.scale
    if out.ndim and not bool(torch.isfinite(out).all()):
        where = ", with values that are not finite"
    elif out.ndim:
        where = f", {int(wrong.sum())} of {wrong.numel()} values wrong"
    return (
        f"output {deviation.name!r} {tuple(ref.shape)}: max|difference| {deviation.difference:.1e} "
        f"at max|reference| {deviation.scale:.1e}{where}"
    )


def explain_gradient(gradient: Tensor, ref: Tensor, deviation: Deviation) -> str:
    """The sentence for a gradient that is not `ok`. A constant factor is a common fault: it is told."""
    g, r = gradient.double().flatten(), ref.double().flatten()
    text = f"{deviation.name!r} {tuple(ref.shape)}: relative difference {deviation.relative:.1e}"
    square = torch.dot(r, r)
    factor = float(torch.dot(g, r) / square) if square else 0.0
    if _norm(g - factor * r) <= 1e-3 * _norm(g):
        return f"{text}, it is {factor:.4g} times the reference's"
    return f"{text}, norm {_norm(g):.2e}, the reference's {_norm(r):.2e}"


def _max_abs(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0  # NaN stays NaN


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
