"""Clips to train on: a window that moves over pictures which matplotlib ships."""

from __future__ import annotations

from dataclasses import dataclass

import matplotlib.image
import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.cbook import get_sample_data
from matplotlib.colors import LightSource
from torch import Tensor
from torch.utils.data import Dataset

FRAMES, SIZE = 5, 48  # of a clip: frames, and pixels of a side
SUBJECTS = ("portrait of an officer", "relief of a mountain range", "scan of a head")
PROMPTS = tuple(f"{motion}, {subject}" for subject in SUBJECTS for motion in ("zoom in", "zoom out", "right", "left"))


@dataclass(frozen=True)
class Window:
    """A square part of a picture: its side, and its middle's x and y. All are shares of the picture's shorter side."""

    side: float
    x: float
    y: float


def movement(motion: int) -> tuple[Window, Window]:
    """Where the window begins and ends: the motion of that number, and a random offset."""
    near, far = Window(0.55, 0.5, 0.4), Window(0.9, 0.5, 0.5)
    left, right = Window(0.7, 0.35, 0.4), Window(0.7, 0.65, 0.4)
    begin, end = ((far, near), (near, far), (left, right), (right, left))[motion]
    x, y = (0.06 * torch.rand(2) - 0.03).tolist()
    return Window(begin.side, begin.x + x, begin.y + y), Window(end.side, end.x + x, end.y + y)


class Clips(Dataset[dict[str, Tensor]]):
    """Clips with all that a training step needs: the prompt's number, and the noise and the time to mix it in.

    A sample is `pixels` [3, FRAMES, SIZE, SIZE] in -1..1, `prompt` [] int64 into PROMPTS, `noise` [`latent_shape`] and
    `time` [] in 0..1, float32. Everything random is drawn here, from torch's own generator: `ResumableLoader` makes
    that a matter of the seed, the epoch and the sample's place in it. So a resumed run, and one on another mesh, trains
    on the same clips and noise.
    """

    def __init__(self, latent_shape: tuple[int, ...], per_prompt: int = 8) -> None:
        self._pictures = load_pictures()
        self._latent_shape = latent_shape
        self._length = per_prompt * len(PROMPTS)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        prompt = index % len(PROMPTS)
        subject, motion = divmod(prompt, len(PROMPTS) // len(SUBJECTS))
        begin, end = movement(motion)
        return {
            "pixels": film(self._pictures[subject], begin, end),
            "prompt": torch.tensor(prompt),
            "noise": torch.randn(self._latent_shape),
            "time": torch.rand(()),
        }


def film(picture: Tensor, begin: Window, end: Window) -> Tensor:
    """What a window that moves from `begin` to `end` shows of `picture` [3, H, W]: [3, FRAMES, SIZE, SIZE]."""
    height, width = picture.shape[1:]
    shorter = min(height, width)
    frames = []
    for time in torch.linspace(0, 1, FRAMES).tolist():
        side, x, y = (
            round(shorter * (a + (b - a) * time))
            for a, b in ((begin.side, end.side), (begin.x, end.x), (begin.y, end.y))
        )
        # x and y are counted in shorter sides from the picture's upper left, and kept inside of it
        left = min(max(x - side // 2, 0), width - side)
        top = min(max(y - side // 2, 0), height - side)
        part = picture[None, :, top : top + side, left : left + side]
        frames.append(torch.nn.functional.interpolate(part, (SIZE, SIZE), mode="bilinear", antialias=True)[0])
    return torch.stack(frames, dim=1)


def load_pictures() -> list[Tensor]:
    """A picture a subject, [3, H, W] float32 in -1..1: a photograph, a map shaded from heights, a slice of a scan."""
    portrait = matplotlib.image.imread(get_sample_data("grace_hopper.jpg", asfileobj=False)) / 255
    heights = get_sample_data("jacksboro_fault_dem.npz")["elevation"]
    relief = LightSource().shade(heights, cmap=colormaps["gist_earth"], blend_mode="soft", dx=60, dy=60)[..., :3]
    with get_sample_data("s1045.ima.gz") as file:
        slice_ = np.frombuffer(file.read(), np.uint16).reshape(256, 256)
    scan = np.repeat(slice_[..., None] / slice_.max(), 3, axis=-1)
    return [torch.tensor(2 * each - 1, dtype=torch.float32).permute(2, 0, 1) for each in (portrait, relief, scan)]
