"""When checkpoints are written, what a failing disk does, and that training goes on meanwhile."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem

from cpgen.runtime.agreement import control_group
from cpgen.runtime.checkpoint import save_checkpoint
from cpgen.runtime.checkpointer import Checkpointer
from cpgen.verify.pool import WorkerPool
from tests.runtime import checkpointer_cases as cases


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_and_keep_and_force(pool: WorkerPool, root, tmp_path, asynchronous):
    for saved, steps, latest, restored in pool.run(cases.scheduled_saves, root, str(tmp_path), asynchronous):
        assert saved == [True, False, True, False, True, False, True, False, True]
        assert steps == [4, 6, 7]
        assert latest == 7 and restored


def test_step_zero_is_the_model_only(pool: WorkerPool, root, tmp_path):
    for result in pool.run(cases.step_zero, root, str(tmp_path)):
        assert result == {
            "step": 0,
            "keys": ["model", "rng"],
            "model": True,
            "others": True,
            "position": 2,
            "draws": True,
        }


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_callback_gets_the_whole_model_on_rank_0(pool: WorkerPool, root, tmp_path, asynchronous):
    results = pool.run(cases.callbacks, root, str(tmp_path), asynchronous, False)
    assert [calls for calls, _, _ in results] == [[(2, True), (4, True)], [], [], []]
    assert all(error == "" and steps == [2, 4] for _, error, steps in results)


def test_a_callback_that_raises_is_an_error_on_every_rank(pool: WorkerPool, root, tmp_path):
    for _, error, steps in pool.run(cases.callbacks, root, str(tmp_path), False, True, world_size=2):
        assert error == "on_save failed at step 4: RuntimeError: no room in the bucket"
        assert steps == [2, 4]


def test_nothing_to_load(pool: WorkerPool, root, tmp_path):
    model = torch.nn.Linear(2, 2)
    assert Checkpointer(tmp_path / "none", model, every=1).load() is None
    with pytest.raises(ValueError, match=r"step 3 in .* is not there; complete steps: none"):
        Checkpointer(tmp_path, model, every=1).load(3)


def test_in_one_process_in_the_background(tmp_path):
    model = torch.nn.Linear(2, 2)
    with Checkpointer(tmp_path, model, every=1, keep=1, asynchronous=True) as saver:
        assert saver.save(1) and saver.save(2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]
    other = torch.nn.Linear(2, 2)
    assert Checkpointer(tmp_path, other, every=1).load() == 2
    assert torch.equal(model.weight, other.weight)


def test_a_given_step(tmp_path):
    model = torch.nn.Linear(2, 2)
    saver = Checkpointer(tmp_path, model, every=2)
    weights = {}
    for step in (2, 4, 6):
        torch.nn.init.constant_(model.weight, step)
        weights[step] = model.weight.detach().clone()
        assert saver.save(step)
    for step in (4, 2, 6):
        assert saver.load(step) == step and torch.equal(model.weight, weights[step])


def test_an_interrupt_is_one_and_leaves_the_checkpoints_as_they_were(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    model = torch.nn.Linear(2, 2)
    saver = Checkpointer(tmp_path, model, every=1, keep=1)
    saver.save(1)
    with monkeypatch.context() as patch:
        patch.setattr(filesystem, "_write_item", interrupted)
        for step in (1, 2):  # one that steps aside for it, and a new one
            with pytest.raises(KeyboardInterrupt):
                saver.save(step)
            assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    assert saver.load() == 1
    saver.save(3)
    assert [path.name for path in tmp_path.iterdir()] == ["step_3"]


def test_later_steps_of_another_run_are_kept_and_warned_of(tmp_path):
    """A run that began anew, or went back to an earlier step: what it saves is not what `load` takes."""
    model = torch.nn.Linear(2, 2)
    Checkpointer(tmp_path, model, every=1).save(5000)
    saver = Checkpointer(tmp_path, model, every=1, keep=1)
    with pytest.warns(UserWarning, match="has step 5000 already, and step 500 is saved now"):
        saver.save(500)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saver.save(1000)  # warned of once
    assert cases.steps_in(str(tmp_path)) == [1000, 5000]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Checkpointer(tmp_path, model, every=1).save(5000)  # the latest itself


@pytest.mark.parametrize("options", [{"every": 0}, {"every": 1, "keep": 0}, {"every": "2"}, {"every": 1, "keep": 1.5}])
def test_options_that_make_no_sense(tmp_path, options):
    with pytest.raises(ValueError, match="must be at least 1"):
        Checkpointer(tmp_path, torch.nn.Linear(2, 2), **options)


# --- disks that fail ---------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system of its own, of 2 MB. Only root can mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"can't mount a small file system here: {mounted.stderr.decode()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def check_survival(results, message: str) -> None:
    assert len({result["error"] for result in results}) == 1  # on every rank the same
    for result in results:
        assert "step_2" in result["error"] and message in result["error"]
        assert result["error"].count("\n") == 0
        assert result["same"]  # losses are those of a run without trouble
        assert result["there"] == ["step_1"]  # nothing half-written is left, and the old one is not pruned
        assert result["loaded"] == (1, 3)
        assert result["steps"] == [4]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("kind", "message"), [("full", "No space left on device"), ("read-only", "Read-only file system")]
)
def test_a_job_outlives_a_disk(pool: WorkerPool, root, small_disk, tmp_path, kind, message, asynchronous):
    arguments = (root, str(small_disk / "runs"), str(tmp_path / "elsewhere"), kind, asynchronous)
    check_survival(pool.run(cases.survived, *arguments, world_size=2), message)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("kind", "message"), [("limit", "File too large"), ("refused", "Read-only file system")])
def test_a_job_outlives_a_failing_rank(pool: WorkerPool, root, tmp_path, kind, message, asynchronous):
    """The same where nothing can be mounted: a limit on one rank's files, and a simulated refusal."""
    arguments = (root, str(tmp_path / "runs"), str(tmp_path / "elsewhere"), kind, asynchronous)
    check_survival(pool.run(cases.survived, *arguments, world_size=2), message)


