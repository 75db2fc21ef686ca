"""Runs on the workers whose checkpoints the export tests read."""

from __future__ import annotations

from typing import Any

import torch

from tests.runtime.training_cases import load, tiny_loss, tiny_model, wan_loss, wan_model


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
