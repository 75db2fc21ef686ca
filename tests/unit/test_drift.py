"""`check` and `diff`: what moved since a package was written, be it plan, source, template or request."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cpgen import package, resources
from cpgen.drift import check_package, find_packages, unified_diff
from cpgen.source import SourceTree
from tests.unit.projects import MADE, made_project, run

OUT = Path("generated")


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run(*MADE).exit == 0
    return tmp_path


def states() -> dict[str, str]:
    return {state.file: state.state for state in check_package("made_package", OUT, SourceTree())}


def change(file: str, old: str, new: str) -> None:
    path = Path(file)
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def moved() -> set[str]:
    return {file for file, state in states().items() if state != "same"}


def test_nothing_moved() -> None:
    assert set(states().values()) == {"same"} and len(states()) == 5


def test_plan_moved() -> None:
    change("made.yaml", "ndim: 3, stream: latent}}\n  gather", "ndim: 4, stream: latent}}\n  gather")
    assert states() == dict.fromkeys(states(), "changed")  # the plan's hash is in every header
    ran = run("check", "--all")
    assert ran.exit == 1 and "would rewrite generated/made_package/made.py (+2 -2)" in ran.err
    assert "5 files out of date, 0 up to date. Run: cpgen emit --all" in ran.err
    diff = run("diff")
    assert diff.exit == 0 and "-        hidden_states = cp.shard(hidden_states" in diff.out and "ndim=4" in diff.out
    assert diff.out.startswith("--- committed/made_package/MANIFEST.json\n+++ generated/made_package/MANIFEST.json\n@@")
    assert run("emit", "--all").exit == 0 and moved() == set() and run("diff").out == ""


def test_source_moved() -> None:
    change("made.py", "return hidden_states", "return hidden_states * 2")
    assert moved() == {"MANIFEST.json", "__init__.py", "checkpoint.py", "made.py", "parallelize.py"}
    change("made.py", "return hidden_states * 2", "return hidden_states")
    assert moved() == set()


def test_source_no_longer_fits() -> None:
    change("made.py", "self.blocks", "self.layers")
    ran = run("check", "--all")
    assert ran.exit == 2 and "error[CP104]: Model has no module 'blocks'" in ran.err


def test_generator_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check regenerates: a changed generator shows, also where plan and source are the same."""
    original = package._header
    monkeypatch.setattr(package, "_header", lambda *arguments: original(*arguments).replace("DO NOT EDIT", "Keep off"))
    assert moved() == {"MANIFEST.json", "__init__.py", "checkpoint.py", "made.py", "parallelize.py"}


def test_template_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "templates"
    folder.mkdir()
    for path in resources.folder("templates").glob("*.j2"):
        more = "# more" if path.name == "checkpoint.py.j2" else ""
        (folder / path.name).write_text(path.read_text() + more)
    monkeypatch.setattr(resources, "folder", lambda name: folder)
    assert moved() == {"MANIFEST.json", "checkpoint.py"}


def test_version_of_diffusers_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "diffusers_version", lambda tree: "9.9.9")
    assert moved() == {"MANIFEST.json"}


def test_project_moved_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path.parent / "elsewhere"
    elsewhere.mkdir()
    for name in ("made.py", "made.yaml", "generated"):
        (tmp_path / name).rename(elsewhere / name)
    assert [state.state for state in check_package("made_package", elsewhere / "generated", SourceTree())] == [
        "same"
    ] * 5
    monkeypatch.chdir(elsewhere / "generated")
    assert run("check", "--all", "--out", ".").exit == 0


def test_verify_refuses_a_package_that_it_would_not_prove() -> None:
    file = Path("generated/made_package/made.py")
    emitted = file.read_text()
    file.write_text(emitted.replace("return hidden_states", "return hidden_states * 2"))
    ran = run("verify", "made_package")
    assert ran.exit == 1 and "error[CP201]: generated/made_package/made.py was edited by hand" in ran.err
    assert "cpgen emit --model made.py:Model --force" in ran.err  # from here, not from where the package is
    file.write_text(emitted)
    change("made.py", "return hidden_states", "return hidden_states * 2")
    ran = run("verify", "made_package")
    assert ran.exit == 1 and "error[CP206]: generated/made_package is not what would be emitted today" in ran.err


def test_stale_and_missing_files() -> None:
    run(*MADE, "--vendor-runtime")
    change("generated/made_package/MANIFEST.json", '"vendor_runtime": true', '"vendor_runtime": false')
    found = states()
    assert found["_runtime/region.py"] == "stale" and found["MANIFEST.json"] == "edited"
    (OUT / "made_package/made.py").unlink()
    assert states()["made.py"] == "missing"
    ran = run("check", "--all")
    assert "would remove generated/made_package/_runtime/region.py" in ran.err
    assert "would write generated/made_package/made.py" in ran.err


def test_uncommitted_upstream_files_are_compared_by_hash() -> None:
    (OUT / ".upstream-not-committed").write_text("")
    (OUT / "made_package/made.py").unlink()
    assert moved() == set() and run("check", "--all").exit == 0
    change("generated/made_package/MANIFEST.json", '"made.py": "', '"made.py": "0')
    assert moved() == {"MANIFEST.json", "made.py"}
    (OUT / "made_package/checkpoint.py").unlink()  # no upstream file: must be there
    assert states()["checkpoint.py"] == "missing"


def test_packages_are_found_by_their_manifests() -> None:
    (OUT / "other").mkdir()
    (OUT / ".hidden").mkdir()
    (OUT / ".hidden/MANIFEST.json").write_text("{}")
    assert find_packages(OUT) == ["made_package"] and find_packages(Path("gone")) == []


@pytest.mark.parametrize("name", ["..", "../generated/made_package/..", ".hidden", "", "other", "made.py"])
def test_names_that_are_no_package(name: str) -> None:
    ran = run("check", "--", name)
    assert ran.exit == 2 and ran.err.startswith("error[CP205]") and "packages there: made_package" in ran.err


def test_diff_without_a_newline_at_the_end() -> None:
    assert unified_diff("a\n", "a", "x", "y").endswith("-a\n+a\n\\ No newline at end of file\n")
    assert unified_diff("a\n", "a\n", "x", "y") == ""


def test_diff_against_upstream_is_the_surgery() -> None:
    text = run("diff", "made_package", "--upstream").out
    assert text.startswith("--- upstream/made_package/made.py\n+++ generated/made_package/made.py\n")
    removed = [line for line in text.splitlines()[2:] if line.startswith("-")]
    added = [line for line in text.splitlines()[2:] if line.startswith("+")]
    assert removed == [] and all("# cpgen: " in line or line.startswith("+# ") for line in added)


def test_diff_against_upstream_leaves_out_what_the_package_does_not_have() -> None:
    assert run("emit", "--model", "AuraFlowTransformer2DModel", "--cp", "2").exit == 0
    diff = run("diff", "aura_flow_transformer_2d", "--upstream").out
    assert re.match(
        r"\d+ definitions of upstream's attention_processor.py that the package does not use are left out\n", diff
    )
    assert not re.search(r"^-(class|def|@)", diff, re.MULTILINE)
    assert "+        query, key, value = cp.seq_to_heads(query, key, value)" in diff
