"""Small made-up projects for tests: a model file with its plan, and what cpgen makes of them."""

from __future__ import annotations

import contextlib
import io
import textwrap
from dataclasses import dataclass
from pathlib import Path

from cpgen.cli import main
from cpgen.plan_loader import load_plan
from cpgen.source import SourceTree
from cpgen.strategy import Exchange
from cpgen.surgery.operate import Operation, operate
from cpgen.target import find_target

REPOSITORY = Path(__file__).parents[2]
TINY_MODEL = REPOSITORY / "tests/models/transformer_tiny.py"
TINY_PLAN = REPOSITORY / "tests/models/tiny.yaml"
TINY = f"{TINY_MODEL}:TinyTransformer2DModel"
MODELS = {
    "cogvideox_transformer_3d": "CogVideoXTransformer3DModel",
    "cogview4_transformer_2d": "CogView4Transformer2DModel",
    "flux_transformer_2d": "FluxTransformer2DModel",
    "hunyuan_video_transformer_3d": "HunyuanVideoTransformer3DModel",
    "ltx_video_transformer_3d": "LTXVideoTransformer3DModel",
    "qwen_image_transformer_2d": "QwenImageTransformer2DModel",
    "sd3_transformer_2d": "SD3Transformer2DModel",
    "wan_transformer_3d": "WanTransformer3DModel",
}

FORWARD = """\
def forward(self, hidden_states):
    for block in self.blocks:
        hidden_states = block(hidden_states)
    hidden_states = self.proj_out(hidden_states)
    return hidden_states
"""
CALL = """\
def __call__(self, attn, query, key, value):
    out = dispatch_attention_fn(query, key, value)
    return out
"""
_SHARD = "{hidden_states: {dim: 1, ndim: 3, stream: STREAMS}}"
_GATHER = "{hidden_states: {after: proj_out, dim: 1, ndim: 3, stream: latent}}"
_SITES = "[{call: 0, kind: self, stream: latent}]"


def module_text(forward: str = FORWARD, call: str = CALL, owner: str = "Processor") -> str:
    """A module with a class Model, and one of `owner` that attends."""
    return (
        "import torch.nn as nn\n"
        "from backend import dispatch_attention_fn\n"
        "\n\n"
        f"class {owner}:\n{textwrap.indent(call, '    ')}"
        "\n\n"
        "class Model(nn.Module):\n"
        "    def __init__(self, heads=4):\n"
        "        self.blocks = nn.ModuleList()\n"
        "        self.proj_out = nn.Linear(1, 1)\n"
        "\n"
        f"{textwrap.indent(forward, '    ')}"
    )


def plan_text(
    shard: str = _SHARD,
    gather: str = _GATHER,
    sites: str = _SITES,
    *,
    streams: str = "[latent]",
    prefix: str | None = None,
    refuse: str | None = None,
    owner: str = "Processor",
    outside: str | None = None,
) -> str:
    """A plan for `module_text`; each part is YAML in flow style."""
    lines = [
        "model: Model",
        "heads: heads",
        "blocks: [blocks]",
        f"streams: {streams}",
        "region:",
        "  begin: {before: blocks}",
        f"  shard: {shard.replace('STREAMS', 'latent' if streams == '[latent]' else streams)}",
        f"  gather: {gather}",
        "attention:",
        f"  {owner}: {sites}",
    ]
    if prefix is not None:
        lines.insert(7, f"  prefix: {prefix}")
    if refuse is not None:
        lines.insert(7, f"  refuse: {refuse}")
    if outside is not None:
        lines.append(f"outside: {outside}")
    return "\n".join(lines) + "\n"


# Each form of an attention call, by the name that the tests have for it.
FORMS = {
    "ulysses": Exchange(True, None),
    "allgather": Exchange(False, "allgather"),
    "ring": Exchange(False, "ring"),
    "ulysses in allgather": Exchange(True, "allgather"),
    "ulysses in ring": Exchange(True, "ring"),
}


def operation(
    folder: Path, source: str | bytes, plan: str, strategy: str = "ulysses", *, file: str = "transformer_made.py"
) -> Operation:
    """Write the module into `folder` and operate on its class Model."""
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(source if isinstance(source, bytes) else source.encode())
    tree = SourceTree()
    return operate(
        find_target(f"{path}:Model", tree), load_plan(plan, "made.yaml"), FORMS[strategy], "cpgen.runtime", tree
    )


def operated(
    folder: Path, source: str | bytes, plan: str, strategy: str = "ulysses", *, file: str = "transformer_made.py"
) -> str:
    """The edited text of the module."""
    return operation(folder, source, plan, strategy, file=file).files[0].text


def function_in(text: str, start: str) -> str:
    """The function of `text` that begins with `start`, dedented."""
    lines = text.splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if line.lstrip().startswith(start))
    indent = len(lines[first]) - len(lines[first].lstrip())
    last = first + 1
    while last < len(lines) and (not lines[last].strip() or len(lines[last]) - len(lines[last].lstrip()) > indent):
        last += 1
    return textwrap.dedent("".join(lines[first:last])).rstrip("\n") + "\n"


@dataclass(frozen=True)
class Ran:
    """What a command of cpgen did."""

    exit: int
    out: str
    err: str


def run(*arguments: str | Path) -> Ran:
    """Run the command line in this process and directory."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 0
    return Ran(code, out.getvalue(), err.getvalue())


def made_project(folder: Path, source: str | None = None, plan: str | None = None) -> None:
    """made.py with its class Model, and made.yaml, in `folder`."""
    (folder / "made.py").write_text(module_text() if source is None else source, "utf-8")
    (folder / "made.yaml").write_text(plan_text() if plan is None else plan, "utf-8")


MADE = ("emit", "--model", "made.py:Model", "--plan", "made.yaml", "--package", "made_package", "--cp", "4")
