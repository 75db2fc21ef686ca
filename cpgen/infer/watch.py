"""Runs the unmodified class once and notes what happens: forward's variables, attention calls, operations.

Attention is replaced by a stand-in that returns the query: then no token sees another but through what the class does
outside attention.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from cpgen.infer.course import Course
from cpgen.infer.intercept import INDEXING, Operation, Operations, StandIn
from cpgen.infer.leaves import Change, Leaf, changed, changed_elements, leaves_of
from cpgen.infer.places import Place, place_in
from cpgen.infer.windows import Window
from cpgen.source import SourceModule
from cpgen.surgery.functions import Function

_IN_TRAINING = "batch_norm"  # over all tokens in training, which no probe runs
_COMPARING = ("aten.eq.", "aten.ne.", "aten.lt.", "aten.le.", "aten.gt.", "aten.ge.")
_SHAPE_ONLY = ("_like", "new_", "sym_size")
RETURNED = "return"  # stands for a variable: what forward returns


@dataclass(frozen=True)
class AttentionCall:
    """One attention call at run time. `query` is (B, H, S, D), `key` (B, H, T, D), `value` (B, H, T, E).

    `absent` are the parameters of the function around it that were None where it began; `whole` its variables that
    were whole numbers when it attended. `blocks` is the attribute of the model whose blocks it ran in, if any.
    """

    place: Place | None
    query: Tensor
    key: Tensor
    value: Tensor
    absent: frozenset[str]
    whole: Mapping[str, int]
    blocks: str | None
    where: tuple[str, int]


@dataclass(frozen=True)
class Snapshot:
    """Tensors among forward's variables that are new since the last snapshot, just ahead of `line`.

    `after` is the line of the statement that has just run, `operations` how many had run by then.
    """

    after: int
    line: int
    operations: int
    calls: int
    tensors: Mapping[Leaf, Tensor]


@dataclass
class Record:
    """What one run showed. `begin`, `numbers` and `absent` are forward's variables where the region begins."""

    begin: dict[Leaf, Tensor] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()
    assigned: frozenset[str] = frozenset()  # the names of all variables there
    calls: list[AttentionCall] = field(default_factory=list)
    first_call: int = 0  # the first of `calls` in the region
    snapshots: list[Snapshot] = field(default_factory=list)
    operations: list[tuple[str, tuple[Tensor, ...]]] = field(default_factory=list)
    comparisons: dict[int, list[Tensor]] = field(default_factory=dict)  # operation -> what it compares
    windows: dict[int, Window] = field(default_factory=dict)  # operation -> what it slides a window over
    deciding: list[int] = field(default_factory=list)  # operations whose results, of `followed`, leave torch
    in_training: list[int] = field(default_factory=list)  # operations on `followed` that mix tokens in training
    attending: list[str] = field(default_factory=list)  # attributes of the model whose blocks attend


class Watcher:
    """Runs `model` on inputs. `course` is None for a first look that only finds out which blocks attend."""

    def __init__(
        self,
        model: nn.Module,
        forward: Function,
        course: Course | None,
        module_of: Callable[[str], SourceModule | None],
    ) -> None:
        self._model = model
        self._forward = forward
        self._course = course
        self._module_of = module_of  # source by file
        self._sources: dict[str, SourceModule | None] = {}
        self._places: dict[tuple[CodeType, int], Place | None] = {}

    @torch.no_grad()
    def run(
        self,
        inputs: Mapping[str, Any],
        changes: Mapping[Leaf, Change] | None = None,
        *,
        operations: bool = False,
        stop_at: int | None = None,
        followed: Collection[Leaf] = (),
        opposing: Record | None = None,
        training: bool = False,
    ) -> Record:
        """Run forward. `changes` are made to variables where the region begins; `operations` are noted from there on,
        with those that hand Python, or a shape, a value that was made from the variables in `followed`. Where what is
        compared is not what it was in `opposing`, the comparison comes out the opposite way of that one: a test that
        no probe's values reach shows on what it depends. In `training` nothing is dropped.

        Raises `Stopped` ahead of operation `stop_at`, and `Refused` for whatever the class raises.
        """
        run = _Run(self, changes or {}, operations, stop_at, followed, opposing)
        try:
            with run.watching():
                self._model.train(training)(**inputs)
        except Stopped:
            raise
        except (Exception, SystemExit) as error:
            raise Refused(in_words(error)) from error
        finally:
            self._model.eval()
        return run.record

    def source(self, file: str) -> SourceModule | None:
        if file not in self._sources:
            self._sources[file] = self._module_of(file)
        return self._sources[file]

    def place(self, frame: FrameType) -> Place | None:
        """The attention call that `frame` is in, if it is in a method with one at its line."""
        where = frame.f_code, frame.f_lasti
        if where not in self._places:
            module = self.source(frame.f_code.co_filename)
            self._places[where] = place_in(frame, module) if module is not None else None
        return self._places[where]


