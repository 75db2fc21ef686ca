"""Requests that packages on disk were emitted by: to repeat them, with other choices or the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from cpgen.diagnostics import CpgenError, fail
from cpgen.disk import read_package
from cpgen.drift import find_packages
from cpgen.package import Package, Request, request_from_manifest
from cpgen.target import snake_case


def requests_in(out: Path, names: list[str] | None = None) -> list[Request]:
    """The requests that wrote the packages `names` in `out`, or all of them. Raises CpgenError for one that is not."""
    known = find_packages(out)
    requests = []
    for name in known if names is None else names:
        if name not in known:
            raise fail("CP205", f"no package '{name}' in {out}", note=f"packages there: {', '.join(known) or 'none'}")
        manifest = read_package(out / name).manifest
        assert manifest is not None
        requests.append(request_from_manifest(manifest, out / name))
    return requests


def say_choices(package: Package, folder: Path) -> None:
    """On stderr: a hybrid that amounts to another strategy, and what differs from the package that is there."""
    strategy = package.strategy
    if strategy.name == "hybrid" and strategy.ulysses_degree in (1, strategy.cp):
        same = strategy.outer if strategy.ulysses_degree == 1 else "ulysses"
        click.echo(f"note: hybrid with a Ulysses degree of {strategy.ulysses_degree} is {same}", err=True)
    try:
        manifest = read_package(folder).manifest if folder.is_dir() else None
        old = None if manifest is None else request_from_manifest(manifest, folder)
    except CpgenError:
        return
    for name in ("cp", "strategy", "ulysses_degree", "outer", "load_balance", "tp") if old is not None else ():
        before, now = getattr(old, name), getattr(package.request, name)
        if before != now:
            option = f"--{name.replace('_', '-')}"
            click.echo(f"note: {folder.name} is emitted with {option} {_shown(now)}, was {_shown(before)}", err=True)


def _shown(value: object) -> str:
    return {None: "unset", True: "on", False: "off"}[value] if value is None or isinstance(value, bool) else str(value)


def request_again(model: str, out: Path, given: dict[str, Any]) -> Request:
    """The request that wrote the model's package, with what is `given` in place of the old.

    Raises click.UsageError if there is no such package.
    """
    name = given.get("package") or snake_case(model.rpartition(":")[2])
    if name not in find_packages(out):
        raise click.UsageError(
            f"--cp N is missing: the context-parallel degree ({out} has no package {name} to repeat)"
        )
    (known,) = requests_in(out, [name])
    if "strategy" in given:
        known = replace(known, ulysses_degree=None, outer=None, load_balance=False)
    return replace(known, model=model, **given)
