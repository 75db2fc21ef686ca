"""Packages on disk: whole or not at all, hand edits kept, nothing outside, nothing written without need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cpgen.package import sha256
from tests.unit.projects import MADE, REPOSITORY, Ran, made_project, run

FILES = ["MANIFEST.json", "__init__.py", "checkpoint.py", "made.py", "parallelize.py"]
FOLDER = Path("generated/made_package")


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def emit(*more: str) -> Ran:
    return run(*MADE, *more)


def state(folder: Path = FOLDER) -> dict[str, tuple[bytes, int]]:
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_whole(folder: Path = FOLDER) -> None:
    """Every file that the manifest lists is there, as listed."""
    outputs = json.loads((folder / "MANIFEST.json").read_text("utf-8"))["outputs"]
    assert outputs == {name: sha256((folder / name).read_text("utf-8")) for name in outputs}
    assert len(outputs) == 4


def test_emit_writes_the_package_and_says_so() -> None:
    ran = emit()
    assert ran.exit == 0 and names(FOLDER) == FILES and names(Path("generated")) == ["made_package"]
    assert ran.out.splitlines() == [f"{FOLDER}/{name}" for name in FILES]
    assert all(line.startswith("wrote generated/made_package/") for line in ran.err.splitlines())
    assert FOLDER.stat().st_mode & 0o777 == 0o755
    assert_whole()


def test_emitting_again_changes_nothing() -> None:
    emit()
    before = state()
    ran = emit()
    assert (ran.exit, ran.out, ran.err) == (0, "", "generated/made_package is up to date\n")
    assert state() == before


def test_only_changed_files_are_written() -> None:
    emit()
    before = state()
    ran = emit("--cp", "2")
    assert ran.out.splitlines() == [f"{FOLDER}/MANIFEST.json", f"{FOLDER}/parallelize.py"]
    assert "parallelize.py (+1 -1)" in ran.err
    after = state()
    assert {name for name in after if after[name] != before[name]} == {"MANIFEST.json", "parallelize.py"}
    assert {n for n in after if after[n][1] != before[n][1]} == {"MANIFEST.json", "parallelize.py"}
    assert_whole()


def test_file_that_is_no_longer_emitted_goes_away() -> None:
    emit("--vendor-runtime")
    assert (FOLDER / "_runtime/region.py").is_file()
    ran = emit()
    assert ran.exit == 0 and f"{FOLDER}/_runtime/region.py" in ran.out.splitlines()
    assert not (FOLDER / "_runtime/region.py").exists()
    assert run("check", "--all").exit == 0


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("made.py", "return hidden_states", "return hidden_states + 1"),
        ("made.py", "DO NOT EDIT", "PLEASE EDIT"),
        ("made.py", "\n\n", "\n\n\n"),
        ("parallelize.py", "CP_DEGREE = 4", "CP_DEGREE = 2"),
        ("made.py", "\n", "\r\n"),
    ],
)
def test_hand_edit_is_found_kept_and_discarded_by_force(file: str, old: str, new: str) -> None:
    emit()
    path = FOLDER / file
    original = path.read_bytes()
    path.write_bytes(original.replace(old.encode(), new.encode()))
    edited = state()
    checked = run("check", "made_package")
    assert checked.exit == 1 and f"CP201]: generated/made_package/{file} was edited by hand" in checked.err
    assert "--force" in checked.err and checked.out == ""
    for arguments in ([], ["--cp", "2"]):
        refused = emit(*arguments)
        assert refused.exit == 1 and "CP201" in refused.err and refused.out == "" and state() == edited
    assert run("emit", "--all").exit == 1 and state() == edited
    forced = emit("--force")
    assert (forced.exit, forced.out) == (0, f"{path}\n") and path.read_bytes() == original
    assert run("check", "--all").exit == 0


def test_file_that_is_not_text_counts_as_edited() -> None:
    emit()
    (FOLDER / "made.py").write_bytes(b"\xff\xfe")
    assert run("check", "--all").exit == 1
    assert emit().exit == 1
    assert emit("--force").exit == 0
    assert_whole()


def test_deleted_file_is_found_and_written_again() -> None:
    emit()
    (FOLDER / "checkpoint.py").unlink()
    checked = run("check", "--all")
    assert checked.exit == 1 and "would write generated/made_package/checkpoint.py" in checked.err
    assert emit().out == f"{FOLDER}/checkpoint.py\n"
    assert_whole()


@pytest.mark.parametrize(
    ("old", "new"),
    [('"cp": 4', '"cp": 2'), ('"cut latent"', '"cut"'), ('"format": 1', '"format": 2'), ("0.1.0", "0.0.9")],
)
def test_edited_manifest_is_found(old: str, new: str) -> None:
    emit()
    path = FOLDER / "MANIFEST.json"
    path.write_text(path.read_text().replace(old, new))
    check, again = run("check", "--all"), emit()
    for ran in (check, again):
        assert ran.exit == 1 and "made_package/MANIFEST.json was edited by hand" in ran.err
    assert emit("--force").exit == 0 and run("check", "--all").exit == 0


def test_manifest_with_another_hash_keeps_the_file() -> None:
    emit()
    path = FOLDER / "MANIFEST.json"
    path.write_text(path.read_text().replace(sha256((FOLDER / "made.py").read_text()), "0" * 64))
    assert run("check", "--all").exit == 1 and emit().exit == 1


NOT_MANIFESTS = ["", "{", "[]", "3", "\x00", '{"outputs": 3}', '{"outputs": ["made.py"]}', '{"outputs": "made.py"}']


@pytest.mark.parametrize("text", [*NOT_MANIFESTS, '{"outputs": {"made.py": null}}', '{"outputs": {"made.py": {}}}'])
def test_broken_manifest(text: str) -> None:
    emit()
    (FOLDER / "MANIFEST.json").write_text(text)
    for arguments in (("check", "--all"), ("diff",), MADE, ("emit", "--all")):
        ran = run(*arguments)
        assert ran.exit == 1 and "CP203" in ran.err and ran.out == "", arguments
    assert emit("--force").exit == 0
    assert run("check", "--all").exit == 0


@pytest.mark.parametrize(
    "change", [{"cp": "x"}, {"cp": None}, {"plan": "gone.yaml"}, {"model": "gone.py:M"}, {"cp": 0}]
)
def test_manifest_with_a_request_that_cannot_be(change: dict[str, object]) -> None:
    emit()
    path = FOLDER / "MANIFEST.json"
    manifest = json.loads(path.read_text())
    manifest["request"] |= change
    path.write_text(json.dumps(manifest))
    ran = run("check", "--all")
    assert ran.exit in (1, 2) and ran.err.startswith("error[CP")


def test_manifest_cannot_point_outside() -> None:
    emit()
    Path("secret.txt").write_text("mine")
    path = FOLDER / "MANIFEST.json"
    manifest = json.loads(path.read_text())
    manifest["outputs"] |= {"../../secret.txt": "0" * 64, f"{Path.cwd()}/secret.txt": "0" * 64}
    path.write_text(json.dumps(manifest))
    assert "secret" not in run("check", "--all").err + emit().err
    emit("--force")
    assert Path("secret.txt").read_text() == "mine"
    assert run("check", "--all").exit == 0


def test_other_files_in_the_package_stay() -> None:
    emit()
    (FOLDER / "notes").mkdir()
    (FOLDER / "notes/mine.txt").write_text("mine")
    (FOLDER / "own.py").symlink_to("made.py")
    (FOLDER / "__pycache__").mkdir()
    assert emit("--cp", "2").exit == 0
    assert (FOLDER / "notes/mine.txt").read_text() == "mine" and (FOLDER / "own.py").is_symlink()
    assert run("check", "--all").exit == 0


def test_directory_that_cpgen_did_not_write() -> None:
    FOLDER.mkdir(parents=True)
    (FOLDER / "made.py").write_text("mine")
    (FOLDER / "other.py").write_text("mine too")
    ran = emit()
    assert ran.exit == 1 and "CP202" in ran.err and names(FOLDER) == ["made.py", "other.py"]
    assert (FOLDER / "made.py").read_text() == "mine"
    assert emit("--force").exit == 0
    assert (FOLDER / "other.py").read_text() == "mine too"
    assert_whole()


def test_empty_directory_is_filled() -> None:
    FOLDER.mkdir(parents=True)
    assert emit().exit == 0
    assert_whole()


def test_package_directory_that_is_a_link_or_a_file() -> None:
    Path("elsewhere").mkdir()
    Path("generated").mkdir()
    FOLDER.symlink_to(Path("elsewhere").resolve())
    for more in ([], ["--force"]):
        ran = emit(*more)
        assert ran.exit == 2 and "CP204" in ran.err and names(Path("elsewhere")) == []
    FOLDER.unlink()
    FOLDER.write_text("a file")
    assert emit().exit == 2 and FOLDER.read_text() == "a file"


def test_link_inside_the_package_is_replaced_not_followed() -> None:
    emit()
    Path("victim.py").write_text((FOLDER / "parallelize.py").read_text())
    (FOLDER / "parallelize.py").unlink()
    (FOLDER / "parallelize.py").symlink_to(Path("victim.py").resolve())
    before = Path("victim.py").read_text()
    assert emit("--cp", "2").exit == 0
    assert Path("victim.py").read_text() == before and not (FOLDER / "parallelize.py").is_symlink()
    assert_whole()


def test_out_that_is_a_file() -> None:
    Path("generated").write_text("a file")
    ran = emit()
    assert ran.exit == 2 and "CP204" in ran.err and Path("generated").read_text() == "a file"


@pytest.mark.parametrize("call", ["mkdtemp", "rename"])
def test_directory_that_cannot_be_written(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a read-only file system; permissions alone don't stop a superuser."""
    from cpgen import disk

    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    emit()
    before = state()
    if call == "mkdtemp":
        monkeypatch.setattr(disk.tempfile, "mkdtemp", refuse)
    else:
        monkeypatch.setattr(disk, "_exchange", refuse)
    ran = emit("--cp", "2")
    assert ran.exit == 2 and "CP204" in ran.err and "Permission denied" in ran.err and ran.out == ""
    assert state() == before and names(Path("generated")) == ["made_package"]


