"""The probe language: how a plan writes down the inputs on which `verify` runs a model.

An input is written as one of:

    {shape: [2, 16, 8], dtype: float32, grad: true}     normal values
    {shape: [2], dtype: int64, low: 0, high: 1000}      whole numbers, uniform in [low, high)
    {shape: [2, 8], dtype: bool}                        random
    {mask: {shape: [2, 8], keep: 0.6}, dtype: int64}    ones and zeros, holes anywhere, the first token of a row kept
    {mask: {shape: [2, 8], lengths: [8, 3]}}            ones for the first `lengths[row]` tokens
    {tensor: [[0, 1], [1, 0]], dtype: int64}            these very numbers
    {list: [input, ...]}, {tuple: [input, ...]}, {dict: {key: input}}      a dict's key of digits is a whole number
    {value: anything}                                   passed as it is

A configuration is passed as it is, but {model: CLASS, config: {...}} in it is such a model, of a class in the model's
file.

dtypes are float32 (the default; int64 for masks), float64, int64, int32 and bool. Float tensors given by `shape`
require grad, unless `grad: false`; `low` and `high` may be given for them too (a float timestep).

`validate_probe` works without torch, for `cpgen plan lint`; `build_inputs` makes the tensors.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from cpgen.diagnostics import did_you_mean

if TYPE_CHECKING:
    import torch

    from cpgen.plan import Probe

Path = tuple[str | int, ...]
Finding = tuple[Path, str]

DTYPES = ("float32", "float64", "int64", "int32", "bool")
_FLOATS = ("float32", "float64")
_DEFAULT_HIGH = 1000  # diffusers' number of training timesteps
_KEYS = {
    "shape": ("shape", "dtype", "low", "high", "grad"),
    "mask": ("mask", "dtype"),
    "tensor": ("tensor", "dtype"),
    "list": ("list",),
    "tuple": ("tuple",),
    "dict": ("dict",),
    "value": ("value",),
}


def validate_probe(probe: Probe) -> list[Finding]:
    """All that is wrong with `probe`, as (path inside the probe, message). Empty if it can be built.

    A path such as ("inputs", "timestep", "dtype") leads to the YAML node that a message is about.
    """
    findings: list[Finding] = []
    if not isinstance(probe.name, str) or not probe.name:
        findings.append((("name",), "a probe needs a name"))
    for section in ("config", "inputs"):
        keys = getattr(probe, section)
        if not isinstance(keys, dict):
            findings.append(((section,), f"expected a mapping from argument to value, got {_kind(keys)}"))
            continue
        for key in keys:
            if not isinstance(key, str) or not key.isidentifier():
                findings.append(((section, key), f"{key!r} is not the name of an argument"))
    if isinstance(probe.inputs, dict):
        if not probe.inputs:
            findings.append((("inputs",), "a probe needs inputs"))
        for name, spec in probe.inputs.items():
            findings.extend(_check(spec, ("inputs", name)))
    if isinstance(probe.config, dict):
        for path, value in models_in(probe.config):
            findings.extend(_check_model(value, path))
    for index, method in enumerate(probe.before):
        if not isinstance(method, str) or not method.isidentifier():
            findings.append((("before", index), f"{method!r} is not the name of a method"))
    return findings


def build_inputs(probe: Probe, seed: int) -> dict[str, Any]:
    """The keyword arguments of the model's forward: the same on every rank and machine for one `seed`.

    Each tensor depends on `seed` and on its own place only, so adding an input leaves the others as they were.
    Raises ValueError if `validate_probe` finds anything.
    """
    findings = validate_probe(probe)
    if findings:
        path, message = findings[0]
        raise ValueError(f"probe {probe.name!r}: {format_path(path)}: {message}")
    return {name: _build(spec, (name,), seed) for name, spec in probe.inputs.items()}


def format_path(path: Path) -> str:
    """("inputs", "masks", 0) as "inputs.masks[0]"."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text


