"""A request becomes a package in memory: file name -> text. Nothing here writes, and nothing is imported."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cpgen
from cpgen import resources
from cpgen.constructor import whole_number_defaults
from cpgen.diagnostics import CpgenError, did_you_mean, fail
from cpgen.native_plan import has_native_plan, is_native, native_plan, other_plan
from cpgen.plan import Plan
from cpgen.plan_files import read_plan
from cpgen.plan_reader import is_name
from cpgen.plan_versions import check_version
from cpgen.source import SourceTree, diffusers_version
from cpgen.strategy import Strategy, resolve
from cpgen.surgery.edits import Insertion
from cpgen.surgery.functions import method
from cpgen.surgery.operate import EditedFile, Operation, operate, region_holder
from cpgen.target import RESERVED_FILES, Target, find_target, snake_case
from cpgen.tensor_parallel import check_tensor_parallel, tp_context

MANIFEST = "MANIFEST.json"
MANIFEST_FORMAT = 1


@dataclass(frozen=True)
class Request:
    """What the user asks for. Paths in `model` and `plan` are relative to the current directory or absolute."""

    model: str
    cp: int
    strategy: str = "ulysses"
    ulysses_degree: int | None = None  # of hybrid; None: chosen by cp and the number of heads
    outer: str | None = None  # of hybrid: "allgather" (None) or "ring"
    load_balance: bool = False
    tp: int = 1
    plan: Path | None = None
    package: str | None = None
    vendor_runtime: bool = False


@dataclass(frozen=True)
class Package:
    """A generated package. `files` are paths inside it, with "/", to text."""

    name: str
    files: dict[str, str]
    request: Request
    plan: Plan
    target: Target
    upstream: dict[str, str]  # file -> upstream's text, for those that have one
    strategy: Strategy


def generate(request: Request, out: Path, tree: SourceTree | None = None) -> Package:
    """Generate the package for `request`, to be written under `out` (which only paths in the manifest depend on).

    Raises CpgenError.
    """
    tree = tree or SourceTree()
    _check_options(request)
    target = find_target(request.model, tree)
    plan = find_plan(target, request.plan, tree)
    name = request.package if request.package is not None else snake_case(target.class_name)
    _check_package_name(name)
    strategy = _strategy(request, target, plan)
    runtime = "._runtime" if request.vendor_runtime else "cpgen.runtime"
    try:
        operation = operate(target, plan, strategy.exchange, runtime, tree)
    except CpgenError as error:
        if not is_native(plan):
            raise
        instead = fail("CP111", f"{target.class_name}'s own _cp_plan cannot be emitted", help=other_plan(target.spec))
        raise CpgenError(error.findings + instead.findings) from None
    recorded = _recorded(request, target, out)
    command = _command(recorded, name, target)
    if not command.isprintable():
        raise fail("CP402", "a path with line breaks or control characters cannot stand in a header", help="rename it")
    files: dict[str, str] = {}
    for file in operation.files:
        files[file.name] = _header(file.upstream.label, file.upstream.sha256, plan, command) + file.text
    files |= _glue(request, strategy, target, plan, name, operation, runtime, command)
    if request.vendor_runtime:
        files |= {f"_runtime/{file}": text for file, text in resources.runtime_files().items()}
    files[MANIFEST] = _manifest(recorded, name, target, plan, operation, files, tree)
    upstream = {file.name: file.upstream.text for file in operation.files}
    return Package(name, files, request, plan, target, upstream, strategy)


def find_plan(target: Target, path: Path | None, tree: SourceTree) -> Plan:
    """`--plan FILE`, else the shipped plan, else the class's own `_cp_plan`: what it says on the installed diffusers.

    Raises CpgenError if there is none, or none for this version.
    """
    shipped = resources.shipped_plans().get(target.class_name) if target.kind == "diffusers" else None
    if path is not None:
        plan = read_plan(path, path.as_posix())
    elif shipped is not None:
        plan = read_plan(shipped, f"plans/{shipped.name}")
    elif has_native_plan(target):
        return native_plan(target, tree)
    else:
        raise fail(
            "CP110",
            f"no plan for {target.class_name}",
            note="it is not shipped, and the class has no _cp_plan of its own",
            help=other_plan(target.spec),
        )
    plan = plan.on(diffusers_version(tree))
    check_version(target, plan, tree)
    return plan


def request_from_manifest(manifest: dict[str, Any], folder: Path) -> Request:
    """The request that wrote `folder`, from its manifest. Raises CpgenError for a manifest that isn't cpgen's."""
    try:
        options = manifest["request"]
        request = Request(
            model=str(options["model"]),
            cp=int(options["cp"]),
            strategy=str(options["strategy"]),
            # Packages of earlier versions have no such entries.
            ulysses_degree=None if (degree := options.get("ulysses_degree")) is None else int(degree),
            outer=None if (outer := options.get("outer")) is None else str(outer),
            load_balance=bool(options.get("load_balance", False)),
            tp=int(options["tp"]),
            plan=None if options["plan"] is None else folder / str(options["plan"]),
            package=str(manifest["package"]),
            vendor_runtime=bool(options["vendor_runtime"]),
        )
    except (KeyError, TypeError, ValueError):
        raise fail("CP203", f"{folder.name}/{MANIFEST} is not a manifest of cpgen", exit_code=1) from None
    place, colon, class_name = request.model.rpartition(":")
    if colon and place.endswith(".py"):
        path = os.path.normpath(folder / place)
        request = replace(request, model=f"{path}:{class_name}")
    if request.plan is not None:
        request = replace(request, plan=Path(os.path.normpath(request.plan)))
    return request


def _check_options(request: Request) -> None:
    if request.cp < 1:
        raise fail("CP403", f"--cp {request.cp} is not a degree: 1 or more")
    if request.tp < 1:
        raise fail("CP403", f"--tp {request.tp} is not a degree: 1 or more")


def _check_package_name(name: str) -> None:
    if not is_name(name) or name in RESERVED_FILES:
        raise fail("CP402", f"{name!r} is not a package name", help="a Python identifier: letters, digits, underscores")


def _strategy(request: Request, target: Target, plan: Plan) -> Strategy:
    """The strategy with its degrees. Raises CpgenError where this model cannot have it."""
    if request.load_balance and not any(site.kind == "causal" for entry in plan.attention for site in entry.sites):
        raise fail(
            "CP403",
            f"--load-balance: {target.class_name} has no causal attention",
            note="in full attention every token attends to all others, so equal parts are equal work already",
        )
    heads = default_heads(target, plan)
    check_tensor_parallel(request.tp, plan, target.class_name, heads)
    heads = None if heads is None else heads // request.tp
    options = (request.strategy, request.cp, request.ulysses_degree, request.outer, request.load_balance)
    strategy = resolve(*options, heads)
    if heads is not None and strategy.ulysses_degree > heads:
        shared = f" on each rank of --tp {request.tp}" if request.tp > 1 else ""
        option = "--cp" if request.strategy == "ulysses" else "--ulysses-degree"
        raise fail(
            "CP405",
            f"{option} {strategy.ulysses_degree} does not fit {target.class_name} under {request.strategy}: it has "
            f"{heads} attention heads{shared}",
            note="ulysses gives each rank at least one head; heads need not divide evenly",
            help=f"{option} {heads} or less, or --strategy allgather or ring, which have no such limit",
        )
    return strategy


def default_heads(target: Target, plan: Plan) -> int | None:
    """The number of attention heads that the constructor defaults to, where it is a plain number.

    Raises CpgenError if the plan's heads is not an argument of the class's own constructor.
    """
    holder = region_holder(target, plan)
    constructor = method(holder.module, holder.node, "__init__")
    if plan.heads is None or constructor is None:
        return None
    if plan.heads not in constructor.parameters[1:]:  # all but self
        hint = did_you_mean(plan.heads, constructor.parameters)
        message = f"'{plan.heads}' (the plan's heads) is not an argument of {holder.class_name}"
        note = f"its constructor is at {holder.module.label}:{constructor.node.lineno}"
        raise fail("CP104", message, plan.heads_location, hint=hint, note=note)
    return whole_number_defaults(holder).get(plan.heads)


@dataclass(frozen=True)
class _Recorded:
    """The request as the manifest keeps it: paths relative to the package's folder, so it means the same anywhere."""

    model: str
    plan: str | None
    shown_model: str
    shown_plan: str | None
    request: Request