def test_a_disk_that_fills_within_a_tensor_is_named_as_such(tmp_path):
    """torch.save's own message for it is "unexpected pos 704 vs 598"."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(ValueError, match=r"step_1 is incomplete .* File too large") as caught:
            save_checkpoint(tmp_path, torch.nn.Linear(200, 200), step=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "unexpected pos" not in str(caught.value) and not list(tmp_path.iterdir())


def test_the_next_save_says_that_the_last_failed_and_is_written(pool: WorkerPool, root, tmp_path):
    for error, steps in pool.run(cases.failure_shown_at_the_next_save, root, str(tmp_path), world_size=2):
        assert "step_1 is incomplete" in error and "No space left on device (on rank 1)" in error
        assert steps == [2]


# --- in the background -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocked", [[0, 1, 2, 3], [1]])
def test_training_goes_on_while_the_write_is_blocked(pool: WorkerPool, root, tmp_path, blocked):
    for result in pool.run(cases.training_while_a_write_is_blocked, root, str(tmp_path / "runs"), blocked):
        assert result["same"]
        assert result["during"] == (False, [1])  # not complete, and the old one is still there
        assert result["after"] == [2] and result["restored"]
        assert not result["main_thread"]


# --- groups and their patience ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "expected"), [(7200, 7200), (5, 1800)])
def test_ranks_wait_for_disks_as_long_as_for_each_other(given, expected):
    """Rank 0 may write or upload for that long; a run that gives its collectives seconds waits for torch's default."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=given))
    try:
        for background in (False, True):
            group = control_group(background=background)
            timeout = group._get_backend(torch.device("cpu")).options._timeout
            assert timeout.total_seconds() == expected
    finally:
        dist.destroy_process_group()


# --- random state ------------------------------------------------------------------------------------------------


def test_random_state_on_as_many_data_ranks_goes_on(pool: WorkerPool, root, tmp_path):
    expected = pool.run(cases.save_for_draws, root, str(tmp_path), 2)
    # ... 4 ranks at cp 2 are 2 data ranks; so are 2 ranks at cp 1.
    for rank, drawn, _ in pool.run(cases.draws_after_loading, root, str(tmp_path), 1, {}, world_size=2):
        assert drawn == expected[2 * rank[0]]


@pytest.mark.parametrize(("cp", "axes"), [(1, {}), (4, {})])
def test_random_state_on_other_data_ranks_is_drawn_anew(pool: WorkerPool, root, tmp_path, cp, axes):
    saved = pool.run(cases.save_for_draws, root, str(tmp_path), 2)
    results = pool.run(cases.draws_after_loading, root, str(tmp_path), cp, axes)
    by_rank = {}
    for rank, drawn, first in results:
        assert by_rank.setdefault(rank, drawn) == drawn  # peers draw the same
        assert drawn != first and drawn not in saved  # not the beginning of the run again
    assert len({value for drawn in by_rank.values() for value in drawn}) == 3 * (4 // cp)


@pytest.mark.parametrize(
    ("cp", "who", "found"),
    [
        (2, [], ""),
        (2, [0, 1, 2, 3], ""),
        (2, [0, 1], ""),  # all of one data rank
        (2, [0], "the generators of numpy, python, torch; data rank 0"),
        (2, [3], "data rank 1"),
        (1, [0], ""),  # no peers
    ],
)
def test_peers_that_draw_apart_are_warned_of(pool: WorkerPool, root, tmp_path, cp, who, found):
    for first, second in pool.run(cases.warned_of_draws, root, str(tmp_path), cp, who):
        assert len(first) == (1 if found else 0) and all(found in message for message in first)
        assert second == []  # once
