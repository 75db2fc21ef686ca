"""Functions on the workers for weights: what is saved and loaded, memory, parameters of two names, and checkpoints."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin
from diffusers.configuration_utils import ConfigMixin, register_to_config
from safetensors.torch import load_file
from torch import Tensor, nn

from cpgen.verify.models import load_package
from tests.runtime.training_models import (
    FILES,
    full,
    load,
    render,
    tiny_batch,
    tiny_loss,
    tiny_model,
    wan_batch,
    wan_loss,
    wan_model,
)

# 72 M parameters whose dims 4 ranks can't share evenly.
LARGE_WAN = {"num_attention_heads": 15, "attention_head_dim": 66, "ffn_dim": 4099, "num_layers": 4, "text_dim": 64}


class TiedTransformer(ModelMixin, ConfigMixin):
    """Two names of one parameter outside the blocks, as a language model's embedding and head."""

    @register_to_config
    def __init__(self, width: int = 6, layers: int = 2) -> None:
        super().__init__()
        self.proj_in = nn.Linear(width, width, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.proj_out = nn.Linear(width, width, bias=False)
        self.proj_out.weight = self.proj_in.weight

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = self.proj_in(hidden_states)
        for block in self.blocks:
            hidden_states = hidden_states + block(hidden_states)
        return self.proj_out(hidden_states)


def emit_tied_package(root: Path) -> None:
    (root / "tied").mkdir()
    (root / "tied/transformer_tied.py").write_text(
        "from tests.runtime.weight_cases import TiedTransformer  # noqa: F401\n"
    )
    for name in FILES:
        text = render(name, package="tied", model_class="TiedTransformer", module="transformer_tied", blocks=["blocks"])
        (root / "tied" / name).write_text(text)


def tied_model(seed: int = 0) -> TiedTransformer:
    torch.manual_seed(seed)
    return TiedTransformer()


def save_weights(
    root: str, kind: str, cp: int, directory: str, options: dict[str, Any], save_options: dict[str, Any]
) -> None:
    package = load(root, f"{kind}_cp{cp}")
    model = {"tiny": tiny_model, "wan": wan_model}[kind]()
    model = package.parallelize(model, package.build_mesh("cpu"), **options)
    package.save_pretrained(model, directory, **save_options)


def load_weights(
    root: str, kind: str, cp: int, directory: str, options: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor], int, Tensor]:
    """(full state dict, buffers and tensors that are not in files, local elements of parameters, output)."""
    package = load(root, f"{kind}_cp{cp}")
    model = package.load_pretrained(directory, package.build_mesh("cpu"), **options)
    state = {name: full(tensor) for name, tensor in model.state_dict().items()}
    others = {name: buffer.clone() for name, buffer in model.named_buffers() if name not in state}
    if kind == "tiny":
        others["positions"] = model.positions
    held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
    assert not model.training
    with torch.no_grad():
        if kind == "wan":
            batch = {name: tensor.to(options.get("dtype")) for name, tensor in wan_batch(0).items()}
            batch["timestep"] = wan_batch(0)["timestep"]
            output = model(**batch, return_dict=False)[0]
        else:
            hidden_states, timestep, _ = tiny_batch(0)
            output = model(hidden_states, timestep)
    return state, others, held, output


def save_weights_error(root: str, directory: str) -> str:
    package = load(root, "tiny_cp1")
    model = package.parallelize(tiny_model(), package.build_mesh("cpu"))
    try:
        package.save_pretrained(model, directory)
    except ValueError as error:
        return str(error)
    return ""


def load_peak(root: str, directory: str, warm_up: str, options: dict[str, Any], whole_files: bool) -> tuple[int, int]:
    """(most bytes of this process's memory above what it had before load_pretrained, bytes of the whole model).

    All resident memory counts, also pages of mapped files, though ranks of a host share those. With `whole_files`
    load_pretrained is made worse: it holds the tensors of a file while it takes its slices.
    """
    from cpgen.runtime.weight_sources import SafetensorsWeights

    package = load(root, "wan_cp2")
    mesh = package.build_mesh("cpu")
    package.load_pretrained(warm_up, mesh, **options)  # modules and groups
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier cases have freed would hide what is allocated now
    read = SafetensorsWeights.read
    held: dict[Path, dict[str, Tensor]] = {}

    def read_all(self: SafetensorsWeights, name: str, target: Tensor) -> None:
        path = self._stored[name].path
        if path not in held:
            held.clear()
            held[path] = {key: tensor.clone() for key, tensor in load_file(path).items()}
        read(self, name, target)

    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = _memory("VmRSS")
    if whole_files:
        SafetensorsWeights.read = read_all  # type: ignore[method-assign]
    try:
        model = package.load_pretrained(directory, mesh, **options)
    finally:
        SafetensorsWeights.read = read  # type: ignore[method-assign]
    return _memory("VmHWM") - before, sum(p.numel() * p.element_size() for p in model.parameters())


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) * 1024


def save_tied(root: str, directory: str, options: dict[str, Any]) -> None:
    package = load(root, "tied")
    package.save_pretrained(package.parallelize(tied_model(), package.build_mesh("cpu"), **options), directory)


def load_tied(root: str, directory: str, options: dict[str, Any]) -> tuple[bool, dict[str, Tensor], Tensor]:
    """(whether it is one parameter still, state, gradient of it) of the tied model."""
    package = load(root, "tied")
    model = package.load_pretrained(directory, package.build_mesh("cpu"), **options)
    tied = model.proj_in.weight is model.proj_out.weight
    model(torch.ones(2, 6)).square().mean().backward()
    return tied, {name: full(tensor) for name, tensor in model.state_dict().items()}, full(model.proj_in.weight.grad)


def load_error(root: str, package: str, directory: str) -> str:
    """What load_pretrained says of the files in `directory`."""
    module = load_package(root, package)
    try:
        module.load_pretrained(directory, module.build_mesh("cpu"))
    except ValueError as error:
        return str(error)
    return ""


def save_trained(root: str, kind: str, cp: int, directory: str, steps: list[int], options: dict[str, Any]) -> Any:
    """Train and save a checkpoint for each step; the last weights, gathered."""
    package = load(root, f"{kind}_cp{cp}")
    model, loss = (tiny_model(), tiny_loss) if kind == "tiny" else (wan_model(), wan_loss)
    model = package.parallelize(model, package.build_mesh("cpu"), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in steps:
        loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        package.save_checkpoint(directory, model, optimizer, step=step)
    return {name: full(tensor) for name, tensor in model.state_dict().items()}
