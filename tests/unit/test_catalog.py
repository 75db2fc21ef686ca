"""`cpgen list` and `cpgen plan show`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cpgen import resources
from cpgen.catalog import catalog, describe
from cpgen.package import read_plan
from tests.unit.projects import MODELS, run


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_transformer_has_a_row_and_its_state() -> None:
    rows = {row["model"]: row for row in catalog(Path("generated"))}
    assert len(rows) > 30 and list(rows) == sorted(rows)
    for model in MODELS.values():
        row = rows[model]
        assert row["state"] == "plan" and row["plan"].startswith("plans/") and row["probes"] and row["streams"]
        assert row["strategies"] == ["ulysses", "allgather", "ring", "hybrid"] and row["diffusers"]
    states = {row["state"] for row in rows.values()}
    assert states == {"plan", "own plan", "no plan"}
    assert all(row["plan"] is None and not row["streams"] for row in rows.values() if row["state"] != "plan")
    assert all(not row["strategies"] for row in rows.values() if row["state"] == "no plan")


def test_emitted_packages_show() -> None:
    run("emit", "--model", "LTXVideoTransformer3DModel", "--cp", "2")
    rows = json.loads(run("list", "--json").out)
    assert [row["model"] for row in rows if row["state"] == "emitted"] == ["LTXVideoTransformer3DModel"]
    other = json.loads(run("list", "--json", "--out", "elsewhere").out)
    assert "emitted" not in {row["state"] for row in other}


def test_table_has_a_line_a_model() -> None:
    lines = run("list").out.splitlines()
    assert lines[0].split() == ["model", "plan", "streams", "strategies", "state"]
    assert len(lines) == len(catalog(Path("generated"))) + 1
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize("path", sorted(resources.folder("plans").glob("*.yaml")), ids=lambda path: path.stem)
def test_plan_in_words_names_all_of_it(path: Path) -> None:
    plan = read_plan(path, f"plans/{path.name}")
    text = describe(plan)
    for shard in plan.shards:
        assert f"cut       {shard.variable}" in text
    for name in (*plan.blocks, *plan.streams, *(f.owner for f in plan.attention), *(p.name for p in plan.probes)):
        assert name in text
    assert run("plan", "show", plan.model).out == text
