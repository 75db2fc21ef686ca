"""Source files that are refused before anything is emitted from them, although they are valid Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpgen.diagnostics import CpgenError
from cpgen.package import Request, generate
from cpgen.source import read_source

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests/models/transformer_tiny.py"
PLAN = ROOT / "tests/models/tiny.yaml"


@pytest.mark.parametrize("line", ["# -*- coding: latin-1 -*-", "#!x\n# vim: set fileencoding=cp1252 :"])
def test_another_encoding_would_change_what_strings_mean(tmp_path: Path, line: str) -> None:
    path = tmp_path / "made.py"
    path.write_bytes(line.encode() + b"\nX = '\xc3\xa9'\n")
    with pytest.raises(CpgenError, match=r"CP303.*another encoding than UTF-8"):
        read_source(path, "made.py")


@pytest.mark.parametrize("line", ["# -*- coding: utf-8 -*-", "# coding=UTF_8", "# a remark on coding in latin-1"])
def test_utf8_may_be_declared(tmp_path: Path, line: str) -> None:
    path = tmp_path / "made.py"
    path.write_bytes(line.encode() + b"\nX = '\xc3\xa9'\n")
    assert "é" in read_source(path, "made.py")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("import torch\n", "import torch  # cpgen: mine\n", "CP503.*holds marked edits of cpgen already"),
        (
            "class TinyFeedForward(",
            "class TinyAttnProcessor:\n"
            "    def __call__(self, attn, context=None):\n"
            "        return dispatch_attention_fn(context, context, context)\n\n\n"
            "class TinyFeedForward(",
            "CP504.*TinyAttnProcessor is defined 2 times",
        ),
    ],
)
def test_a_file_that_would_be_misread(tmp_path: Path, old: str, new: str, expected: str) -> None:
    path = tmp_path / "transformer_tiny.py"
    text = TINY.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), "utf-8")
    with pytest.raises(CpgenError, match=f"(?s){expected}"):
        generate(Request(f"{path}:TinyTransformer2DModel", 2, plan=PLAN), tmp_path)
