"""The plan infer command: probes, a plan from what they show, its proof, and only then a file."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from cpgen.diagnostics import CpgenError, Finding, fail
from cpgen.package import Request
from cpgen.plan import Probe
from cpgen.plan_files import read_text
from cpgen.plan_loader import load_probes
from cpgen.probe_arguments import check_probes
from cpgen.source import SourceTree, diffusers_version
from cpgen.target import Target, find_target
from cpgen.verify.command import check_installed, run_requests
from cpgen.verify.run import Result

DEGREE = 2
STRATEGIES = ("ulysses", "allgather")


def infer_command(model: str, probes: Path | None, write: Path | None, draft: Path | None, force: bool) -> int:
    """Infer a plan for `model`, prove it, and write it to `write`, or print it on stdout. Returns the exit code.

    `probes` is a file with probes (a plan will do); without one they are made up from the class's signatures. A plan
    that is not proven goes nowhere but into `draft`. Raises CpgenError with all that could not be decided or proven.
    """
    check_installed("plan infer")
    if sys.version_info < (3, 11):  # it asks Python at which column an instruction is
        raise fail("CP304", "plan infer needs Python 3.11 or newer", help="the plan that it writes works on 3.10, too")
    for path in (write, draft):
        if path is not None:
            _check_place(path, force)
    with _prints_on_stderr():
        text = _proven_plan(model, probes, draft)
    if write is None:
        click.echo(text, nl=False)
    else:
        _write(write, text)
        click.echo(write.as_posix())
    return 0


def _check_place(path: Path, force: bool) -> None:
    """Raises CpgenError if a file can't be written there: before minutes of work, not behind them."""
    name = path.as_posix()
    if path.is_dir() or not path.parent.is_dir():
        missing = "is a directory" if path.is_dir() else f"{path.parent.as_posix()} is no directory"
        raise fail("CP404", f"cannot write {name}: {missing}")
    if path.exists() and not path.is_file():  # a device, a pipe: the rename would take its place
        raise fail("CP404", f"cannot write {name}: it is no regular file")
    if path.exists() and not force:
        raise fail("CP404", f"{path} exists", help="choose another name, or replace it with --force")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise fail("CP404", f"cannot write {name}: {path.parent.as_posix()} may not be written to")


@contextlib.contextmanager
def _prints_on_stderr() -> Iterator[None]:
    """What the model prints, here or in a worker, goes to stderr: stdout is for the plan."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _proven_plan(model: str, probes: Path | None, draft: Path | None) -> str:
    from cpgen.infer.branches import untaken_branches
    from cpgen.infer.draft import plan_text
    from cpgen.infer.guess import guess_probes
    from cpgen.infer.inference import infer_plan

    tree = SourceTree()
    target = find_target(model, tree)
    given = guess_probes(target) if probes is None else _read_probes(probes)
    check_probes(target, given)
    click.echo(
        f"running {target.class_name} on {len(given)} probes: {', '.join(each.name for each in given)}", err=True
    )
    inferred = infer_plan(target, given, tree)
    plan, problems = inferred.plan, inferred.problems
    results: Sequence[Result] = ()
    if not problems:
        click.echo(f"verifying what they show: cp {DEGREE}, {' and '.join(STRATEGIES)}", err=True)
        problems, results = prove(model, plan_text(plan, ""))
    if problems:
        if draft is not None:
            _write(draft, plan_text(plan, "Not proven. Left open by cpgen plan infer:\n" + _sentences(problems)))
            click.echo(f"{draft}: not proven", err=True)
        raise CpgenError(problems, exit_code=1)
    unproven = inferred.warnings + untaken_branches(target, plan)
    for finding in unproven:
        click.echo(finding.render("warning") + "\n", err=True)
    comment = _proof(results, target, tree)
    if unproven:
        comment += "\nNot proven:\n" + "\n".join(_comment_on(each) for each in unproven)
    return plan_text(plan, comment)


def _comment_on(finding: Finding) -> str:
    place = finding.location
    if place is None:
        return f"- {finding.message}"
    return f"- {place.file.rpartition('/')[2]}:{place.line}, {finding.message}: {(place.text or '').strip()}"


def _read_probes(path: Path) -> tuple[Probe, ...]:
    found = load_probes(read_text(path, f"the file of probes {path.as_posix()}"), path.as_posix())
    if not found:
        raise fail("CP404", f"{path.as_posix()} has no probes")
    return found


def prove(model: str, text: str) -> tuple[list[Finding], Sequence[Result]]:
    """What `verify` has to say against the plan with this text; and its results."""
    with tempfile.TemporaryDirectory(prefix="cpgen-infer-") as folder:
        file = Path(folder) / "plan.yaml"
        file.write_text(text, "utf-8")
        try:
            results = run_requests([Request(model, DEGREE, plan=file)], [DEGREE], STRATEGIES)
        except CpgenError as error:
            return [_unplaced(finding, file) for finding in error.findings], ()
    wrong = [result for result in results if not result.ok]
    return [
        Finding(
            "CP606",
            f"the plan that was found is not right: probe '{each.probe}', cp {each.cp}, {each.strategy}",
            note=each.error,
            help="--draft FILE keeps it, to go on from by hand (docs/plans.md)",
        )
        for each in wrong
    ], results


def _unplaced(finding: Finding, file: Path) -> Finding:
    """A finding about the plan's own text, which the user has not seen, without its place there."""
    location = finding.location
    if location is not None and location.file == file.as_posix():
        location = None
    return Finding(finding.code, finding.message, location, note=finding.note, help=finding.help)


def _proof(results: Sequence[Result], target: Target, tree: SourceTree) -> str:
    output = max(results, key=lambda result: _ratio(result))
    gradient = max(result.grad_max_rel or 0.0 for result in results)
    version = f"diffusers {diffusers_version(tree)}, " if target.kind == "diffusers" else ""
    unchecked = "" if any(result.checkpointed for result in results) else "\nNot run with gradient checkpointing."
    return (
        f"{target.class_name}. Found and proven by cpgen plan infer: {version}cp {DEGREE}, {' and '.join(STRATEGIES)}, "
        f"{len(results)} cases,\nworst output off by {output.forward_max_abs:.1e} of {output.reference_max_abs:.1e}, "
        f"worst gradient by {gradient:.1e} of its norm.{unchecked}"
    )


def _ratio(result: Result) -> float:
    return (result.forward_max_abs or 0.0) / (result.reference_max_abs or 1.0)


def _sentences(findings: Sequence[Finding]) -> str:
    return "\n".join(f"- {finding.message}".splitlines()[0] for finding in findings)


def _write(path: Path, text: str) -> None:
    """All of the file or nothing."""
    try:
        handle, staged = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(staged).chmod(0o644)
            Path(staged).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(staged).unlink()
            raise
    except OSError as error:
        raise fail("CP404", f"cannot write {path.as_posix()}: {error.strerror}") from None