class Stopped(Exception):  # noqa: N818
    """A run was stopped ahead of an operation: the file and line of the class's code that asked for it."""

    def __init__(self, file: str, line: int) -> None:
        super().__init__(f"{file}:{line}")
        self.file, self.line = file, line


class Refused(Exception):  # noqa: N818
    """The class raised on its inputs, or on changed variables."""


def in_words(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    text = str(error).splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


class _Run:
    def __init__(
        self,
        watcher: Watcher,
        changes: Mapping[Leaf, Change],
        operations: bool,
        stop_at: int | None,
        followed: Collection[Leaf],
        opposing: Record | None,
    ) -> None:
        self._opposing = opposing
        self.record = Record()
        self._watcher = watcher
        self._changes = changes
        self._operations = operations
        self._stop_at = stop_at
        self._began = False
        self._noting = False  # operations are the class's, not those of taking notes
        self._last_line = 0
        self._seen: dict[Leaf, tuple[int, int]] = {}
        self._absent: dict[int, frozenset[str]] = {}  # by id of a frame that runs
        self._blocks: list[str] = []
        self._followed = followed
        self._traces: dict[int, Any] = {}  # storages with values made from followed variables, kept so that ids hold

    @contextmanager
    def watching(self) -> Iterator[None]:
        before = sys.gettrace()
        with ExitStack() as stack:
            for hook in self._hooks():
                stack.callback(hook.remove)
            stack.enter_context(StandIn(self._attend, self._left_torch))
            if self._operations:
                stack.enter_context(Operations(self._operation))
            stack.callback(sys.settrace, before)
            sys.settrace(self._on_call)
            yield

    def _hooks(self) -> Iterator[Any]:
        for name, child in _lists_of(self._watcher._model):
            for block in _blocks_of(child):
                yield block.register_forward_pre_hook(lambda *_, name=name: self._blocks.append(name))
                yield block.register_forward_hook(lambda *_: self._left())

    def _left(self) -> None:
        self._blocks.pop()

    # What the interpreter reports

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        function = self._watcher._forward
        if code.co_name in ("__call__", "forward") and self._watcher.source(code.co_filename) is not None:
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            self._absent[id(frame)] = frozenset(name for name in names if frame.f_locals[name] is None)
        if self._watcher._course is None or code.co_name != "forward" or not _same(code.co_filename, function):
            return None
        inside = function.node.lineno <= frame.f_lineno <= (function.node.end_lineno or 0)
        decorated = min([function.node.lineno, *(each.lineno for each in function.node.decorator_list)])
        return self._in_forward if inside or decorated <= code.co_firstlineno <= function.node.lineno else None

    def _in_forward(self, frame: FrameType, event: str, argument: Any) -> Any:
        course = self._watcher._course
        assert course is not None
        line = frame.f_lineno
        if event == "line":
            if not self._began and line >= course.begin.lineno:
                self._begin(frame.f_locals)
            elif self._began and line > course.end_line:
                self._snapshot(line, frame.f_locals)
            self._last_line = line
        elif event == "return" and self._began:
            self._snapshot(line, {**frame.f_locals, RETURNED: argument})
        return self._in_forward

    def _begin(self, variables: dict[str, Any]) -> None:
        for name, value in list(variables.items()):
            if self._changes:
                # The interpreter writes changes of this dict back into the frame.
                variables[name] = changed(value, Leaf(name), self._changes)
            for leaf, tensor in leaves_of(variables[name], Leaf(name)):
                self.record.begin[leaf] = tensor.clone()
                if leaf in self._followed:
                    self._follow(tensor)
            if isinstance(value, int) and not isinstance(value, bool):
                self.record.numbers[name] = value
        self.record.assigned = frozenset(variables)
        self.record.absent = frozenset(name for name, value in variables.items() if value is None)
        self.record.first_call = len(self.record.calls)
        self._began = self._noting = True

    def _snapshot(self, line: int, variables: dict[str, Any]) -> None:
        self._noting = False
        new = {}
        for name, value in variables.items():
            for leaf, tensor in leaves_of(value, Leaf(name)):
                version = (id(tensor), tensor._version)
                if self._seen.get(leaf) != version:
                    self._seen[leaf] = version
                    new[leaf] = tensor.clone()
        if new:
            sizes = len(self.record.operations), len(self.record.calls)
            self.record.snapshots.append(Snapshot(self._last_line, line, *sizes, new))
        self._noting = True

    # What torch reports

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        frame: FrameType | None = sys._getframe(1)
        where = ("", 0)
        place = None
        while frame is not None and place is None:
            if self._watcher.source(frame.f_code.co_filename) is not None:
                place = self._watcher.place(frame)
                if place is not None or not where[0]:
                    where = frame.f_code.co_filename, frame.f_lineno
            if place is not None:
                break
            frame = frame.f_back
        whole = {}
        if frame is not None:
            whole = {
                name: value
                for name, value in frame.f_locals.items()
                if isinstance(value, int) and not isinstance(value, bool)
            }
        blocks = self._blocks[0] if self._blocks else None
        absent = self._absent.get(id(frame), frozenset())
        noting, self._noting = self._noting, False
        tensors = query.clone(), key.clone(), value.clone()
        self.record.calls.append(AttentionCall(place, *tensors, absent, whole, blocks, where))
        self._noting = noting
        if blocks is not None and blocks not in self.record.attending:
            self.record.attending.append(blocks)

    def _left_torch(self, operation: Operation) -> None:
        if self._operations:
            self._operation(operation)

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._traces[storage._cdata] = storage

    def _operation(self, operation: Operation) -> None:
        if not self._noting:
            return
        name, inputs, outputs = operation.name, operation.inputs, operation.outputs
        followed = [tensor for tensor in inputs if tensor.untyped_storage()._cdata in self._traces]
        if followed:
            by_bools = name == str(INDEXING) and any(tensor.dtype == torch.bool for tensor in followed)
            if by_bools or operation.decides:
                self.record.deciding.append(len(self.record.operations))
            if _IN_TRAINING in name:
                self.record.in_training.append(len(self.record.operations))
            for tensor in operation.results if not any(word in name for word in _SHAPE_ONLY) else []:
                self._follow(tensor)
        if self._stop_at == len(self.record.operations):
            frame: FrameType | None = sys._getframe(1)
            while frame is not None:
                if self._watcher.source(frame.f_code.co_filename) is not None:
                    raise Stopped(frame.f_code.co_filename, frame.f_lineno)
                frame = frame.f_back
        self._noting = False  # these clones are operations as well, outside of a dispatch
        if name.startswith(_COMPARING):
            outputs = (self._compared(inputs, outputs[0]),)
        if operation.window is not None:
            seen = replace(operation.window, tensor=operation.window.tensor.clone())
            self.record.windows[len(self.record.operations)] = seen
        self.record.operations.append((name, tuple(output.clone() for output in outputs)))
        self._noting = True

    def _compared(self, inputs: Sequence[Tensor], output: Tensor) -> Tensor:
        """`output` of a comparison that is the next operation, changed in place if it opposes another run's."""
        index = len(self.record.operations)
        if self._opposing is None:
            self.record.comparisons[index] = [tensor.clone() for tensor in inputs]
            return output
        before = self._opposing.comparisons.get(index, [])
        if before and [tensor.shape for tensor in before] == [tensor.shape for tensor in inputs]:
            result = self._opposing.operations[index][1][0]
            for old, new in zip(before, inputs, strict=True):
                torch.where(changed_elements(old, new), ~result, output, out=output)
        return output


def _lists_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The children of a model, and in place of a ModuleDict of lists these lists, under dotted names."""
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleDict) and all(isinstance(each, nn.ModuleList) for each in child.values()):
            yield from ((f"{name}.{key}", each) for key, each in child.items())
        else:
            yield name, child


def _blocks_of(child: nn.Module) -> Iterator[nn.Module]:
    if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
        for inner in child.children():
            yield from [inner] if not isinstance(inner, (nn.ModuleList, nn.ModuleDict)) else _blocks_of(inner)


def _same(file: str, function: Function) -> bool:
    return Path(file).resolve() == function.module.path.resolve()
