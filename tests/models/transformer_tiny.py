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
"""A small image transformer in diffusers' style: joint, self- and cross-attention, a text mask, rope, checkpointing.

The project's own example: its emitted package is committed whole, to be read and compared.
"""

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.loaders import PeftAdapterMixin
from diffusers.models.attention import AttentionMixin
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.modeling_utils import ModelMixin
from torch import nn


def rotate(x, rope):
    """Turn pairs of channels of x (B, S, H, D) by the angles whose cosine and sine are in rope (S, D/2 each)."""
    cos, sin = (table[None, :, None, :] for table in rope)
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).type_as(x)


class TinyAttnProcessor:
    """Self-attention, or cross-attention where there is a context."""

    _attention_backend = None

    def __call__(self, attn, hidden_states, context=None, rope=None):
        source = hidden_states if context is None else context
        query = attn.to_q(hidden_states).unflatten(-1, (attn.heads, -1))
        key = attn.to_k(source).unflatten(-1, (attn.heads, -1))
        value = attn.to_v(source).unflatten(-1, (attn.heads, -1))
        if rope is not None:
            query, key = rotate(query, rope), rotate(key, rope)
        hidden_states = dispatch_attention_fn(query, key, value, backend=self._attention_backend)
        return attn.to_out(hidden_states.flatten(2))


class TinyJointAttnProcessor:
    """Attention of text and latent tokens together, text first."""

    _attention_backend = None

    def __call__(self, attn, hidden_states, text, text_mask=None, rope=None):
        text_length, latent_length = text.shape[1], hidden_states.shape[1]
        joint = torch.cat([text, hidden_states], dim=1)
        query = attn.to_q(joint).unflatten(-1, (attn.heads, -1))
        key = attn.to_k(joint).unflatten(-1, (attn.heads, -1))
        value = attn.to_v(joint).unflatten(-1, (attn.heads, -1))
        if rope is not None:
            query = torch.cat([query[:, :text_length], rotate(query[:, text_length:], rope)], dim=1)
            key = torch.cat([key[:, :text_length], rotate(key[:, text_length:], rope)], dim=1)
        mask = None
        if text_mask is not None:
            latent_mask = text_mask.new_ones(text_mask.shape[0], latent_length)
            mask = torch.cat([text_mask, latent_mask], dim=1)[:, None, None, :]
        joint = dispatch_attention_fn(query, key, value, attn_mask=mask, backend=self._attention_backend)
        text, hidden_states = attn.to_out(joint.flatten(2)).split([text_length, joint.shape[1] - text_length], dim=1)
        return text, hidden_states


class TinyAttention(nn.Module):
    def __init__(self, dim, heads, processor):
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(dim, dim)
        self.to_k = nn.Linear(dim, dim)
        self.to_v = nn.Linear(dim, dim)
        self.to_out = nn.Linear(dim, dim)
        self.processor = processor

    def get_processor(self):
        return self.processor

    def set_processor(self, processor):
        self.processor = processor

    def forward(self, *args, **kwargs):
        return self.processor(self, *args, **kwargs)


class TinyFeedForward(nn.Sequential):
    def __init__(self, dim):
        super().__init__(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))


class TinyJointBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.text_norm = nn.LayerNorm(dim)
        self.modulation = nn.Linear(dim, dim)
        self.attn = TinyAttention(dim, heads, TinyJointAttnProcessor())
        self.ff = TinyFeedForward(dim)
        self.text_ff = TinyFeedForward(dim)

    def forward(self, hidden_states, text, temb, text_mask, rope):
        shift = self.modulation(temb)[:, None]
        new_text, new = self.attn(self.norm(hidden_states) + shift, self.text_norm(text) + shift, text_mask, rope)
        hidden_states = hidden_states + new
        text = text + new_text
        return hidden_states + self.ff(hidden_states), text + self.text_ff(text)


class TinyBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn1 = TinyAttention(dim, heads, TinyAttnProcessor())
        self.norm2 = nn.LayerNorm(dim)
        self.attn2 = TinyAttention(dim, heads, TinyAttnProcessor())
        self.gate = nn.Linear(dim, dim)
        self.ff = TinyFeedForward(dim)

    def forward(self, hidden_states, context, temb, rope):
        hidden_states = hidden_states + self.attn1(self.norm1(hidden_states), rope=rope)
        hidden_states = hidden_states + self.attn2(self.norm2(hidden_states), context)
        return hidden_states + self.gate(temb)[:, None] * self.ff(hidden_states)


class TinyTransformer2DModel(ModelMixin, ConfigMixin, PeftAdapterMixin, AttentionMixin):
    _supports_gradient_checkpointing = True
    _no_split_modules = ["TinyJointBlock", "TinyBlock"]

    @register_to_config
    def __init__(
        self,
        in_channels: int = 4,
        num_attention_heads: int = 4,
        attention_head_dim: int = 8,
        num_joint_layers: int = 1,
        num_layers: int = 1,
        text_dim: int = 16,
        context_dim: int = 16,
    ):
        super().__init__()
        dim = num_attention_heads * attention_head_dim
        self.proj_in = nn.Linear(in_channels, dim)
        self.text_proj = nn.Linear(text_dim, dim)
        self.context_proj = nn.Linear(context_dim, dim)
        self.time_proj = nn.Linear(1, dim)
        self.joint_blocks = nn.ModuleList([TinyJointBlock(dim, num_attention_heads) for _ in range(num_joint_layers)])
        self.blocks = nn.ModuleList([TinyBlock(dim, num_attention_heads) for _ in range(num_layers)])
        self.norm_out = nn.LayerNorm(dim)
        self.proj_out = nn.Linear(dim, in_channels)
        self.gradient_checkpointing = False

    def positions(self, length, device):
        """Rope tables (S, D/2) for that many tokens."""
        channels = torch.arange(0, 1, 2 / self.config.attention_head_dim, device=device)
        angles = torch.arange(length, device=device)[:, None] / 100**channels
        return angles.cos(), angles.sin()

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        context: torch.Tensor,
        timestep: torch.Tensor,
        encoder_attention_mask: torch.Tensor | None = None,
        return_dict: bool = True,
    ):
        """
        Args:
            hidden_states: `(batch, channels, height, width)`.
            encoder_hidden_states: `(batch, text tokens, text_dim)`, attended to jointly.
            context: `(batch, context tokens, context_dim)`, for cross-attention.
            timestep: `(batch,)`.
            encoder_attention_mask: bool `(batch, text tokens)`, false for padding.
        """
        batch, channels, height, width = hidden_states.shape
        hidden_states = self.proj_in(hidden_states.flatten(2).transpose(1, 2))
        text = self.text_proj(encoder_hidden_states)
        context = self.context_proj(context)
        temb = self.time_proj(timestep.to(hidden_states.dtype)[:, None])
        rope = self.positions(hidden_states.shape[1], hidden_states.device)

        for block in self.joint_blocks:
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                hidden_states, text = self._gradient_checkpointing_func(
                    block, hidden_states, text, temb, encoder_attention_mask, rope
                )
            else:
                hidden_states, text = block(hidden_states, text, temb, encoder_attention_mask, rope)

        for block in self.blocks:
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                hidden_states = self._gradient_checkpointing_func(block, hidden_states, context, temb, rope)
            else:
                hidden_states = block(hidden_states, context, temb, rope)

        hidden_states = self.proj_out(self.norm_out(hidden_states))
        output = hidden_states.transpose(1, 2).reshape(batch, channels, height, width)
        if not return_dict:
            return (output,)
        return Transformer2DModelOutput(sample=output)
