"""The whole operation on a model: plan and source in, edited files out, each checked by erasure."""

from __future__ import annotations

import ast
import itertools
from dataclasses import dataclass

from cpgen.diagnostics import CpgenError, Finding, Location, did_you_mean, fail
from cpgen.plan import AttentionFunction, Plan
from cpgen.source import SourceModule, SourceTree
from cpgen.strategy import Exchange
from cpgen.surgery.attention_edits import attention_edits, variables_of
from cpgen.surgery.carry import carried_file, close_over, constructed_nowhere
from cpgen.surgery.edits import MARK, Edit, Insertion, Wrap, apply_edits
from cpgen.surgery.erase import difference
from cpgen.surgery.functions import Function, attention_references, method, submodules
from cpgen.surgery.imports import Carried, import_rewrites
from cpgen.surgery.region_edits import plan_location, region_edits
from cpgen.target import Target

REFUSAL = "refuse_enable_parallelism"


@dataclass(frozen=True)
class EditedFile:
    """One file of the package: its text, without header, and the marked edits in it."""

    name: str
    upstream: SourceModule
    text: str
    edits: tuple[Insertion | Wrap, ...]


@dataclass(frozen=True)
class Processor:
    """An attention processor class of the package: `module` is the file's stem."""

    module: str
    name: str


@dataclass(frozen=True)
class Operation:
    files: tuple[EditedFile, ...]
    processors: tuple[Processor, ...]
    called_alone: tuple[str, ...]  # paths of submodules of blocks that the model's forward calls


def operate(target: Target, plan: Plan, exchange: Exchange, runtime: str, tree: SourceTree) -> Operation:
    """Write `plan` into the source of `target`. `runtime` is the module that emitted code imports.

    Raises CpgenError with everything in the plan that does not fit the source.
    """
    findings: list[Finding] = []
    main = target.module
    if MARK in main.text:
        line = next(i for i, text in enumerate(main.lines) if MARK in text)
        place = Location(main.label, line + 1, 1, 1, main.lines[line].rstrip("\n"))
        raise fail("CP503", f"{main.label} holds marked edits of cpgen already", place, help="emit from the original")
    if plan.model != target.class_name:
        findings.append(Finding("CP105", f"{plan.name} is a plan for {plan.model}, not for {target.class_name}"))
    holder = region_holder(target, plan)
    _check_blocks(holder, plan, findings)
    owners = {entry.owner: _owner(entry, target, tree, findings) for entry in plan.attention}
    edits: dict[str, list[Edit]] = {main.name: []}
    imported: dict[str, set[str]] = {main.name: {"begin_region"}}
    forward = method(main, holder.node, "forward")
    if forward is None:
        place = main.location(holder.node)
        raise fail("CP504", f"{holder.class_name} defines no forward of its own", place, note="it inherits it")
    cp = _free_names(forward, 1)[0]
    edits[main.name] += region_edits(plan, forward, cp, findings)
    for each in [holder] if holder is target else [holder, target]:
        if any(ast.unparse(base).endswith("ModelMixin") for base in each.node.bases):
            imported[main.name].add(REFUSAL)
            edits[main.name].append(_refusal(each))
    carried = Carried()
    processors = []
    for entry in plan.attention:
        function = owners[entry.owner]
        if function is None:
            continue
        module = function.module
        edits.setdefault(module.name, [])
        if module.name != main.name:
            carried.names.setdefault(module.name, set()).add(entry.owner)
        free = _free_names(function, variables_of(entry))
        new = attention_edits(entry, function, exchange, free, findings)
        edits[module.name] += new
        if new:
            imported.setdefault(module.name, set()).add("attention_site")
        if function.node.name == "__call__":
            processors.append(Processor(module.path.stem, entry.owner))
    _check_described(target, plan, [function for function in owners.values() if function is not None], findings)
    if findings:
        raise CpgenError(findings)
    carried = close_over(carried, main, tree)
    unused = constructed_nowhere(carried, main, tree)
    if defaults := [function for name, function in owners.items() if function is not None and name in unused]:
        imported[main.name].add("use_processors")
        edits[main.name] += _use_processors(holder, plan, defaults)
    files = [_main_file(target, edits[main.name], imported[main.name], runtime, tree, carried)]
    for name in sorted(carried.names):
        carried_module = tree.find(name)
        assert carried_module is not None
        files.append(_carried(carried_module, edits.get(name, []), imported.get(name, set()), runtime, tree, carried))
    _check_names(files)
    local = {file.upstream.path.stem: file.upstream.name for file in files}
    for file in files:
        names = None if file.upstream is main else carried.names[file.upstream.name]
        problem = difference(file.text, file.upstream, tree, names, local)
        if problem is not None:
            raise AssertionError(f"erasing the edits of {file.name} does not give back upstream's code: {problem}")
    alone = forward.calls_into(plan.blocks)
    if alone and plan.wraps is not None:
        message = f"{holder.class_name}.forward calls a part of a block, {alone[0]}: such models cannot be wrapped"
        raise fail("CP504", message, plan.wraps.location)
    return Operation(tuple(files), tuple(processors), alone)


