"""YAML with positions: values, places, and what a plan may not hold."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cpgen.diagnostics import CpgenError
from cpgen.plan import Plan
from cpgen.plan_loader import load_plan
from cpgen.yamldoc import parse_yaml
from tests.unit.projects import REPOSITORY, plan_text


def test_values_and_where_they_stand() -> None:
    document = parse_yaml("a: 1\nb:\n  - x\n  - {c: [true, null, 1.5]}\n", "p.yaml")
    assert document.value == {"a": 1, "b": ["x", {"c": [True, None, 1.5]}]}
    place = document.at(("b", 1, "c", 2))
    assert place is not None and (place.file, place.line, place.column, place.width) == ("p.yaml", 4, 22, 3)
    key = document.key(("b", 1, "c"))
    assert key is not None and (key.line, key.column, key.width, key.text) == (4, 6, 1, "  - {c: [true, null, 1.5]}")
    assert document.at(("b", 7, "c")) == document.at(("b",))  # the nearest that there is
    assert document.key(("b", 0)) == document.at(("b", 0))


def test_empty_document() -> None:
    assert parse_yaml("", "p").value is None
    assert parse_yaml("# only this\n", "p").value is None


@pytest.mark.parametrize(
    ("text", "code", "message", "line", "column"),
    [
        ("a: [1", "CP101", "broken YAML", 1, 6),
        ("a: 1\n b: 2", "CP101", "broken YAML: mapping values are not allowed here", 2, 3),
        ("a: 1\n\tb: 2", "CP101", "broken YAML", 2, 1),
        ("a: 1\n---\nb: 2", "CP101", "broken YAML: but found another document", 2, 1),
        ("a: &x 1\nb: *x", "CP101", "anchors and aliases", 1, 4),
        ("a: 1\na: 2", "CP102", "duplicate key 'a'", 2, 1),
        ("? [a]\n: 1", "CP101", "a key must be plain text", 1, 3),
        ("a: !!python/object/apply:os.system [id]", "CP101", "a python/object/apply:os.system value", 1, 4),
        ("a: !!python/name:os.system ''", "CP101", "a python/name:os.system value", 1, 4),
        ("a: !x:int 3", "CP101", "a !x:int value is not allowed", 1, 4),
        ("a: !map {b: 1}", "CP101", "a !map value is not allowed", 1, 4),
        ("a: !!set {b}", "CP101", "a set value is not allowed", 1, 4),
        ("a: !!binary aGk=", "CP101", "a binary value is not allowed", 1, 4),
        ("a: 2024-01-02", "CP101", "a timestamp value is not allowed", 1, 4),
        ("a: !!int x", "CP101", "not a valid int: 'x'", 1, 4),
        ("a: 0x" + "f" * 5000, "CP101", "not a valid int: '0xff", 1, 4),
        ("a: " + "9" * 5000, "CP101", "not a valid int: '999", 1, 4),
        ("a: " + "[" * 60 + "]" * 60, "CP101", "nested too deeply", 1, 43),
    ],
)
def test_refused(text: str, code: str, message: str, line: int, column: int) -> None:
    with pytest.raises(CpgenError) as error:
        parse_yaml(text, "p.yaml")
    finding = error.value.findings[0]
    assert finding.code == code and message in finding.message and len(finding.message) < 200
    assert finding.location is not None and (finding.location.line, finding.location.column) == (line, column)


@pytest.mark.parametrize("text", ["a: \x00", "a: \x1b[31m", "a: 1\n" * 300_000])
def test_refused_without_a_place(text: str) -> None:
    with pytest.raises(CpgenError):
        parse_yaml(text, "p.yaml")


def test_depth_is_bounded_ahead_of_all_work() -> None:
    with pytest.raises(CpgenError, match="nested too deeply"):
        parse_yaml("[" * 400_000, "p.yaml")  # would take hours


def test_every_duplicate_is_found() -> None:
    with pytest.raises(CpgenError) as error:
        parse_yaml("a: 1\nb: {c: 1, c: 2}\na: 3\n", "p")
    assert [finding.message for finding in error.value.findings] == ["duplicate key 'c'", "duplicate key 'a'"]


# Whatever the text, reading it as a plan gives a plan or findings.

PLAN = plan_text()
FRAGMENTS = [
    *"{}[]:,-#'\"|>%?~\n\t\u2028\ufeff",
    "  ",
    "&a",
    "*a",
    "!!x",
    "<<:",
    "0",
    "-1",
    "1e9",
    ".inf",
    "null",
    "true",
]
FRAGMENTS += ["x", "model", "latent", "dim: 9", "stream", "when: x is None"]


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text(text: str) -> None:
    plan_or_findings(text)


@settings(deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS)).map("".join))
def test_any_mixture_of_yaml(text: str) -> None:
    plan_or_findings(text)


@settings(deadline=None)
@given(st.data())
def test_plan_with_a_piece_replaced(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(PLAN)))
    end = data.draw(st.integers(start, min(len(PLAN), start + 30)))
    middle = data.draw(st.lists(st.sampled_from(FRAGMENTS), max_size=3).map("".join))
    plan_or_findings(PLAN[:start] + middle + PLAN[end:])


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=["C"]))
WORDS = (
    "model diffusers heads blocks streams region begin before after shard gather prefix refuse dim ndim stream"
    " optional when attention sites call kind kv otherwise layout whole variables until"
    " outside probes name config inputs wraps list x"
)
KEYS = st.sampled_from(WORDS.split())
TREES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner), max_leaves=20)


@settings(deadline=None)
@given(st.dictionaries(KEYS, TREES))
@example({"region": {"begin": {"before": [1]}, "shard": [], "gather": {"x": None}}, "attention": {"A": {"sites": 3}}})
@example({"probes": [{"name": 1, "config": [], "inputs": {"x": {"shape": {}}}}], "streams": [["a"], {"b": 1}]})
@example({"streams": ["a"], "region": {"shard": {"x": {"stream": {"a": 1}}, "y": {"stream": [["a"]]}}}})
@example(
    {"streams": ["a"], "blocks": ["b"], "attention": {"A": [{"call": 0, "stream": {"b": {"a": 1}, "c.d": ["a"]}}]}}
)
@example({"region": {"refuse": [{"when": [1]}, 3]}})
@example({"attention": {"A": [{"call": 0, "kind": {"self": 1}, "layout": ["BSHD"], "stream": None}]}})
def test_any_tree(tree: dict[str, object]) -> None:
    plan_or_findings(yaml.safe_dump(tree, allow_unicode=True))


SHIPPED = yaml.safe_load((REPOSITORY / "plans/cogvideox.yaml").read_text("utf-8"))
SHIPPED["probes"] = SHIPPED["probes"][:1]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in `value`, with each of its keys or indices."""
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(inner, (dict, list)):
            yield from places(inner)


@settings(deadline=None)
@given(st.data())
def test_good_plan_with_one_value_replaced(data: st.DataObject) -> None:
    plan = copy.deepcopy(SHIPPED)
    container, key = data.draw(st.sampled_from(list(places(plan))))
    container[key] = data.draw(TREES)
    plan_or_findings(yaml.safe_dump(plan, allow_unicode=True))


def plan_or_findings(text: str) -> None:
    try:
        assert isinstance(load_plan(text, "p.yaml"), Plan)
    except CpgenError as error:
        assert error.findings and error.exit_code == 2
        assert all(finding.render() for finding in error.findings)
