"""The command line: parses, calls, prints. Data goes to stdout, messages to stderr."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

import cpgen

OUT = click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("generated"),
    show_default=True,
    help="Directory of packages.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")


class _SeveralValues(click.Command):
    """Takes `--cp 2 4` and `--strategy ulysses allgather` for options that may be given several times."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        expanded: list[str] = []
        option = ""
        for arg in args:
            if arg in ("--cp", "--strategy"):
                option = arg
            elif option and expanded[-1] != option and _is_value(option, arg):
                expanded.append(option)
            elif expanded and expanded[-1] != option:
                option = ""
            expanded.append(arg)
        return super().parse_args(ctx, expanded)


def _is_value(option: str, arg: str) -> bool:
    # A package is never called a number, and would hardly be called like a strategy.
    return arg.isdigit() if option == "--cp" else arg in ("ulysses", "allgather", "ring", "hybrid")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(cpgen.__version__, prog_name="cpgen")
def cli() -> None:
    """Generate readable, context-parallel model packages from diffusers transformers."""


@cli.command()
@click.option(
    "--model", "models", multiple=True, metavar="M", help="Class of diffusers, package.module:Class, or file.py:Class."
)
@click.option("--cp", type=int, metavar="N", help="Context-parallel degree  [default: as the package was emitted].")
@click.option("--strategy", metavar="S", help="ulysses (default), allgather, ring or hybrid.")
@click.option("--ulysses-degree", type=int, metavar="K", help="Of hybrid: ranks that trade tokens for heads.")
@click.option("--outer", metavar="S", help="Of hybrid, between those groups: allgather (default) or ring.")
@click.option("--load-balance", is_flag=True, help="Cut streams in head-tail order, for causal attention.")
@click.option("--tp", type=int, metavar="N", help="Tensor-parallel degree  [default: 1].")
@click.option("--plan", type=click.Path(path_type=Path), metavar="FILE", help="Plan to use instead of the shipped one.")
@click.option("--package", metavar="NAME", help="Package name  [default: from the class name].")
@OUT
@click.option("--vendor-runtime", is_flag=True, help="Copy the runtime library into the package.")
@click.option("--all", "everything", is_flag=True, help="Emit every package in --out again, as its manifest says.")
@click.option("--dry-run", is_flag=True, help="Say what would be written.")
@click.option("--force", is_flag=True, help="Overwrite files edited by hand.")
@JSON
def emit(
    models: tuple[str, ...],
    cp: int | None,
    strategy: str | None,
    ulysses_degree: int | None,
    outer: str | None,
    load_balance: bool,
    tp: int | None,
    plan: Path | None,
    package: str | None,
    out: Path,
    vendor_runtime: bool,
    everything: bool,
    dry_run: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Write the parallel package of a model. All files or none; only what changed."""
    from cpgen.package import Request
    from cpgen.package_commands import emit_command
    from cpgen.package_requests import request_again, requests_in

    if everything == bool(models):
        raise click.UsageError("give --model M (or more of them), or --all")
    options = {
        "cp": cp,
        "strategy": strategy,
        "ulysses_degree": ulysses_degree,
        "outer": outer,
        "load_balance": load_balance or None,
        "tp": tp,
        "plan": plan,
        "package": package,
        "vendor_runtime": vendor_runtime or None,
    }
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if everything and given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise click.UsageError(f"--all emits packages as their manifests say: {names} can't be given with it")
    if package is not None and len(models) > 1:
        raise click.UsageError("--package names one package: give one --model")
    if plan is not None and len(models) > 1:
        raise click.UsageError("--plan is for one model: give one --model")
    if everything:
        requests = requests_in(out)
        if not requests:
            click.echo(f"no packages in {out}", err=True)
    elif cp is None:
        requests = [request_again(model, out, given) for model in models]
    else:
        requests = [Request(model, **given) for model in models]
    emit_command(requests, out, dry_run=dry_run, force=force, as_json=as_json)


@cli.command()
@click.argument("packages", nargs=-1, metavar="[PACKAGE]...")
@click.option("--all", "everything", is_flag=True, help="Every package in --out.")
@OUT
@JSON
def check(packages: tuple[str, ...], everything: bool, out: Path, as_json: bool) -> None:
    """Regenerate packages in memory and compare. Exits 1 if a plan, cpgen, diffusers or a hand moved something."""
    from cpgen.drift import find_packages
    from cpgen.package_commands import check_command

    names = _package_names(packages, everything, out, find_packages(out))
    sys.exit(check_command(names, out, as_json))


@cli.command()
@click.argument("packages", nargs=-1, metavar="[PACKAGE]...")
@click.option("--upstream", is_flag=True, help="Compare with upstream's source instead of the files on disk.")
@OUT
def diff(packages: tuple[str, ...], upstream: bool, out: Path) -> None:
    """Show the diff from the files on disk to what would be emitted, or the surgery itself (--upstream)."""
    from cpgen.drift import diff_package, find_packages
    from cpgen.source import SourceTree

    names = _package_names(packages, not packages, out, find_packages(out))
    tree = SourceTree()
    for name in names:
        text = diff_package(name, out, tree, upstream=upstream)
        click.echo(_coloured(text) if sys.stdout.isatty() and "NO_COLOR" not in os.environ else text, nl=False)


@cli.command("list")
@OUT
@JSON
def list_models(out: Path, as_json: bool) -> None:
    """List diffusers' transformers and ControlNets: plan, streams, strategies, probes, last proven version, state."""
    from cpgen.catalog import as_table, catalog

    rows = catalog(out)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    click.echo(as_table(rows), nl=False)


@cli.group()
def plan() -> None:
    """Show, check or find plans."""


@plan.command("show")
@click.argument("model", metavar="M")
@click.option(
    "--plan", "path", type=click.Path(path_type=Path), metavar="FILE", help="Plan to use instead of the shipped one."
)
@click.option("--cp", type=int, metavar="N", help="Also show what each strategy sends at this degree.")
@click.option("--tokens", type=int, metavar="T", help="With --cp: tokens of an attention call  [default: 32768].")
@click.option("--batch", type=int, metavar="B", help="With --cp: the batch size  [default: 1].")
def plan_show(model: str, path: Path | None, cp: int | None, tokens: int | None, batch: int | None) -> None:
    """Describe the plan of a model."""
    from cpgen.catalog import describe
    from cpgen.package import find_plan
    from cpgen.source import SourceTree
    from cpgen.target import find_target

    if cp is None and (tokens is not None or batch is not None):
        raise click.UsageError("--tokens and --batch go with --cp N")
    tree = SourceTree()
    target = find_target(model, tree)
    found = find_plan(target, path, tree)
    text = describe(found)
    if cp is not None:
        from cpgen.comparison import TOKENS, describe_costs

        sizes = (TOKENS if tokens is None else tokens, 1 if batch is None else batch)
        text += "\n" + describe_costs(target, found, tree, cp, *sizes)
    click.echo(text, nl=False)


@plan.command("lint")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--model", metavar="M", help="The class, where the plan is for one that diffusers does not export.")
def plan_lint(file: Path, model: str | None) -> None:
    """Check a plan: its form, and that all it names is in the source."""
    from cpgen.package import default_heads, find_plan
    from cpgen.plan_files import read_plan
    from cpgen.probe_arguments import check_probes
    from cpgen.source import SourceTree
    from cpgen.strategy import EXCHANGES
    from cpgen.surgery.operate import operate
    from cpgen.target import find_target

    loaded = read_plan(file, file.as_posix())
    tree = SourceTree()
    target = find_target(model or loaded.model, tree)
    checked = find_plan(target, file, tree)
    for exchange in EXCHANGES:
        operate(target, checked, exchange, "cpgen.runtime", tree)
    default_heads(target, checked)
    check_probes(target, checked.probes)
    click.echo(f"{file.as_posix()}: fits {target.module.label}, {len(checked.probes)} probes", err=True)
    if checked.wraps and checked.wraps.plan:
        click.echo(f"  = note: what it leaves out of {checked.wraps.model} is from {checked.wraps.plan}", err=True)
    if not checked.probes:
        click.echo("  = note: without probes cpgen verify has nothing to run: nothing is proven", err=True)


@plan.command("infer")
@click.option("--model", required=True, metavar="M", help="As for emit.")
@click.option(
    "--probes",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Probes to run it on; a plan file will do  [default: guessed from its signatures].",
)
@click.option("--write", type=click.Path(path_type=Path), metavar="FILE", help="Where to write the plan, if proven.")
@click.option("--draft", type=click.Path(path_type=Path), metavar="FILE", help="Where to write it if it is not.")
@click.option("--force", is_flag=True, help="Replace FILE.")
def plan_infer(model: str, probes: Path | None, write: Path | None, draft: Path | None, force: bool) -> None:
    """Find a plan by running the model on changed inputs, prove it on 2 local ranks, and print or write it."""
    from cpgen.infer.command import infer_command

    sys.exit(infer_command(model, probes, write, draft, force))


@cli.command(cls=_SeveralValues)
@click.argument("packages", nargs=-1, metavar="[PACKAGE]...")
@click.option("--model", "models", multiple=True, metavar="M", help="Verify this model without a package on disk.")
@click.option("--plan", type=click.Path(path_type=Path), metavar="FILE", help="With --model: the plan to use.")
@click.option("--cp", "degrees", type=int, multiple=True, metavar="N", help="Degree, or several: --cp 2 4.")
@click.option("--strategy", "strategies", multiple=True, metavar="S", help="Strategy, or several.")
@click.option("--ulysses-degree", type=int, metavar="K", help="With --model and --strategy hybrid: as for emit.")
@click.option("--outer", metavar="S", help="With --model and --strategy hybrid: as for emit.")
@click.option("--load-balance", is_flag=True, help="With --model: as for emit.")
@click.option("--tp", type=int, default=1, metavar="N", help="With --model: as for emit.")
@click.option("--probe", "probes", multiple=True, metavar="NAME", help="Only these probes.")
@click.option("--all", "everything", is_flag=True, help="Every model that has a shipped plan.")
@click.option("--markdown", is_flag=True, help="Print a Markdown table, one row a model.")
@OUT
@JSON
def verify(
    packages: tuple[str, ...],
    models: tuple[str, ...],
    plan: Path | None,
    degrees: tuple[int, ...],
    strategies: tuple[str, ...],
    ulysses_degree: int | None,
    outer: str | None,
    load_balance: bool,
    tp: int,
    probes: tuple[str, ...],
    everything: bool,
    markdown: bool,
    out: Path,
    as_json: bool,
) -> None:
    """Run probes on local ranks, forward and gradients, against the unmodified class. Exits 1 on a mismatch."""
    from cpgen.package import Request
    from cpgen.package_commands import refuse_drift
    from cpgen.package_requests import requests_in
    from cpgen.resources import shipped_plans
    from cpgen.verify.command import verify_command

    if sum(map(bool, (packages, models, everything))) != 1:
        raise click.UsageError("give PACKAGE, --model M, or --all")
    if plan is not None and len(models) != 1:
        raise click.UsageError("--plan belongs to one --model")
    options: dict[str, Any] = {"ulysses_degree": ulysses_degree, "outer": outer, "load_balance": load_balance}
    if any(options.values()) and (not models or len(strategies) > 1):
        raise click.UsageError("--ulysses-degree, --outer and --load-balance go with --model and one --strategy")
    if tp != 1 and not models:
        raise click.UsageError("--tp goes with --model: a package has its own degree")
    if packages:
        names = [_package_name(name, out) for name in packages]
        requests = requests_in(out, names)
        refuse_drift(names, out)
    else:
        default = strategies[0] if strategies else "ulysses"
        named = shipped_plans() if everything else models
        requests = [
            Request(model, degrees[0] if degrees else 2, default, tp=tp, plan=plan, **options) for model in named
        ]
    sys.exit(verify_command(requests, degrees, strategies, probes, as_json, markdown))


@cli.command()
@click.argument("checkpoint", type=click.Path(path_type=Path), metavar="CHECKPOINT")
@click.option("--to", "directory", type=click.Path(path_type=Path), required=True, metavar="DIR", help="Where to.")
@click.option("--step", type=int, metavar="N", help="Of a directory of checkpoints: which  [default: the latest].")
@click.option("--dtype", metavar="D", help="float32, float16 or bfloat16  [default: as saved].")
@click.option("--max-shard-size", default="5GB", show_default=True, metavar="S", help="Of a file: 5GB, 500MB.")
@click.option("--config", type=click.Path(path_type=Path), metavar="FILE", help="config.json, if CHECKPOINT lacks it.")
@click.option("--force", is_flag=True, help="Replace weights that are in DIR.")
def export(
    checkpoint: Path,
    directory: Path,
    step: int | None,
    dtype: str | None,
    max_shard_size: str,
    config: Path | None,
    force: bool,
) -> None:
    """Write the model of a training checkpoint as weights that plain diffusers loads. Needs no process group."""
    from cpgen.export import DTYPES, export_command

    if dtype is not None and dtype not in DTYPES:
        raise click.UsageError(f"--dtype {dtype} is not one of {', '.join(DTYPES)}")
    if step is not None and step < 0:
        raise click.UsageError(f"--step {step} must not be negative; the latest is the default")
    options = {"step": step, "dtype": dtype, "max_shard_size": max_shard_size, "config": config, "force": force}
    for path in export_command(checkpoint, directory, **options):  # type: ignore[arg-type]
        click.echo(path.as_posix())


def _package_names(given: tuple[str, ...], everything: bool, out: Path, known: list[str]) -> list[str]:
    from cpgen.diagnostics import fail

    if everything:
        if given:
            raise click.UsageError("give package names or --all, not both")
        if not known:
            raise fail("CP205", f"no packages in {out}", help="run it where that directory is, or name it with --out")
        return known
    if not given:
        raise click.UsageError("give a package name, or --all")
    return [_package_name(name, out) for name in given]


def _package_name(given: str, out: Path) -> str:
    """A shell completes paths: generated/wan_transformer_3d/ names the package as well."""
    name = given.rstrip("/").rpartition("/")[2]
    return name if (out / name).is_dir() else given


def _coloured(text: str) -> str:
    colours = {"+": "green", "-": "red", "@": "cyan"}
    return "".join(
        click.style(line, fg=colours[line[0]]) if line[:1] in colours else line
        for line in text.splitlines(keepends=True)
    )


def main(arguments: list[str] | None = None) -> Any:
    """Run the command line.

    Exit codes: 0 fine, 1 drift or a failed check, 2 bad input, 3 internal error, 130 interrupted.
    """
    from cpgen.diagnostics import CpgenError

    stdout = sys.stdout
    if str(Path.cwd()) not in sys.path:
        sys.path.append(
            str(Path.cwd())
        )  # for package.module:Class, as python -m has it; last, so that it hides nothing
    try:
        cli.main(args=arguments, prog_name="cpgen", standalone_mode=False)
    except click.exceptions.Exit as exit_:
        sys.exit(exit_.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except CpgenError as error:
        click.echo(str(error), err=True)
        count = len(error.findings)
        if count > 1:
            click.echo(f"\n{count} errors", err=True)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except SystemExit:
        if sys.stdout is stdout:
            raise
        # click has replaced it: the reader of a pipe went away. Not an error, though click exits with 1.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
        sys.exit(0)
    except Exception as error:
        if os.environ.get("CPGEN_TRACEBACK"):
            raise
        click.echo(f"internal error: {type(error).__name__}: {error}", err=True)
        click.echo("  = help: this is a fault of cpgen; CPGEN_TRACEBACK=1 shows where", err=True)
        sys.exit(3)


if __name__ == "__main__":
    main()
