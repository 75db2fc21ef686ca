"""Trains a small Wan on clips of real pictures, with context parallelism and FSDP2.

    cpgen emit --model WanTransformer3DModel --cp 2
    python examples/prepare_wan.py
    torchrun --nproc-per-node 4 examples/train_wan.py

Four processes at degree 2 make two context-parallel groups: each group works on its clips together, and FSDP2 shards
parameters and averages gradients over all four. Every rank computes the loss from the whole output; nothing is scaled.
Stop it as you like: started again, also with a package of another degree, it goes on at the last checkpoint. Ctrl-C
saves one first.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from clips import FRAMES, PROMPTS, SIZE, Clips
from diffusers import AutoencoderKLWan
from prepare_wan import load_components
from progress import Display, LossHistory
from torch import Tensor
from torch.multiprocessing import _prctl_pr_set_pdeathsig
from torch.optim.lr_scheduler import LambdaLR

from cpgen.runtime.checkpointer import Checkpointer
from cpgen.runtime.data import ResumableLoader
from cpgen.runtime.mesh import data_rank, seed_everything

sys.path.insert(0, str(Path.cwd()))  # where `generated` is
from generated.wan_transformer_3d import WanTransformer3DModel, build_mesh, parallelize

# It matters only to code that changes the model's output in place.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, default=Path("runs/wan"))
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=12, help="clips a step, over all ranks")
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--lr", type=float, default=1e-2)
    return parser.parse_args()


def join_process_group() -> torch.device:
    """Start the process group; returns this rank's device."""
    # Were torchrun alone killed, its workers would train on, and write checkpoints next to those of the next run.
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", timeout=timedelta(minutes=10))
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timedelta(minutes=10), device_id=device)
    return device


class StopRequest:
    """Whether someone asked for an end. torchrun hands Ctrl-C (SIGINT) and SIGTERM on, and kills after 30 seconds."""

    def __init__(self) -> None:
        self.made = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.made = True


def learning_rate(step: int, steps: int) -> float:
    """The share of the highest learning rate at `step`: a warm-up, then a half cosine down to nothing."""
    return min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / steps))


@torch.no_grad()
def encode(vae: AutoencoderKLWan, pixels: Tensor) -> Tensor:
    """Normalised latents [B, C, F, H, W] of `pixels` [B, 3, F, H, W] in -1..1."""
    latents = vae.encode(pixels).latent_dist.mode()
    mean, std = (
        latents.new_tensor(each).view(1, -1, 1, 1, 1) for each in (vae.config.latents_mean, vae.config.latents_std)
    )
    return (latents - mean) / std


def flow_matching_loss(
    model: torch.nn.Module, latents: Tensor, noise: Tensor, sigma: Tensor, prompts: Tensor
) -> Tensor:
    """The error of the velocity that leads from the latents to the noise; `sigma` [B] is the noise's share."""
    share = sigma.view(-1, 1, 1, 1, 1)
    mixed = (1 - share) * latents + share * noise
    velocity = model(mixed, timestep=1000 * sigma, encoder_hidden_states=prompts, return_dict=False)[0]
    return torch.nn.functional.mse_loss(velocity, noise - latents)


def mean_over_ranks(*values: float, device: torch.device) -> list[float]:
    total = torch.tensor(values, device=device, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def batches(loader: ResumableLoader) -> Iterator[dict[str, Tensor]]:
    """Epoch after epoch, from where the loader is."""
    while True:
        yield from loader


def main() -> None:
    options = parse_options()
    device = join_process_group()
    stop = StopRequest()
    first = dist.get_rank() == 0
    mesh = build_mesh(device.type)

    frozen = load_components(options.directory).to(device)
    length = frozen.tokenizer.model_max_length
    with torch.no_grad():
        prompts, _ = frozen.encode_prompt(list(PROMPTS), do_classifier_free_guidance=False, max_sequence_length=length)

    torch.manual_seed(0)  # the same weights on every rank
    model = WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=frozen.vae.config.z_dim,
        out_channels=frozen.vae.config.z_dim,
        text_dim=prompts.shape[-1],
        freq_dim=64,
        ffn_dim=512,
        num_layers=3,
        rope_max_seq_len=32,
    ).to(device)
    model.enable_gradient_checkpointing()
    model = parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.99))
    schedule = LambdaLR(optimizer, lambda step: learning_rate(step, options.steps))

    _, data_ranks = data_rank(mesh)
    if options.batch_size % data_ranks:
        raise SystemExit(f"--batch-size {options.batch_size} is not a multiple of the {data_ranks} data ranks")
    side = SIZE // frozen.vae.config.scale_factor_spatial
    clips = Clips(latent_shape=(frozen.vae.config.z_dim, FRAMES, side, side))
    loader = ResumableLoader(clips, mesh, batch_size=options.batch_size // data_ranks, drop_last=True)
    history = LossHistory()
    checkpointer = Checkpointer(
        options.directory / "checkpoints",
        model,
        optimizer,
        every=options.save_every,
        keep=2,
        extra={"data": loader, "schedule": schedule, "history": history},
        asynchronous=True,
    )
    seed_everything(1, mesh)  # for draws in the loop, were there any: the same in a context-parallel group

    done = checkpointer.load() or 0
    data = batches(loader)
    with Display(options.steps, quiet=not first) as display:
        if done:
            display.say(f"resumed at step {done}")
        for step in range(done + 1, options.steps + 1):
            batch = {name: value.to(device) for name, value in next(data).items()}
            shift = frozen.scheduler.config.shift
            sigma = shift * batch["time"] / (1 + (shift - 1) * batch["time"])
            latents = encode(frozen.vae, batch["pixels"])
            loss = flow_matching_loss(model, latents, batch["noise"], sigma, prompts[batch["prompt"]])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

            mean_loss, stopping = mean_over_ranks(loss.item(), stop.made, device=device)
            history.losses.append(mean_loss)
            display.step(step, mean_loss)
            last = step == options.steps or stopping > 0
            if checkpointer.save(step, force=last) and first:
                history.plot(options.directory / "loss.png")
            if stopping:
                display.say(f"stopped after step {step}")
                break
        checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
