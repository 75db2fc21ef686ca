"""Erasure: undoing the marked edits and the import rewrites must give back upstream's syntax tree.

Works from the emitted text alone, so it proves the surgery whatever the steps before it did.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from typing import TypeGuard

from cpgen.source import SourceModule, SourceTree
from cpgen.surgery.edits import MARK

RUNTIME_CALLS = {"attention_site", "begin_region"}
REGION_METHODS = {
    "shard",
    "local_prefix",
    "gather",
    "seq_to_heads",
    "heads_to_seq",
    "gather_kv",
    "whole_length",
    "local_length",
}
_CP = re.compile(r"cp(_\d+)?")
WRAPPERS = {
    "pin",
    "shard",
    "gather",
    "local_prefix",
    "heads_to_seq",
    "mask_heads",
    "mask_rows",
    "ring_attention",
    "own_queries",
    "trading_heads",
    "gathering_kv",
}


def erase(text: str, bound: frozenset[str] | set[str] = frozenset()) -> ast.Module:
    """The syntax tree of an emitted file without its marked edits. Imports that bind a name of `bound`, those that
    upstream's file binds, are no edits."""
    tree = ast.parse(text)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    marked = {token.start[0] for token in tokens if token.type == tokenize.COMMENT and MARK in token.string}
    erased = _Eraser(marked, bound).visit(tree)
    assert isinstance(erased, ast.Module)
    return erased


def difference(
    emitted: str, upstream: SourceModule, tree: SourceTree, names: set[str] | None, local: dict[str, str]
) -> str | None:
    """What differs between the erased `emitted` text and `upstream`, or None if they are the same.

    `names` limits the comparison to those definitions, for a file that carries only some of them. `local` maps the
    package's modules to the upstream modules that they stand for.
    """
    ours, theirs = erase(emitted, upstream.bound), ast.parse(upstream.text)
    resolver = _Resolver(upstream, tree, local)
    if names is None:
        pairs: list[tuple[str, ast.AST | None, ast.AST | None]] = [(upstream.label, ours, theirs)]
    else:
        found = {getattr(node, "name", ""): node for node in ours.body}
        wanted = {getattr(node, "name", ""): node for node in theirs.body}
        pairs = [(name, found.get(name), wanted.get(name)) for name in sorted(names)]
        extra = [
            n
            for n in ours.body
            if not isinstance(n, (ast.Import, ast.ImportFrom)) and getattr(n, "name", "") not in names
        ]
        if extra:
            return f"an unexpected statement at line {extra[0].lineno}"
        if _future(ours) != _future(theirs):
            return f"it has {_future(ours)} from __future__, upstream has {_future(theirs)}"
        bound = resolver.bindings(ours)
        for name, origin in bound.items():
            if origin not in (resolver.upstream_binding(name), (upstream.name, name)):
                return f"'{name}' is imported from {origin}, upstream has {resolver.upstream_binding(name)}"
        used = {n.id for node in ours.body for n in ast.walk(node) if isinstance(n, ast.Name)}
        unbound = sorted(used & upstream.bound - set(bound) - names)
        if unbound:
            return f"'{unbound[0]}' is not imported"
    for name, mine, upstreams in pairs:
        if mine is None or upstreams is None:
            return f"{name} is missing"
        if ast.dump(resolver.normalise(mine)) != ast.dump(resolver.normalise(upstreams)):
            return _first_difference(resolver.normalise(mine), resolver.normalise(upstreams), name)
    return None


def _future(tree: ast.Module) -> list[str]:
    nodes = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    return sorted({alias.name for node in nodes for alias in node.names})


