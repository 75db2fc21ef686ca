"""The grammar of `when`: what is in it, and that nothing else gets through."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpgen.conditions import ConditionError, parse_condition


@pytest.mark.parametrize(
    ("text", "source", "names"),
    [
        ("ndim == 4", "temb.ndim == 4", {"temb"}),
        ("shape[1] != 1", "temb.shape[1] != 1", {"temb"}),
        ("other.ndim > 1 and shape[0] < 3", "other.ndim > 1 and temb.shape[0] < 3", {"other", "temb"}),
        ("1 < ndim <= 4", "1 < temb.ndim <= 4", {"temb"}),
        ("x is None", "x is None", {"x"}),
        ("not (x is not None or y == z)", "not (x is not None or y == z)", {"x", "y", "z"}),
        ("ndim==4", "temb.ndim == 4", {"temb"}),
    ],
)
def test_allowed(text: str, source: str, names: set[str]) -> None:
    assert parse_condition(text, "temb") == (source, names)


def test_without_a_subject_the_words_are_names() -> None:
    assert parse_condition("ndim == 4") == ("ndim == 4", {"ndim"})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "True",
        "x is 4",
        "x is y",
        "x == 1.5",
        "x == 'a'",
        "x == True",
        "x == -1",
        "x in y",
        "f(x) == 1",
        "x.y == 1",
        "x.shape == 1",
        "x.shape[y] == 1",
        "x.shape[-1] == 1",
        "x.shape[1:2] == 1",
        "x[0] == 1",
        "x.ndim.real == 1",
        "x.shape[0].real == 1",
        "__import__ == 1",
        "__import__('os').system('id') == 1",
        "(lambda: 1)() == 1",
        "[x for x in y] == 1",
        "(x := 1) == 1",
        "x == 1 if y else 0",
        "x == 1; import os",
        "x == 1\nimport os",
        "x ==",
        "x == 1)",
        "not " * 60 + "x == 1",
        "x == 0x" + "f" * 400,
        "(" * 150 + "x",
        "\x00",
        "x == 1 and f'{y}' == 1",
        "await x == 1",
        "yield == 1",
    ],
)
def test_not_allowed(text: str) -> None:
    with pytest.raises(ConditionError):
        parse_condition(text, "temb")


@settings(deadline=None)
@given(st.text(max_size=60) | st.text("xyn=<>!()[]. 0123isotandrNoemhp_:'\"\\{}", max_size=60))
def test_any_text_is_a_condition_or_an_error(text: str) -> None:
    try:
        source, names = parse_condition(text, "temb")
    except ConditionError:
        return
    assert_harmless(source, names)


NAMES = st.sampled_from(["x", "temb", "ndim"])
OPERANDS = (
    NAMES
    | st.integers(0, 9).map(str)
    | NAMES.map(lambda name: f"{name}.ndim")
    | st.tuples(NAMES, st.integers(0, 5)).map(lambda pair: f"{pair[0]}.shape[{pair[1]}]")
)
COMPARISONS = st.tuples(OPERANDS, st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), OPERANDS).map(" ".join)
CONDITIONS = st.recursive(
    COMPARISONS | NAMES.map(lambda name: f"{name} is None"),
    lambda inner: (
        st.tuples(inner, st.sampled_from([" and ", " or "]), inner).map("".join).map(lambda text: f"({text})")
        | inner.map(lambda text: f"not {text}")
    ),
    max_leaves=4,
)


@settings(deadline=None)
@given(CONDITIONS)
def test_everything_in_the_grammar_is_accepted_and_means_the_same(text: str) -> None:
    source, names = parse_condition(text)
    assert ast.dump(ast.parse(source, mode="eval")) == ast.dump(ast.parse(text, mode="eval"))
    assert_harmless(source, names)
    assert parse_condition(source) == (source, names)


def assert_harmless(source: str, names: frozenset[str]) -> None:
    """One expression on one line, of comparisons only, that reads `names`."""
    assert "\n" not in source and "#" not in source
    nodes = list(ast.walk(ast.parse(source, mode="eval")))
    assert not any(
        isinstance(node, (ast.Call, ast.Lambda, ast.NamedExpr, ast.JoinedStr, ast.Starred)) for node in nodes
    )
    assert {node.attr for node in nodes if isinstance(node, ast.Attribute)} <= {"ndim", "shape"}
    assert {node.id for node in nodes if isinstance(node, ast.Name)} == names
