"""Definitions from other upstream files that must come along: edited ones, and those that refer to them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from cpgen.source import SourceModule, SourceTree
from cpgen.surgery.edits import Edit, Insertion, apply_edits
from cpgen.surgery.imports import Carried, import_rewrites, import_text

# Diffusers, peft and users ask whether a module is one: a copy would not be.
_NEVER_CARRIED = {("diffusers.models.attention_processor", "Attention")}


def close_over(carried: Carried, main: SourceModule, tree: SourceTree) -> Carried:
    """`carried` plus every definition between `main` and them: that refers to one of them, and that `main` refers to.

    SD3's blocks, for one, live in diffusers' attention.py and construct a processor from attention_processor.py.
    """
    return _needed(carried, _referring(carried, main, tree), main, tree)


def _needed(carried: Carried, referring: Carried, main: SourceModule, tree: SourceTree) -> Carried:
    """`carried`, and those of `referring` that `main` refers to, directly or through another of them."""
    result = Carried({module: set(names) for module, names in carried.names.items()})
    names = [(main, n.id) for n in _running(main.tree) if isinstance(n, ast.Name)]
    seen = set()
    for module, name in names:  # grows
        found = tree.resolve(module, name) if (module.name, name) not in seen else None
        seen.add((module.name, name))
        if found is None or found[0].name == main.name or not referring.has(found[0].name, found[1]):
            continue
        result.names.setdefault(found[0].name, set()).add(found[1])
        names += [(found[0], used) for used in sorted(free_names(found[0].definitions[found[1]]))]
    return result


def _referring(carried: Carried, main: SourceModule, tree: SourceTree) -> Carried:
    """`carried` plus every definition of modules that `main` imports from which refers to one that is carried."""
    result = Carried({module: set(names) for module, names in carried.names.items()})
    modules = {origin for origin, inner in main.imported.values() if inner is not None}
    grew = bool(result.names)
    while grew:
        grew = False
        words = set().union(*result.names.values())
        for name in sorted(modules):
            module = tree.find(name)
            if module is None or module.name == main.name or not any(word in module.text for word in words):
                continue
            for definition, node in module.definitions.items():
                if result.has(name, definition) or (name, definition) in _NEVER_CARRIED:
                    continue
                if any(_is_carried(module, used, tree, result) for used in free_names(node)):
                    result.names.setdefault(name, set()).add(definition)
                    grew = True
    return result


def constructed_nowhere(carried: Carried, main: SourceModule, tree: SourceTree) -> set[str]:
    """The names of `carried` that neither `main` nor another carried definition refers to."""
    used = {n.id for n in _running(main.tree) if isinstance(n, ast.Name)}
    for module_name, names in carried.names.items():
        module = tree.find(module_name)
        assert module is not None
        for name in names:
            used |= free_names(module.definitions[name]) - {name}
    return set().union(*carried.names.values()) - used


def carried_file(module: SourceModule, names: set[str], edits: list[Edit], tree: SourceTree, carried: Carried) -> str:
    """The package's file for `module`: the definitions `names` with their edits, and the imports they need."""
    rewrites = import_rewrites(module, tree, carried)
    inserted = [edit for edit in edits if not (isinstance(edit, Insertion) and edit.line == 0)]
    nodes = [node for node in module.tree.body if getattr(node, "name", None) in names]
    inside = [
        rewrite for rewrite in rewrites if any(node.lineno <= rewrite.line <= (node.end_lineno or 0) for node in nodes)
    ]
    chunks = apply_edits(module.lines, [*inserted, *inside])
    bodies = []
    for node in nodes:
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
        while first > 1 and module.lines[first - 2].startswith("#"):
            first -= 1
        bodies.append("".join(chunks[first - 1 : node.end_lineno]))
    parts = [_licence(module)]
    if any(isinstance(n, ast.ImportFrom) and n.module == "__future__" for n in module.tree.body):
        parts.append("from __future__ import annotations\n")
    runtime = [edit for edit in edits if isinstance(edit, Insertion) and edit.line == 0]
    imports = _imports(module, nodes, names, tree, carried) + "".join(edit.text for edit in runtime)
    return "\n".join([*parts, imports]) + "\n\n" + "\n\n".join(bodies)


def free_names(node: ast.AST) -> set[str]:
    """Names that `node` may construct or call. Annotations and isinstance tests only mention them."""
    return {n.id for n in _running(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def _running(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass"):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _running(child)


def _is_carried(module: SourceModule, name: str, tree: SourceTree, carried: Carried) -> bool:
    if not any(name in names for names in carried.names.values()) and name not in module.imported:
        return False
    found = tree.resolve(module, name)
    return found is not None and carried.has(found[0].name, found[1])


def _licence(module: SourceModule) -> str:
    lines = []
    for line in module.lines:
        if not line.startswith("#"):
            break
        lines.append(line)
    return "".join(lines)


def _imports(module: SourceModule, nodes: list[ast.stmt], names: set[str], tree: SourceTree, carried: Carried) -> str:
    """One import a name, from where upstream's file has it: its own imports, or the file itself."""
    used = {n.id for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name)}
    texts: dict[str, None] = {}
    for name in sorted(used & module.bound - names):
        alias = ast.alias(name)
        if name in module.imported:
            origin, inner = module.imported[name]
            if inner is None:
                text = f"import {origin}\n" if name == origin.partition(".")[0] else f"import {origin} as {name}\n"
            elif (found := tree.resolve(module, name)) is not None and carried.has(found[0].name, found[1]):
                text = import_text("", "." + found[0].name.rpartition(".")[2], [_alias(found[1], name)])
            else:
                text = import_text("", origin, [_alias(inner, name)])
            if _conditional(module, name):
                text = import_text("", module.name, [alias])
        else:
            text = import_text("", module.name, [alias])
        texts[text] = None
    plain = sorted(text for text in texts if text.startswith("import "))
    others = sorted(text for text in texts if not text.startswith("import "))
    relative = [text for text in others if text.startswith("from .")]
    absolute = [text for text in others if not text.startswith("from .")]
    return "".join([*plain, *absolute, *relative])


def _alias(name: str, bound: str) -> ast.alias:
    return ast.alias(name, None if name == bound else bound)


def _conditional(module: SourceModule, name: str) -> bool:
    """Whether the import that binds `name` stands in a condition: then it is taken from upstream's module instead."""
    for node in module.tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                if (alias.asname or alias.name.partition(".")[0]) == name:
                    return False
    return True
