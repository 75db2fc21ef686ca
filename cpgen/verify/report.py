"""What `verify` shows: a table, a list of failures, JSON, a progress bar, and a table in Markdown.

`python -m cpgen.verify.report results.json` prints that of `--markdown` from what `cpgen verify --json` printed.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from cpgen.verify.case import TOLERANCE
from cpgen.verify.run import OnProgress, Result


def to_json(results: Sequence[Result]) -> str:
    """A list of objects with the fields of `Result`. What is not a finite number is null: JSON has no other."""
    return json.dumps([{key: _finite(value) for key, value in asdict(result).items()} for result in results], indent=2)


def from_json(text: str) -> list[Result]:
    """Undo `to_json`. Raises ValueError for anything else."""
    objects = json.loads(text)
    known = {field.name for field in fields(Result)}
    if not isinstance(objects, list) or not all(isinstance(o, dict) and known.issuperset(o) for o in objects):
        raise ValueError("this is not the output of cpgen verify --json")
    try:
        return [Result(**each) for each in objects]
    except TypeError as error:
        raise ValueError(f"this is not the output of cpgen verify --json: {error}") from error


def render(results: Sequence[Result], console: Console) -> None:
    """Print a table with a row a result, then each failure in full, then a line that counts them."""
    table = Table(box=None, pad_edge=False)
    degrees = ("cp", "tp") if any(result.tp > 1 for result in results) else ("cp",)
    for heading in ("package", "probe", *degrees, "strategy", "max|out - ref|", "max|ref|", "gradient", "", "seconds"):
        numeric = heading in ("cp", "tp", "max|out - ref|", "max|ref|", "gradient", "seconds")
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=True)
    for result in results:
        table.add_row(
            result.package,
            result.probe,
            *(str(getattr(result, degree)) for degree in degrees),
            result.strategy,
            _number(result.forward_max_abs),
            _number(result.reference_max_abs),
            _number(result.grad_max_rel),
            _outcome(result),
            f"{result.seconds:.2f}",
        )
    console.print(table)
    failures = [result for result in results if not result.ok]
    for result in failures:
        console.print(Text(describe_failure(result)), soft_wrap=True)
    skipped = [result for result in results if result.ok and result.skipped]
    for result in skipped:
        console.print(Text(f"skipped {result.package} {result.probe!r}: {result.skipped}"), soft_wrap=True)
    unchecked = sorted({result.model for result in results if result.ok and result.checkpointed is False})
    if unchecked:
        console.print(Text(f"not run with gradient checkpointing: {', '.join(unchecked)}"), soft_wrap=True)
    counted = f"{len(results) - len(failures) - len(skipped)} of {len(results)} passed"
    if skipped:
        counted += f", {len(skipped)} skipped"
    wide = sum(result.gradient_dtype == "float64" for result in results)
    rounding = f"{wide} times rounding was told from error in float64, " if wide else ""
    console.print(f"{counted} (tolerance {TOLERANCE:g}, {rounding}{sum(result.seconds for result in results):.1f} s)")


def _outcome(result: Result) -> Text:
    if not result.ok:
        return Text("FAILED", style="bold red")
    return Text("skipped", style="yellow") if result.skipped else Text("ok", style="green")


def describe_failure(result: Result) -> str:
    """One failure in full: model, package, probe, degree, strategy; the error names tensor or parameter and rank."""
    probe = f"probe {result.probe!r}, " if result.probe else ""
    tp = f"tp {result.tp}, " if result.tp > 1 else ""
    where = f"{result.model} ({result.package}), {probe}cp {result.cp}, {tp}{result.strategy}"
    return f"FAILED {where}\n" + "\n".join(f"    {line}" for line in (result.error or "").splitlines())


@contextmanager
def progress(console: Console | None = None) -> Iterator[OnProgress | None]:
    """A bar on stderr to pass as `on_progress`, if stderr is a terminal; else None."""
    console = Console(stderr=True) if console is None else console
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("verify", total=None)

        def advance(done: int, total: int, result: Result) -> None:
            description = f"{result.package} {result.probe} {result.strategy} cp{result.cp}"
            bar.update(task, completed=done, total=total, description=description)

        yield advance


def markdown_table(results: Sequence[Result]) -> str:
    """Models as rows; for each degree and strategy the worst output and gradient error over all of a model's probes.

    An output error is max|out - ref| / max|ref|, a gradient error ||g - ref|| / ||ref||. A failure is shown as one.
    """
    runs = sorted({_run(result) for result in results})
    names = [f"{strategy}, cp {cp}" + (f", tp {tp}" if tp > 1 else "") for strategy, cp, tp in runs]
    headings = ["model", "probes", *names]
    lines = [_row(headings), _row(["---"] * len(headings))]
    for model in sorted({result.model for result in results}):
        of_model = [result for result in results if result.model == model]
        cells = [_cell([r for r in of_model if _run(r) == run and not (r.ok and r.skipped)]) for run in runs]
        probes = {result.probe for result in of_model if not (result.ok and result.skipped)}
        lines.append(_row([f"`{model}`", str(len(probes)), *cells]))
    return "\n".join(lines) + "\n"


def _run(result: Result) -> tuple[str, int, int]:
    return result.strategy, result.cp, result.tp


def _cell(results: Sequence[Result]) -> str:
    if not results:
        return "not run"
    failed = [result for result in results if not result.ok]
    if failed:
        return f"{len(failed)} of {len(results)} failed"
    return f"{_worst(results, forward_error)} / {_worst(results, lambda result: result.grad_max_rel)}"


def _worst(results: Sequence[Result], error: Callable[[Result], float | None]) -> str:
    return _number(max((error(result) or 0.0 for result in results), default=None))


def forward_error(result: Result) -> float | None:
    """max|out - ref| / max|ref| of the worst output; None where nothing was measured."""
    if result.forward_max_abs is None or not result.reference_max_abs:
        return None
    return result.forward_max_abs / result.reference_max_abs


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return "0" if value == 0 else f"{value:.1e}"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) != 1:
        print("usage: python -m cpgen.verify.report RESULTS.json", file=sys.stderr)
        return 2
    try:
        results = from_json(Path(arguments[0]).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        print(f"error: {arguments[0]}: {error}", file=sys.stderr)
        return 2
    print(markdown_table(results), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
