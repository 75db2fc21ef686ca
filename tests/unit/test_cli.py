"""The command line, by cases: tests/cases/<name>/ holds `cmd`, its input files, and what comes out.

Each case runs in a copy of its folder, on top of the files in tests/cases/_made. A file `name.in` is copied as `name`.
UPDATE_CASES=1 writes what comes out into the folder instead: read the diff.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cpgen.cli
from cpgen.diagnostics import CpgenError
from tests.unit.projects import MADE, REPOSITORY, made_project, run

CASES = REPOSITORY / "tests/cases"
NAMES = sorted(path.name for path in CASES.iterdir() if (path / "cmd").is_file())
EXPECTED = ("cmd", "stdout", "stderr", "exit")


def copy_inputs(case: Path, place: Path) -> None:
    for folder in (CASES / "_made", case):
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and name not in EXPECTED:
                target = place / name.removesuffix(".in")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)


def normal(text: str) -> str:
    text = re.sub(r"\b[0-9a-f]{64}\b", "<sha256>", text)
    return re.sub(r"\b0\.42\.\d+\b", "<version>", text)


@pytest.mark.parametrize("name", NAMES)
def test_case(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES / name
    copy_inputs(case, tmp_path)
    monkeypatch.chdir(tmp_path)
    out, err, code = "", "", 0
    for line in (case / "cmd").read_text().splitlines():
        ran = run(*shlex.split(line))
        out, err, code = out + ran.out, err + ran.err, ran.exit
    found = {"stdout": normal(out), "stderr": normal(err), "exit": f"{code}\n"}
    assert "Traceback" not in err and str(tmp_path) not in out + err
    assert code in (0, 1, 2)
    if os.environ.get("UPDATE_CASES"):
        for file, text in found.items():
            (case / file).write_text(text)
    for file, text in found.items():
        assert text == (case / file).read_text(), file


def test_cases_are_complete() -> None:
    assert len(NAMES) > 40
    for name in NAMES:
        for file in EXPECTED:
            assert (CASES / name / file).is_file(), f"{name}/{file}"
        if (CASES / name / "exit").read_text() == "2\n":
            assert (CASES / name / "stderr").read_text() != "", name
            one = len((CASES / name / "cmd").read_text().splitlines()) == 1
            assert not one or (CASES / name / "stdout").read_text() == "", name


# Exit codes


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def raising(error: BaseException) -> Any:
    def generate(*arguments: object) -> None:
        raise error

    return generate


def test_internal_error_is_3_and_shows_no_traceback(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpgen.package_commands.generate", raising(KeyError("lost")))
    ran = run(*MADE)
    assert ran.exit == 3 and ran.out == "" and not Path("generated").exists()
    assert ran.err.splitlines() == [
        "internal error: KeyError: 'lost'",
        "  = help: this is a fault of cpgen; CPGEN_TRACEBACK=1 shows where",
    ]
    monkeypatch.setenv("CPGEN_TRACEBACK", "1")
    with pytest.raises(KeyError):
        run(*MADE)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), cpgen.cli.click.Abort()])
def test_interruption_is_130(project: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    monkeypatch.setattr("cpgen.package_commands.generate", raising(error))
    ran = run(*MADE)
    assert (ran.exit, ran.out, ran.err.strip()) == (130, "", "interrupted")


def test_several_errors_are_counted(project: Path) -> None:
    text = Path("made.yaml").read_text()
    Path("made.yaml").write_text(text.replace("dim: 1", "dim: 7"))
    ran = run("plan", "lint", "made.yaml", "--model", "made.py:Model")
    assert ran.exit == 2 and ran.err.endswith("\n\n2 errors\n") and ran.err.count("error[CP105]") == 2


@pytest.mark.parametrize(
    "arguments",
    [("emit", "--model", "WanTransformer3DModel", "--cp", "4"), ("list",), ("check", "--all"), ("plan", "show", "Wan")],
)
def test_without_diffusers(project: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]) -> None:
    run(*MADE)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ran = run(*arguments)
    assert ran.exit == 2 and ran.out == "" and "error[CP304]: diffusers is not installed" in ran.err
    assert "pip install" in ran.err


# Data on stdout, messages on stderr


def test_json_of_emit(project: Path) -> None:
    ran = run(*MADE, "--json")
    (row,) = json.loads(ran.out)
    assert row["package"] == "made_package" and row["model"] == "Model" and row["changed"] == row["files"]
    assert json.loads(run(*MADE, "--json").out)[0]["changed"] == []


def test_json_of_check(project: Path) -> None:
    run(*MADE)
    ran = run("check", "--all", "--json")
    assert ran.exit == 0 and {row["state"] for row in json.loads(ran.out)} == {"same"}
    Path("generated/made_package/made.py").write_text("mine\n")
    ran = run("check", "--all", "--json")
    rows = {row["file"]: row for row in json.loads(ran.out)}
    assert ran.exit == 1 and rows["made.py"]["state"] == "edited" and rows["made.py"]["added"] == 1
    assert rows["checkpoint.py"] == {
        "package": "made_package", "file": "checkpoint.py", "state": "same", "added": 0, "removed": 0
    }  # fmt: skip


def test_path_of_a_package_names_it(project: Path) -> None:
    run(*MADE)
    for name in ("made_package", "generated/made_package", "generated/made_package/"):
        assert run("check", name).exit == 0
        assert run("diff", name).exit == 0


def test_colour_only_on_a_terminal(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(*MADE)
    assert "\x1b" not in run("diff", "--upstream").out
    assert "\x1b[32m+" in cpgen.cli._coloured("+a\n b\n") and "\x1b" not in cpgen.cli._coloured(" b\n")


def test_version_and_help() -> None:
    assert run("--version").out == f"cpgen, version {cpgen.__version__}\n"
    for command in (
        [],
        ["emit"],
        ["check"],
        ["diff"],
        ["verify"],
        ["list"],
        ["plan"],
        ["plan", "show"],
        ["plan", "lint"],
    ):
        ran = run(*command, "--help")
        assert ran.exit == 0 and ran.out.startswith("Usage: cpgen") and ran.err == ""


def test_module_and_script_run(project: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-m", "cpgen", "emit", "--model", "made.py:Modl", "--cp", "2"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.startswith("error[CP401]: made.py defines no class 'Modl'")


def test_reader_that_goes_away_is_no_error(project: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "cpgen", "list"], env=environment, stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_findings_are_errors_of_the_command_line(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpgen.package_commands.generate", raising(CpgenError([], exit_code=1)))
    assert run(*MADE).exit == 1
