"""A class that is a plain torch module: no config, no gradient checkpointing, nothing of diffusers."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from cpgen.infer.command import infer_command
from cpgen.package import Request
from cpgen.verify import report
from cpgen.verify.command import run_requests
from cpgen.verify.models import load_package
from cpgen.verify.pool import WorkerPool

from .emitted import emit
from .model_cases import replaced_without_processor
from .weight_cases import load_error

MODEL = f"{Path(__file__).parents[1] / 'models/transformer_plain.py'}:PlainTransformer"


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("plain") / "plain.yaml"
    assert infer_command(MODEL, None, file, None, force=False) == 0
    return file


def test_its_plan_is_found_and_says_what_was_not_run(plan: Path) -> None:
    text = plan.read_text("utf-8")
    assert "4 cases" in text and "# Not run with gradient checkpointing.\n" in text
    assert "x: {dim: 1, ndim: 3, stream: latent}" in text


def test_verify_says_that_checkpointing_was_not_run(plan: Path) -> None:
    results = run_requests([Request(MODEL, 2, plan=plan)], [2], ["ulysses"], ["guessed-1"])
    assert [(result.ok, result.checkpointed) for result in results] == [(True, False)]
    stream = io.StringIO()
    report.render(results, Console(file=stream, width=120))
    assert "not run with gradient checkpointing: PlainTransformer\n" in stream.getvalue()


@pytest.mark.parametrize("what", ["attn1", "block"])
def test_attention_put_in_after_parallelize_is_refused(plan: Path, tmp_path: Path, pool: WorkerPool, what: str) -> None:
    emitted = emit(tmp_path, MODEL, 2, plan=plan)
    for message in pool.run(replaced_without_processor, emitted, emitted.probe(), what, world_size=2):
        assert "'1.attn1' was replaced after parallelize" in message


def test_more_ranks_than_heads_are_refused_though_no_config_says_how_many_there_are(plan: Path) -> None:
    few = plan.with_name("few.yaml")
    few.write_text(plan.read_text("utf-8").replace("config: {", "config: {num_heads: 2, "), "utf-8")
    results = run_requests([Request(MODEL, 4, plan=few)], [4], ["ulysses"], ["guessed-1"])
    assert "has 2 attention heads: ulysses gives every rank at least one" in str(results[0].error)


def test_its_checkpoints_are_loaded_and_its_files_are_written(plan: Path, tmp_path: Path, pool: WorkerPool) -> None:
    emitted = emit(tmp_path, MODEL, 1, plan=plan)
    package = load_package(emitted.directory, emitted.name)
    model, other = package.PlainTransformer(), package.PlainTransformer()
    package.save_checkpoint(tmp_path / "run", model, step=3)
    assert package.load_checkpoint(tmp_path / "run", other) == 3
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    package.save_pretrained(model, tmp_path / "files")
    assert (tmp_path / "files/config.json").read_text("utf-8") == '{\n  "_class_name": "PlainTransformer"\n}\n'
    [error] = pool.run(load_error, emitted.directory, emitted.name, str(tmp_path / "files"), world_size=1)
    assert error.startswith("PlainTransformer has no from_config") and "load_checkpoint" in error
