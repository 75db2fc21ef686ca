"""The random state of a process: taken, put back, and moved to another number of data ranks."""

from __future__ import annotations

import contextlib
import importlib
import io
import random
from collections.abc import Iterator
from hashlib import sha256
from types import ModuleType
from typing import Any

import torch


def numpy_random() -> ModuleType | None:
    """numpy.random, or None where numpy is not installed: torch needs none."""
    try:
        return importlib.import_module("numpy.random")
    except ImportError:
        return None


def seed_process(seed: int) -> None:
    """Seed Python's random, torch on every device, and numpy."""
    random.seed(seed)
    torch.manual_seed(seed)
    if (numpy := numpy_random()) is not None:
        numpy.seed(seed % 2**32)


def capture() -> dict[str, Any]:
    """The state of Python's random, torch on the host and the current CUDA device, and numpy."""
    state = _capture_host()
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Put back what `capture` returned, but for what this machine does not have."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and (numpy := numpy_random()) is not None:
        numpy.set_state(state["numpy"])


def reseed_from(saved: bytes, rank: int, size: int) -> None:
    """Seed data rank `rank` of `size` from the saved state of another number of data ranks.

    Peers of one data rank draw the same and data ranks differ, as with `seed_everything`; and no rank draws again what
    it drew when the run began.
    """
    digest = sha256(saved + f"{rank}/{size}".encode()).digest()
    seed_process(int.from_bytes(digest[:8], "big") % 2**63)


@contextlib.contextmanager
def drawing_from(*key: int | str) -> Iterator[None]:
    """Inside, the host's generators draw what `key` alone decides; afterwards they go on as if nothing was drawn.

    CUDA's generator is left alone: this runs in workers of a dataloader too.
    """
    before = _capture_host()
    seed = int.from_bytes(sha256(repr(key).encode()).digest()[:8], "big") % 2**63
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if (numpy := numpy_random()) is not None:
        numpy.seed(seed % 2**32)
    try:
        yield
    finally:
        restore(before)


def to_bytes(value: Any) -> bytes:
    """`value`, pickled with its tensors."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def from_bytes(data: bytes) -> Any:
    """What `to_bytes` was given. It is unpickled: only for data that is trusted."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def _capture_host() -> dict[str, Any]:
    state = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := numpy_random()) is not None:
        state["numpy"] = numpy.get_state()
    return state
