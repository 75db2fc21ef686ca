"""Keys and values that a cache carries from one forward to the next: they are exchanged ahead of it, not of the call,
so that it holds those of all tokens."""

from __future__ import annotations

import ast

from cpgen.surgery.functions import Function

_SIMPLE_STATEMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr)


def first_use(cache: str, call: ast.stmt, function: Function) -> ast.stmt | None:
    """The first statement in the function's body that uses the variable `cache`, if it is ahead of `call`."""
    return next((s for s in function.node.body if s.lineno < call.lineno and cache in _names(s)), None)


def misuse(cache: str, start: ast.stmt, call: ast.stmt, tensors: set[str], function: Function) -> str | None:
    """What is wrong with an exchange of `tensors` ahead of `start` instead of `call`, or None.

    Between the two they are of other tokens and heads: only statements with the cache in them may use them.
    """
    if call not in function.node.body:
        return "the call is in a branch, but its exchange, ahead of the cache, would always run"
    for node in ast.walk(function.node):
        if not isinstance(node, ast.Name) or node.id not in tensors or not start.lineno <= node.lineno < call.lineno:
            continue
        parent, statement = function.parents[node], function.statement_of(node)
        harmless = isinstance(parent, ast.Attribute) and parent.attr in ("dtype", "device")
        if harmless or (isinstance(statement, _SIMPLE_STATEMENTS) and cache in _names(statement)):
            continue
        return f"'{node.id}' at line {node.lineno}, where '{cache}' is not used, would be the exchanged one"
    return None


def _names(statement: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
