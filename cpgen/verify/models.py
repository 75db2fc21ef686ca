"""The two models of a case: importing their classes, building them with equal, random weights."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cpgen.plan import Probe
from cpgen.verify.case import Reference


def load_reference(reference: Reference) -> type[nn.Module]:
    """The unmodified class. Raises ImportError or AttributeError."""
    if not reference.source.endswith(".py"):
        module = importlib.import_module(reference.source)
    else:
        # A file inside a package is imported as part of it, so that its relative imports work.
        path = Path(reference.source).resolve()
        root, parts = path.parent, [path.stem]
        while (root / "__init__.py").exists():
            root, parts = root.parent, [root.name, *parts]
        with _import_from(str(root)):
            module = importlib.import_module(".".join(parts)) if len(parts) > 1 else _load_file(path)
    model_class: type[nn.Module] = getattr(module, reference.class_name)
    return model_class


_meshes: list[Any] = []  # the world's group, and meshes over it by the degrees of their packages


def mesh_for(package: ModuleType) -> Any:
    """The package's mesh over all ranks, kept for others of the same degrees for as long as the process group lives.

    torch's caches of DTensor operations never let go of a mesh, and its groups have threads.
    """
    if not _meshes or _meshes[0] is not dist.group.WORLD:
        _meshes[:] = [dist.group.WORLD, {}]
    degrees = tuple(getattr(package, name, None) for name in ("CP_DEGREE", "ULYSSES_DEGREE", "TP_DEGREE"))
    if degrees not in _meshes[1]:
        _meshes[1][degrees] = package.build_mesh("cpu")
    return _meshes[1][degrees]


def load_package(directory: str, name: str) -> ModuleType:
    """Import package `name` from `directory`, afresh: one process imports the same name from many directories."""
    for module in list(sys.modules):
        if module == name or module.startswith(f"{name}."):
            del sys.modules[module]
    importlib.invalidate_caches()
    with _import_from(directory):
        return importlib.import_module(name)


def build_model(model_class: type[nn.Module], probe: Probe, seed: int, dtype: torch.dtype) -> nn.Module:
    """The probe's model in `dtype` and eval mode, after the probe's `before` methods were called."""
    torch.manual_seed(seed)  # for buffers that a constructor draws at random and does not save
    config = {name: _with_models(value, sys.modules[model_class.__module__]) for name, value in probe.config.items()}
    model = model_class(**config).eval()  # eval: dropout has no reference value
    if dtype != torch.float32:
        model.to(dtype)
    for method in probe.before:
        getattr(model, method)()
    return model


def _with_models(value: Any, module: ModuleType) -> Any:
    """`value` of a probe's config, where {model: CLASS, config: {...}} is such a model, of a class in `module`."""
    if isinstance(value, list):
        return [_with_models(item, module) for item in value]
    if isinstance(value, dict) and value.keys() == {"model", "config"}:
        return getattr(module, value["model"])(**value["config"])
    return value


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    """Give every parameter a random value of a sane size: zero-initialised gates make wrong code look right.

    So do tables in buffers that hold one number until weights are loaded: these get values around it. A tensor's values
    depend on its name and `seed` only.
    """
    saved = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        constant = name in saved and buffer.is_floating_point() and buffer.numel() > 1 and buffer.min() == buffer.max()
        if constant and torch.isfinite(buffer).all():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
            buffer.add_(0.1 * torch.randn(buffer.shape, generator=generator).to(buffer.dtype))
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.copy_(_scaled(name, noise))


def _scaled(name: str, noise: Tensor) -> Tensor:
    leaf = name.rpartition(".")[2]
    if noise.ndim <= 1:
        return 1 + 0.1 * noise if leaf == "weight" else 0.1 * noise  # a norm's weight; a bias
    if noise.shape[0] == 1:
        return 0.3 * noise  # a table that is added or multiplied: shifts, scales, gates, learned tokens
    return noise / math.sqrt(noise.numel() / noise.shape[0])


@contextmanager
def _import_from(directory: str) -> Iterator[None]:
    # Without bytecode: a file written again within the clock's resolution would be taken for the old one.
    before = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    sys.path.insert(0, directory)
    try:
        yield
    finally:
        sys.path.remove(directory)
        sys.dont_write_bytecode = before


def _load_file(path: Path) -> ModuleType:
    # Under a name of its own: path.stem may be the name of a module that is installed.
    name = f"_cpgen_reference_{zlib.crc32(str(path).encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