class _Eraser(ast.NodeTransformer):
    def __init__(self, marked: set[int], bound: frozenset[str] | set[str]) -> None:
        self._marked = marked
        self._bound = bound

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for field, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                setattr(node, field, [stmt for stmt in value if not self._inserted(stmt)])
        return super().generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        marked = node.lineno in self._marked or node.end_lineno in self._marked
        if marked and node.args and _is_call_of_cp(node, WRAPPERS):
            return node.args[0]
        return node

    def _inserted(self, stmt: ast.stmt) -> bool:
        if stmt.lineno not in self._marked or stmt.lineno != stmt.end_lineno:
            return False
        if isinstance(stmt, ast.ImportFrom):
            ours = (stmt.module or "").endswith("runtime") or stmt.level == 1
            return ours and not any((alias.asname or alias.name) in self._bound for alias in stmt.names)
        if isinstance(stmt, ast.Expr):
            call = stmt.value
            if not isinstance(call, ast.Call):
                return False
            named = isinstance(call.func, ast.Name) and call.func.id == "use_processors"
            return named or _is_call_of_cp(call, {"refuse"})
        if not isinstance(stmt, ast.Assign):
            return False
        value = stmt.value.body if isinstance(stmt.value, ast.IfExp) else stmt.value
        bound = {n.id for t in stmt.targets for n in ast.walk(t) if _is_store(n)}
        if isinstance(value, ast.Name):
            return value.id == "refuse_enable_parallelism"
        if not isinstance(value, ast.Call):
            return False
        if isinstance(value.func, ast.Name):
            return value.func.id in RUNTIME_CALLS and all(_CP.fullmatch(name) for name in bound)
        # An insertion binds again what it is given: q, k, v = cp.seq_to_heads(q, k, v).
        given = {argument.id for argument in value.args if isinstance(argument, ast.Name)}
        return _is_call_of_cp(value, REGION_METHODS) and bool(bound) and bound <= given


def _is_store(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _is_call_of_cp(call: ast.Call, methods: set[str]) -> bool:
    """Whether `call` is cp.method(...), and not upstream's own torch.gather on the same line."""
    function = call.func
    return (
        isinstance(function, ast.Attribute)
        and function.attr in methods
        and isinstance(function.value, ast.Name)
        and _CP.fullmatch(function.value.id) is not None
    )


class _Resolver:
    """Rewrites imports to one form: a statement a name, from where the name is defined, in sorted order."""

    def __init__(self, upstream: SourceModule, tree: SourceTree, local: dict[str, str]) -> None:
        self._upstream = upstream
        self._tree = tree
        self._local = local
        self._names = {name for module in local.values() for name in self._definitions(module)}

    def normalise(self, node: ast.AST) -> ast.AST:
        for parent in ast.walk(node):
            for field, value in ast.iter_fields(parent):
                if isinstance(value, list) and any(isinstance(item, ast.ImportFrom) for item in value):
                    setattr(parent, field, self._exploded(value))
        return node

    def bindings(self, tree: ast.Module) -> dict[str, tuple[str, str | None]]:
        found: dict[str, tuple[str, str | None]] = {}
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module != "__future__":
                for alias in node.names:
                    found[alias.asname or alias.name] = self._origin(self._module(node), alias.name, always=True)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    found[alias.asname or alias.name.partition(".")[0]] = (alias.name, None)
        return found

    def upstream_binding(self, name: str) -> tuple[str, str | None]:
        if name in self._upstream.imported:
            module, inner = self._upstream.imported[name]
            return (module, None) if inner is None else self._origin(module, inner, always=True)
        return (self._upstream.name, name)

    def _exploded(self, body: list[ast.stmt]) -> list[ast.stmt]:
        result: list[ast.stmt] = []
        run: list[tuple[str, str, str]] = []
        for stmt in [*body, None]:
            if isinstance(stmt, ast.ImportFrom):
                module = self._module(stmt)
                for alias in stmt.names:
                    origin, name = self._origin(module, alias.name)
                    run.append((origin, name or "", alias.asname or alias.name))
                continue
            result += [ast.ImportFrom(module, [ast.alias(name, bound)], 0) for module, name, bound in sorted(run)]
            run = []
            if stmt is not None:
                result.append(stmt)
        return result

    def _module(self, node: ast.ImportFrom) -> str:
        if node.level == 1 and node.module in self._local:
            return self._local[node.module]
        return self._upstream.absolute(node)

    def _origin(self, module: str, name: str, *, always: bool = False) -> tuple[str, str | None]:
        # Re-exports matter only for names that came along: anything else must be imported from the same place.
        if not always and name not in self._names:
            return module, name
        inside = module.partition(".")[0] in (self._upstream.name.partition(".")[0], "diffusers")
        source = self._tree.find(module) if inside else None
        found = self._tree.resolve(source, name) if source is not None else None
        return (found[0].name, found[1]) if found is not None else (module, name)

    def _definitions(self, module: str) -> set[str]:
        source = self._tree.find(module)
        return set(source.definitions) if source is not None else set()


def _first_difference(ours: ast.AST, theirs: ast.AST, name: str) -> str:
    mine = ast.unparse(ours).splitlines()
    upstreams = ast.unparse(theirs).splitlines()
    for left, right in zip(mine, upstreams, strict=False):
        if left != right:
            return f"{name}: {left.strip()!r} where upstream has {right.strip()!r}"
    return f"{name}: {len(mine)} lines of code where upstream has {len(upstreams)}"