def test_system_without_an_atomic_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    from cpgen import disk

    monkeypatch.setattr(disk, "_exchange", lambda left, right: False)
    emit()
    assert emit("--cp", "2").exit == 0
    assert_whole()
    assert names(Path("generated")) == ["made_package"] and "CP_DEGREE = 2" in (FOLDER / "parallelize.py").read_text()


def test_dry_run_writes_nothing() -> None:
    ran = emit("--dry-run")
    assert ran.exit == 0 and ran.out.splitlines() == [f"{FOLDER}/{name}" for name in FILES]
    assert all(line.startswith("would write ") for line in ran.err.splitlines()) and not Path("generated").exists()
    emit()
    before = state()
    ran = emit("--dry-run", "--cp", "2")
    assert ran.out.splitlines() == [f"{FOLDER}/MANIFEST.json", f"{FOLDER}/parallelize.py"] and state() == before


def test_directories_that_a_kill_left_confuse_nobody() -> None:
    emit()
    left = Path("generated/.made_package.abc123")
    left.mkdir()
    (left / "MANIFEST.json").write_text("{")
    checked = run("check", "--all")
    assert (checked.exit, checked.err) == (0, "5 files up to date\n")
    assert run("diff").out == "" and run("emit", "--all").exit == 0 and emit("--cp", "2").exit == 0
    assert left.is_dir()


