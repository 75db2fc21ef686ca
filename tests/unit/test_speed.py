"""What commands import: neither torch nor diffusers, and `--help` next to nothing. Not a test of seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.projects import MADE, REPOSITORY, made_project

SCRIPT = """
import json, sys
before = set(sys.modules)
from cpgen.cli import main
code = 0
try:
    main(sys.argv[1:])
except SystemExit as exit_:
    code = exit_.code
print(json.dumps([code, sorted(set(sys.modules) - before)]), file=sys.stderr)
"""
HEAVY = {"torch", "diffusers", "numpy", "transformers", "safetensors", "huggingface_hub", "libcst"}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def modules(*arguments: str) -> set[str]:
    """The modules that a command brings in."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], env=environment, capture_output=True, text=True)
    code, names = json.loads(done.stderr.splitlines()[-1])
    assert code == 0, done.stderr
    return set(names)


def tops(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def test_help_needs_only_click(project: Path) -> None:
    names = modules("--help")
    assert {name for name in names if name.startswith("cpgen")} == {"cpgen", "cpgen.cli", "cpgen.diagnostics"}
    assert tops(names) - sys.stdlib_module_names <= {"click", "cpgen", "__mp_main__"}
    assert modules("emit", "--help") - names == set()


@pytest.mark.parametrize(
    "arguments",
    [
        ("emit", "--model", "WanTransformer3DModel", "--cp", "4"),
        MADE,
        ("list",),
        ("list", "--json"),
        ("plan", "show", "WanTransformer3DModel"),
        ("plan", "show", "WanTransformer3DModel", "--cp", "8"),
        ("plan", "lint", str(REPOSITORY / "plans/sd3.yaml")),
    ],
)
def test_commands_import_neither_torch_nor_diffusers(project: Path, arguments: tuple[str, ...]) -> None:
    names = modules(*arguments)
    assert not tops(names) & HEAVY
    third_party = {name for name in tops(names) - sys.stdlib_module_names if "cython" not in name}
    assert third_party <= {"cpgen", "click", "yaml", "_yaml", "packaging", "jinja2", "markupsafe"}
    assert not {name for name in names if name.startswith(("cpgen.runtime", "cpgen.verify"))}


def test_check_and_diff_import_neither_torch_nor_diffusers(project: Path) -> None:
    modules(*MADE)
    for arguments in (("check", "--all"), ("diff",), ("diff", "--upstream"), ("emit", "--all")):
        assert not tops(modules(*arguments)) & HEAVY, arguments


def test_the_users_module_is_never_run(project: Path) -> None:
    Path("made.py").write_text(Path("made.py").read_text() + "\nraise SystemExit(9)\n")
    modules(*MADE)
    modules("check", "--all")
    Path("package").mkdir()
    Path("package/__init__.py").write_text("raise SystemExit(9)\n")
    Path("package/made.py").write_text(Path("made.py").read_text())
    modules("emit", "--model", "package.made:Model", "--plan", "made.yaml", "--cp", "2")
