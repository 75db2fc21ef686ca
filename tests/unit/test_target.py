"""From --model to a class, and the name of its package."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from cpgen.diagnostics import CpgenError
from cpgen.source import SourceTree
from cpgen.target import find_target, snake_case
from tests.unit.projects import TINY


@pytest.mark.parametrize(
    ("class_name", "package"),
    [
        ("WanTransformer3DModel", "wan_transformer_3d"),
        ("SD3Transformer2DModel", "sd3_transformer_2d"),
        ("CogView4Transformer2DModel", "cog_view4_transformer_2d"),
        ("HunyuanVideo15Transformer3DModel", "hunyuan_video15_transformer_3d"),
        ("UNet2DConditionModel", "u_net_2d_condition"),
        ("DiTTransformer2DModel", "di_t_transformer_2d"),
        ("Flux2", "flux2"),
        ("tiny_model", "tiny_model"),
        ("A", "a"),
        ("Model", "model"),
    ],
)
def test_package_names(class_name: str, package: str) -> None:
    assert snake_case(class_name) == package


def test_class_of_diffusers() -> None:
    target = find_target("WanTransformer3DModel", SourceTree())
    assert (target.kind, target.class_name, target.file_stem) == (
        "diffusers",
        "WanTransformer3DModel",
        "transformer_wan",
    )
    assert target.module.label == "diffusers/models/transformers/transformer_wan.py"


def test_class_in_a_file_has_no_machines_path_in_its_label() -> None:
    target = find_target(TINY, SourceTree())
    assert (target.kind, target.module.label) == ("file", "transformer_tiny.py")
    assert target.module.name == "tests.models.transformer_tiny"  # the packages around it count for relative imports


def test_class_in_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    (tmp_path / "target_pkg").mkdir()
    (tmp_path / "target_pkg/model.py").write_text("class M: ...\n")
    target = find_target("target_pkg.model:M", SourceTree())
    assert (target.kind, target.module.label, target.node.name) == ("module", "target_pkg/model.py", "M")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("WanTransformer3DModl", "CP401.*diffusers exports no model class 'WanTransformer3DModl'"),
        ("", "CP401.*no model class ''"),
        ("zzz.zzz:Model", "CP401.*no module zzz.zzz with Python source"),
        ("a b:Model", "CP401.*'a b' is neither a module's name nor a .py file"),
        ("os;x:Model", "CP401.*neither a module"),
        ("..:Model", "CP401.*neither a module"),
        (":Model", "CP401.*neither a module"),
        ("gone.py:Model", "CP401.*no file gone.py"),
        ("good.py:Modl", "(?s)CP401.*good.py defines no class 'Modl'.*did you mean 'Model'"),
        ("good.py:Other", "(?s)CP401.*defines no class 'Other'.*classes there: Model"),
        ("good.py:function", "CP401.*defines no class 'function'"),
        ("good.py:", "CP401.*'' is not a class name"),
        ("good.py:a.b", "CP401.*'a.b' is not a class name"),
        ("empty.py:Model", "(?s)CP401.*classes there: none"),
        ("broken.py:Model", "CP301.*broken.py is not valid Python"),
        ("latin.py:Model", "CP303.*latin.py is not UTF-8"),
        ("folder.py:Model", "CP401.*no file folder.py"),
        ("parallelize.py:Model", "CP402.*cannot hold a file called parallelize.py"),
        ("my-model.py:Model", "CP402.*cannot hold a file called my-model.py"),
    ],
)
def test_targets_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, message: str) -> None:
    good = "class Model: ...\ndef function(): ...\n"
    files = {"good": good, "empty": "", "broken": "def (:\n", "parallelize": good, "my-model": good}
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "latin.py").write_bytes(b"# \xe4\nclass Model: ...\n")
    (tmp_path / "folder.py").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CpgenError, match=message) as error:
        find_target(spec, SourceTree())
    assert error.value.exit_code == 2


def test_near_matches() -> None:
    with pytest.raises(CpgenError) as error:
        find_target("FluxTransformer2DModl", SourceTree())
    assert "did you mean 'FluxTransformer2DModel'" in str(error.value)
