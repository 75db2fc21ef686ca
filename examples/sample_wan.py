"""Samples clips from exported weights: with diffusers' own Wan, and with the emitted class in its place.

    cpgen export runs/wan/checkpoints --to runs/wan/exported
    python examples/sample_wan.py                                   # the emitted class in one process
    torchrun --nproc-per-node 4 examples/sample_wan.py              # and under context parallelism

The pipeline is diffusers' WanPipeline both times, and so is the noise that it starts from. The script says how far the
frames of the two are apart, and writes those of the emitted class: a row a prompt as frames.png, and moving as
frames.gif. It exits with 1 if they are further apart than rounding explains.
"""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from clips import FRAMES, PROMPTS, SIZE
from diffusers import WanPipeline, WanTransformer3DModel
from diffusers.utils import logging
from PIL import Image
from prepare_wan import load_components
from torch import Tensor, nn

sys.path.insert(0, str(Path.cwd()))  # where `generated` is
from generated import wan_transformer_3d as emitted

TOLERANCE = {"one process": 0.0, "context parallel": 1e-5}  # of frames in 0..1


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, default=Path("runs/wan"))
    parser.add_argument("--prompt", choices=PROMPTS, action="append", help="may be repeated (default: three of them)")
    parser.add_argument("--steps", type=int, default=20)
    return parser.parse_args()


def sample(pipeline: WanPipeline, transformer: nn.Module, prompts: list[str], steps: int) -> Tensor:
    """Frames [prompts, FRAMES, 3, SIZE, SIZE] in 0..1, from the same noise whenever it is called."""
    side = SIZE // pipeline.vae_scale_factor_spatial
    noise = torch.randn(
        len(prompts), pipeline.vae.config.z_dim, FRAMES, side, side, generator=torch.Generator().manual_seed(0)
    )
    pipeline.register_modules(transformer=transformer)
    frames: Tensor = pipeline(
        prompt=prompts,
        height=SIZE,
        width=SIZE,
        latents=noise,
        num_inference_steps=steps,
        guidance_scale=1.0,
        max_sequence_length=pipeline.tokenizer.model_max_length,
        output_type="pt",
    ).frames
    return frames


def write_images(frames: Tensor, directory: Path) -> None:
    """All frames beside each other, a row a prompt, as frames.png; one after the other as frames.gif."""
    pixels = (255 * frames).round().byte().permute(0, 1, 3, 4, 2)  # [prompts, frames, height, width, 3]
    rows = [torch.cat(list(clip), dim=1) for clip in pixels]
    Image.fromarray(torch.cat(rows).numpy()).save(directory / "frames.png")
    moments = [Image.fromarray(torch.cat(list(moment), dim=1).numpy()) for moment in pixels.transpose(0, 1)]
    moments[0].save(directory / "frames.gif", save_all=True, append_images=moments[1:], duration=250, loop=0)


def main() -> None:
    options = parse_options()
    prompts = options.prompt or [PROMPTS[0], PROMPTS[5], PROMPTS[10]]
    exported = options.directory / "exported"
    logging.set_verbosity_error()  # of diffusers: a pipeline warns about num_frames even where the latents are given
    if not (exported / "config.json").exists():
        raise SystemExit(
            f"there is no model in {exported}: cpgen export {options.directory}/checkpoints --to {exported}"
        )
    pipeline = load_components(options.directory)
    pipeline.set_progress_bar_config(disable=True)

    theirs = WanTransformer3DModel.from_pretrained(exported)
    ours: nn.Module
    if dist.is_torchelastic_launched():
        how = "context parallel"
        dist.init_process_group("gloo", timeout=timedelta(minutes=10))
        ours = emitted.load_pretrained(exported, emitted.build_mesh("cpu"), data_parallel="none")
    else:
        how = "one process"
        ours = emitted.WanTransformer3DModel.from_pretrained(exported)

    expected = sample(pipeline, theirs, prompts, options.steps)
    frames = sample(pipeline, ours, prompts, options.steps)
    difference = float((frames - expected).abs().max())
    if not dist.is_initialized() or dist.get_rank() == 0:
        write_images(frames, options.directory)
        print(f"{how}: frames differ by at most {difference:.1e}; they are in {options.directory / 'frames.png'}")
    if dist.is_initialized():
        dist.destroy_process_group()
    if difference > TOLERANCE[how]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