def _recorded(request: Request, target: Target, out: Path) -> _Recorded:
    def relative(path: Path, start: Path) -> str:
        return Path(os.path.relpath(path.resolve(), start.resolve())).as_posix()

    folder = out / "package"  # its own name doesn't matter to a relative path
    above = out.resolve().parent  # of ".", too
    model = shown_model = request.model
    if target.kind == "file":
        model = f"{relative(target.module.path, folder)}:{target.class_name}"
        shown_model = f"{relative(target.module.path, above)}:{target.class_name}"
    plan = None if request.plan is None else relative(request.plan, folder)
    shown_plan = None if request.plan is None else relative(request.plan, above)
    return _Recorded(model, plan, shown_model, shown_plan, request)


def _command(recorded: _Recorded, name: str, target: Target) -> str:
    """How to regenerate, from the directory that holds the output directory. Without the degree: see the manifest."""
    parts = ["cpgen emit --model", shlex.quote(recorded.shown_model)]
    if recorded.shown_plan is not None:
        parts += ["--plan", shlex.quote(recorded.shown_plan)]
    if name != snake_case(target.class_name):
        parts += ["--package", name]
    return " ".join(parts)


def _header(label: str, sha256: str, plan: Plan, command: str) -> str:
    return (
        "# Code generated by cpgen. DO NOT EDIT. @generated\n"
        f"# source: {label} sha256:{sha256}\n"
        f"# plan:   {_plan_label(plan)} sha256:{plan.sha256}\n"
        f"# regenerate: {command}\n"
    )


