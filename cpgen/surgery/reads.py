"""Reads around an attention call: of tensors that the exchange changes, and of what the call gives back."""

from __future__ import annotations

import ast

from cpgen.surgery.functions import Function, argument


def length_read(call: ast.Call, tensors: list[ast.expr | None], function: Function) -> ast.expr | None:
    """An expression in the call, beside query, key and value, that reads one of them or some tensor's length.

    Their channels, dtype and device are the same before and after any exchange.
    """
    names = {tensor.id for tensor in tensors if isinstance(tensor, ast.Name)}
    causal = argument(call, 5, "is_causal")
    for node in ast.walk(causal) if causal is not None else ():
        if isinstance(node, ast.Attribute) and node.attr in ("shape", "size"):
            return node
    for node in ast.walk(call):
        if node in tensors or not isinstance(node, ast.Name) or node.id not in names:
            continue
        parent = function.parents[node]
        harmless = isinstance(parent, ast.Attribute) and parent.attr in ("dtype", "device")
        if not harmless and not (isinstance(parent, ast.Attribute) and _is_channels(parent, function)):
            return node
    return None


def later_use(function: Function, call: ast.Call, statement: ast.stmt, names: tuple[str, ...]) -> ast.Name | None:
    """A read of one of `names` that would see the exchanged tensor: beside the call in its statement, in a function
    inside this one, or behind the statement and ahead of the next assignment. Its dtype and device may be read.
    """
    end = statement.end_lineno or statement.lineno
    inside_call = set(ast.walk(call))
    inner = {
        node
        for part in ast.walk(function.node)
        if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and part is not function.node
        for node in ast.walk(part)
        if not _binds(part, names)
    }
    reassigned: dict[str, int] = {}
    for node in ast.walk(function.node):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.lineno > end and node.id in names:
            reassigned[node.id] = min(node.lineno, reassigned.get(node.id, node.lineno))
    for node in ast.walk(function.node):
        if not (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names):
            continue
        beside = statement.lineno <= node.lineno <= end and node not in inside_call
        behind = end < node.lineno <= reassigned.get(node.id, node.lineno)
        if not (beside or behind or node in inner):
            continue
        parent = function.parents[node]
        if isinstance(parent, ast.Attribute) and parent.attr in ("dtype", "device"):
            continue
        if isinstance(parent, ast.Call) and isinstance(parent.func, ast.Attribute) and parent.func.attr == "type_as":
            continue
        return node
    return None


def reads_of(target: ast.expr, function: Function) -> list[str]:
    """Names that `target` binds and the function reads anywhere."""
    bound = {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}
    return sorted(
        node.id
        for node in ast.walk(function.node)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in bound
    )


def _is_channels(attribute: ast.Attribute, function: Function) -> bool:
    """Whether it is x.shape[-1], or x.size(-1)."""
    parent = function.parents[attribute]
    if attribute.attr == "shape" and isinstance(parent, ast.Subscript):
        return ast.unparse(parent.slice) == "-1"
    return attribute.attr == "size" and isinstance(parent, ast.Call) and [ast.unparse(a) for a in parent.args] == ["-1"]


def _binds(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, names: tuple[str, ...]) -> bool:
    """Whether an inner function has parameters of these names, which are then its own."""
    args = function.args
    return any(arg.arg in names for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs))