def _owner(entry: AttentionFunction, target: Target, tree: SourceTree, findings: list[Finding]) -> Function | None:
    """The attention function of `entry`: in the model's file, in one that it imports from (SD3's blocks bring their
    processor), or in one that those import from (blocks whose attention has a default processor)."""
    main = target.module
    seen = [main]
    found = None
    for module in seen:  # grows
        if entry.owner in module.text and entry.owner in {**module.definitions, **module.imported}:
            found = tree.resolve(module, entry.owner)
            break
        if module is main or module in _imported_modules(main, tree):
            seen += [near for near in _imported_modules(module, tree) if near not in seen]
    node = found[0].definitions.get(found[1]) if found is not None else None
    if found is None or not isinstance(node, ast.ClassDef):
        findings.append(_no_owner(entry, main, seen, tree))
        return None
    for name in ("__call__", "forward"):
        function = method(found[0], node, name)
        if function is not None:
            return function
    message = f"{entry.owner} defines neither __call__ nor forward"
    findings.append(Finding("CP104", message, entry.location))
    return None


def _imported_modules(module: SourceModule, tree: SourceTree) -> list[SourceModule]:
    """The modules that `module` imports names from, in its own package or in diffusers."""
    origins = sorted({origin for origin, inner in module.imported.values() if inner is not None})
    tops = (module.name.partition(".")[0], "diffusers")
    found = [tree.find(origin) for origin in origins if origin.partition(".")[0] in tops]
    return [each for each in found if each is not None]


def region_holder(target: Target, plan: Plan) -> Target:
    """The class with the blocks and the forward that the plan is about: the model's, or that of those it wraps.

    Raises CpgenError if the model's file defines no such class, or the model has no such list.
    """
    if plan.wraps is None:
        return target
    module, wraps = target.module, plan.wraps
    classes = [name for name, node in module.definitions.items() if isinstance(node, ast.ClassDef)]
    if wraps.model not in classes:
        message = f"{module.label} defines no class '{wraps.model}'"
        raise fail("CP104", message, wraps.location, hint=did_you_mean(wraps.model, classes))
    attributes = submodules(target.node)
    if wraps.attribute not in attributes:
        message = f"{target.class_name} has no list '{wraps.attribute}'"
        raise fail("CP104", message, wraps.location, hint=did_you_mean(wraps.attribute, attributes))
    return target.neighbour(wraps.model)


