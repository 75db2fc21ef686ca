"""The verify command: emits what is asked for into a temporary directory, runs it, and prints what came out."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from cpgen.diagnostics import fail
from cpgen.package import Request, generate
from cpgen.probe_arguments import check_probes
from cpgen.source import SourceTree
from cpgen.verify.case import reference_of
from cpgen.verify.pool import WorkerPool
from cpgen.verify.report import markdown_table, progress, render, to_json
from cpgen.verify.run import PackageToVerify, Result, verify

MAX_RANKS = 64


def verify_command(
    requests: Sequence[Request],
    degrees: Sequence[int],
    strategies: Sequence[str],
    probes: Sequence[str],
    as_json: bool,
    markdown: bool,
) -> int:
    """Verify `requests` at `degrees` and `strategies` (default: each request's own). Returns the exit code, 0 or 1.

    Raises CpgenError for input that cannot be used.
    """
    check_installed("verify")
    for degree in degrees:
        if not 1 <= degree <= MAX_RANKS:
            raise fail("CP403", f"--cp {degree}: verify runs 1 to {MAX_RANKS} local ranks")
    results = run_requests(requests, degrees, strategies, probes)
    if as_json:
        click.echo(to_json(results))
    elif markdown:
        click.echo(markdown_table(results), nl=False)
    else:
        from rich.console import Console

        render(results, Console(width=None if sys.stdout.isatty() else 160))
    return 0 if results and all(result.ok for result in results) else 1


def check_installed(command: str) -> None:
    """Raises CpgenError if what it takes to run a model is not there."""
    for name in ("torch", "diffusers"):
        if importlib.util.find_spec(name) is None:
            message = f"{command} runs the model, and {name} is not installed"
            raise fail("CP304", message, help="pip install 'cpgen[run]'")


def run_requests(
    requests: Sequence[Request], degrees: Sequence[int], strategies: Sequence[str], probes: Sequence[str] = ()
) -> list[Result]:
    """Emit `requests` into a temporary directory and verify them there. Raises CpgenError for unusable input."""
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="cpgen-verify-") as folder:
        groups = _group(requests, degrees, strategies)
        size = max(cp * request.tp for group, cps, _ in groups for cp in cps for request in group)
        if size > MAX_RANKS:
            raise fail("CP403", f"cp times tp is {size}: verify runs 1 to {MAX_RANKS} local ranks")
        with WorkerPool(size) as pool, progress() as on_progress:
            for group, cps, chosen in groups:
                packages = [_emit(request, cps, chosen, Path(folder)) for request in group]
                try:
                    results += verify(packages, cps, chosen, pool=pool, on_progress=on_progress, probes=probes or None)
                except ValueError as error:
                    raise fail("CP407", str(error)) from None
    return results


def _group(
    requests: Sequence[Request], degrees: Sequence[int], strategies: Sequence[str]
) -> list[tuple[list[Request], list[int], list[str]]]:
    """Requests that run at the same degrees and strategies."""
    groups: dict[tuple[tuple[int, ...], tuple[str, ...]], list[Request]] = {}
    for request in requests:
        key = (tuple(dict.fromkeys(degrees)) or (request.cp,), tuple(dict.fromkeys(strategies)) or (request.strategy,))
        groups.setdefault(key, []).append(request)
    return [(group, list(cps), list(chosen)) for (cps, chosen), group in groups.items()]


def _emit(request: Request, cps: list[int], strategies: list[str], folder: Path) -> PackageToVerify:
    tree = SourceTree()
    for cp in cps:
        for strategy in strategies:
            variant = replace(request, cp=cp, strategy=strategy)
            if strategy != request.strategy:
                variant = replace(variant, ulysses_degree=None, outer=None, load_balance=False)
            package = generate(variant, folder, tree)
            emitted = PackageToVerify(
                package.name, folder / package.name, package.plan, reference_of(package.target), request.tp
            )
            for name, text in package.files.items():
                file = emitted.variant(cp, strategy) / package.name / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, "utf-8")
    check_probes(package.target, package.plan.probes)
    return emitted
