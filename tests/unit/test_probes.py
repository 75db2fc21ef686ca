"""The probe language: every kind of input, every finding with its path, and inputs that are the same everywhere."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from cpgen.plan import Probe
from cpgen.probes import build_inputs, format_path, validate_probe


def probe(**inputs: Any) -> Probe:
    return Probe("tiny", {"num_layers": 1}, inputs)


def build(spec: Any, seed: int = 0) -> Any:
    return build_inputs(probe(x=spec), seed)["x"]


GOOD = [
    {"shape": [2, 3]},
    {"shape": []},
    {"shape": [2], "dtype": "int64"},
    {"shape": [2], "dtype": "float64", "low": 0, "high": 5, "grad": False},
    {"shape": [2], "dtype": "int32", "low": -5, "high": 0},
    {"shape": [2], "dtype": "bool"},
    {"mask": {"shape": [2, 8], "keep": 0.6}},
    {"mask": {"shape": [2, 8], "lengths": [8, 1]}, "dtype": "bool"},
    {"tensor": [[1, 2], [3, 4]], "dtype": "int64"},
    {"tensor": 0.5},
    {"list": [{"shape": [1]}, {"value": None}]},
    {"tuple": [{"list": []}]},
    {"dict": {"scale": {"value": 1.0}}},
    {"value": [1, {"shape": "anything"}]},
]


@pytest.mark.parametrize("spec", GOOD)
def test_good_inputs_have_no_findings_and_build(spec: Any) -> None:
    assert validate_probe(probe(x=spec)) == []
    build(spec)


BAD = [
    ([1, 2], "inputs.x", "write {value: ...} to pass list [1, 2]"),
    (None, "inputs.x", "to pass nothing"),
    ({}, "inputs.x", "an empty input; write one of shape, mask"),
    ({"shpae": [2]}, "inputs.x.shpae", "unknown input 'shpae'; did you mean 'shape'?"),
    ({"shape": [2], "dtpye": "bool"}, "inputs.x.dtpye", "unknown key 'dtpye' beside 'shape'; did you mean 'dtype'?"),
    ({"shape": [2], "dtype": "float23"}, "inputs.x.dtype", "unknown dtype 'float23'; did you mean 'float32'"),
    ({"shape": [2], "dtype": ["bool"]}, "inputs.x.dtype", "unknown dtype"),
    ({"shape": [2], "value": 1}, "inputs.x.value", "'value' and 'shape' exclude each other"),
    ({"shape": 2}, "inputs.x.shape", "a shape is a list of sizes, got int 2"),
    ({"shape": [2, 0]}, "inputs.x.shape[1]", "a size is a whole number above 0, got 0"),
    ({"shape": [True]}, "inputs.x.shape[0]", "got True"),
    ({"shape": [2], "low": 5, "high": 5}, "inputs.x.high", "low must be below high"),
    ({"shape": [2], "low": 1000}, "inputs.x.low", "low must be below high (default 1000)"),
    ({"shape": [2], "high": 0.5}, "inputs.x.high", "high is a whole number, got 0.5"),
    ({"shape": [2], "dtype": "bool", "high": 2}, "inputs.x.high", "high means nothing for bool"),
    ({"shape": [2], "grad": 1}, "inputs.x.grad", "grad is true or false"),
    ({"shape": [2], "dtype": "int64", "grad": True}, "inputs.x.grad", "a tensor of int64 has no gradient"),
    ({"mask": [2, 8]}, "inputs.x.mask", "a mask is a mapping"),
    ({"mask": {"keep": 0.5}}, "inputs.x.mask.shape", "a shape is a list of sizes, got nothing"),
    ({"mask": {"shape": [8], "keep": 0.5}}, "inputs.x.mask.shape", "a mask has shape [batch, tokens]"),
    ({"mask": {"shape": [2, 8]}}, "inputs.x.mask", "a mask needs either keep"),
    ({"mask": {"shape": [2, 8], "keep": 1, "lengths": [1, 1]}}, "inputs.x.mask.lengths", "exclude each other"),
    ({"mask": {"shape": [2, 8], "keep": 0}}, "inputs.x.mask.keep", "keep is a fraction"),
    ({"mask": {"shape": [2, 8], "keeep": 0.5}}, "inputs.x.mask.keeep", "did you mean 'keep'?"),
    ({"mask": {"shape": [2, 8], "lengths": [8]}}, "inputs.x.mask.lengths", "for each of 2 rows"),
    ({"mask": {"shape": [2, 8], "lengths": [8, 9]}}, "inputs.x.mask.lengths[1]", "a length is in 1..8, got 9"),
    ({"mask": {"shape": [2, 8], "keep": 0.5}, "low": 1}, "inputs.x.low", "unknown key 'low' beside 'mask'"),
    ({"tensor": [[1], [2, 3]]}, "inputs.x.tensor", "lists of equal length"),
    ({"tensor": "abc"}, "inputs.x.tensor", "a tensor is a number"),
    ({"list": {"shape": [1]}}, "inputs.x.list", "a list is written as a list of inputs"),
    ({"tuple": [{"value": 1}, 2]}, "inputs.x.tuple[1]", "write {value: ...} to pass int 2"),
    ({"dict": [1]}, "inputs.x.dict", "a dict is written as a mapping"),
    ({"dict": {"a": {"list": [{"shpe": []}]}}}, "inputs.x.dict.a.list[0].shpe", "did you mean 'shape'?"),
]


@pytest.mark.parametrize(("spec", "path", "message"), BAD, ids=range(len(BAD)))
def test_bad_input_is_found_with_its_path(spec: Any, path: str, message: str) -> None:
    findings = [(format_path(where), text) for where, text in validate_probe(probe(x=spec))]
    ((found_path, found),) = findings
    assert found_path == path and message in found
    with pytest.raises(ValueError, match="probe 'tiny': inputs"):
        build(spec)


def test_models_in_a_configuration() -> None:
    nets = [{"model": "Net", "config": {"layers": 1}}, {"model": "a b", "config": {}}, {"model": "Net", "config": 3}]
    paths = [format_path(path) for path, _ in validate_probe(replace(probe(x={"shape": [1]}), config={"nets": nets}))]
    assert paths == ["config.nets[1].model", "config.nets[2].config"]


def test_all_findings_are_collected() -> None:
    bad = Probe("", {"a b": 1}, {"x": {"shape": [0, -1], "dtype": "f"}, "y z": {"value": 1}}, ("fuse it",))
    paths = [format_path(path) for path, _ in validate_probe(bad)]
    assert paths == [
        "name",
        "config.a b",
        "inputs.y z",
        "inputs.x.dtype",
        "inputs.x.shape[0]",
        "inputs.x.shape[1]",
        "before[0]",
    ]
    assert [path for path, _ in validate_probe(Probe("a", [], {}))] == [("config",), ("inputs",)]  # type: ignore[arg-type]


def test_validation_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from cpgen.plan import Probe\n"
        "from cpgen.probes import validate_probe\n"
        "assert validate_probe(Probe('a', {}, {'x': {'shape': [2]}})) == []\n"
        "import cpgen.verify.run, cpgen.verify.report\n"  # nor does handing out cases
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_inputs_depend_on_seed_and_place_only() -> None:
    spec = {"shape": [4]}
    first, second = build_inputs(probe(x=spec, y=spec), 0), build_inputs(probe(z=spec, y=spec, x=spec), 0)
    assert torch.equal(first["x"], second["x"]) and torch.equal(first["y"], second["y"])
    assert not torch.equal(first["x"], first["y"])
    assert not torch.equal(first["x"], build(spec, seed=1))
    pair = build({"list": [spec, spec]})
    assert not torch.equal(pair[0], pair[1])


def test_tensors_have_the_dtype_range_and_gradient_asked_for() -> None:
    normal = build({"shape": [50, 50]})
    assert normal.dtype == torch.float32 and normal.requires_grad and normal.is_leaf
    assert abs(normal.mean()) < 0.1 and abs(normal.std() - 1) < 0.1
    whole = build({"shape": [500], "dtype": "float64", "low": -3, "high": 3})
    assert whole.dtype == torch.float64 and whole.requires_grad
    assert sorted(set(whole.tolist())) == [-3, -2, -1, 0, 1, 2]
    assert not build({"shape": [2], "grad": False}).requires_grad
    default = build({"shape": [5000], "dtype": "int64"})
    assert default.dtype == torch.int64 and default.min() >= 0 and 900 < default.max() < 1000
    assert build({"shape": [2], "dtype": "int32"}).dtype == torch.int32
    assert set(build({"shape": [50], "dtype": "bool"}).tolist()) == {True, False}
    assert build({"tensor": [[1, 0]], "dtype": "bool"}).tolist() == [[True, False]]


@pytest.mark.parametrize("keep", [0.2, 0.6, 0.99])
def test_random_mask_keeps_the_first_token_and_has_holes_in_every_row(keep: float) -> None:
    mask = build({"mask": {"shape": [40, 16], "keep": keep}})
    assert mask.dtype == torch.int64 and set(mask.unique().tolist()) == {0, 1}
    assert mask[:, 0].all()
    assert (mask == 0).any(dim=1).all()
    assert (mask == 0).any(dim=0)[1:].all()  # anywhere, not at the end
    assert len({tuple(row) for row in mask.tolist()}) > 10


def test_mask_by_lengths_is_a_prefix() -> None:
    mask = build({"mask": {"shape": [2, 4], "lengths": [4, 1]}, "dtype": "float32"})
    assert mask.dtype == torch.float32 and not mask.requires_grad
    assert mask.tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]
    assert build({"mask": {"shape": [1, 4], "keep": 1}}).tolist() == [[1, 1, 1, 1]]


def test_containers_and_values_keep_their_types() -> None:
    built = build({"dict": {"pair": {"tuple": [{"shape": [1]}, {"value": False}]}, "sizes": {"value": [1, 2]}}})
    assert isinstance(built["pair"], tuple) and built["pair"][1] is False and built["sizes"] == [1, 2]


def test_a_dicts_key_of_digits_is_a_number() -> None:
    """YAML's keys are read as text; OmniGen's input_image_sizes counts samples."""
    assert list(build({"dict": {"0": {"value": 1}, "12": {"value": 2}, "01": {"value": 3}}})) == [0, 12, "01"]
