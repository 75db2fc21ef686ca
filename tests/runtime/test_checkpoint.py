import shutil
from pathlib import Path

import pytest
import torch

from cpgen.runtime import checkpoint
from cpgen.verify.pool import WorkerError, WorkerPool
from tests.runtime import checkpoint_cases as cases


@pytest.mark.parametrize(
    ("cp", "axes", "options", "world_size", "evaluate"),
    [
        (1, {}, {}, 4, False),
        (2, {}, {}, 4, True),
        (1, {"dp_replicate": 2}, {}, 4, False),
        (2, {}, {"data_parallel": "ddp"}, 4, True),
        (2, {}, {"cpu_offload": True}, 2, False),
        (1, {}, {}, 1, False),
    ],
)
def test_resume_gives_the_same_losses_bit_for_bit(
    pool: WorkerPool, root, tmp_path, cp, axes, options, world_size, evaluate
):
    arguments = (root, str(tmp_path / "runs"), cp, axes, options, 3, evaluate)
    results = pool.run(cases.resumed_losses, *arguments, world_size=world_size)
    for rank, (expected, losses, step, plain) in enumerate(results):
        assert losses == expected
        assert len(set(losses)) == 6
        assert step == 3
        data_rank = rank // cp
        assert plain == {"epoch": 41, "position": 100 * data_rank + 6}


def test_a_save_before_the_first_step_changes_nothing(pool: WorkerPool, root, tmp_path):
    [(expected, losses)] = pool.run(cases.saved_and_continued, root, str(tmp_path), world_size=1)
    assert losses == expected


@pytest.mark.parametrize(
    ("cp", "axes", "world_size"),
    [(1, {"dp_replicate": 2}, 4), (2, {}, 4), (4, {}, 4), (1, {}, 2), (1, {}, 1)],
)
def test_load_on_another_mesh(pool: WorkerPool, root, tmp_path, cp, axes, world_size):
    saved = pool.run(cases.save_run, root, str(tmp_path), 1, {}, [1, 2])[0]
    arguments = (root, str(tmp_path), cp, axes, -1, ("position",))
    for step, loaded in pool.run(cases.load_run, *arguments, world_size=world_size):
        assert step == 2
        assert loaded.keys() == saved.keys()
        assert any(name.startswith("exp_avg_sq.") for name in saved)
        assert "exp_avg.unused.weight" not in saved  # it has no gradient: no state, before and after
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)


def test_state_of_each_data_rank_needs_as_many(pool: WorkerPool, root, tmp_path):
    pool.run(cases.save_run, root, str(tmp_path), 1, {}, [1])
    [(error, untouched)] = pool.run(cases.failed_load, root, str(tmp_path), world_size=1)
    assert "extra position differs by data rank and was saved by 4 of them, now there are 1" in error
    assert untouched


def test_single_process(tmp_path, root):
    assert cases.single_process_checkpoint(root, str(tmp_path)) == (5, True)


def test_no_checkpoint_is_none_and_an_absent_step_an_error(pool: WorkerPool, root, tmp_path):
    assert [step for step, _ in pool.run(cases.load_run, root, str(tmp_path / "none"), 1, {}, world_size=2)] == [
        None
    ] * 2
    pool.run(cases.save_run, root, str(tmp_path), 1, {}, [3, 5], world_size=2)
    for error, untouched in pool.run(cases.failed_load, root, str(tmp_path), 4, world_size=2):
        assert error.endswith("step 4 in " + str(tmp_path) + " is not there; complete steps: 3, 5")
        assert untouched


def test_a_killed_save_is_never_picked(pool: WorkerPool, root, tmp_path):
    pool.run(cases.save_run, root, str(tmp_path), 1, {}, [1, 2], world_size=2)
    (tmp_path / "step_2" / ".metadata").unlink()
    assert [step for step, _ in pool.run(cases.load_run, root, str(tmp_path), 1, {}, world_size=2)] == [1, 1]
    for error, untouched in pool.run(cases.failed_load, root, str(tmp_path), 2, world_size=2):
        assert "is incomplete; complete steps: 1" in error
        assert untouched
    # The same step can be saved over the remains.
    pool.run(cases.save_run, root, str(tmp_path), 1, {}, [2], world_size=2)
    assert [step for step, _ in pool.run(cases.load_run, root, str(tmp_path), 1, {}, world_size=2)] == [2, 2]


