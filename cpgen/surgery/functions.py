"""One function in a source module, and the questions that binding a plan asks of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from cpgen.source import SourceModule

ATTENTION_LAYOUT = {"dispatch_attention_fn": "BSHD", "scaled_dot_product_attention": "BHSD"}
_CHECKPOINTS = {
    "self._gradient_checkpointing_func",
    "checkpoint",
    "checkpoint.checkpoint",
    "torch.utils.checkpoint.checkpoint",
}


@dataclass(frozen=True)
class Function:
    """A method `node` of class `owner` in `module`."""

    module: SourceModule
    owner: ast.ClassDef
    node: ast.FunctionDef

    @cached_property
    def parameters(self) -> list[str]:
        args = self.node.args
        names = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
        return names + [arg.arg for arg in (args.vararg, args.kwarg) if arg is not None]

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        return {child: parent for parent in ast.walk(self.node) for child in ast.iter_child_nodes(parent)}

    @cached_property
    def names(self) -> set[str]:
        """Every name that the function reads or writes."""
        return {node.id for node in ast.walk(self.node) if isinstance(node, ast.Name)} | set(self.parameters)

    @cached_property
    def bound_anywhere(self) -> set[str]:
        """`names`, and those that imports, handlers and inner functions bind."""
        found = set(self.names)
        for node in ast.walk(self.node):
            if isinstance(node, ast.alias):
                found.add(node.asname or node.name.partition(".")[0])
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, (ast.ExceptHandler, ast.FunctionDef, ast.ClassDef)) and node.name:
                found.add(node.name)
        return found

    @property
    def first_statement(self) -> ast.stmt:
        """The first statement after the docstring."""
        body = self.node.body
        return body[1] if ast.get_docstring(self.node) is not None and len(body) > 1 else body[0]

    def statement_of(self, node: ast.AST) -> ast.stmt:
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def top_statement_of(self, node: ast.AST) -> ast.stmt:
        """The statement directly in the function's body that holds `node`."""
        while self.parents[node] is not self.node:
            node = self.parents[node]
        assert isinstance(node, ast.stmt)
        return node

    def last_assignment(self, variable: str) -> ast.stmt | None:
        """The last statement, in source order, that assigns a value to the variable."""
        found = [
            self.statement_of(node)
            for node in self._in_order()
            if isinstance(node, ast.Name) and node.id == variable and isinstance(node.ctx, ast.Store)
        ]
        return found[-1] if found else None

    def calls_into(self, lists: tuple[str, ...]) -> tuple[str, ...]:
        """The paths of submodules of blocks that are called by themselves, as in self.blocks[0].norm.emb(...)."""
        found = []
        for node in self._in_order():
            path = _path_into(node.func, lists) if isinstance(node, ast.Call) else None
            if path is not None and path.count(".") > 1:
                found.append(path)
        return tuple(dict.fromkeys(found))

    def loops_over(self, attribute: str) -> list[ast.For]:
        """The loops whose iterable mentions `self.<attribute>`; a dotted one is a list in a ModuleDict."""
        name, *keys = attribute.split(".")
        wanted = f"self.{name}" + "".join(f"[{key!r}]" for key in keys)
        loops = (node for node in self._in_order() if isinstance(node, ast.For))
        return [loop for loop in loops if any(ast.unparse(part) == wanted for part in ast.walk(loop.iter))]

    def calls_of(self, attribute: str) -> list[ast.Call]:
        """The calls `self.<attribute>(...)`."""
        return [n for n in self._in_order() if isinstance(n, ast.Call) and is_self_attribute(n.func, attribute)]

    def reads_of(self, attribute: str) -> list[ast.Attribute]:
        """The reads of an attribute that is written so, such as self.config.patch_size."""
        found = (n for n in self._in_order() if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load))
        return [node for node in found if ast.unparse(node) == attribute]

    def attention_calls(self) -> list[ast.Call]:
        return [node for node in self._in_order() if attention_function(node) is not None]  # type: ignore[misc]

    def checkpoint_calls(self) -> list[ast.Call]:
        """The calls that run their first argument under activation checkpointing."""
        return [
            node
            for node in self._in_order()
            if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in _CHECKPOINTS
        ]

    def assignments_of(self, name: str) -> list[ast.stmt]:
        """The statements that assign the variable `name` as a whole, in source order."""
        found: list[ast.stmt] = []
        for node in self._in_order():
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(name in _target_names(target) for target in targets):
                    found.append(node)
        return found

    def bound_before(self, line: int) -> set[str]:
        """The variables that have a value somewhere ahead of `line`."""
        names = set(self.parameters)
        for node in ast.walk(self.node):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.lineno < line:
                names.add(node.id)
        return names

    def _in_order(self) -> Iterator[ast.AST]:
        return iter(sorted(_with_position(self.node), key=lambda node: (node.lineno, node.col_offset)))  # type: ignore[attr-defined]


