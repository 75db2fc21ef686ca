"""A third party's file in diffusers' convention whose attention cpgen cannot see: written into a test's directory."""

from __future__ import annotations

from pathlib import Path

TEMPLATE = """
import torch
import torch.nn.functional as F
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import nn
{imports}

{helper}

class Attn(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.parallel = None

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).unbind(2)
        {call}
        return out.flatten(2)


class Model(nn.Module):
    _cp_plan = {{
        "blocks.0": {{"x": ContextParallelInput(split_dim=1, expected_dims=3)}},
        "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
    }}

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Attn() for _ in range(1)])
        self.proj_out = nn.Linear(8, 8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        x = self.proj_out(x)
        return (x,)
"""

SEEN = "out = dispatch_attention_fn(q, k, v, parallel_config=self.parallel)"
HIDDEN = {
    "an alias from an import": (
        "from diffusers.models.attention_dispatch import dispatch_attention_fn as attend",
        "",
        "out = attend(q, k, v, parallel_config=self.parallel)",
    ),
    "a function of the file": (
        "",
        "def attend(q, k, v, p):\n    return dispatch_attention_fn(q, k, v, parallel_config=p)",
        "out = attend(q, k, v, self.parallel)",
    ),
    "a variable": ("", "", "fn = dispatch_attention_fn; out = fn(q, k, v, parallel_config=self.parallel)"),
    "written out": (
        "",
        "",
        "out = torch.einsum('bhqk,bkhd->bqhd', torch.einsum('bqhd,bkhd->bhqk', q, k).softmax(-1), v)",
    ),
    "another kernel": ("from other import kernel", "", "out = kernel(q, k, v)"),
}


def write(folder: Path, imports: str = "", helper: str = "", call: str = SEEN) -> Path:
    path = folder / "third.py"
    path.write_text(TEMPLATE.format(imports=imports, helper=helper, call=call))
    return path
