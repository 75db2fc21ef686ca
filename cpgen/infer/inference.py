"""Runs the unmodified class on probes and makes a plan of what they show."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from rich.console import Console
from rich.progress import track
from torch import nn

from cpgen.diagnostics import CpgenError, Finding, fail
from cpgen.infer.course import course_of, forward_of
from cpgen.infer.leaves import Leaf, leaves_of
from cpgen.infer.look import look
from cpgen.infer.merge import merge
from cpgen.infer.watch import Refused, Watcher, in_words
from cpgen.infer.wrapped import Run, runs_of_wrapped, wrapped
from cpgen.plan import Plan, Probe
from cpgen.probes import build_inputs
from cpgen.source import SourceModule, SourceTree, diffusers_version
from cpgen.target import Target
from cpgen.verify.case import reference_of
from cpgen.verify.models import build_model, load_reference, randomise
from cpgen.verify.quiet import quietly

_SEED = 0


@dataclass(frozen=True)
class Inferred:
    """A plan that nothing has proven yet, what could not be decided about it, and what was guessed or not looked at."""

    plan: Plan
    problems: list[Finding]
    warnings: list[Finding]


def infer_plan(target: Target, probes: Sequence[Probe], tree: SourceTree) -> Inferred:
    """A plan for `target` from what it does on `probes`.

    Raises CpgenError if the class cannot be run on the probes, or has no loop over blocks that attend.
    """
    with quietly():
        model_class = class_of(target)
        module_of = _source_finder(target, tree)
        models = [_built(target, model_class, probe) for probe in probes]
        wraps = wrapped(target, models)
        forward = forward_of(target.neighbour(wraps.model) if wraps else target)
        runs: list[Run] = []
        for probe, model in zip(probes, models, strict=True):
            with _said_as_refusal(target, probe):
                runs += runs_of_wrapped(probe, model, wraps, _SEED) if wraps else [_whole_run(probe, model)]
        attending: list[str] = []
        for run in runs:
            with _said_as_refusal(target, run.probe):
                first = Watcher(run.model, forward, None, module_of).run(run.inputs())
            attending += [name for name in first.attending if name not in attending]
        course = course_of(forward, tuple(attending))
        looks = []
        for run in _with_bar(runs):
            watcher = Watcher(run.model, forward, course, module_of)
            with _said_as_refusal(target, run.probe, "run again, and watched: "):
                looks.append(look(run.probe.name, run.model, course, watcher, run.inputs))
    configs = [{**_defaults(type(run.model)), **run.config} for run in runs]
    plan, problems, guesses = merge(target.class_name, _versions(target, tree), course, looks, probes, configs, wraps)
    if all(_has_batch_of_one(probe) for probe in probes):
        guesses.append(
            Finding(
                "CP607",
                "no probe has a batch of more than one",
                forward.module.location(forward.node),
                help="add one that has: where samples follow each other in one dim, the plan may be wrong for several",
            )
        )
    # What else was not found may follow from tokens that mix.
    mixing = [finding for finding in problems if finding.code == "CP602"]
    return Inferred(plan, mixing or problems, guesses)


def _has_batch_of_one(probe: Probe) -> bool:
    """Whether dim 0 of each of its inputs with three or more dims is 1: dim 0 of others may count tokens."""
    inputs = build_inputs(probe, _SEED)
    sizes = {tensor.shape[0] for name in inputs for _, tensor in leaves_of(inputs[name], Leaf(name)) if tensor.ndim > 2}
    return sizes == {1}


def _built(target: Target, model_class: type[nn.Module], probe: Probe) -> nn.Module:
    """The probe's model, with random weights. Raises CpgenError if it cannot be built."""
    try:
        model = build_model(model_class, probe, _SEED, torch.float32)
        randomise(model, _SEED)
    except (Exception, SystemExit) as error:
        raise _does_not_run(target, probe, in_words(error)) from error
    return model


def _whole_run(probe: Probe, model: nn.Module) -> Run:
    return Run(probe, model, lambda: build_inputs(probe, _SEED), probe.config)


@contextmanager
def _said_as_refusal(target: Target, probe: Probe, words: str = "") -> Iterator[None]:
    try:
        yield
    except Refused as error:
        raise _does_not_run(target, probe, f"{words}{error}") from error
    except (Exception, SystemExit) as error:  # of making inputs
        raise _does_not_run(target, probe, in_words(error)) from error


def _defaults(model_class: type[nn.Module]) -> dict[str, Any]:
    parameters = inspect.signature(model_class.__init__).parameters
    return {name: each.default for name, each in parameters.items() if each.default is not each.empty}


def class_of(target: Target) -> type[nn.Module]:
    """The class, imported. Raises CpgenError if that fails."""
    try:
        return load_reference(reference_of(target))
    except (Exception, SystemExit) as error:
        raise fail("CP605", f"{target.module.label} cannot be imported", note=in_words(error)) from error


def _does_not_run(target: Target, probe: Probe, note: str) -> CpgenError:
    return fail("CP605", f"{target.class_name} does not run on probe '{probe.name}'", note=note)


def _with_bar(runs: Sequence[Run]) -> Iterable[Run]:
    """`runs`, with a bar on stderr where that is a terminal."""
    console = Console(stderr=True)
    return track(runs, "looking", console=console, transient=True, disable=not console.is_terminal)


def _versions(target: Target, tree: SourceTree) -> str | None:
    if target.kind != "diffusers":
        return None
    major, minor = Version(diffusers_version(tree)).release[:2]
    return f">={major}.{minor},<{major}.{minor + 1}"


def _source_finder(target: Target, tree: SourceTree) -> Callable[[str], SourceModule | None]:
    """From a file to its source: those of the model's own package and of diffusers' models."""
    main = target.module
    tops = (main.name.partition(".")[0], "diffusers")

    def find(file: str) -> SourceModule | None:
        if Path(file).resolve() == main.path.resolve():
            return main
        for name, module in list(sys.modules.items()):
            if getattr(module, "__file__", None) == file and name.partition(".")[0] in tops:
                return tree.find(name)
        return None

    return find
