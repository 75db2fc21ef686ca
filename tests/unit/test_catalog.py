"""`cpgen list` and `cpgen plan show`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cpgen import resources
from cpgen.catalog import catalog, describe
from cpgen.native_plan import has_native_plan
from cpgen.plan_files import read_plan
from cpgen.proofs import Proof, Run, of_probes
from cpgen.source import SourceTree, exported_models
from cpgen.target import find_target
from tests.unit.projects import MODELS, run


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_transformer_has_a_row_and_its_state() -> None:
    rows = {row["model"]: row for row in catalog(Path("generated"))}
    exported = exported_models(SourceTree())
    families = ("diffusers.models.transformers.", "diffusers.models.controlnets.")
    assert list(rows) == sorted(model for model, module in exported.items() if module.startswith(families))
    assert len(rows) > 30 and "FluxControlNetModel" in rows
    for model in MODELS.values():
        row = rows[model]
        assert row["state"] == "plan" and row["plan"].startswith("plans/") and row["probes"] and row["streams"]
        assert row["strategies"] == ["ulysses", "allgather", "ring", "hybrid"] and row["diffusers"]
    states = {row["state"] for row in rows.values()}
    assert {"plan", "no plan"} <= states <= {"plan", "own plan", "no plan"}
    assert all(row["plan"] is None and not row["streams"] for row in rows.values() if row["state"] != "plan")
    assert all(not row["strategies"] for row in rows.values() if row["state"] == "no plan")


def test_a_class_with_a_cp_plan_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no plan for it: Wan's, without the shipped one."""
    plans = {model: path for model, path in resources.shipped_plans().items() if model != "WanTransformer3DModel"}
    monkeypatch.setattr(resources, "shipped_plans", lambda: plans)
    (row,) = [row for row in catalog(Path("generated")) if row["model"] == "WanTransformer3DModel"]
    assert (row["state"], row["plan"], row["strategies"]) == (
        "own plan",
        None,
        ["ulysses", "allgather", "ring", "hybrid"],
    )


def test_proven_version_is_that_of_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    path = resources.shipped_plans()["WanTransformer3DModel"]
    plan = read_plan(path, "plans/wan.yaml")
    proof = Proof(plan.model, "0.41.0", plan.meaning, of_probes(plan), (Run("ulysses", 2, 0.0, 0.0, 0),))
    monkeypatch.setattr("cpgen.catalog.read_proofs", lambda: [proof, replace(proof, diffusers="0.42.0", error="no")])
    rows = {row["model"]: row for row in json.loads(run("list", "--json").out)}
    assert rows["WanTransformer3DModel"]["proven"] == "0.41.0"
    assert rows["FluxTransformer2DModel"]["proven"] is None
    (line,) = [line for line in run("list").out.splitlines() if line.startswith("WanTransformer3DModel ")]
    assert line.split()[-3:] == [str(len(plan.probes)), "0.41.0", "plan"]


def test_every_class_without_a_plan_is_told_of_plan_infer() -> None:
    models = [row["model"] for row in catalog(Path("generated")) if row["plan"] is None]
    assert len(models) > 10
    tree = SourceTree()
    for model in models:
        ran = run("emit", "--model", model, "--cp", "2")
        assert (ran.exit, ran.out) == (2, "")
        own = has_native_plan(find_target(model, tree))
        assert ("error[CP111]: " if own else f"error[CP110]: no plan for {model}\n") in ran.err
        assert f"cpgen plan infer --model {model} --write FILE finds one" in ran.err


def test_emitted_packages_show() -> None:
    run("emit", "--model", "LTXVideoTransformer3DModel", "--cp", "2")
    rows = json.loads(run("list", "--json").out)
    assert [row["model"] for row in rows if row["state"] == "emitted"] == ["LTXVideoTransformer3DModel"]
    other = json.loads(run("list", "--json", "--out", "elsewhere").out)
    assert "emitted" not in {row["state"] for row in other}


def test_table_has_a_line_a_model() -> None:
    lines = run("list").out.splitlines()
    assert lines[0].split() == ["model", "plan", "streams", "strategies", "probes", "proven", "state"]
    assert len(lines) == len(catalog(Path("generated"))) + 1
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize("path", sorted(resources.folder("plans").glob("*.yaml")), ids=lambda path: path.stem)
def test_plan_in_words_names_all_of_it(path: Path) -> None:
    plan = read_plan(path, f"plans/{path.name}")
    text = describe(plan)
    for shard in plan.shards:
        assert f"cut       {shard.variable}" in text
        assert shard.start is None or f"without the stream's first {shard.start}" in text
        assert shard.after is None or f"where {shard.after} gives it" in text
        assert shard.before is None or f"ahead of {shard.before}" in text
    for gather in plan.gathers:
        place = f"behind {gather.after}" if gather.after else "where it is assigned last"
        (line,) = [line for line in text.splitlines() if f"gather    {gather.variable}" in line and place in line]
        assert ("may be None" in line) == gather.optional and ("cut again" in line) == gather.cut_again
    for function in plan.attention:
        assert all(f"keys of {' + '.join(site.kv)}" in text for site in function.sites if site.kv)
        assert all(f"whole     {name}: " in text for whole in function.whole for name, _ in whole.variables)
    assert plan.wraps is None or f"wraps       {plan.wraps.attribute}, a list of {plan.wraps.model}" in text
    assert all(f"requires    {name}" in text for name in plan.requires[:1])
    for shard in [shard for function in plan.attention for shard in function.shards]:
        assert f"cut       {shard.variable}" in text
    for name in (*plan.blocks, *plan.streams, *(f.owner for f in plan.attention), *(p.name for p in plan.probes)):
        assert name in text
    assert run("plan", "show", plan.model).out == text
