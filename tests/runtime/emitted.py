"""Packages that the tests emit, and models from them with random weights and their reference."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cpgen.package import Request, generate
from cpgen.plan import Plan, Probe
from cpgen.plan_files import read_plan
from cpgen.probes import build_inputs
from cpgen.resources import shipped_plans
from cpgen.source import SourceTree
from cpgen.verify.case import Reference
from cpgen.verify.float64 import to_float64
from cpgen.verify.models import build_model, load_package, load_reference, randomise

ROOT = Path(__file__).parents[2]
TINY = f"{ROOT}/tests/models/transformer_tiny.py:TinyTransformer2DModel"
CAUSAL = f"{ROOT}/tests/models/transformer_causal.py:CausalTransformer2DModel"
TINY_PLAN = ROOT / "tests/models/tiny.yaml"
_DIFFUSERS = SourceTree()  # read and parsed once: nothing writes there
_PLANS = {TINY: TINY_PLAN, CAUSAL: ROOT / "tests/models/causal.yaml"}


@dataclass(frozen=True)
class Emitted:
    """A package on disk and where its reference is: can be sent to a worker."""

    directory: str
    name: str
    reference: Reference
    plan: Plan

    def probe(self, name: str | None = None) -> Probe:
        return self.plan.probes[0] if name is None else next(p for p in self.plan.probes if p.name == name)


def shipped() -> list[Any]:
    """The models that have a plan, to parametrize by. Skipped where a package that the class needs is missing."""
    parameters = []
    for model, path in sorted(shipped_plans().items()):
        requires = read_plan(path, path.name).requires
        missing = [name for name in requires if importlib.util.find_spec(name) is None]
        marks = [pytest.mark.skip(reason=f"needs {', '.join(missing)}")] if missing else []
        parameters.append(pytest.param(model, marks=marks))
    return parameters


def emit(out: Path, model: str, cp: int, strategy: str = "ulysses", **options: Any) -> Emitted:
    options.setdefault("plan", _PLANS.get(model))
    tree = None if ":" in model else _DIFFUSERS
    package = generate(Request(model, cp, strategy, **options), out, tree)
    for name, text in package.files.items():
        path = out / package.name / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    source = model.rpartition(":")[0] if model.count(":") and ".py" in model else package.target.module.name
    reference = Reference(source, package.target.class_name)
    return Emitted(str(out), package.name, reference, package.plan)


def reference_and_model(
    emitted: Emitted, probe: Probe, dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, nn.Module, Any]:
    """The unmodified model and the emitted one with equal random weights, and the emitted package.

    In float64 by default: then a gradient that is truly zero (a key's bias) is not all rounding.
    """
    reference = build_model(load_reference(emitted.reference), probe, 0, dtype)
    randomise(reference, 0)
    package = load_package(emitted.directory, emitted.name)
    model = build_model(getattr(package, emitted.reference.class_name), probe, 0, dtype)
    model.load_state_dict(reference.state_dict(), strict=True)
    return reference, model, package


def inputs_of(probe: Probe, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    inputs: dict[str, Any] = build_inputs(probe, 0)
    inputs.pop("return_dict", None)  # who calls the model says what it returns
    return to_float64(inputs) if dtype == torch.float64 else inputs


def loss_of(output: Tensor) -> Tensor:
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return (output * weights).sum()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest relative L2 difference, with small norms counted as 1e-5 of the largest (DESIGN 10)."""
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    floor = 1e-5 * max(float(g.norm()) for g in theirs.values())
    return max(float((ours[n].double() - g.double()).norm()) / max(float(g.norm()), floor) for n, g in theirs.items())
