"""What `emit` and `check` do with packages, and what they say of it: paths and JSON on stdout, the rest on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from cpgen.diagnostics import CpgenError, Finding
from cpgen.disk import write_package
from cpgen.drift import FileState, check_package, edited_error, unified_diff
from cpgen.native_plan import is_native
from cpgen.package import Request, generate
from cpgen.package_requests import say_choices
from cpgen.source import SourceTree


def emit_command(requests: Sequence[Request], out: Path, *, dry_run: bool, force: bool, as_json: bool) -> None:
    """Write the packages that are asked for into `out`, or say what would be written.

    Raises CpgenError for a request that can't be met: all packages are made before the first is written.
    """
    tree = SourceTree()
    packages = [generate(request, out, tree) for request in requests]
    for item in packages:
        say_choices(item, out / item.name)
    report = []
    for item in packages:
        counts = _line_counts(out / item.name, item.files)
        changed = sorted(counts) if dry_run else sorted(write_package(item, out, force=force))
        for file in changed:
            path = (out / item.name / file).as_posix()
            added, removed = counts.get(file, (0, 0))
            click.echo(f"{'would write' if dry_run else 'wrote'} {path} (+{added} -{removed})", err=True)
            if not as_json and not sys.stdout.isatty():  # on a terminal the line above says it
                click.echo(path)
        if not changed:
            click.echo(f"{(out / item.name).as_posix()} is up to date", err=True)
        if changed and is_native(item.plan):
            click.echo(f"  = note: {item.plan.name} has no probes, so nothing has proven {item.name}", err=True)
            click.echo(
                "  = help: write a plan with probes (docs/plans.md), emit with it, and run cpgen verify", err=True
            )
        report.append(
            {"package": item.name, "model": item.target.class_name, "files": sorted(item.files), "changed": changed}
        )
    if as_json:
        click.echo(json.dumps(report, indent=2))


def check_command(names: Sequence[str], out: Path, as_json: bool) -> int:
    """Regenerate the packages `names` in memory and compare them with `out`. Returns the exit code, 0 or 1."""
    tree = SourceTree()
    states: list[FileState] = []
    with click.progressbar(names, label="checking", file=sys.stderr, hidden=not sys.stderr.isatty()) as bar:
        for name in bar:
            states += check_package(name, out, tree)
    if as_json:
        click.echo(json.dumps([vars(state) for state in states], indent=2))
    for state in states:
        path = (out / state.package / state.file).as_posix()
        if state.state == "changed":
            click.echo(f"would rewrite {path} (+{state.added} -{state.removed})", err=True)
        elif state.state == "missing":
            click.echo(f"would write {path}", err=True)
        elif state.state == "stale":
            click.echo(f"would remove {path}", err=True)
    error = edited_error(states, out)
    if error is not None:
        click.echo(str(error), err=True)
    bad = sum(state.state != "same" for state in states)
    good = len(states) - bad
    if bad:
        advice = "" if error is not None else " Run: cpgen emit --all"
        click.echo(f"{_files(bad)} out of date, {good} up to date.{advice}", err=True)
        return 1
    click.echo(f"{_files(good)} up to date", err=True)
    return 0


def refuse_drift(names: Sequence[str], out: Path) -> None:
    """Raise CpgenError if a package on disk is not what its request gives today: what is verified is the latter."""
    tree = SourceTree()
    states = [state for name in names for state in check_package(name, out, tree)]
    if (error := edited_error(states, out)) is not None:
        raise error
    findings = [
        Finding(
            "CP206",
            f"{(out / name).as_posix()} is not what would be emitted today, so verifying would not prove these files",
            note=f"what differs: cpgen check {name}",
            help="emit it again, as its manifest says: cpgen emit --all",
        )
        for name in dict.fromkeys(state.package for state in states if state.state != "same")
    ]
    if findings:
        raise CpgenError(findings, exit_code=1)


def _line_counts(folder: Path, files: dict[str, str]) -> dict[str, tuple[int, int]]:
    """For each file that is not on disk as in `files`: lines added and removed."""
    counts = {}
    for name, text in files.items():
        path = folder / name
        old = path.read_bytes().decode("utf-8", errors="replace") if path.is_file() else ""
        if old != text or not path.is_file():
            lines = unified_diff(old, text, "", "").splitlines()[2:]
            counts[name] = (sum(line.startswith("+") for line in lines), sum(line.startswith("-") for line in lines))
    return counts


def _files(count: int) -> str:
    return f"{count} file" if count == 1 else f"{count} files"
