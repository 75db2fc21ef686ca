"""Import statements: relative ones become absolute, and names whose definition comes along become local."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from cpgen.diagnostics import fail
from cpgen.source import SourceModule, SourceTree
from cpgen.surgery.edits import ImportRewrite

MAX_WIDTH = 119


@dataclass(frozen=True)
class Carried:
    """Definitions that come along into the package: dotted module -> names. Files keep the module's last name."""

    names: dict[str, set[str]] = field(default_factory=dict)

    def has(self, module: str, name: str) -> bool:
        return name in self.names.get(module, ())


def import_rewrites(module: SourceModule, tree: SourceTree, carried: Carried) -> list[ImportRewrite]:
    """The rewrites of every import in `module`, also of those inside functions and conditions."""
    rewrites = []
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        if any(alias.name == "*" for alias in node.names):
            raise fail(
                "CP503",
                f"star import in {module.label}",
                module.location(node),
                note="what it brings cannot be known from the source",
            )
        text = rewritten_import(module, node, tree, carried)
        if text is not None:
            assert node.end_lineno is not None
            rewrites.append(ImportRewrite(node.lineno, node.end_lineno, text))
    return rewrites


def rewritten_import(module: SourceModule, node: ast.ImportFrom, tree: SourceTree, carried: Carried) -> str | None:
    """The new text of one statement, or None where it stays as it is."""
    local: dict[str, list[ast.alias]] = {}
    kept = []
    for alias in node.names:
        wanted = any(alias.name in names for names in carried.names.values())
        origin = _definition(module, node, alias, tree) if wanted else None
        if origin is not None and carried.has(*origin) and origin[0] != module.name:
            local.setdefault(origin[0].rpartition(".")[2], []).append(alias)
        else:
            kept.append(alias)
    if not node.level and not local:
        return None
    indent = module.lines[node.lineno - 1].encode()[: node.col_offset].decode()
    lines = module.lines[node.lineno - 1 : node.end_lineno]
    if ";" in lines[-1].partition("#")[0] or indent.strip():
        raise fail("CP503", f"several statements on an import's line in {module.label}", module.location(node))
    if not local:
        # Only what stands between `from` and `import` changes: names, layout and comments stay.
        head, keyword, rest = "".join(lines).partition(" import ")
        if not keyword or head.strip() != f"from {'.' * node.level}{node.module or ''}":
            raise fail("CP503", f"an import in {module.label} is laid out in an unknown way", module.location(node))
        return f"{indent}from {module.absolute(node)} import {rest}"
    texts = []
    if kept:
        texts.append(import_text(indent, module.absolute(node), kept))
    texts += [import_text(indent, f".{stem}", aliases) for stem, aliases in sorted(local.items())]
    return "".join(texts)


def import_text(indent: str, module: str, aliases: list[ast.alias]) -> str:
    names = [alias.name + (f" as {alias.asname}" if alias.asname else "") for alias in aliases]
    line = f"{indent}from {module} import {', '.join(names)}"
    if len(line) <= MAX_WIDTH:
        return line + "\n"
    return f"{indent}from {module} import (\n" + "".join(f"{indent}    {name},\n" for name in names) + f"{indent})\n"


def _definition(
    module: SourceModule, node: ast.ImportFrom, alias: ast.alias, tree: SourceTree
) -> tuple[str, str] | None:
    origin = tree.find(module.absolute(node))
    if origin is None:
        return None
    found = tree.resolve(origin, alias.name)
    return (found[0].name, found[1]) if found else None
