"""What a model class's constructor defaults to, read from its source."""

from __future__ import annotations

import ast

from cpgen.surgery.functions import method
from cpgen.target import Target


def whole_number_defaults(target: Target) -> dict[str, int]:
    """The arguments of the class's own constructor whose default is written as a whole number."""
    constructor = method(target.module, target.node, "__init__")
    if constructor is None:
        return {}
    args = constructor.node.args
    positional = [*args.posonlyargs, *args.args]
    pairs: list[tuple[ast.arg, ast.expr | None]] = [*zip(reversed(positional), reversed(args.defaults), strict=False)]
    pairs += zip(args.kwonlyargs, args.kw_defaults, strict=True)
    return {
        arg.arg: default.value
        for arg, default in pairs
        if isinstance(default, ast.Constant) and type(default.value) is int
    }