def attention_function(node: ast.AST) -> str | None:
    """The attention function that `node` calls, or None if it isn't such a call."""
    if not isinstance(node, ast.Call):
        return None
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", None)
    return name if name in ATTENTION_LAYOUT else None


def argument(call: ast.Call, position: int, name: str) -> ast.expr | None:
    """What `call` is given for a parameter, by keyword or position."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    return call.args[position] if position < len(call.args) else None


def may_be_causal(call: ast.Call) -> bool:
    """Whether an attention call has a causal flag that is not plainly false."""
    causal = argument(call, 5, "is_causal")
    return causal is not None and not (isinstance(causal, ast.Constant) and causal.value is False)


def attention_references(module: SourceModule) -> list[ast.expr]:
    """Every mention of an attention function in a file: by its name, an alias from an import, or an attribute."""
    aliases = {name for name, (_, inner) in module.imported.items() if inner in ATTENTION_LAYOUT}
    found: list[ast.expr] = []
    for node in ast.walk(module.tree):
        named = isinstance(node, ast.Name) and (node.id in ATTENTION_LAYOUT or node.id in aliases)
        if isinstance(node, ast.expr) and (named or getattr(node, "attr", None) in ATTENTION_LAYOUT):
            found.append(node)
    return found


def is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def is_self_attribute(node: ast.AST, attribute: str) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == attribute
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def method(module: SourceModule, owner: ast.ClassDef, name: str) -> Function | None:
    """The method `name` that `owner` itself defines, or None. Of several, the last: that is the one that runs."""
    for node in reversed(owner.body):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return Function(module, owner, node)
    return None


def submodules(owner: ast.ClassDef) -> dict[str, ast.expr | None]:
    """The attributes that a class's methods assign on self, with the value of the first assignment."""
    found: dict[str, ast.expr | None] = {}
    for node in ast.walk(owner):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            for part in ast.walk(target):
                if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self":
                    found.setdefault(part.attr, getattr(node, "value", None))
    return found


def _with_position(node: ast.AST) -> list[ast.AST]:
    return [child for child in ast.walk(node) if child is not node and hasattr(child, "lineno")]


def _target_names(target: ast.expr) -> set[str]:
    if isinstance(target, ast.Name):
        return {target.id}
    if isinstance(target, (ast.Tuple, ast.List)):
        return set().union(*(_target_names(item) for item in target.elts))
    return set()


def _path_into(node: ast.expr, lists: tuple[str, ...]) -> str | None:
    """The path of a module below one block of a list: self.blocks[0].norm is blocks.0.norm."""
    if isinstance(node, ast.Attribute):
        parent = _path_into(node.value, lists)
        return None if parent is None else f"{parent}.{node.attr}"
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, int):
        name = next((name for name in lists if is_self_attribute(node.value, name)), None)
        return None if name is None else f"{name}.{node.slice.value}"
    return None
