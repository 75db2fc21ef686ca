"""Runs on the workers whose checkpoints the export tests read."""

from __future__ import annotations

from typing import Any

import torch

from cpgen.verify.models import build_model, load_package, randomise
from tests.runtime.emitted import Emitted, inputs_of
from tests.runtime.training_models import load, tiny_loss, tiny_model, wan_loss, wan_model


def save_both(
    root: str, kind: str, cp: int, directory: str, steps: list[int], options: dict[str, Any], dtype: torch.dtype | None
) -> None:
    """Train a step and save, for each step; then write the weights of the last one as save_pretrained does."""
    package = load(root, f"{kind}_cp{cp}")
    model, loss = (tiny_model(), tiny_loss) if kind == "tiny" else (wan_model(), wan_loss)
    model = package.parallelize(model, package.build_mesh("cpu"), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in steps:
        loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        package.save_checkpoint(f"{directory}/checkpoints", model, optimizer, step=step)
    for size in ("5GB", "20KB"):
        package.save_pretrained(model, f"{directory}/{size}", dtype=dtype, max_shard_size=size)


def save_both_emitted(emitted: Emitted, directory: str) -> None:
    """The same, from a package that was emitted, after a step on its probe's inputs."""
    package = load_package(emitted.directory, emitted.name)
    model = build_model(getattr(package, emitted.reference.class_name), emitted.probe(), 0, torch.float32)
    randomise(model, 0)
    model = package.parallelize(model, package.build_mesh("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model(**inputs_of(emitted.probe(), torch.float32), return_dict=False)[0].square().mean().backward()
    optimizer.step()
    package.save_checkpoint(f"{directory}/checkpoints", model, optimizer, step=1)
    package.save_pretrained(model, f"{directory}/expected")
