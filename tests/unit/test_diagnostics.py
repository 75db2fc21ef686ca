"""How findings look."""

from __future__ import annotations

from cpgen.diagnostics import CpgenError, Finding, Location, did_you_mean, fail


def test_finding_with_everything() -> None:
    place = Location("plans/wan.yaml", 12, 5, 12, "    hidden_state: {dim: 1}")
    finding = Finding("CP104", "no such thing", place, hint="did you mean 'x'?", note="it is there", help="do this")
    assert finding.render() == (
        "error[CP104]: no such thing\n"
        "   --> plans/wan.yaml:12:5\n"
        "   |\n"
        "12 |     hidden_state: {dim: 1}\n"
        "   |     ^^^^^^^^^^^^ did you mean 'x'?\n"
        "   = note: it is there\n"
        "   = help: do this"
    )


def test_finding_without_a_line_of_text_shows_its_hint() -> None:
    rendered = Finding("CP104", "no", Location("a.py", 7), hint="did you mean 'x'?").render()
    assert rendered == "error[CP104]: no\n  --> a.py:7:1\n  = did you mean 'x'?"
    assert Finding("CP104", "no", note="why").render() == "error[CP104]: no\n = note: why"


def test_caret_stays_inside_the_line_and_under_tabs() -> None:
    assert Finding("CP1", "x", Location("a", 1, 3, 99, "\tabc")).render().endswith("1 |  abc\n  |   ^^")
    assert Finding("CP1", "x", Location("a", 1, 9, 1, "ab")).render().endswith("1 | ab\n  |         ^")


def test_long_line_is_shown_around_the_caret() -> None:
    text = "a" * 5000 + "HERE" + "b" * 5000
    lines = Finding("CP1", "x", Location("a", 1, 5001, 4, text)).render().splitlines()
    assert max(map(len, lines)) < 220
    caret = lines[-1].index("^")
    assert lines[-2][caret : caret + 4] == "HERE" and lines[-1].count("^") == 4


def test_error_joins_its_findings() -> None:
    error = CpgenError([Finding("CP1", "one"), Finding("CP2", "two")])
    assert str(error) == "error[CP1]: one\n\nerror[CP2]: two" and error.exit_code == 2
    assert fail("CP1", "one", exit_code=1).exit_code == 1


def test_near_matches() -> None:
    assert did_you_mean("blcks", ["blocks", "norm", "block"]) == "did you mean 'blocks' or 'block'?"
    assert did_you_mean("zzz", ["blocks"]) is None
    assert did_you_mean("proj_out", ["proj_out", "norm_out"]) == "did you mean 'norm_out'?"
