"""`cpgen plan show M --cp N`: what the cases of the command line don't show."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpgen.comparison import choices, options
from cpgen.constructor import whole_number_defaults
from cpgen.diagnostics import CpgenError
from cpgen.package import Request, generate
from cpgen.plan_files import read_plan
from cpgen.source import SourceTree
from cpgen.strategy import Strategy
from cpgen.surgery.operate import operate
from cpgen.target import find_target
from tests.unit.projects import FORMS, MODELS, REPOSITORY, TINY, TINY_PLAN, module_text, run


def test_choices_are_all_that_a_degree_admits() -> None:
    def names(cp: int) -> list[str]:
        return [options(strategy) for strategy in choices(cp)]

    assert names(1) == names(2) == names(7) == ["ulysses", "allgather", "ring"]
    assert names(4)[3:] == ["hybrid --ulysses-degree 2", "hybrid --ulysses-degree 2 --outer ring"]
    assert [strategy.ulysses_degree for strategy in choices(12)[3:]] == [2, 2, 3, 3, 4, 4, 6, 6]


@pytest.mark.parametrize("strategy", choices(4), ids=options)
def test_options_are_those_of_emit(strategy: Strategy, tmp_path: Path) -> None:
    words = options(strategy).split()
    tiny = ("--model", TINY, "--plan", TINY_PLAN, "--cp", "4", "--out", tmp_path)
    assert run("emit", *tiny, "--strategy", *words).exit == 0


def test_a_strategy_is_refused_where_emit_refuses_it(tmp_path: Path) -> None:
    rows = run("plan", "show", TINY, "--plan", TINY_PLAN, "--cp", "16").out.splitlines()
    for strategy in choices(16):
        (row,) = [row for row in rows if row.partition("  ")[0] == options(strategy)]
        given = (
            {"ulysses_degree": strategy.ulysses_degree, "outer": strategy.outer} if strategy.name == "hybrid" else {}
        )
        try:
            generate(Request(TINY, 16, strategy.name, plan=TINY_PLAN, **given), tmp_path)
        except CpgenError:
            assert " no: " in row
        else:
            assert " no: " not in row


def test_every_shipped_plan_has_a_table() -> None:
    for model in MODELS.values():
        ran = run("plan", "show", model, "--cp", "4")
        plain = run("plan", "show", model).out
        assert ran.exit == 0 and ran.err == "" and ran.out.startswith(plain + "\nattention at --cp 4\n")
        assert " no: " not in ran.out.partition("--load-balance")[0]


def test_defaults_are_read_from_source(tmp_path: Path) -> None:
    text = module_text().replace("heads=4", "first, heads=4, rate=0.5, flag=True, *, size=8, other=None, last")
    (tmp_path / "made.py").write_text(text)
    target = find_target(f"{tmp_path}/made.py:Model", SourceTree())
    assert whole_number_defaults(target) == {"heads": 4, "size": 8}


def test_the_page_shows_what_is_emitted() -> None:
    tree = SourceTree()
    plan = read_plan(TINY_PLAN, "tiny.yaml")
    target = find_target(TINY, tree)
    emitted = {
        line.strip()
        for form in FORMS.values()
        for file in operate(target, plan, form, "cpgen.runtime", tree).files
        for line in file.text.splitlines()
    }
    page = (REPOSITORY / "docs/strategies.md").read_text("utf-8")
    shown = [line for block in page.split("```python\n")[1:] for line in block.partition("```")[0].splitlines()]
    assert len(shown) > 8
    assert [line for line in shown if line not in emitted] == []
