"""Erasure proves that nothing but marked edits changed: it gives back upstream's tree, and sees every other change."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cpgen import resources
from cpgen.plan_files import read_plan
from cpgen.source import SourceModule, SourceTree
from cpgen.surgery.erase import difference, erase
from cpgen.surgery.operate import Operation, operate
from cpgen.target import find_target
from tests.unit.projects import FORMS, MODELS, TINY, TINY_PLAN, module_text

TREE = SourceTree()
MARK = "# cpgen:"


@cache
def operation(model: str, strategy: str) -> Operation:
    target = find_target(TINY if model == "tiny" else model, TREE)
    path = TINY_PLAN if model == "tiny" else resources.shipped_plans()[model]
    return operate(target, read_plan(path, path.name), FORMS[strategy], "cpgen.runtime", TREE)


def problem(operation: Operation, index: int, text: str) -> str | None:
    """What erasure finds in `text`, put in place of a file of the operation."""
    local = {file.upstream.path.stem: file.upstream.name for file in operation.files}
    upstream = operation.files[index].upstream
    names = None
    if index:
        tree = ast.parse(operation.files[index].text)
        names = {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    return difference(text, upstream, TREE, names, local)


@pytest.mark.parametrize("strategy", FORMS)
@pytest.mark.parametrize("model", MODELS.values())
def test_shipped_plan_erases_to_upstream(model: str, strategy: str) -> None:
    made = operation(model, strategy)
    assert sum(MARK in line for file in made.files for line in file.text.splitlines()) > 5
    for index, file in enumerate(made.files):
        assert file.text != file.upstream.text
        assert problem(made, index, file.text) is None


FILES = [("tiny", 0), ("SD3Transformer2DModel", 0), ("SD3Transformer2DModel", 1), ("SD3Transformer2DModel", 2)]
FILES += [("WanTransformer3DModel", 0)]


def code_lines(text: str) -> list[int]:
    """The unmarked lines that hold code."""
    code = {node.lineno for node in ast.walk(ast.parse(text)) if hasattr(node, "lineno")}
    return [i for i, line in enumerate(text.split("\n")) if i + 1 in code and MARK not in line]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_other_change_is_seen(data: st.DataObject) -> None:
    model, index = data.draw(st.sampled_from(FILES))
    made = operation(model, data.draw(st.sampled_from(sorted(FORMS))))
    text = made.files[index].text
    lines = text.split("\n")
    number = data.draw(st.sampled_from(code_lines(text)))
    line = lines[number]
    match data.draw(st.sampled_from(["delete", "duplicate", "swap", "cut", "insert", "call"])):
        case "delete":
            lines[number : number + 1] = []
        case "duplicate":
            lines[number : number + 1] = [line, line]
        case "swap":
            other = data.draw(st.sampled_from(code_lines(text)))
            lines[number], lines[other] = lines[other], line
        case "cut":
            start = data.draw(st.integers(0, len(line)))
            end = data.draw(st.integers(start, len(line)))
            lines[number] = line[:start] + line[end:]
        case "insert":
            start = data.draw(st.integers(0, len(line)))
            piece = data.draw(st.sampled_from([" not ", "0", "1 + ", "x", ", None", ".detach()", "self."]))
            lines[number] = line[:start] + piece + line[start:]
        case "call":
            indent = " " * (len(line) - len(line.lstrip()))
            lines.insert(number, f"{indent}print(cp.shard(1))")
    changed = "\n".join(lines)
    try:
        erased = ast.dump(erase(changed))
    except (SyntaxError, ValueError):
        return  # not Python any more: emit fails on it in any case
    assume(erased != ast.dump(erase(text)))
    if index:
        assume(normal(changed) != normal(text))
    assert problem(made, index, changed) is not None


def normal(text: str) -> list[str]:
    """A carried file, whatever the order and the number of its imports."""
    nodes = erase(text).body
    imports = {ast.dump(node) for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))}
    return [*sorted(imports), *(ast.dump(node) for node in nodes if not isinstance(node, (ast.Import, ast.ImportFrom)))]


# One by one


UPSTREAM = module_text()


def erased(emitted: str, upstream: str = UPSTREAM) -> str | None:
    made = SourceModule("made.model", Path("model.py"), "made/model.py", upstream)
    return difference(emitted, made, SourceTree(), None, {"model": "made.model"})


def test_comments_and_layout_are_no_difference() -> None:
    assert erased("# header\n\n" + UPSTREAM.replace("(hidden_states)", "(  hidden_states,\n)  # why\n", 1)) is None


@pytest.mark.parametrize(
    "line",
    [
        "cp = begin_region(self)",
        "cp_1 = attention_site(attn, 'latent')",
        "cp = attention_site(attn, 'a') if x else attention_site(attn, 'b')",
        "x = cp.shard(x, 'x')",
        "q, k, v = cp_0.seq_to_heads(q, k, v)",
        "from ._runtime import begin_region",
        "from cpgen.runtime import begin_region",
        "enable_parallelism = refuse_enable_parallelism",
    ],
)
def test_marked_insertions_are_erased_and_unmarked_ones_are_not(line: str) -> None:
    assert erased(UPSTREAM.replace("        for block", f"        {line}  # cpgen: why\n        for block")) is None
    assert erased(UPSTREAM.replace("        for block", f"        {line}\n        for block")) is not None


@pytest.mark.parametrize(
    "line",
    [
        "x = torch.gather(x, 1, y)",
        "x = model.cp.shard(x)",
        "cpu = cpu.shard(x)",
        "x = cp.run(x)",
        "x = cp.shard(y)",
        "x, y = cp.seq_to_heads(x, z)",
        "x.y = cp.gather(x)",
        "x = begin_region(self)",
        "forward = attention_site(attn, 'latent')",
        "cp.shard(x)",
        "x = begin(self)",
        "import cpgen.runtime",
        "from cpgen.other import x",
        "x = 1",
        "del x",
        "x += cp.shard(x)",
        "x = cp.shard(x) + 1",
        "enable_parallelism = other",
    ],
)
def test_a_mark_does_not_excuse_other_code(line: str) -> None:
    assert erased(UPSTREAM.replace("        for block", f"        {line}  # cpgen: why\n        for block")) is not None


def test_mark_inside_a_string_is_no_mark() -> None:
    assert erased(UPSTREAM.replace("        for", '        x = cp.shard(x, "# cpgen: why")\n        for')) is not None


def test_wraps_are_erased_on_marked_lines_only() -> None:
    wrapped = UPSTREAM.replace("self.proj_out(hidden_states)", "cp.gather(self.proj_out(hidden_states), 'x')")
    marked = wrapped.replace("'x')", "'x')  # cpgen: why")
    assert erased(wrapped) is not None
    assert erased(marked) is None
    assert erased(marked.replace("self.proj_out(", "self.proj_in(")) is not None
    assert erased(marked.replace("cp.gather", "cp.run")) is not None
    assert erased(marked.replace("cp.gather", "torch.gather")) is not None


def test_upstreams_own_gather_on_a_marked_line_stays() -> None:
    upstream = UPSTREAM.replace("self.proj_out(hidden_states)", "torch.gather(self.proj_out(hidden_states), 1, 2)")
    emitted = upstream.replace("self.proj_out(hidden_states)", "cp.gather(self.proj_out(hidden_states), 'x')")
    assert erased(emitted.replace("1, 2)", "1, 2)  # cpgen: why"), upstream) is None


def test_statement_of_several_lines_is_never_an_insertion() -> None:
    line = "x = cp.shard(  # cpgen: why\n            x)"
    assert erased(UPSTREAM.replace("        for block", f"        {line}\n        for block")) is not None


def test_the_difference_names_both_sides() -> None:
    message = erased(UPSTREAM.replace("block(hidden_states)", "block(hidden_states, 1)"))
    assert message is not None and "block(hidden_states, 1)" in message and "where upstream has" in message
    assert "lines of code where upstream has" in str(erased(UPSTREAM + "\n\nx = 1\n"))


def test_import_from_elsewhere_is_a_difference() -> None:
    assert erased(UPSTREAM.replace("from backend import", "from other import")) is not None
    assert erased(UPSTREAM.replace("import dispatch_attention_fn", "import x as dispatch_attention_fn")) is not None