def _check_blocks(target: Target, plan: Plan, findings: list[Finding]) -> None:
    attributes = submodules(target.node)
    place = plan.blocks_location or plan_location(plan)
    items = {ast.unparse(node) for node in ast.walk(target.node) if isinstance(node, ast.Subscript)}
    for name in plan.blocks:
        module, *keys = name.split(".")
        item = f"self.{module}" + "".join(f"[{key!r}]" for key in keys)
        if module not in attributes:
            message = f"{target.class_name} has no module '{module}'"
            hint = did_you_mean(module, attributes)
            findings.append(Finding("CP104", message, place, hint=hint, note="named in the plan's blocks"))
        elif not keys and _is_no_list(attributes[module]):
            message = f"{target.class_name}'s '{module}' is no list of modules"
            note = f"it is made as {ast.unparse(attributes[module])[:80]}"  # type: ignore[arg-type]
            findings.append(Finding("CP104", message, place, note=f"{note}; '{name}' is named in the plan's blocks"))
        elif keys and item not in items:
            message = f"{target.class_name} nowhere reads {item}"
            findings.append(Finding("CP104", message, place, note=f"'{name}' is named in the plan's blocks"))


def _is_no_list(value: ast.expr | None) -> bool:
    """Whether an attribute is plainly given another module of torch, such as nn.Linear(...)."""
    made = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
    return made.startswith(("nn.", "torch.nn.")) and not made.endswith(("List", "Sequential", "Dict"))


def _check_described(target: Target, plan: Plan, functions: list[Function], findings: list[Finding]) -> None:
    """Every mention of an attention function in the model's file is a described call, or said to be outside.

    Processors that the plan leaves out are allowed: a bound model refuses to run them.
    """
    module = target.module
    described = {
        call.func for function in functions if function.module is module for call in function.attention_calls()
    }
    planned = {entry.owner for entry in plan.attention}
    references = [node for node in attention_references(module) if node not in described]
    for owner in module.tree.body if references else []:
        name = getattr(owner, "name", "")
        processor = isinstance(owner, ast.ClassDef) and method(module, owner, "forward") is None
        if name in plan.outside or (processor and name not in planned):
            continue
        inside = set(ast.walk(owner))
        for node in references:
            if node not in inside:
                continue
            has_forward = isinstance(owner, ast.ClassDef) and not processor
            where = f"{name}.forward" if has_forward else name or module.label
            findings.append(
                Finding(
                    "CP501",
                    f"{where} attends, but the plan does not describe it",
                    module.location(node),
                    help=f"describe it under 'attention', or list {name} under 'outside' if it runs outside the region",
                )
            )
    for function in functions:
        same = [n for n in function.module.tree.body if getattr(n, "name", None) == function.owner.name]
        if len(same) > 1:
            message = f"{function.owner.name} is defined {len(same)} times"
            findings.append(Finding("CP504", message, function.module.location(same[-1])))
    for name in plan.outside:
        if name not in target.module.definitions:
            hint = did_you_mean(name, target.module.definitions)
            message = f"'outside' names '{name}', which is not in {target.module.label}"
            findings.append(Finding("CP104", message, plan.outside_location, hint=hint))


def _no_owner(entry: AttentionFunction, main: SourceModule, read: list[SourceModule], tree: SourceTree) -> Finding:
    for module in read:
        origin, name = module.imported.get(entry.owner, ("", None))
        source = tree.find(origin) if name is not None and entry.owner in module.text else None
        if source is not None:  # upstream's own import would fail, too
            message = f"{module.label} imports '{entry.owner}', but {source.label} defines no such class"
            return Finding("CP104", message, entry.location, hint=did_you_mean(entry.owner, source.definitions))
    classes = [name for name, item in main.definitions.items() if isinstance(item, ast.ClassDef)]
    message = f"{main.label} neither defines nor imports a class '{entry.owner}'"
    return Finding("CP104", message, entry.location, hint=did_you_mean(entry.owner, [*classes, *main.imported]))


