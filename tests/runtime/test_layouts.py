"""A run saved at (dp 2, cp 2) goes on elsewhere: with the same state, data and losses."""

from __future__ import annotations

import warnings

import pytest
import torch

from cpgen.verify.pool import WorkerPool
from tests.runtime import layout_cases as cases
from tests.runtime.emitted import TINY, emit

BEFORE, AFTER = 3, 4  # four steps make an epoch
ROUNDING = 1e-9


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    root = tmp_path_factory.mktemp("packages")
    return {cp: emit(root / f"cp{cp}", TINY, cp) for cp in (1, 2, 4)}


@pytest.fixture(scope="module")
def straight(packages, pool: WorkerPool, tmp_path_factory):
    """(directory, losses after the save, everything at the save, everything at the end)"""
    directory = str(tmp_path_factory.mktemp("runs"))
    results = pool.run(cases.straight_run, packages[2], {}, directory, BEFORE, AFTER)
    return directory, *results[0]


def test_on_the_same_mesh_bit_for_bit(packages, straight, pool: WorkerPool):
    directory, losses, then, end = straight
    for step, resumed, loaded, last in pool.run(cases.resumed_run, packages[2], {}, directory, AFTER):
        assert step == BEFORE and resumed == losses
        assert equal(loaded, then) and equal(last, end)


@pytest.mark.parametrize(
    ("cp", "axes", "world_size"),
    [
        (4, {}, 4),
        (1, {}, 4),
        (1, {"dp_replicate": 2, "dp_shard": 2}, 4),
        (2, {"dp_replicate": 2}, 4),
        (2, {}, 2),
        (1, {}, 1),
    ],
    ids=["cp4", "dp4", "dp_replicate2-dp_shard2", "dp_replicate2-cp2", "cp2", "one-rank"],
)
def test_on_another_mesh_to_rounding(packages, straight, pool: WorkerPool, cp, axes, world_size):
    results = pool.run(cases.resumed_run, packages[cp], axes, straight[0], AFTER, world_size=world_size)
    assert all(result[1] == results[0][1] for result in results)
    check_against(straight, results[0])


def test_in_one_process_without_a_group(packages, straight):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* another number of data ranks")
        check_against(straight, cases.resumed_run(packages[1], None, straight[0], AFTER))


def check_against(straight, result):
    _, losses, then, end = straight
    step, resumed, loaded, last = result
    assert step == BEFORE
    assert equal(loaded, then) and any(name.startswith("exp_avg_sq.") for name in then)
    assert len(set(losses)) == AFTER and resumed == pytest.approx(losses, rel=ROUNDING)
    assert last.keys() == end.keys()
    for name in end:
        assert torch.allclose(last[name], end[name], rtol=ROUNDING, atol=ROUNDING), name


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
