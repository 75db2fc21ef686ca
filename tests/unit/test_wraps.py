"""Plans with `wraps` that leave out what the wrapped class's plan says."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from cpgen import resources
from cpgen.diagnostics import CpgenError, Finding
from cpgen.infer.draft import differences
from cpgen.plan import Plan
from cpgen.plan_files import read_plan
from cpgen.plan_loader import load_plan
from tests.unit.projects import module_text, plan_text, run

PROBES = "probes: [{name: one, config: {nets: []}, inputs: {hidden_states: {shape: [1, 5, 8]}}}]\n"
INNER = plan_text().replace("model: Model", "model: Inner")
OUTER = "model: Model\nwraps: {list: nets, model: Inner}\n"
SOURCE = (
    module_text().replace("class Model", "class Inner")
    + """

class Model(nn.Module):
    def __init__(self, nets):
        self.nets = nn.ModuleList(nets)

    def forward(self, hidden_states):
        return [net(hidden_states) for net in self.nets]
"""
)
EMIT = ("emit", "--model", "made.py:Model", "--plan", "made.yaml", "--cp", "2", "--package", "made")


def loaded(outer: str = OUTER, inner: str = INNER) -> Plan:
    return load_plan(outer, "made.yaml", lambda model: [(inner, "inner.yaml")] if model == "Inner" else [])


def finding(outer: str = OUTER, inner: str = INNER) -> Finding:
    with pytest.raises(CpgenError) as caught:
        loaded(outer, inner)
    (found,) = caught.value.findings
    return found


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made.py").write_text(SOURCE)
    (tmp_path / "made.yaml").write_text(OUTER + PROBES)
    (tmp_path / "inner.yaml").write_text(INNER)
    return tmp_path


def test_it_says_what_it_would_with_the_parts_repeated() -> None:
    whole = plan_text().replace("\n", "\nwraps: {list: nets, model: Inner}\n", 1)
    taken, repeated = loaded(), load_plan(whole, "made.yaml")
    assert not differences(taken, repeated)
    assert (taken.heads, taken.meaning) == ("heads", repeated.meaning)
    assert (taken.wraps and taken.wraps.plan, repeated.wraps and repeated.wraps.plan) == ("inner.yaml", None)


def test_what_it_says_itself_counts() -> None:
    inner = INNER + "outside: [Refiner]\nrequires: [torchvision]\n" + 'diffusers: "<0.2"\n' + PROBES
    taken = loaded(OUTER, inner)
    assert (taken.outside, taken.requires, taken.diffusers, taken.probes) == (("Refiner",), ("torchvision",), None, ())
    own = loaded(OUTER + "heads: other\noutside: []\nrequires: []\n", inner)
    assert (own.heads, own.outside, own.requires, own.streams) == ("other", (), (), ("latent",))
    assert loaded(OUTER, inner + "tensor_parallel: {blocks: {a: column}}\n").tensor_parallel == ()


def test_places_are_those_of_the_file_that_holds_the_line() -> None:
    plan = loaded(OUTER + "heads: other\n")
    assert plan.heads_location and (plan.heads_location.file, plan.heads_location.line) == ("made.yaml", 3)
    for place in (plan.blocks_location, plan.shards[0].location, plan.attention[0].sites[0].location):
        assert place and place.file == "inner.yaml" and INNER.splitlines()[place.line - 1] == place.text


@pytest.mark.parametrize(
    ("outer", "inner", "code", "message", "file"),
    [
        (OUTER, INNER.replace("dim: 1", "dim: 3", 1), "CP105", "dim 3 cannot be", "inner.yaml"),
        (OUTER + "heads: 3\n", INNER, "CP105", "3 is not a name", "made.yaml"),
        (OUTER, INNER + "wraps: {list: nets, model: Model}\n", "CP105", "Inner wraps models itself", "made.yaml"),
        (OUTER.replace("Inner", "Other"), INNER, "CP110", "no plan for Other, from which blocks, streams", "made.yaml"),
    ],
)
def test_faults(outer: str, inner: str, code: str, message: str, file: str) -> None:
    found = finding(outer, inner)
    assert found.code == code and message in found.message
    assert found.location and found.location.file == file


def test_a_stream_of_its_own_that_the_other_plan_lacks() -> None:
    with pytest.raises(CpgenError) as caught:
        loaded(OUTER + "streams: [text]\n")
    places = {found.location.file for found in caught.value.findings if found.location}
    assert places == {"inner.yaml"} and {f.message for f in caught.value.findings} == {"unknown stream 'latent'"}


def test_any_change_of_the_other_plan_is_one_of_the_hash_and_of_words_one_of_the_meaning() -> None:
    plan, comment, said = loaded(), loaded(inner=INNER + "# more\n"), loaded(inner=INNER.replace("self", "causal"))
    assert len({plan.sha256, comment.sha256, said.sha256}) == 3
    assert plan.meaning == comment.meaning != said.meaning
    assert loaded(inner=INNER + PROBES + 'diffusers: "<0.43"\n').meaning == plan.meaning


def test_variants_of_both() -> None:
    outer = OUTER + 'variants:\n  - {diffusers: "<0.35", heads: old}\n  - {diffusers: "<0.39", outside: [Mine]}\n'
    inner = INNER + (
        "variants:\n"
        '  - {diffusers: "<0.30", heads: theirs, outside: [Theirs]}\n'
        '  - {diffusers: "<0.40", outside: [Theirs]}\n'
        f'  - {{diffusers: ">=0.50", {PROBES.strip()}}}\n'
    )
    plan = loaded(outer, inner)
    found = {v: (plan.on(v).heads, plan.on(v).outside) for v in ("0.29", "0.34", "0.38", "0.39", "0.41", "0.50")}
    assert found == {
        "0.29": ("old", ("Theirs",)),
        "0.34": ("old", ("Theirs",)),
        "0.38": ("heads", ("Mine",)),
        "0.39": ("heads", ("Theirs",)),
        "0.41": ("heads", ()),
        "0.50": ("heads", ()),
    }
    assert [(each.diffusers, each.replaces) for each in plan.variants] == [
        ("<0.35,<0.30", ("heads", "outside")),
        ("<0.35,<0.40", ("heads", "outside")),
        ("<0.35", ("heads",)),
        ("<0.39,<0.30", ("outside", "heads")),
        ("<0.39", ("outside",)),
        ("<0.30", ("heads", "outside")),
        ("<0.40", ("outside",)),
    ]
    assert len({plan.on(version).meaning for version in ("0.29", "0.38", "0.39", "0.41")}) == 4


def test_the_plan_beside_it_is_taken_and_named(project: Path) -> None:
    ran = run("plan", "lint", "made.yaml", "--model", "made.py:Model")
    assert ran.exit == 0 and "= note: what it leaves out of Inner is from inner.yaml\n" in ran.err
    ran = run("plan", "show", "made.py:Model", "--plan", "made.yaml")
    assert "wraps       nets, a list of Inner: all that follows is theirs, from inner.yaml\n" in ran.out
    (project / "inner.yaml").rename("inner.yml")
    assert "from inner.yml\n" in run("plan", "lint", "made.yaml", "--model", "made.py:Model").err


def test_other_files_beside_it(project: Path) -> None:
    (project / "binary.yaml").write_bytes(b"model: Inner\xff\n\x00")
    (project / "folder.yaml").mkdir()
    (project / "dangling.yaml").symlink_to("nowhere")
    assert run("plan", "lint", "made.yaml", "--model", "made.py:Model").exit == 0
    (project / "second.yaml").write_text('model: "Inner" # again\n')
    ran = run("plan", "lint", "made.yaml", "--model", "made.py:Model")
    assert ran.exit == 2
    assert "error[CP110]: 2 plans for Inner: inner.yaml, second.yaml\n  --> made.yaml:2:28\n" in ran.err


def test_without_one_the_shipped_plan_is_taken(tmp_path: Path) -> None:
    shipped = resources.folder("plans")
    (tmp_path / "mine.yaml").write_text((shipped / "sd3_multi_controlnet.yaml").read_text())
    plan = read_plan(tmp_path / "mine.yaml", "mine.yaml")
    assert plan.wraps and plan.wraps.plan == "plans/sd3_controlnet.yaml"
    (tmp_path / "own.yaml").write_text((shipped / "sd3_controlnet.yaml").read_text())
    plan = read_plan(tmp_path / "mine.yaml", "mine.yaml")
    assert plan.wraps and plan.wraps.plan == "own.yaml"


def test_check_finds_a_change_of_the_other_plan(project: Path) -> None:
    assert run(*EMIT).exit == 0 and run("check", "made").exit == 0
    (project / "inner.yaml").write_text(INNER + "# more\n")
    ran = run("check", "made")
    assert ran.exit == 1 and "would rewrite generated/made/made.py (+1 -1)\n" in ran.err
    (project / "inner.yaml").unlink()
    ran = run("check", "made")
    assert ran.exit == 2 and "no plan for Inner" in ran.err


def test_names_that_the_source_lacks_are_shown_in_the_other_plan(project: Path) -> None:
    (project / "inner.yaml").write_text(INNER.replace("after: proj_out", "after: proj"))
    ran = run(*EMIT)
    assert ran.exit == 2 and re.search(r"error\[CP104\].*\n +--> inner\.yaml:8:12\n", ran.err), ran.err


@pytest.mark.parametrize("path", sorted(resources.folder("plans").glob("*multi_controlnet.yaml")), ids=lambda p: p.stem)
def test_shipped_wrappers_take_all_from_their_controlnet(path: Path) -> None:
    plan = read_plan(path, f"plans/{path.name}")
    assert plan.wraps is not None
    other = read_plan(resources.shipped_plans()[plan.wraps.model], plan.wraps.plan or "")
    assert not differences(replace(plan, model=other.model, wraps=None, probes=other.probes), other)
