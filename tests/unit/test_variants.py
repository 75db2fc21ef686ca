"""Variants: what a plan says on some versions of diffusers only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cpgen.catalog import describe
from cpgen.diagnostics import CpgenError
from cpgen.package import Package, Request, generate
from cpgen.plan_loader import load_plan
from cpgen.proofs import Proof, Run, last_proven, of_probes
from cpgen.source import SourceTree, diffusers_version
from tests.unit.projects import made_project, module_text, plan_text, run

PROBE = "{{name: {name}, config: {{}}, inputs: {{hidden_states: {{shape: [1, 8, 4]}}}}}}"
VARIANTS = f"""\
diffusers: ">=0.30,<0.50"
probes: [{PROBE.format(name="new")}]
variants:
  - diffusers: "<0.35"
    attention:
      OldProcessor: [{{call: 0, kind: self, stream: latent}}]
    probes: [{PROBE.format(name="old")}]
  - diffusers: "<0.40"
    heads: head_count
"""
TEXT = plan_text() + VARIANTS
PLAN = load_plan(TEXT, "made.yaml")


@pytest.mark.parametrize(
    ("version", "owner", "heads", "probe"),
    [
        ("0.34.9", "OldProcessor", "heads", "old"),  # in both ranges: the first counts
        ("0.35.0", "Processor", "head_count", "new"),
        ("0.40.0", "Processor", "heads", "new"),
        ("0.39.0.dev0", "Processor", "head_count", "new"),
        ("unknown", "Processor", "heads", "new"),
    ],
)
def test_first_variant_with_the_version_replaces_keys(version: str, owner: str, heads: str, probe: str) -> None:
    plan = PLAN.on(version)
    assert ([entry.owner for entry in plan.attention], plan.heads) == ([owner], heads)
    assert [each.name for each in plan.probes] == [probe]
    assert (plan.model, plan.diffusers, plan.sha256) == (PLAN.model, ">=0.30,<0.50", PLAN.sha256)
    assert (plan.shards, plan.variants) == (PLAN.shards, PLAN.variants)


def emitted(folder: Path, version: str, source: str) -> Package:
    made_project(folder, source, TEXT)
    tree = SourceTree()
    root = tree.find("diffusers")
    assert root is not None
    tree._modules["diffusers"] = replace(root, text=root.text.replace(diffusers_version(tree), version))
    request = Request(f"{folder / 'made.py'}:Model", 2, plan=folder / "made.yaml", package="made_package")
    return generate(request, folder / "generated", tree)


def test_emit_takes_the_variant_of_the_installed_version(tmp_path: Path) -> None:
    old = module_text(owner="OldProcessor")
    assert "attention_site(attn" in emitted(tmp_path, "0.34.0", old).files["made.py"]
    with pytest.raises(CpgenError, match=r"(?s)CP104.*imports a class 'OldProcessor'.*--> \S*made.yaml:\d+:7"):
        emitted(tmp_path, "0.34.0", module_text())
    assert "attention_site(attn" in emitted(tmp_path, "0.45.0", module_text()).files["made.py"]
    with pytest.raises(CpgenError, match=r"CP104.*imports a class 'Processor'"):
        emitted(tmp_path, "0.45.0", old)


@pytest.mark.parametrize(
    ("old", "new", "code", "message", "line"),
    [
        ('"<0.40"', "newest", "CP105", "'newest' is not a version range", 8),
        ('  - diffusers: "<0.40"\n    heads', "  - heads", "CP107", "missing key 'diffusers'", 8),
        ("    heads: head_count", "    model: Other", "CP103", "unknown key 'model'", 9),
        ("    heads: head_count\n", "", "CP107", "a variant replaces nothing", 8),
        ("    heads: head_count", "    heads: 4", "CP105", "4 is not a name", 9),
        ("    heads: head_count", "    blocks: [a, b-c]", "CP105", "'b-c' is not a name", 9),
        ("OldProcessor: [{call: 0", "OldProcessor: [{cal: 0", "CP103", "unknown key 'cal'", 6),
    ],
)
def test_each_variant_is_checked_whichever_is_installed(old: str, new: str, code: str, message: str, line: int) -> None:
    assert VARIANTS.count(old) == 1
    with pytest.raises(CpgenError) as caught:
        load_plan(plan_text() + VARIANTS.replace(old, new), "made.yaml")
    found = [finding for finding in caught.value.findings if finding.code == code and message in finding.message]
    (finding,) = found
    assert finding.location is not None and finding.location.line == len(plan_text().splitlines()) + line


@pytest.mark.parametrize(
    ("own", "ranges", "message", "line"),
    [
        (">=0.38,<0.43", ["<0.38"], "no version in '<0.38' is in the plan's range '>=0.38,<0.43'", 0),
        (">=0.38,<0.43", ["<=0.38.0"], None, 0),
        (">=0.38,<0.43", [">=0.43"], "no version in '>=0.43' is in the plan's range '>=0.38,<0.43'", 0),
        (">=0.38,<0.43", ["<0.40", "==0.39.*"], "earlier variants have every version in '==0.39.*'", 1),
        (">=0.38,<0.43", ["<0.40", "<0.40"], "earlier variants have every version in '<0.40'", 1),
        (">=0.38,<0.43", ["==0.39.*", "<0.40"], None, 0),
        (">=0.38,<0.43", ["<0.40", ">=0.40,<0.42", ">=0.39,<0.42"], "earlier variants have every version in", 2),
        (">=0.38,<0.43", ["<0.40", ">=0.41", ">=0.39"], None, 0),
        (">=0.38,<0.43", ["~=0.39.1", "==0.39.0"], None, 0),
        (">=0.38,<0.43", ["!=0.39.0", "<0.39"], "earlier variants have every version in '<0.39'", 1),
        (">=0.38,<0.43", ["!=0.39.0", "<0.40"], None, 0),
        (None, ["<0.1", ">=0.1"], None, 0),
        (None, ["<0.2", "<0.1"], "earlier variants have every version in '<0.1'", 1),
    ],
)
def test_every_variant_counts_somewhere(own: str | None, ranges: list[str], message: str | None, line: int) -> None:
    lines = [f'  - {{diffusers: "{range_}", heads: other}}' for range_ in ranges]
    text = plan_text() + (f'diffusers: "{own}"\n' if own else "") + "\n".join(["variants:", *lines, ""])
    if message is None:
        assert len(load_plan(text, "made.yaml").variants) == len(ranges)
        return
    with pytest.raises(CpgenError) as caught:
        load_plan(text, "made.yaml")
    (finding,) = caught.value.findings
    assert finding.code == "CP105" and finding.message.startswith(message)
    assert finding.location and finding.location.line == len(text.splitlines()) - len(ranges) + 1 + line
    assert finding.location.column == 17


@pytest.mark.parametrize(("value", "message"), [("{}", "expected a list"), ("[3]", "expected a mapping")])
def test_variants_are_a_list_of_mappings(value: str, message: str) -> None:
    with pytest.raises(CpgenError, match=f"CP105.*{message}"):
        load_plan(f"{plan_text()}variants: {value}\n", "made.yaml")


def test_fault_outside_of_variants_is_one_error() -> None:
    with pytest.raises(CpgenError) as caught:
        load_plan(TEXT.replace("dim: 1", "dim: 7"), "made.yaml")
    assert [finding.code for finding in caught.value.findings] == ["CP105", "CP105"]  # shard and gather


def test_replaced_key_is_said_with_its_place_in_the_variant(tmp_path: Path) -> None:
    with pytest.raises(CpgenError, match=r"(?s)'head_count' \(the plan's heads\).*--> \S*made.yaml:(\d+):12") as caught:
        emitted(tmp_path, "0.39.0", module_text())
    (finding,) = caught.value.findings
    assert finding.location is not None and finding.location.line == len(TEXT.splitlines())


def test_proof_is_of_the_variant_of_its_version() -> None:
    def proof(version: str, of: str) -> Proof:
        return Proof(
            "Model", version, PLAN.on(version).meaning, of_probes(PLAN.on(of)), (Run("ulysses", 2, 0.0, 0.0, 0),)
        )

    other = load_plan(TEXT.replace("OldProcessor", "OlderProcessor"), "made.yaml")
    for plan, on_old in ((PLAN, True), (other, False)):
        assert proof("0.34.0", "0.34.0").is_of(plan) == on_old
        assert proof("0.45.0", "0.45.0").is_of(plan)
    assert last_proven(PLAN, [proof("0.34.0", "0.34.0")]) == "0.34.0"
    assert last_proven(PLAN, [proof("0.34.0", "0.45.0")]) is None


def test_they_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "variant     on diffusers <0.35 it has another attention, probes\n" in describe(PLAN)
    made_project(tmp_path, plan=TEXT)
    monkeypatch.chdir(tmp_path)
    assert (
        "variant     on diffusers <0.40 it has another heads\n"
        in run("plan", "show", "made.py:Model", "--plan", "made.yaml").out
    )