def test_a_save_killed_while_it_replaces_a_step_leaves_the_old_one(pool: WorkerPool, root, tmp_path):
    saved = pool.run(cases.save_run, root, str(tmp_path), 1, {}, [1], world_size=1)[0]
    (tmp_path / "step_1").rename(tmp_path / "step_1.replaced")  # where a save of step 1 puts it
    (tmp_path / "step_1").mkdir()
    [(step, loaded)] = pool.run(cases.load_run, root, str(tmp_path), 1, {}, world_size=1)
    assert step == 1
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    pool.run(cases.save_run, root, str(tmp_path), 1, {}, [1], world_size=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


def test_keep(pool: WorkerPool, root, tmp_path):
    pool.run(cases.save_run, root, str(tmp_path), 1, {}, [1, 2, 3, 10], 2, world_size=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10", "step_3"]


def test_keep_counts_only_complete_ones(pool: WorkerPool, root, tmp_path):
    pool.run(cases.save_run, root, str(tmp_path), 1, {}, [1, 2, 3], world_size=2)
    for step in (2, 3):
        (tmp_path / f"step_{step}" / ".metadata").unlink()
    pool.run(cases.save_run, root, str(tmp_path), 1, {}, [4], 2, world_size=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_4"]


def test_a_failed_save_deletes_nothing(pool: WorkerPool, root, tmp_path, monkeypatch):
    pool.run(cases.save_run, root, str(tmp_path), 1, {}, [1, 2], world_size=2)
    errors = pool.run(cases.interrupted_save, root, str(tmp_path), world_size=2)
    assert all("step_3 is incomplete and will not be loaded" in error and "disk full" in error for error in errors)
    assert [step for step, _ in pool.run(cases.load_run, root, str(tmp_path), 1, {}, world_size=2)] == [2, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_2"]  # and leaves nothing


def test_asynchronous(pool: WorkerPool, root, tmp_path):
    for saved, loaded, steps in pool.run(cases.asynchronous_saves, root, str(tmp_path)):
        assert saved.keys() == loaded.keys()
        assert all(torch.equal(saved[name], loaded[name]) for name in saved)
        assert steps == ["step_2", "step_3"]


def test_directory_that_is_a_file(pool: WorkerPool, root, tmp_path):
    (tmp_path / "runs").write_text("")
    errors = pool.run(cases.save_error, root, str(tmp_path / "runs"), world_size=2)
    assert all("step_1 can't be written" in error for error in errors)
    for error, _ in pool.run(cases.failed_load, root, str(tmp_path / "runs"), world_size=2):
        assert "is not a directory" in error


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0xFF
    path.write_bytes(content)


def position_of_weights(path: Path) -> int:
    """A byte inside a stored tensor: after the first zip entry of that kind."""
    return path.read_bytes().index(b"archive/data/0") + 100


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-500]), "damaged"),
        (lambda path: flip(path, position_of_weights(path)), "damaged"),
        (lambda path: path.unlink(), "No such file"),
        (lambda path: path.write_bytes(b"x" * path.stat().st_size), "damaged"),
    ],
    ids=["cut", "flipped", "gone", "foreign"],
)
def test_a_damaged_file_is_named_and_nothing_loaded(pool: WorkerPool, root, tmp_path, damage, message):
    pool.run(cases.save_run, root, str(tmp_path), 1, {}, [1], world_size=2)
    [damaged] = tmp_path.glob("step_1/__1_0.distcp")
    damage(damaged)
    for error, untouched in pool.run(cases.failed_load, root, str(tmp_path), world_size=2):
        assert damaged.name in error and message in error
        assert untouched


@pytest.mark.parametrize("content", [b"", b"no pickle", None])
def test_damaged_metadata(pool: WorkerPool, root, tmp_path, content):
    pool.run(cases.save_run, root, str(tmp_path), 1, {}, [1], world_size=2)
    path = tmp_path / "step_1" / ".metadata"
    path.write_bytes(path.read_bytes()[:200] if content is None else content)
    for error, untouched in pool.run(cases.failed_load, root, str(tmp_path), world_size=2):
        assert f"{path} is damaged" in error
        assert untouched


def test_another_models_checkpoint_lists_all_differences(pool: WorkerPool, root, tmp_path):
    pool.run(cases.save_run, root, str(tmp_path), 1, {}, [1], world_size=2)
    for error, untouched in pool.run(cases.failed_load, root, str(tmp_path), -1, 3, world_size=2):
        assert untouched
        for name in ("norm.weight", "norm.bias", "ffn.0.weight", "ffn.2.bias", "gate"):
            assert f"missing: model.transformer_blocks.2.{name}" in error
        assert "unexpected" not in error
    for error, _ in pool.run(cases.failed_load, root, str(tmp_path), -1, 1, world_size=2):
        assert "unexpected: model.transformer_blocks.1.gate" in error
        assert "missing" not in error


def test_copying_a_checkpoint_keeps_it_whole(pool: WorkerPool, root, tmp_path):
    pool.run(cases.save_run, root, str(tmp_path / "here"), 1, {}, [1], world_size=2)
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    assert [step for step, _ in pool.run(cases.load_run, root, str(tmp_path / "there"), 1, {}, world_size=2)] == [1, 1]


@pytest.mark.parametrize("call", ["save", "load"])
def test_an_optimizer_of_parameters_that_parallelize_replaced(pool: WorkerPool, root, tmp_path, call):
    with pytest.raises(WorkerError, match=r"of the optimizer's \d+ parameters are not the model's.*after it") as caught:
        pool.run(cases.optimizer_made_too_early, root, str(tmp_path), call, world_size=2)
    assert {kind for kind, _, _ in caught.value.failures.values()} == {"ValueError"}


def test_an_interrupted_wait_forgets_no_save(monkeypatch):
    class Save:
        finished = False

        def wait(self):
            if not self.finished:
                raise KeyboardInterrupt

        def done(self):
            return self.finished

    save = Save()
    monkeypatch.setattr(checkpoint, "_pending", save)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.finish_pending()
    assert checkpoint._pending is save
    save.finished = True
    checkpoint.finish_pending()
    assert checkpoint._pending is None


@pytest.mark.parametrize("step", [4.0, True, "8", None])
def test_a_step_that_is_no_whole_number(tmp_path, step):
    with pytest.raises(ValueError, match="is not a whole number"):
        checkpoint.save_checkpoint(tmp_path, torch.nn.Linear(1, 1), step=step)
    assert not any(tmp_path.iterdir())
