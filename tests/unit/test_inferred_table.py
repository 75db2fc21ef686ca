"""docs/models.md, "Plans that are found": the table of what `cpgen plan infer` was tried on."""

from __future__ import annotations

from cpgen.resources import shipped_plans
from tests.unit.projects import REPOSITORY
from tools.inferred import table

TRIED = {
    "A": {"diffusers": "0.42.1", "found": "same", "why": ""},
    "B": {"diffusers": "0.42.1", "found": "no", "why": "a|b"},
}


def test_it_says_how_many_were_not_tried() -> None:
    text = table(TRIED, 5)
    assert (
        "diffusers 0.42.1: 1 of 2 found and proven, 1 of them as shipped, 0 in other words. 3 more plans have" in text
    )
    assert "| `B` | no | a\\|b |\n" in text
    assert "not been tried" not in table(TRIED, 2)


def test_changelog_counts_the_plans() -> None:
    assert f"\n- {len(shipped_plans())} plans with probes" in (REPOSITORY / "CHANGELOG.md").read_text("utf-8")
