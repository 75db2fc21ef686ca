"""Trains a small Wan with context parallelism and FSDP2, saves checkpoints, resumes, and exports.

    cpgen emit --model WanTransformer3DModel --cp 2
    torchrun --nproc-per-node 4 examples/train_wan.py --steps 20
    torchrun --nproc-per-node 4 examples/train_wan.py --steps 40      # goes on at step 20

Four processes at degree 2 make two context-parallel groups: each group works on one batch together, and FSDP2 shards
parameters and averages gradients over all four. Every rank computes the loss from the whole output; nothing is scaled.
The data are random latents: put your own dataset in the place of `Latents`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from cpgen.runtime.checkpointer import Checkpointer
from cpgen.runtime.data import ResumableLoader
from cpgen.runtime.mesh import seed_everything

sys.path.insert(0, str(Path.cwd()))  # where `generated` is
from generated.wan_transformer_3d import (
    WanTransformer3DModel,
    build_mesh,
    parallelize,
    save_pretrained,
)

CONFIG = {
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 64,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}


class Latents(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Latents and text."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(4, 3, 6, 10, generator=generator), torch.randn(7, 16, generator=generator)


def batches(loader: ResumableLoader) -> Iterator[list[torch.Tensor]]:
    """Epoch after epoch, from where the loader is."""
    while True:
        yield from loader


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--directory", default="runs/wan")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

    mesh = build_mesh(device)
    torch.manual_seed(0)  # the same weights on every rank
    model = WanTransformer3DModel(**CONFIG).to(device)
    model.enable_gradient_checkpointing()
    model = parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = ResumableLoader(Latents(), mesh, batch_size=1)  # context-parallel peers get the same batch
    checkpointer = Checkpointer(
        f"{options.directory}/checkpoints",
        model,
        optimizer,
        every=options.save_every,
        keep=2,
        extra={"data": loader},
        asynchronous=True,
    )
    seed_everything(1, mesh)  # from here on, the same noise in a context-parallel group, other noise in another

    done = checkpointer.load() or 0
    if dist.get_rank() == 0 and done:
        print(f"resumed at step {done}", flush=True)
    data = batches(loader)
    for step in range(done + 1, options.steps + 1):
        latents, text = next(data)
        latents, text = latents.to(device), text.to(device)
        noise = torch.randn_like(latents)
        sigma = torch.rand(latents.shape[0], device=device)
        mixed = (1 - sigma) * latents + sigma * noise
        predicted = model(mixed, timestep=1000 * sigma, encoder_hidden_states=text, return_dict=False)[0]
        loss = torch.nn.functional.mse_loss(predicted, noise - latents)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.6f}", flush=True)
        checkpointer.save(step)
    checkpointer.close()
    save_pretrained(model, f"{options.directory}/exported")  # WanTransformer3DModel.from_pretrained loads it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
