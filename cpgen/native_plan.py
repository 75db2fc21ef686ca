"""A class's own `_cp_plan`, in diffusers' convention, read from its source as a `Plan`.

The convention says what hooks cut and gather at which module, but neither which tensors belong to one token sequence
nor in which order an attention call sees them. Both are worked out from the source here, and checked at run time:
lengths that don't agree are an error in the emitted code, before any number comes out.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from cpgen.diagnostics import CpgenError, Finding, fail
from cpgen.native_attention import LATENT, attention_functions
from cpgen.plan import Gather, Plan, Shard
from cpgen.source import SourceTree
from cpgen.surgery.functions import Function, is_none, method, submodules
from cpgen.target import Target

_LABEL = " (_cp_plan)"  # behind the file, as the plan's name


def has_native_plan(target: Target) -> bool:
    return _plan_node(target) is not None


def is_native(plan: Plan) -> bool:
    """Whether it was read from a class's own `_cp_plan`."""
    return plan.name.endswith(_LABEL)


def other_plan(model: str) -> str:
    """What to do for a class that has no plan which can be emitted."""
    return (
        f"cpgen plan infer --model {model} --write FILE finds one where it can; else write one (docs/plans.md). "
        "Then emit with --plan FILE"
    )


def native_plan(target: Target, tree: SourceTree) -> Plan:
    """Read the class's `_cp_plan`. Raises CpgenError with each entry that has no counterpart in the source."""
    del tree
    node = _plan_node(target)
    forward = method(target.module, target.node, "forward")
    assert node is not None
    if forward is None:
        raise fail("CP504", f"{target.class_name} defines no forward of its own", target.module.location(target.node))
    reader = _Reader(target, forward)
    reader.read(node)
    streams = reader.token_streams()
    attention = tuple(attention_functions(target, streams, reader.main_stream() or LATENT, reader.find))
    blocks = reader.blocks()
    if not blocks:
        reader.find(target.node, "no list of blocks: forward loops over no nn.ModuleList")
    if reader.findings:
        raise CpgenError(reader.findings)
    return Plan(
        model=target.class_name,
        diffusers=None,
        heads="num_attention_heads" if "num_attention_heads" in _constructor_arguments(target) else None,
        blocks=blocks,
        streams=tuple(dict.fromkeys(stream for shard in reader.shards for stream in shard.streams)),
        begin=None,
        shards=tuple(reader.shards),
        prefixes=(),
        gathers=tuple(reader.gathers),
        attention=attention,
        outside=tuple(reader.local_owners),
        name=f"{target.module.label}{_LABEL}",
        sha256=target.module.sha256,
    )


@dataclass(frozen=True)
class _Entry:
    """A ContextParallelInput or ContextParallelOutput."""

    node: ast.Call
    dim: int
    ndim: int | None
    split_output: bool