def _plan_label(plan: Plan) -> str:
    # A shipped plan is named with its folder; of a user's own only the file, wherever the command ran.
    return plan.name if plan.name.startswith("plans/") else Path(plan.name).name


def _glue(
    request: Request,
    strategy: Strategy,
    target: Target,
    plan: Plan,
    name: str,
    operation: Operation,
    runtime: str,
    command: str,
) -> dict[str, str]:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(resources.folder("templates")),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    context = {
        "header": _header(target.module.label, target.module.sha256, plan, command).rstrip("\n"),
        "package": name,
        "model_class": target.class_name,
        "module": target.file_stem,
        "cp": request.cp,
        "tp": request.tp,
        "strategy": strategy.name,
        "ulysses_degree": strategy.ulysses_degree,
        "load_balance": strategy.load_balance,
        "wraps": plan.wraps.attribute if plan.wraps else None,
        "wrapped_class": plan.wraps.model if plan.wraps else None,
        "blocks": list(plan.blocks),
        "called_alone": list(operation.called_alone),
        "heads": plan.heads if _has_config(region_holder(target, plan)) else None,
        "processors": [{"module": item.module, "name": item.name} for item in operation.processors],
        "runtime": runtime,
        "plan": json.dumps(_plan_label(plan)),  # a file's name, quoted
        **tp_context(plan),
    }
    names = ("__init__.py", "parallelize.py", "checkpoint.py")
    return {file: environment.get_template(f"{file}.j2").render(context) for file in names}


def _has_config(target: Target) -> bool:
    bases = [ast.unparse(base) for base in target.node.bases]
    return any(base.endswith(("ConfigMixin", "ModelMixin")) for base in bases)


def _manifest(
    recorded: _Recorded,
    name: str,
    target: Target,
    plan: Plan,
    operation: Operation,
    files: dict[str, str],
    tree: SourceTree,
) -> str:
    request = recorded.request
    sources = {file.upstream.label: file.upstream.sha256 for file in operation.files}
    manifest = {
        "format": MANIFEST_FORMAT,
        "package": name,
        "model": target.class_name,
        "request": {
            "model": recorded.model,
            "cp": request.cp,
            "tp": request.tp,
            "strategy": request.strategy,
            "ulysses_degree": request.ulysses_degree,
            "outer": request.outer,
            "load_balance": request.load_balance,
            "plan": recorded.plan,
            "vendor_runtime": request.vendor_runtime,
        },
        "versions": {"cpgen": cpgen.__version__, "diffusers": diffusers_version(tree)},
        "sources": dict(sorted(sources.items())),
        "plan": {"name": _plan_label(plan), "sha256": plan.sha256},
        "templates": resources.template_hashes(),
        "outputs": {file: sha256(text) for file, text in sorted(files.items())},
        "edits": [edit for file in operation.files for edit in _listed(file)],
    }
    return seal(manifest)


def seal(manifest: dict[str, Any]) -> str:
    """A manifest's text. Its last entry is the hash of the text with that entry empty, which tells of edits by hand."""

    def text(hash_: str) -> str:
        return json.dumps({**manifest, "self": hash_}, indent=2, ensure_ascii=True) + "\n"

    return text(sha256(text("")))


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _listed(file: EditedFile) -> list[dict[str, Any]]:
    return [
        {
            "file": file.name,
            "upstream_line": edit.line,
            "kind": "insert" if isinstance(edit, Insertion) else "wrap",
            "code": edit.code,
            "reason": edit.reason,
        }
        for edit in file.edits
    ]
