"""The small expression grammar of a plan's `when`. Nothing else from a plan becomes an expression in code."""

from __future__ import annotations

import ast

_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Is, ast.IsNot)
_MAX_LENGTH = 200  # and so no deep nesting
GRAMMAR = "comparisons of names, NAME.ndim, NAME.shape[i], whole numbers and None, joined by and / or / not"


class ConditionError(ValueError):
    """The text is not in the grammar."""


def parse_condition(text: str, subject: str | None = None) -> tuple[str, frozenset[str]]:
    """Check `text` against the grammar; return it as Python source, and the names it reads.

    A bare `ndim` or `shape[i]` is read as that of `subject`, the value that the condition belongs to.
    Raises ConditionError.
    """
    if len(text) > _MAX_LENGTH:
        raise ConditionError(f"longer than {_MAX_LENGTH} characters")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ConditionError(f"not an expression: {text!r}") from None
    body = _SubjectOf(subject).visit(tree.body) if subject else tree.body
    names: set[str] = set()
    _check(body, names)
    return ast.unparse(body), frozenset(names)


class _SubjectOf(ast.NodeTransformer):
    def __init__(self, subject: str) -> None:
        self._subject = subject

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in ("ndim", "shape"):
            return ast.Attribute(ast.Name(self._subject, ast.Load()), node.id, ast.Load())
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return node


def _check(node: ast.expr, names: set[str]) -> None:
    if isinstance(node, ast.BoolOp):
        for value in node.values:
            _check(value, names)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        _check(node.operand, names)
    elif isinstance(node, ast.Compare) and all(isinstance(op, _COMPARISONS) for op in node.ops):
        operands = [node.left, *node.comparators]
        for operand in operands:
            _check_operand(operand, names)
        for op, right in zip(node.ops, operands[1:], strict=True):
            if isinstance(op, (ast.Is, ast.IsNot)) and not (isinstance(right, ast.Constant) and right.value is None):
                raise ConditionError("'is' and 'is not' are for None only")
    else:
        raise ConditionError(f"{ast.unparse(node)!r} is not allowed in a condition")


def _check_operand(node: ast.expr, names: set[str]) -> None:
    if isinstance(node, ast.Constant) and (node.value is None or type(node.value) is int):
        return
    if isinstance(node, ast.Subscript):
        index, node = node.slice, node.value
        whole = isinstance(index, ast.Constant) and type(index.value) is int
        if not (whole and isinstance(node, ast.Attribute) and node.attr == "shape"):
            raise ConditionError(f"{ast.unparse(node)!r} is not allowed in a condition")
        node = node.value
    elif isinstance(node, ast.Attribute):
        if node.attr != "ndim":
            raise ConditionError(f"attribute {node.attr!r} is not allowed in a condition")
        node = node.value
    if not isinstance(node, ast.Name) or node.id.startswith("__"):
        raise ConditionError(f"{ast.unparse(node)!r} is not allowed in a condition")
    names.add(node.id)
