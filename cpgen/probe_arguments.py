"""Whether the classes in the source take what a plan's probes give them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from cpgen.diagnostics import CpgenError, Finding, did_you_mean
from cpgen.plan import Probe
from cpgen.probes import Path, models_in
from cpgen.surgery.functions import Function, method
from cpgen.target import Target


def check_probes(target: Target, probes: Iterable[Probe]) -> None:
    """Raise CpgenError for arguments that the constructors or forward do not have, and for models of no such class."""
    findings: list[Finding] = []
    for probe in probes:
        found = [*_unknown_arguments(target, probe), *_unknown_models(target, probe)]
        places = [finding.location for finding in findings]  # what is of a probe's base is said once
        findings += [finding for finding in found if finding.location is None or finding.location not in places]
    if findings:
        raise CpgenError(findings)


def _unknown_arguments(target: Target, probe: Probe) -> Iterator[Finding]:
    for section, name, given in (("config", "__init__", probe.config), ("inputs", "forward", probe.inputs)):
        yield from _not_taken(method(target.module, target.node, name), given, (section,), probe)


def _unknown_models(target: Target, probe: Probe) -> Iterator[Finding]:
    """Of the models in its configuration: verify looks for their classes in the model's module."""
    module = target.module
    for path, value in models_in(probe.config):
        name = value["model"]
        node = module.definitions.get(name)
        if isinstance(node, ast.ClassDef):
            yield from _not_taken(method(module, node, "__init__"), value["config"], (*path, "config"), probe)
        elif module.imported.get(name, ("", None))[1] is None:  # nor is it a class that the file imports
            classes = [known for known, item in module.definitions.items() if isinstance(item, ast.ClassDef)]
            message = f"probe '{probe.name}': {module.label} defines no class '{name}'"
            hint = did_you_mean(name, classes)
            yield Finding("CP104", message, probe.places.get((*path, "model")), hint=hint)


def _not_taken(function: Function | None, given: Iterable[str], path: Path, probe: Probe) -> Iterator[Finding]:
    if function is None or function.node.args.kwarg is not None:
        return
    parameters = function.parameters[1:]  # all but self
    for key in given:
        if key not in parameters:
            message = f"probe '{probe.name}': '{key}' is not an argument of {function.owner.name}.{function.node.name}"
            hint = did_you_mean(key, parameters)
            yield Finding("CP104", message, probe.places.get((*path, key)), hint=hint)
