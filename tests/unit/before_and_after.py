"""What tests of surgery compare: a function of a small made-up module, before and after."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from cpgen.diagnostics import CpgenError
from tests.unit.projects import function_in, module_text, operated, plan_text

IN = 'cp.shard(hidden_states, "hidden_states", dim=1, ndim=3, stream="latent")  # cpgen: cut latent'
OUT = 'cp.gather(hidden_states, "hidden_states", dim=1, ndim=3, stream="latent")  # cpgen: region ends'


def code(text: str) -> str:
    """An indented literal as code; IN and OUT stand for the usual cut and gather of hidden_states."""
    return textwrap.dedent(text).lstrip("\n").replace("<IN>", IN).replace("<OUT>", OUT)


def check_forward(folder: Path, before: str, after: str, **plan: str) -> None:
    text = operated(folder, module_text(forward=code(before)), plan_text(**plan))
    assert function_in(text, "def forward") == code(after)


def check_call(folder: Path, before: str, sites: str, ulysses: str, allgather: str, **plan: str) -> None:
    for strategy, after in (("ulysses", ulysses), ("allgather", allgather)):
        text = operated(folder, module_text(call=code(before)), plan_text(sites=sites, **plan), strategy)
        assert function_in(text, "def __call__") == code(after), strategy


def findings(folder: Path, source: str, plan: str, strategy: str = "ulysses") -> list[str]:
    with pytest.raises(CpgenError) as error:
        operated(folder, source, plan, strategy)
    return [f"{finding.code} {finding.message}" for finding in error.value.findings]
