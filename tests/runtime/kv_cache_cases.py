"""Forwards that write keys and values into a cache and read them again, on the workers: GlmImage's reference images."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from cpgen.plan import Probe

from .emitted import Emitted, gradients, inputs_of, loss_of, worst
from .model_cases import averaged, bound, run

# Reference images of each sample of the batch, in this order: 15 and 6 tokens, 6 and 15.
IMAGES = (((6, 10), (4, 6)), ((4, 6), (6, 10)))


def read_after_write(emitted: Emitted, probe: Probe) -> float:
    """The worst output or gradient error of all forwards, in float64."""
    reference, model = bound(emitted, probe)
    model.enable_gradient_checkpointing()  # type: ignore[operator]
    ours, theirs = _forwards(model, probe), _forwards(reference, probe)
    error = max(float((a - b).detach().abs().max()) for a, b in zip(ours, theirs, strict=True))
    return max(error, worst(averaged(gradients(model)), gradients(reference)))


def message_of_reading(emitted: Emitted, probe: Probe) -> str:
    """What a model says whose strategy cannot read a cache."""
    _, model = bound(emitted, probe)
    try:
        _forwards(model, probe)
    except ValueError as error:
        return str(error)
    return ""


def _forwards(model: nn.Module, probe: Probe) -> list[Tensor]:
    """Outputs, as GlmImage's pipeline calls the model: without text and gradients for each reference image, then with
    the cache and without. The gradient is that of the last two."""
    caches = sys.modules[type(model).__module__].GlmImageKVCache(probe.config["num_layers"])
    inputs = inputs_of(probe)
    outputs = []
    caches.set_mode("write")
    for images in IMAGES:
        for height, width in images:
            with torch.no_grad():
                outputs.append(run(model, _image(inputs, height, width) | {"kv_caches": caches}))
        caches.next_sample()
    for mode in ("read", "skip"):
        caches.set_mode(mode)
        outputs.append(run(model, inputs | {"kv_caches": caches}))
        loss_of(outputs[-1]).backward()  # ahead of another mode: checkpointed blocks look at it again
    return outputs


def _image(inputs: dict[str, Any], height: int, width: int) -> dict[str, Any]:
    tokens = height * width // 4
    generator = torch.Generator().manual_seed(tokens)
    first = {name: value[:1] for name, value in inputs.items() if isinstance(value, Tensor)}
    return first | {
        "hidden_states": torch.randn(1, 4, height, width, generator=generator, dtype=torch.float64),
        "encoder_hidden_states": first["encoder_hidden_states"][:, :0],
        "prior_token_id": torch.randint(0, 16, (1, tokens), generator=generator),
        "prior_token_drop": torch.zeros(1, tokens, dtype=torch.bool),
    }