def models_in(config: dict[str, Any]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Each {model: CLASS, config: {...}} in a probe's configuration, with its path inside the probe."""
    for name, value in config.items():
        yield from _models(value, ("config", name))


def _models(value: Any, path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _models(item, (*path, index))
    if isinstance(value, dict) and value.keys() == {"model", "config"}:
        yield path, value


# Checks. Each yields findings and goes on, so that one run shows everything that is wrong.


def _check(spec: Any, path: Path) -> Iterator[Finding]:
    if not isinstance(spec, dict):
        yield path, f"an input is a mapping such as {{shape: [2, 16]}}; write {{value: ...}} to pass {_kind(spec)}"
        return
    kinds = [key for key in spec if key in _KEYS]
    if not kinds:
        every = tuple(dict.fromkeys(word for words in _KEYS.values() for word in words))
        for key in spec:
            yield (*path, key), f"unknown input {key!r}{_suggestion(key, every)}"
        if not spec:
            yield path, f"an empty input; write one of {', '.join(_KEYS)}"
        return
    kind = kinds[0]
    for key in spec:
        if key in kinds[1:]:
            yield (*path, key), f"{key!r} and {kind!r} exclude each other"
        elif key not in _KEYS[kind]:
            yield (*path, key), f"unknown key {key!r} beside {kind!r}{_suggestion(key, _KEYS[kind])}"
    if "dtype" in spec and spec["dtype"] not in DTYPES:
        yield (*path, "dtype"), f"unknown dtype {spec['dtype']!r}{_suggestion(spec['dtype'], DTYPES)}"
    yield from _CHECKS[kind](spec, path)


def _check_model(value: dict[str, Any], path: Path) -> Iterator[Finding]:
    if not isinstance(value["model"], str) or not value["model"].isidentifier():
        yield (*path, "model"), f"{value['model']!r} is not the name of a class"
    if not isinstance(value["config"], dict):
        yield (*path, "config"), f"expected a mapping from argument to value, got {_kind(value['config'])}"


def _check_shape(spec: dict[str, Any], path: Path) -> Iterator[Finding]:
    yield from _check_sizes(spec["shape"], (*path, "shape"))
    dtype = spec.get("dtype", "float32")
    for key in ("low", "high"):
        if key in spec and not _is_int(spec[key]):
            yield (*path, key), f"{key} is a whole number, got {spec[key]!r}"
            return
        if key in spec and dtype == "bool":
            yield (*path, key), f"{key} means nothing for bool"
    if spec.get("low", 0) >= spec.get("high", _DEFAULT_HIGH):
        yield (*path, "high" if "high" in spec else "low"), "low must be below high (default 1000)"
    if "grad" in spec and not isinstance(spec["grad"], bool):
        yield (*path, "grad"), f"grad is true or false, got {spec['grad']!r}"
    elif spec.get("grad") and dtype not in _FLOATS:
        yield (*path, "grad"), f"a tensor of {dtype} has no gradient"


def _check_mask(spec: dict[str, Any], path: Path) -> Iterator[Finding]:
    mask, path = spec["mask"], (*path, "mask")
    if not isinstance(mask, dict):
        yield path, f"a mask is a mapping such as {{shape: [2, 16], keep: 0.6}}, got {_kind(mask)}"
        return
    known = ("shape", "keep", "lengths")
    for key in mask:
        if key not in known:
            yield (*path, key), f"unknown key {key!r} in a mask{_suggestion(key, known)}"
    findings = list(_check_sizes(mask.get("shape"), (*path, "shape")))
    yield from findings
    if findings:
        return
    if len(mask["shape"]) != 2:
        yield (*path, "shape"), "a mask has shape [batch, tokens]"
        return
    if "keep" in mask and "lengths" in mask:
        yield (*path, "lengths"), "'lengths' and 'keep' exclude each other"
    elif "keep" not in mask and "lengths" not in mask:
        if set(mask) <= set(known):  # else it is most likely misspelt
            yield path, "a mask needs either keep (a fraction) or lengths (one a row)"
    elif "keep" in mask:
        keep = mask["keep"]
        if isinstance(keep, bool) or not isinstance(keep, (int, float)) or not 0 < keep <= 1:
            yield (*path, "keep"), f"keep is a fraction above 0, at most 1, got {keep!r}"
    else:
        yield from _check_lengths(mask["lengths"], mask["shape"], (*path, "lengths"))


def _check_lengths(lengths: Any, shape: list[int], path: Path) -> Iterator[Finding]:
    batch, tokens = shape
    if not isinstance(lengths, list) or len(lengths) != batch:
        yield path, f"lengths is a list with one length for each of {batch} rows, got {lengths!r}"
        return
    for row, length in enumerate(lengths):
        if not _is_int(length) or not 1 <= length <= tokens:
            yield (*path, row), f"a length is in 1..{tokens}, got {length!r}"


def _check_sizes(shape: Any, path: Path) -> Iterator[Finding]:
    if not isinstance(shape, list):
        yield path, f"a shape is a list of sizes, got {_kind(shape)}"
        return
    for index, size in enumerate(shape):
        if not _is_int(size) or size < 1:
            yield (*path, index), f"a size is a whole number above 0, got {size!r}"


def _check_tensor(spec: dict[str, Any], path: Path) -> Iterator[Finding]:
    def shape_of(value: Any) -> tuple[int, ...] | None:
        if isinstance(value, (int, float)):
            return ()
        shapes = {shape_of(item) for item in value} if isinstance(value, list) else {None}
        inner = shapes.pop() if len(shapes) == 1 else None
        return None if inner is None else (len(value), *inner)

    if shape_of(spec["tensor"]) is None:
        yield (*path, "tensor"), "a tensor is a number, or lists of equal length nested around numbers"


def _check_items(spec: dict[str, Any], path: Path) -> Iterator[Finding]:
    kind = "list" if "list" in spec else "tuple"
    if not isinstance(spec[kind], list):
        yield (*path, kind), f"a {kind} is written as a list of inputs, got {_kind(spec[kind])}"
        return
    for index, item in enumerate(spec[kind]):
        yield from _check(item, (*path, kind, index))


def _check_dict(spec: dict[str, Any], path: Path) -> Iterator[Finding]:
    if not isinstance(spec["dict"], dict):
        yield (*path, "dict"), f"a dict is written as a mapping from key to input, got {_kind(spec['dict'])}"
        return
    for key, item in spec["dict"].items():
        yield from _check(item, (*path, "dict", key))


def _check_value(spec: dict[str, Any], path: Path) -> Iterator[Finding]:
    yield from ()


_CHECKS: dict[str, Callable[[dict[str, Any], Path], Iterator[Finding]]] = {
    "shape": _check_shape,
    "mask": _check_mask,
    "tensor": _check_tensor,
    "list": _check_items,
    "tuple": _check_items,
    "dict": _check_dict,
    "value": _check_value,
}


def _suggestion(word: object, known: tuple[str, ...]) -> str:
    return f"; {did_you_mean(str(word), known) or 'known: ' + ', '.join(known)}"


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {value!r}"


# Building. The spec has been checked.


def _build(spec: dict[str, Any], path: Path, seed: int) -> Any:
    import torch

    if "value" in spec:
        return spec["value"]
    if "list" in spec:
        return [_build(item, (*path, index), seed) for index, item in enumerate(spec["list"])]
    if "tuple" in spec:
        return tuple(_build(item, (*path, index), seed) for index, item in enumerate(spec["tuple"]))
    if "dict" in spec:
        return {_key(key): _build(item, (*path, key), seed) for key, item in spec["dict"].items()}
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{format_path(path)}".encode()))
    if "mask" in spec:
        return _build_mask(spec["mask"], generator).to(getattr(torch, spec.get("dtype", "int64")))
    dtype = spec.get("dtype", "float32")
    if "tensor" in spec:
        return torch.tensor(spec["tensor"], dtype=getattr(torch, dtype))
    return _build_random(spec, dtype, generator)


def _key(text: str) -> str | int:
    """A dict's key: YAML keys are read as text, but one of digits is meant as a number."""
    return int(text) if re.fullmatch(r"0|[1-9][0-9]*", text) else text


def _build_random(spec: dict[str, Any], dtype: str, generator: torch.Generator) -> torch.Tensor:
    import torch

    shape = spec["shape"]
    torch_dtype = getattr(torch, dtype)
    if dtype == "bool":
        return torch.rand(shape, generator=generator) < 0.5
    if dtype in _FLOATS and "low" not in spec and "high" not in spec:
        tensor = torch.randn(shape, generator=generator).to(torch_dtype)
    else:
        low, high = spec.get("low", 0), spec.get("high", _DEFAULT_HIGH)
        tensor = torch.randint(low, high, shape, generator=generator).to(torch_dtype)
    return tensor.requires_grad_(dtype in _FLOATS and spec.get("grad", True))


def _build_mask(mask: dict[str, Any], generator: torch.Generator) -> torch.Tensor:
    import torch

    batch, tokens = mask["shape"]
    if "lengths" in mask:
        return torch.arange(tokens) < torch.tensor(mask["lengths"]).unsqueeze(1)
    # The same number of holes in every row, at least one: a random row without any would prove nothing.
    holes = math.ceil((tokens - 1) * (1 - mask["keep"]))
    order = torch.rand(batch, tokens, generator=generator)
    order[:, 0] = math.inf  # a row with no token at all would be NaN under softmax
    kept = torch.ones(batch, tokens, dtype=torch.bool)
    return kept.scatter_(1, order.argsort(dim=1)[:, :holes], False)