def _free_names(function: Function, count: int) -> list[str]:
    taken = function.bound_anywhere | set(function.module.definitions) | set(function.module.imported)
    base = "cp" if count == 1 else "cp_0"
    names: list[str] = []
    number = 0
    while len(names) < max(1, count):
        name = base if count <= 1 and number == 0 else f"cp_{number}"
        number += 1
        if name not in taken:
            names.append(name)
    return names


def _refusal(target: Target) -> Insertion:
    body = target.node.body
    first = body[1] if ast.get_docstring(target.node) is not None and len(body) > 1 else body[0]
    line = min([first.lineno, *(d.lineno for d in getattr(first, "decorator_list", []))])
    while target.module.lines[line - 2].lstrip().startswith("#"):
        line -= 1
    code = f"enable_parallelism = {REFUSAL}"
    return Insertion(line, target.module.indent(first), code, "diffusers' hooks would cut a second time")


def _use_processors(target: Target, plan: Plan, functions: list[Function]) -> list[Edit]:
    """The import of processors that nothing in the model's file constructs, and their use at the end of __init__:
    blocks from diffusers' files construct the default ones of diffusers' Attention."""
    constructor = method(target.module, target.node, "__init__")
    if constructor is None:
        place = target.module.location(target.node)
        raise fail("CP504", f"{target.class_name} defines no __init__ of its own", place, note="it inherits it")
    reason = "default processors, with context-parallel calls"
    line = _behind_imports(target.module)
    imports = [
        Insertion(line, "", f"from .{function.module.path.stem} import {function.owner.name}", reason)
        for function in functions
    ]
    last = constructor.node.body[-1]
    blocks = ", ".join(f"self.{name}" for name in plan.blocks)
    code = f"use_processors([{blocks}], {', '.join(function.owner.name for function in functions)})"
    indent = target.module.indent(last)
    return [*imports, Insertion((last.end_lineno or 0) + 1, indent, code, reason, follows=True)]


def _runtime_import(line: int, names: set[str], runtime: str) -> Insertion:
    return Insertion(line, "", f"from {runtime} import {', '.join(sorted(names))}", "what the edits below call")


def _main_file(
    target: Target, edits: list[Edit], imported: set[str], runtime: str, tree: SourceTree, carried: Carried
) -> EditedFile:
    module = target.module
    marked = [*edits, _runtime_import(_behind_imports(module), imported, runtime)]
    chunks = apply_edits(module.lines, [*marked, *import_rewrites(module, tree, carried)])
    return EditedFile(module.path.name, module, "".join(chunks), _marked(marked))


def _behind_imports(module: SourceModule) -> int:
    """The line behind the imports at the top; without any, that of the first statement behind the docstring."""
    body = module.tree.body
    definitions = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    top = list(itertools.takewhile(lambda node: not isinstance(node, definitions), body))
    imports = [node for node in top if isinstance(node, (ast.Import, ast.ImportFrom))]
    if imports:
        return (imports[-1].end_lineno or 0) + 1
    first = body[1 if ast.get_docstring(module.tree) is not None else 0]
    decorators: list[ast.expr] = getattr(first, "decorator_list", [])
    return min([first.lineno, *(decorator.lineno for decorator in decorators)])


def _carried(
    module: SourceModule, edits: list[Edit], imported: set[str], runtime: str, tree: SourceTree, carried: Carried
) -> EditedFile:
    marked = [*edits, _runtime_import(0, imported, runtime)] if imported else edits
    text = carried_file(module, carried.names[module.name], marked, tree, carried)
    return EditedFile(module.path.name, module, text, _marked(marked))


def _marked(edits: list[Edit]) -> tuple[Insertion | Wrap, ...]:
    marked = [edit for edit in edits if isinstance(edit, (Insertion, Wrap))]
    return tuple(sorted(marked, key=lambda edit: edit.line))


def _check_names(files: list[EditedFile]) -> None:
    names = [file.name for file in files]
    for name in names:
        if names.count(name) > 1:
            raise fail("CP402", f"two upstream files of the package are called {name}")
