"""Models that hold a list of models: the plan is about those, as they are called."""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cpgen.infer.watch import Refused, in_words
from cpgen.plan import Probe, Wraps
from cpgen.probes import build_inputs
from cpgen.surgery.functions import method
from cpgen.target import Target


@dataclass(frozen=True)
class Run:
    """A model to look at and its inputs, which are made anew for each forward; `config` built it."""

    probe: Probe
    model: nn.Module
    inputs: Callable[[], dict[str, Any]]
    config: Mapping[str, Any]


def wrapped(target: Target, models: Sequence[nn.Module]) -> Wraps | None:
    """The list of models that `models` are made of, and of nothing else: all of one class of their own file."""
    found = {
        (name, type(each).__name__)
        for model in models
        for name, child in model.named_children()
        for each in (child if isinstance(child, nn.ModuleList) else [child])
    }
    if len(found) != 1 or any(next(model.parameters(recurse=False), None) is not None for model in models):
        return None
    attribute, class_name = found.pop()
    node = target.module.definitions.get(class_name)
    listed = all(isinstance(getattr(model, attribute), nn.ModuleList) for model in models)
    if not listed or not isinstance(node, ast.ClassDef) or class_name == target.class_name:
        return None
    forward = method(target.module, node, "forward")
    lists = [
        name
        for model in models
        for each in getattr(model, attribute)
        for name, child in each.named_children()
        if isinstance(child, nn.ModuleList)
    ]
    loops = forward is not None and any(forward.loops_over(name) for name in lists)
    return Wraps(attribute, class_name) if loops else None


def runs_of_wrapped(probe: Probe, model: nn.Module, wraps: Wraps, seed: int) -> Iterator[Run]:
    """The calls of wrapped models when `model` runs `probe`, each of which is a run. Raises Refused if it fails."""
    calls: list[tuple[Any, dict[str, Any]]] = []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        calls.append((module, copy.deepcopy(bound.arguments)))

    hooks = [
        each.register_forward_pre_hook(note, with_kwargs=True)
        for each in model.get_submodule(wraps.attribute).children()
    ]
    try:
        with torch.no_grad():
            model(**build_inputs(probe, seed))
    except (Exception, SystemExit) as error:
        raise Refused(in_words(error)) from error
    finally:
        for hook in hooks:
            hook.remove()
    for module, arguments in calls:
        config = dict(module.config) if hasattr(module, "config") else {}
        yield Run(probe, module, lambda arguments=arguments: copy.deepcopy(arguments), config)  # type: ignore[misc]
