"""Blocks of diffusers' own files: the processors that diffusers' Attention constructs by default, and FSDP units."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import pytest
from diffusers.models.attention_processor import Attention

from cpgen.source import SourceTree
from cpgen.surgery.erase import erase
from cpgen.surgery.functions import method
from cpgen.target import find_target
from tests.runtime.emitted import emit

DIT = "DiTTransformer2DModel"


def test_the_model_uses_the_packages_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emitted = emit(tmp_path, DIT, 2)
    monkeypatch.syspath_prepend(str(tmp_path))
    package = importlib.import_module(emitted.name)
    ours = importlib.import_module(f"{emitted.name}.attention_processor").AttnProcessor2_0
    model = package.DiTTransformer2DModel(**emitted.probe().config)
    attention = [module for module in model.transformer_blocks.modules() if isinstance(module, Attention)]
    assert len(attention) == 2 and all(type(module.processor) is ours for module in attention)
    files = sorted(path.name for path in (tmp_path / emitted.name).glob("*.py"))
    assert files == [
        "__init__.py",
        "attention_processor.py",
        "checkpoint.py",
        "dit_transformer_2d.py",
        "parallelize.py",
    ]  # neither Attention nor the blocks come along
    del sys.modules[emitted.name]


def test_a_submodule_that_forward_calls_is_a_unit_of_its_own(tmp_path: Path) -> None:
    emitted = emit(tmp_path, DIT, 2)
    text = (tmp_path / emitted.name / "parallelize.py").read_text("utf-8")
    assert text.count('alone = model.get_submodule("transformer_blocks.0.norm1.emb")') == 2  # fsdp and ddp
    assert text.index("alone = ") < text.index("for block in blocks:\n            # Backward")


def test_which_submodules_forward_calls(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(
        "class Model:\n"
        "    def forward(self, x):\n"
        "        a = self.blocks[0].norm.emb(x)\n"
        "        b = self.blocks[1].proj(self.blocks[0].norm.emb(a))\n"
        "        c = self.blocks[0](b)\n"
        "        d = self.others[0].norm(c)\n"
        "        e = self.blocks[i].norm(d)\n"
        "        return e.size(self.blocks[1].heads)\n"
    )
    target = find_target(f"{path}:Model", SourceTree())
    forward = method(target.module, target.node, "forward")
    assert forward is not None
    assert forward.calls_into(("blocks",)) == ("blocks.0.norm.emb", "blocks.1.proj")


@pytest.mark.parametrize(
    ("line", "erased"),
    [
        ("from .attention_processor import AttnProcessor2_0  # cpgen: why", True),
        ("from .attention_processor import Attention  # cpgen: why", False),  # upstream's file has the name
        ("from .attention_processor import A as Attention  # cpgen: why", False),
        ("from .attention_processor import AttnProcessor2_0", False),  # not marked
        ("from diffusers import AttnProcessor2_0  # cpgen: why", False),
        ("use_processors([], AttnProcessor2_0)  # cpgen: why", True),
        ("use_processor([], AttnProcessor2_0)  # cpgen: why", False),
        ("use_processors([], AttnProcessor2_0)", False),
    ],
)
def test_what_is_erased(line: str, erased: bool) -> None:
    body = erase(f"{line}\nx = 1\n", {"Attention"}).body
    assert len(body) == (1 if erased else 2)


def test_a_controlnet_brings_no_whole_transformer(tmp_path: Path) -> None:
    emitted = emit(tmp_path, "CosmosControlNetModel", 2)
    tree = ast.parse((tmp_path / emitted.name / "transformer_cosmos.py").read_text("utf-8"))
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    assert classes == ["CosmosAttnProcessor2_0", "CosmosAttnProcessor2_5", "CosmosTransformerBlock"]
