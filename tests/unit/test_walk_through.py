"""docs/plans.md, "Walk through one": its commands run, and its YAML is that of the plan it is about."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.projects import REPOSITORY, TINY_PLAN, run

TEXT = (REPOSITORY / "docs/plans.md").read_text("utf-8")
SECTION = TEXT.partition("## Walk through one\n")[2].partition("\n## ")[0]
BLOCKS = [textwrap.dedent(block) for block in re.findall(r"(?:^    .*\n(?:\n(?=    ))?)+", SECTION, re.MULTILINE)]
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if line.startswith("cpgen ")]


def contains(whole: Any, part: Any) -> bool:
    """Whether `part` is in `whole`: of a mapping some keys, of a list some elements."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(key in whole and contains(whole[key], part[key]) for key in part)
    if isinstance(part, list) and isinstance(whole, list):
        return all(any(contains(each, item) for each in whole) for item in part)
    return bool(whole == part)


def test_its_yaml_is_the_plans() -> None:
    plan = yaml.safe_load(TINY_PLAN.read_text())
    parts = [yaml.safe_load(block) for block in BLOCKS if not block.startswith(("cpgen ", "grep "))]
    assert {key for part in parts for key in part} == set(plan)
    for part in parts:
        assert contains(plan, part), part


def test_its_commands_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert [command.split()[1] for command in COMMANDS] == ["plan", "emit", "diff", "verify"]
    for command in COMMANDS[:-1]:  # tests/runtime verifies this model
        words = [str(tmp_path / "walk") if word == "walk" else word for word in shlex.split(command)[1:]]
        ran = run(*words)
        assert ran.exit == 0, ran.err
    assert "+        cp = begin_region(self)  # cpgen: region begins" in ran.out


def test_its_grep_finds_what_there_is_to_describe() -> None:
    (command,) = [block for block in BLOCKS if block.startswith("grep ")]
    _, _, pattern, path = shlex.split(command)
    found = [line for line in (REPOSITORY / path).read_text().splitlines() if re.search(pattern, line)]
    assert sum("ModuleList" in line for line in found) == 2
    assert sum("dispatch_attention_fn(" in line for line in found) == 2
