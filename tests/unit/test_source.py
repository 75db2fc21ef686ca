"""Source files as text: found without importing anything, with the names that they bind."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from cpgen.diagnostics import CpgenError
from cpgen.source import SourceModule, SourceTree, diffusers_version, exported_models, read_source


def module(text: str, name: str = "a.b.c", *, is_package: bool = False) -> SourceModule:
    return SourceModule(name, Path("c.py"), "a/b/c.py", text, is_package)


def test_names_that_imports_bind() -> None:
    text = """
import os.path
import numpy as np
from .near import one, two as deux
from .. import far
from ..far import three
if os:
    from conditional import four
def f():
    from local import five
class C:
    from inner import six
"""
    assert module(text).imported == {
        "os": ("os.path", None),
        "np": ("numpy", None),
        "one": ("a.b.near", "one"),
        "deux": ("a.b.near", "two"),
        "far": ("a", "far"),
        "three": ("a.far", "three"),
        "four": ("conditional", "four"),
        "six": ("inner", "six"),
    }


def test_relative_imports_of_a_package_start_at_itself() -> None:
    assert module("from . import x\nfrom .y import z\n", "a.b", is_package=True).imported == {
        "x": ("a.b", "x"),
        "z": ("a.b.y", "z"),
    }


def test_relative_import_past_the_top() -> None:
    with pytest.raises(CpgenError, match="CP302") as error:
        _ = module("import os\nfrom ....x import y\n").imported
    (finding,) = error.value.findings
    assert finding.location is not None and finding.location.line == 2


def test_location_counts_characters_not_bytes() -> None:
    made = module('x = "äöü", call(1)\n')
    call = next(node for node in ast.walk(made.tree) if isinstance(node, ast.Call))
    place = made.location(call)
    assert (place.line, place.column, place.width, place.file) == (1, 12, 7, "a/b/c.py")


def test_lines_are_those_of_the_syntax_tree() -> None:
    made = module("a = 1\n\x0c\nb = '\u2028\x85'\nc = 3")
    assert made.lines == ["a = 1\n", "\x0c\n", "b = '\u2028\x85'\n", "c = 3"]
    assert [node.lineno for node in made.tree.body] == [1, 3, 4]
    assert module("").lines == []


@pytest.mark.parametrize(
    ("text", "node", "indent"),
    [("if x:\n    y\n", 1, "    "), ("if x:\n\ty  # why\n", 1, "\t"), ("x\n", 0, ""), ("if x: y\n", 0, "")],
)
def test_indent_of_a_statement(text: str, node: int, indent: str) -> None:
    made = module(text)
    statements = [statement for statement in ast.walk(made.tree) if isinstance(statement, ast.stmt)]
    assert made.indent(statements[node]) == indent


@pytest.mark.parametrize(("text", "node"), [("if x: y\n", 1), ("x; y\n", 0), ("x; y\n", 1)])
def test_statement_that_shares_its_line(text: str, node: int) -> None:
    made = module(text)
    statements = [statement for statement in ast.walk(made.tree) if isinstance(statement, ast.stmt)]
    with pytest.raises(CpgenError, match="CP503"):
        made.indent(statements[node])


def test_lines_that_cannot_take_a_comment() -> None:
    assert module('a = """\nb"""\nc = 1 + \\\n    2\nd = f("x", """\n{1}\n""")\n# \\\n').open_lines >= {1, 3, 5, 6}
    assert module('a = (\n    1,\n)\nb = "\\\\"\n').open_lines == set()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(:\n", "c.py is not valid Python: "),
        ("x = \x00\n", "source code"),
        ("(" * 500, "c.py is not valid Python: too many nested parentheses"),
        ("x = " + "-" * 100_000 + "1", "c.py cannot be parsed: nested too deeply"),
    ],
)
def test_text_that_is_not_python(text: str, message: str) -> None:
    with pytest.raises(CpgenError, match="CP301") as error:
        _ = module(text).tree
    assert message in error.value.findings[0].message


def test_syntax_error_points_at_its_line() -> None:
    with pytest.raises(CpgenError) as error:
        _ = module("x = 1\ny = = 2\n").tree
    place = error.value.findings[0].location
    assert place is not None and (place.line, place.column, place.text) == (2, 5, "y = = 2")


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.py").write_bytes(b"# \xe4\n")
    with pytest.raises(CpgenError, match=r"CP303.*latin.py is not UTF-8"):
        read_source(tmp_path / "latin.py", "latin.py")
    with pytest.raises(CpgenError, match=r"CP303.*cannot read gone.py: No such file"):
        read_source(tmp_path / "gone.py", "gone.py")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return tmp_path


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_modules_are_found_without_running_them(folder: Path) -> None:
    write(
        folder,
        {
            "found_pkg/__init__.py": "raise RuntimeError\n",
            "found_pkg/inner/deep.py": "raise RuntimeError\n",
            "found_top.py": "raise RuntimeError\n",
            "found_pkg/both.py": "",
            "found_pkg/both/__init__.py": "",
        },
    )
    tree = SourceTree()
    for name, label, is_package in (
        ("found_pkg", "found_pkg/__init__.py", True),
        ("found_pkg.inner.deep", "found_pkg/inner/deep.py", False),
        ("found_top", "found_top.py", False),
    ):
        made = tree.find(name)
        assert made is not None and (made.name, made.label, made.is_package) == (name, label, is_package)
    for name in ("found_pkg.inner", "found_pkg.gone", "found_top.x", "nowhere_at_all", "", "sys", "math", ".."):
        assert tree.find(name) is None, name
    package = tree.find("found_pkg.both")
    assert package is not None


def test_names_are_followed_through_reexports(folder: Path) -> None:
    write(
        folder,
        {
            "hop/__init__.py": "import os\nfrom elsewhere import Far\nfrom .one import Thing as Out\n"
            "from .ring import Loop\n",
            "hop/one.py": "from .two import Thing\n",
            "hop/two.py": "class Thing: ...\n",
            "hop/ring.py": "from . import Loop\n",
            "elsewhere.py": "class Far: ...\n",
        },
    )
    tree = SourceTree()
    root = tree.find("hop")
    assert root is not None
    found = tree.resolve(root, "Out")
    assert found is not None and (found[0].name, found[1]) == ("hop.two", "Thing")
    assert tree.resolve(root, "Loop") is None  # a circle
    assert tree.resolve(root, "Far") is None  # another distribution's: not read
    assert tree.resolve(root, "os") is None
    assert tree.resolve(root, "unknown") == (root, "unknown")


def test_installed_diffusers() -> None:
    tree = SourceTree()
    assert diffusers_version(tree)[0].isdigit()
    models = exported_models(tree)
    assert models["WanTransformer3DModel"] == "diffusers.models.transformers.transformer_wan"
    assert len(models) > 50 and all(name.isidentifier() for name in models)


def test_diffusers_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CpgenError, match=r"CP304.*diffusers is not installed") as error:
        exported_models(SourceTree())
    assert "pip install" in str(error.value)
