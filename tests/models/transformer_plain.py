# Copyright 2026 The cpgen authors.
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""A transformer that is a plain torch module: no configuration, no gradient checkpointing, no mixin of diffusers."""

import torch
from torch import nn
from torch.nn import functional as F


class PlainAttention(nn.Module):
    """Self-attention, or cross-attention where there is a context."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(dim, dim)
        self.to_kv = nn.Linear(dim, 2 * dim)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, context=None):
        source = x if context is None else context
        query = self.to_q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key, value = self.to_kv(source).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(query, key, value)
        return self.to_out(out.transpose(1, 2).flatten(2))


class PlainBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn1 = PlainAttention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.attn2 = PlainAttention(dim, heads)
        self.ff = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x, context, shift):
        x = x + self.attn1(self.norm1(x) + shift)
        x = x + self.attn2(self.norm2(x), context)
        return x + self.ff(x)


class PlainTransformer(nn.Module):
    _supports_gradient_checkpointing = True  # as in classes that were copied from diffusers; nothing turns it on here

    def __init__(self, in_channels=4, num_heads=4, head_dim=8, num_layers=2, text_dim=16):
        super().__init__()
        dim = num_heads * head_dim
        self.proj_in = nn.Linear(in_channels, dim)
        self.text_proj = nn.Linear(text_dim, dim)
        self.time_proj = nn.Linear(1, dim)
        self.blocks = nn.ModuleList([PlainBlock(dim, num_heads) for _ in range(num_layers)])
        self.norm_out = nn.LayerNorm(dim)
        self.proj_out = nn.Linear(dim, in_channels)

    def forward(self, hidden_states, timestep, encoder_hidden_states):
        """hidden_states (B, S, C), timestep (B,), encoder_hidden_states (B, T, text_dim) -> (B, S, C)."""
        x = self.proj_in(hidden_states)
        context = self.text_proj(encoder_hidden_states)
        shift = self.time_proj(torch.cos(timestep)[:, None, None])
        for block in self.blocks:
            x = block(x, context, shift)
        return self.proj_out(self.norm_out(x))
