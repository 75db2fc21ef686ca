"""The options of `cpgen verify` that take several values."""

from __future__ import annotations

from typing import Any

import pytest

from cpgen import cli


@pytest.mark.parametrize(
    ("arguments", "packages", "degrees", "strategies"),
    [
        (["p", "--cp", "2", "4"], ("p",), (2, 4), ()),
        (["--cp", "2", "--cp", "4", "p"], ("p",), (2, 4), ()),
        (["--cp", "2", "4", "p", "--strategy", "ulysses", "allgather"], ("p",), (2, 4), ("ulysses", "allgather")),
        (["--strategy", "ulysses", "p", "--cp", "3"], ("p",), (3,), ("ulysses",)),
        (["p", "q", "--strategy", "allgather", "--json"], ("p", "q"), (), ("allgather",)),
    ],
)
def test_several_values(arguments: list[str], packages: Any, degrees: Any, strategies: Any) -> None:
    context = cli.verify.make_context("verify", list(arguments))
    assert context.params["packages"] == packages
    assert context.params["degrees"] == degrees
    assert context.params["strategies"] == strategies
