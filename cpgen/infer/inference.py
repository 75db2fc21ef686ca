"""Runs the unmodified class on probes and makes a plan of what they show."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from rich.console import Console
from rich.progress import track
from torch import nn

from cpgen.diagnostics import CpgenError, Finding, fail
from cpgen.infer.course import course_of, forward_of
from cpgen.infer.look import look
from cpgen.infer.merge import merge
from cpgen.infer.watch import Refused, Watcher, in_words
from cpgen.plan import Plan, Probe
from cpgen.probes import build_inputs
from cpgen.source import SourceModule, SourceTree, diffusers_version
from cpgen.target import Target
from cpgen.verify.case import reference_of
from cpgen.verify.models import build_model, load_reference, randomise
from cpgen.verify.quiet import quietly

_SEED = 0


def infer_plan(target: Target, probes: Sequence[Probe], tree: SourceTree) -> tuple[Plan, list[Finding]]:
    """A plan that nothing has proven yet, and what could not be decided about it.

    Raises CpgenError if the class cannot be run on the probes, or has no loop over blocks that attend.
    """
    forward = forward_of(target)
    with quietly():
        model_class = class_of(target)
        module_of = _source_finder(target, tree)
        models = []
        attending: list[str] = []
        for probe in probes:
            try:
                model = build_model(model_class, probe, _SEED, torch.float32)
                randomise(model, _SEED)
                first = Watcher(model, forward, None, module_of).run(build_inputs(probe, _SEED))
            except Refused as error:
                raise _does_not_run(target, probe, str(error)) from error
            except (Exception, SystemExit) as error:
                raise _does_not_run(target, probe, in_words(error)) from error
            models.append(model)
            attending += [name for name in first.attending if name not in attending]
        course = course_of(forward, tuple(attending))
        looks = []
        for probe, model in _with_bar(list(zip(probes, models, strict=True))):
            watcher = Watcher(model, forward, course, module_of)
            try:
                looks.append(look(probe.name, model, course, watcher, _inputs_of(probe)))
            except Refused as error:
                raise _does_not_run(target, probe, f"run again, and watched: {error}") from error
    parameters = inspect.signature(model_class.__init__).parameters
    defaults = {name: each.default for name, each in parameters.items() if each.default is not each.empty}
    return merge(target.class_name, _versions(target, tree), course, looks, probes, defaults)


def class_of(target: Target) -> type[nn.Module]:
    """The class, imported. Raises CpgenError if that fails."""
    try:
        return load_reference(reference_of(target))
    except (Exception, SystemExit) as error:
        raise fail("CP605", f"{target.module.label} cannot be imported", note=in_words(error)) from error


def _does_not_run(target: Target, probe: Probe, note: str) -> CpgenError:
    return fail("CP605", f"{target.class_name} does not run on probe '{probe.name}'", note=note)


def _with_bar(pairs: list[tuple[Probe, nn.Module]]) -> Iterable[tuple[Probe, nn.Module]]:
    """`pairs`, with a bar on stderr where that is a terminal."""
    console = Console(stderr=True)
    return track(pairs, "looking", console=console, transient=True, disable=not console.is_terminal)


def _inputs_of(probe: Probe) -> Callable[[], dict[str, Any]]:
    return lambda: build_inputs(probe, _SEED)


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