@dataclass
class _Reader:
    target: Target
    forward: Function
    shards: list[Shard] = field(default_factory=list)
    gathers: list[Gather] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    local_owners: list[str] = field(default_factory=list)

    def find(self, node: ast.AST, message: str) -> None:
        place = self.target.module.location(node)
        self.findings.append(Finding("CP111", message, place, help=other_plan(self.target.spec)))

    def read(self, node: ast.Dict) -> None:
        outputs = []
        for key, value in zip(node.keys, node.values, strict=True):
            if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
                self.find(key or node, "a module id in _cp_plan must be a plain string")
            elif isinstance(value, ast.Dict):
                self._inputs(key, value)
            else:
                outputs.append((key, value))
        for key, value in outputs:  # after the streams are known
            self._outputs(key, value)

    def blocks(self) -> tuple[str, ...]:
        attributes = submodules(self.target.node)
        lists = [
            name
            for name, value in attributes.items()
            if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("ModuleList")
        ]
        looped = [(loops[0].lineno, name) for name in lists if (loops := self.forward.loops_over(name))]
        return tuple(name for _, name in sorted(looped))

    # Inputs

    def _inputs(self, key: ast.Constant, value: ast.Dict) -> None:
        module = str(key.value)
        for name_node, entry_node in zip(value.keys, value.values, strict=True):
            name = name_node.value if isinstance(name_node, ast.Constant) else None
            several = isinstance(entry_node, (ast.List, ast.Tuple))
            for i, part in enumerate(
                entry_node.elts if isinstance(entry_node, (ast.List, ast.Tuple)) else [entry_node]
            ):
                entry = self._entry(part, "ContextParallelInput")
                if entry is None:
                    continue
                path: tuple[str | int, ...] = (i,) if several else ()
                if type(name) is int and entry.split_output:
                    self._module_output(key, module, name, entry)
                elif isinstance(name, str) and not entry.split_output:
                    self._module_input(key, module, name, path, entry)
                else:
                    self.find(part, "inputs are split by parameter name, outputs by index with split_output=True")

    def _module_input(
        self, key: ast.Constant, module: str, name: str, path: tuple[str | int, ...], entry: _Entry
    ) -> None:
        if module == "":
            if name not in self.forward.parameters:
                self.find(entry.node, f"forward has no parameter '{name}'")
                return
            self._shard(name, path, entry, name, optional=_may_be_none(self.forward, name))
            return
        base, _, index = module.partition(".")
        if not index:
            for call in self.forward.calls_of(base):
                variable = self._argument(call, self._parameters(base), name)
                if variable is not None:
                    self._shard(variable, path, entry, variable, argument_of=base)
            if not self.forward.calls_of(base):
                self.find(key, f"forward does not call self.{base}")
            return
        if index not in ("0", "*"):
            self.find(key, f"'{module}': only the first block, or '*' for every block, is supported")
            return
        variables = {self._argument(call, self._parameters(base), name) for call in self._block_calls(base)}
        if len(variables) != 1 or None in variables:
            self.find(key, f"'{name}' of self.{base} is not one variable of forward")
            return
        variable = str(variables.pop())
        if index == "*" and self._assigned_in_loops(base, variable):
            self.find(key, f"'{variable}' changes from block to block: it cannot be cut for each")
            return
        if any(shard.variable == variable and shard.path == path for shard in self.shards):
            return  # an entry for "blocks.0" and one for "blocks.*"
        self._shard(variable, path, entry, variable, before=base, optional=index == "*" or entry.ndim == 2)

    def _module_output(self, key: ast.Constant, module: str, index: int, entry: _Entry) -> None:
        calls = self.forward.calls_of(module)
        if not calls:
            self.find(key, f"forward does not call self.{module}")
        for call in calls:
            statement = self.forward.statement_of(call)
            if not (isinstance(statement, ast.Assign) and statement.value is call):
                self.find(key, f"the result of self.{module} is not assigned to a variable")
                continue
            target = statement.targets[0]
            if isinstance(target, (ast.Tuple, ast.List)) and index < len(target.elts):
                target, path = target.elts[index], ()
            else:
                path = (index,) if self._returns_tuple(module) else ()  # type: ignore[assignment]
            if not isinstance(target, ast.Name):
                self.find(key, f"the result of self.{module} is not assigned to a variable")
                continue
            self._shard(target.id, path, entry, module if path else f"{module}[{index}]", after=module)

    def _shard(
        self,
        variable: str,
        path: tuple[str | int, ...],
        entry: _Entry,
        stream: str,
        *,
        optional: bool = False,
        after: str | None = None,
        before: str | None = None,
        argument_of: str | None = None,
    ) -> None:
        when = None
        ndim = entry.ndim
        if entry.ndim == 2 and entry.dim == 1 and not path and after is None:
            # One value a sample or one a token (Wan's timestep): without a token dim there is nothing to cut.
            when = f"{variable} is not None and {variable}.ndim > 1"
        label = stream + "".join(f"[{step}]" for step in path)
        place = self.target.module.location(entry.node)
        self.shards.append(
            Shard(variable, path, entry.dim, ndim, (label,), optional, when, after, before, argument_of, place)
        )

    # Outputs

    def _outputs(self, key: ast.Constant, value: ast.expr) -> None:
        module = str(key.value)
        several = isinstance(value, (ast.List, ast.Tuple))
        calls = self.forward.calls_of(module) if module else []
        if not calls:
            self.find(key, f"forward does not call self.{module}" if module else "the root's output cannot be gathered")
            return
        statement = self.forward.statement_of(calls[0])
        variable = module
        if (
            isinstance(statement, ast.Assign)
            and statement.value is calls[0]
            and isinstance(statement.targets[0], ast.Name)
        ):
            variable = statement.targets[0].id
        stream = self.main_stream()
        for i, part in enumerate(value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value]):
            entry = self._entry(part, "ContextParallelOutput")
            if entry is not None and stream is not None:
                path: tuple[str | int, ...] = (i,) if several else ()
                place = self.target.module.location(part)
                self.gathers.append(Gather(variable, path, entry.dim, entry.ndim, stream, module, location=place))

    def main_stream(self) -> str | None:
        streams = self.token_streams()
        if not streams:
            return self.shards[0].streams[0] if self.shards else None
        return LATENT if LATENT in streams else streams[0]

    def token_streams(self) -> list[str]:
        """Streams of hidden states: inputs with three dims."""
        return [s.streams[0] for s in self.shards if s.after is None and s.ndim in (3, None) and not s.path]

    # The source

    def _entry(self, node: ast.expr, kind: str) -> _Entry | None:
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith(kind):
            self.find(node, f"expected a {kind}(...)")
            return None
        names = ("split_dim" if kind.endswith("Input") else "gather_dim", "expected_dims", "split_output")
        values = dict(zip(names, node.args, strict=False)) | {k.arg or "": k.value for k in node.keywords}
        plain = {name: value.value for name, value in values.items() if isinstance(value, ast.Constant)}
        dim, ndim = plain.get(names[0]), plain.get("expected_dims")
        if len(plain) != len(values) or type(dim) is not int or not (ndim is None or type(ndim) is int):
            self.find(node, f"{kind} must hold plain numbers")
            return None
        if dim < 0 or (ndim is not None and dim >= ndim):
            self.find(node, f"dim {dim} cannot be in a tensor of {ndim} dims")
            return None
        return _Entry(node, dim, ndim, bool(plain.get("split_output", False)))

    def _block_calls(self, base: str) -> list[ast.Call]:
        calls = []
        for loop in self.forward.loops_over(base):
            names = {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
            for node in ast.walk(loop):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
                    calls.append(node)
        return calls

    def _assigned_in_loops(self, base: str, variable: str) -> bool:
        return any(
            isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == variable
            for loop in self.forward.loops_over(base)
            for node in ast.walk(loop)
        )

    def _class_of(self, attribute: str) -> ast.ClassDef | None:
        """The class that `self.<attribute>`, or each element of it, is constructed from, where this file defines it."""
        value = submodules(self.target.node).get(attribute)
        for node in ast.walk(value) if value is not None else []:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                found = self.target.module.definitions.get(node.func.id)
                if isinstance(found, ast.ClassDef):
                    return found
        return None

    def _parameters(self, attribute: str) -> list[str]:
        owner = self._class_of(attribute)
        function = method(self.target.module, owner, "forward") if owner is not None else None
        return [p for p in function.parameters if p != "self"] if function is not None else []

    def _returns_tuple(self, attribute: str) -> bool:
        owner = self._class_of(attribute)
        function = method(self.target.module, owner, "forward") if owner is not None else None
        returns = [n for n in ast.walk(function.node) if isinstance(n, ast.Return)] if function is not None else []
        return all(isinstance(node.value, ast.Tuple) for node in returns) if returns else True

    @staticmethod
    def _argument(call: ast.Call, parameters: list[str], name: str) -> str | None:
        value = next((k.value for k in call.keywords if k.arg == name), None)
        if value is None and name in parameters and parameters.index(name) < len(call.args):
            value = call.args[parameters.index(name)]
        return value.id if isinstance(value, ast.Name) else None


def _plan_node(target: Target) -> ast.Dict | None:
    for node in target.node.body:
        value = getattr(node, "value", None)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if (
            isinstance(value, ast.Dict)
            and value.keys
            and any(isinstance(t, ast.Name) and t.id == "_cp_plan" for t in targets)
        ):
            return value
    return None


def _constructor_arguments(target: Target) -> list[str]:
    function = method(target.module, target.node, "__init__")
    return function.parameters if function is not None else []


def _may_be_none(function: Function, name: str) -> bool:
    args = function.node.args
    positional = [*args.posonlyargs, *args.args]
    defaults = {a.arg: d for a, d in zip(reversed(positional), reversed(args.defaults), strict=False)}
    defaults |= {a.arg: d for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True) if d is not None}
    return name in defaults and is_none(defaults[name])
