"""Probes for a class that nobody wrote any for: a small configuration, and inputs by the names of its arguments.

Names and shapes are diffusers' conventions. What is guessed is tried, and kept only if the class runs on it.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from cpgen.diagnostics import fail
from cpgen.infer.inference import class_of
from cpgen.infer.watch import in_words
from cpgen.plan import Probe
from cpgen.probes import build_inputs
from cpgen.target import Target
from cpgen.verify.models import build_model
from cpgen.verify.quiet import quietly

Spec = dict[str, Any]

_LAYERS = re.compile(r"(num_|n_)?\w*(layers|depth|blocks)\w*")
_HEADS = re.compile(r"(num_|n_)?(\w+_)?heads")
_TEXT = re.compile(
    r"\w*(text|caption|cross_attention|joint_attention|context|cond|encoder|llm)\w*(dim|channels|size)\w*"
)
_LARGEST = 150_000_000  # parameters: more would take minutes
_TRIALS = 400
_SIZES = ((2, 7, (3, 5, 1), (3, 6, 10)), (1, 8, (2, 4, 2), (2, 4, 8)))  # batch, text tokens, grids of tokens and pixels


def guess_probes(target: Target) -> tuple[Probe, ...]:
    """Two probes that the class runs on. Raises CpgenError, saying what is missing, if none is found."""
    model_class = class_of(target)
    config = _config(target, model_class)
    required = [name for name, each in _parameters(model_class.forward).items() if each.default is each.empty]
    settings = {name: each.default for name, each in _parameters(model_class.__init__).items()} | config
    unknown = [name for name in required if not _choices(name, settings, *_SIZES[0])]
    if unknown:
        raise _give_probes(target, f"nothing is known about its argument{'s'[: len(unknown) - 1]} {', '.join(unknown)}")
    trials = 0
    last = ""
    with quietly(), torch.no_grad():
        model = build_model(model_class, Probe("guess", config, {}), 0, torch.float32)
        for guess in _guesses(model_class, required, settings):
            trials += 1
            if trials > _TRIALS:
                break
            found = [Probe(f"guessed-{number}", config, each) for number, each in enumerate(guess, start=1)]
            error = _error_of(model, found[0])
            if error is None:
                error = _error_of(model, found[1])
                return tuple(found if error is None else found[:1])
            last = error
    raise _give_probes(target, f"none of {trials} guesses at its inputs ran; the last: {last}")


def _config(target: Target, model_class: type[nn.Module]) -> dict[str, Any]:
    """Arguments of the constructor that make a small model: few layers, few heads. Raises CpgenError."""
    parameters = _parameters(model_class.__init__)
    missing = [name for name, each in parameters.items() if each.default is each.empty]
    if missing:
        raise _give_probes(target, f"its constructor needs {', '.join(missing)}")
    defaults = {name: each.default for name, each in parameters.items()}
    few = {name: 2 for name, value in defaults.items() if _is_int(value) and value > 2 and _LAYERS.fullmatch(name)}
    heads = {name: 4 for name, value in defaults.items() if _is_int(value) and value > 4 and _HEADS.fullmatch(name)}
    for config in (few | heads | _following(defaults, heads), few | heads, few):
        try:
            with torch.device("meta"):
                model = model_class(**config)
        except (Exception, SystemExit):  # some other arguments depend on those that were changed
            continue
        if sum(parameter.numel() for parameter in model.parameters()) <= _LARGEST:
            return config
    raise _give_probes(target, "no small configuration of it was found")


def _following(defaults: Mapping[str, Any], heads: Mapping[str, int]) -> dict[str, int]:
    """Arguments that default to the channels of all heads, for fewer heads."""
    products = {
        defaults[name] * size: count * size
        for name, count in heads.items()
        for key, size in defaults.items()
        if _is_int(size) and "head_dim" in key
    }
    return {name: products[value] for name, value in defaults.items() if _is_int(value) and value in products}


def _guesses(
    model_class: type[nn.Module], required: list[str], settings: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Spec], dict[str, Spec]]]:
    """Inputs of both sizes: first with the required arguments alone, then with usual optional ones."""
    parameters = _parameters(model_class.forward)
    usual = [name for name in parameters if name not in required and _choices(name, settings, *_SIZES[0])]
    tried = []
    for extra in ([], [name for name in usual if "mask" not in name], usual):
        names = [*required, *extra]
        if names in tried:
            continue
        tried.append(names)
        small, other = ([_choices(name, settings, *size) for name in names] for size in _SIZES)
        for picks in itertools.product(*(range(len(choices)) for choices in small)):
            yield tuple(  # type: ignore[misc]
                {name: choices[pick] for name, choices, pick in zip(names, of, picks, strict=True)}
                for of in (small, other)
            )


def _choices(
    name: str,
    settings: Mapping[str, Any],
    batch: int,
    text: int,
    grid: tuple[int, int, int],
    pixels: tuple[int, int, int],
) -> list[Spec]:
    """What an argument of this name may be, likeliest first; [] for a name that says nothing."""
    channels = _values(settings, "in_channels", "num_channels", "input_channels", "in_dim", "channels", "io_channels")
    tokens = math.prod(grid)
    frames, height, width = pixels
    if name in ("hidden_states", "sample", "x", "latents"):
        shapes = [[batch, tokens, c] for c in channels]
        shapes += [[batch, c, height, width] for c in channels] + [[batch, c, frames, height, width] for c in channels]
        shapes += [[batch, frames, c, height, width] for c in channels] + [[batch, c, tokens] for c in channels]
        return [{"shape": shape} for shape in shapes]
    if name in ("timestep", "timesteps", "t"):
        return [{"shape": [batch], "low": 0, "high": 1000, "grad": False}, {"shape": [batch], "dtype": "int64"}]
    if name == "guidance":
        return [{"shape": [batch], "grad": False}] if settings.get("guidance_embeds") else []
    if "pooled" in name:
        dims = _values(settings, "pooled_projection_dim")
        return [{"shape": [batch, dim]} for dim in dims]
    if "mask" in name and ("encoder" in name or "text" in name):
        lengths = {"shape": [batch, text], "keep": 0.6}
        return [{"mask": lengths, "dtype": "bool"}, {"mask": lengths}]
    if name in ("encoder_hidden_states", "context", "text_embeds", "prompt_embeds"):
        dims = [value for key, value in settings.items() if _is_int(value) and _TEXT.fullmatch(key)]
        return [{"shape": [batch, text, dim]} for dim in dict.fromkeys(dims)]
    if name in ("num_frames", "height", "width"):
        return [{"value": dict(zip(("num_frames", "height", "width"), grid, strict=True))[name]}]
    if name == "class_labels":
        return [{"shape": [batch], "dtype": "int64", "high": 10}]
    if name in ("img_ids", "txt_ids"):
        return [{"shape": [tokens if name == "img_ids" else text, 3], "low": 0, "high": 8, "grad": False}]
    return []


def _values(settings: Mapping[str, Any], *names: str) -> list[int]:
    return list(dict.fromkeys(settings[name] for name in names if _is_int(settings.get(name))))


def _error_of(model: nn.Module, probe: Probe) -> str | None:
    try:
        model(**build_inputs(probe, 0))
    except (Exception, SystemExit) as error:
        return in_words(error)
    return None


def _parameters(function: Any) -> dict[str, inspect.Parameter]:
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = inspect.signature(function).parameters
    return {name: each for name, each in found.items() if name != "self" and each.kind in plain}


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _give_probes(target: Target, reason: str) -> Exception:
    return fail(
        "CP605",
        f"no probe was found for {target.class_name} from its signatures",
        note=reason,
        help="write one, a constructor config and inputs, as docs/plans.md shows, and pass it with --probes FILE",
    )