# Kills. A helper process forks a child for each: the child emits and is killed, the rest looks at what is left.

KILL = """
import os, select, signal, sys
mode = sys.argv[1]
from cpgen.cli import main
from tests.unit.test_disk import look

EVENTS = {"open", "os.rename", "os.mkdir", "os.chmod", "os.rmdir", "os.remove", "os.utime", "ctypes.dlopen",
          "os.scandir", "os.listdir", "tempfile.mkdtemp", "shutil.rmtree", "shutil.copyfile", "os.symlink"}
devnull = os.open(os.devnull, os.O_WRONLY)

def emit(degree):
    try:
        main([*sys.argv[2:], "--cp", str(degree)])
    except SystemExit as exit_:
        assert not exit_.code

def die_at(number):
    def hook(event, values):
        nonlocal number
        if event in EVENTS:
            number -= 1
            if number < 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

def child(number):
    os.dup2(devnull, 1), os.dup2(devnull, 2)
    if mode == "random":
        for turn in range(1000):
            emit(2 + turn % 2)
    path = "generated/made_package/parallelize.py"
    other = 3 if os.path.exists(path) and "CP_DEGREE = 2" in open(path).read() else 2
    die_at(number)
    emit(other)

if mode != "first":
    emit(2)
kills = 0
for number in range(0, 400, 5 if mode == "first" else 1):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            child(number)
            os._exit(0)
        except BaseException:
            os._exit(7)
    if mode == "random":  # up to the time of about two runs
        select.select([reader], [], [], 0.12 * (number % 29) / 29)
        os.kill(pid, signal.SIGKILL)
    os.close(reader), os.close(writer)
    status = os.waitpid(pid, 0)[1]
    look(may_be_missing=mode == "first")
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0, status
        break
    kills += 1
    if mode == "random" and kills == 40:
        break
print(kills)
"""


def look(*, may_be_missing: bool) -> None:
    """What must hold after every kill, in the directory of the project."""
    if may_be_missing and not FOLDER.exists():
        return
    assert_whole()
    assert names(FOLDER) == FILES
    assert [name for name in names(Path("generated")) if not name.startswith(".")] == ["made_package"]


@pytest.mark.parametrize(
    ("mode", "least"),
    [
        ("event", 20),  # at each operation on files, one after the other
        ("random", 40),  # at any time, while the package changes back and forth
        ("first", 10),  # while there is no package yet
    ],
)
def test_kill_leaves_the_old_package_or_the_new_one(mode: str, least: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", KILL, mode, *MADE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) >= least
    assert run("check", "--all").exit == 0
    assert emit("--cp", "3").exit == 0
    assert_whole()
