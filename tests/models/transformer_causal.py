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
"""A small autoregressive audio transformer in diffusers' style: causal and block-causal attention, grouped queries.

A spectrogram's latents are frames of bins. They form one sequence, frame after frame; text stands ahead of it.
"""

import torch
import torch.nn.functional as F
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


def project(attn, hidden_states, rope=None):
    """Query, key and value as (B, S, heads, D); key and value may have fewer heads."""
    query = attn.norm_q(attn.to_q(hidden_states).unflatten(-1, (attn.heads, -1)))
    key = attn.norm_k(attn.to_k(hidden_states).unflatten(-1, (attn.kv_heads, -1)))
    value = attn.to_v(hidden_states).unflatten(-1, (attn.kv_heads, -1))
    if rope is not None:
        query, key = rotate(query, rope), rotate(key, rope)
    return query, key, value


class CausalAttnProcessor:
    """A token sees itself and those ahead of it. Torch's own attention, heads first."""

    def __call__(self, attn, hidden_states, rope=None, frame_size=None):
        query, key, value = project(attn, hidden_states, rope)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        hidden_states = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=attn.heads != attn.kv_heads
        )
        hidden_states = hidden_states.transpose(1, 2).flatten(2)
        return attn.to_out(hidden_states)


class DispatchedCausalAttnProcessor:
    """The same, through diffusers' dispatcher, tokens first."""

    _attention_backend = None

    def __call__(self, attn, hidden_states, rope=None, frame_size=None):
        query, key, value = project(attn, hidden_states, rope)
        hidden_states = dispatch_attention_fn(
            query=query,
            key=key,
            value=value,
            is_causal=True,
            enable_gqa=attn.heads != attn.kv_heads,
            backend=self._attention_backend,
        )
        return attn.to_out(hidden_states.flatten(2))


class BlockCausalAttnProcessor:
    """A token sees all of its own frame and of the frames ahead of it."""

    def __call__(self, attn, hidden_states, rope=None, frame_size=None):
        length = hidden_states.shape[1]
        frame = torch.arange(length, device=hidden_states.device) // frame_size
        mask = (frame[:, None] >= frame[None, :])[None, None]
        query, key, value = project(attn, hidden_states, rope)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        hidden_states = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, enable_gqa=attn.heads != attn.kv_heads
        )
        hidden_states = hidden_states.transpose(1, 2).flatten(2)
        return attn.to_out(hidden_states)


class JointCausalAttnProcessor:
    """Causal attention of text and latent tokens together, text first."""

    _attention_backend = None

    def __call__(self, attn, hidden_states, text, rope=None):
        text_length, latent_length = text.shape[1], hidden_states.shape[1]
        query, key, value = project(attn, torch.cat([text, hidden_states], dim=1), rope)
        joint = dispatch_attention_fn(
            query,
            key,
            value,
            is_causal=True,
            enable_gqa=attn.heads != attn.kv_heads,
            backend=self._attention_backend,
        )
        text, hidden_states = attn.to_out(joint.flatten(2)).split([text_length, latent_length], dim=1)
        return text, hidden_states


PROCESSORS = {
    "causal": CausalAttnProcessor,
    "dispatched": DispatchedCausalAttnProcessor,
    "block": BlockCausalAttnProcessor,
}


class CausalAttention(nn.Module):
    def __init__(self, dim, heads, kv_heads, head_dim, processor):
        super().__init__()
        self.heads = heads
        self.kv_heads = kv_heads
        self.to_q = nn.Linear(dim, heads * head_dim, bias=False)
        self.to_k = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.to_v = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.norm_q = nn.RMSNorm(head_dim, eps=1e-6)
        self.norm_k = nn.RMSNorm(head_dim, eps=1e-6)
        self.to_out = nn.Linear(heads * head_dim, dim)
        self.processor = processor

    def get_processor(self):
        return self.processor

    def set_processor(self, processor):
        self.processor = processor

    def forward(self, *args, **kwargs):
        return self.processor(self, *args, **kwargs)


class CausalFeedForward(nn.Sequential):
    def __init__(self, dim):
        super().__init__(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))


class CausalJointBlock(nn.Module):
    def __init__(self, dim, heads, kv_heads, head_dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.text_norm = nn.LayerNorm(dim)
        self.modulation = nn.Linear(dim, dim)
        self.attn = CausalAttention(dim, heads, kv_heads, head_dim, JointCausalAttnProcessor())
        self.ff = CausalFeedForward(dim)
        self.text_ff = CausalFeedForward(dim)

    def forward(self, hidden_states, text, temb, rope):
        shift = self.modulation(temb)[:, None]
        new_text, new = self.attn(self.norm(hidden_states) + shift, self.text_norm(text), rope)
        hidden_states = hidden_states + new
        text = text + new_text
        return hidden_states + self.ff(hidden_states), text + self.text_ff(text)


class CausalBlock(nn.Module):
    def __init__(self, dim, heads, kv_heads, head_dim, processor):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attn = CausalAttention(dim, heads, kv_heads, head_dim, processor)
        self.gate = nn.Linear(dim, dim)
        self.ff = CausalFeedForward(dim)

    def forward(self, hidden_states, temb, rope, frame_size):
        hidden_states = hidden_states + self.attn(self.norm(hidden_states), rope=rope, frame_size=frame_size)
        return hidden_states + self.gate(temb)[:, None] * self.ff(hidden_states)


class CausalTransformer2DModel(ModelMixin, ConfigMixin, PeftAdapterMixin, AttentionMixin):
    _supports_gradient_checkpointing = True
    _no_split_modules = ["CausalJointBlock", "CausalBlock"]  # noqa: RUF012 (diffusers' style)

    @register_to_config
    def __init__(
        self,
        in_channels: int = 4,
        num_attention_heads: int = 6,
        num_key_value_heads: int = 2,
        attention_head_dim: int = 8,
        num_joint_layers: int = 1,
        layer_types: tuple[str, ...] = ("causal", "dispatched", "block"),
        text_dim: int = 16,
    ):
        super().__init__()
        dim = num_attention_heads * attention_head_dim
        sizes = (dim, num_attention_heads, num_key_value_heads, attention_head_dim)
        self.proj_in = nn.Linear(in_channels, dim)
        self.text_proj = nn.Linear(text_dim, dim)
        self.time_proj = nn.Linear(1, dim)
        self.joint_blocks = nn.ModuleList([CausalJointBlock(*sizes) for _ in range(num_joint_layers)])
        self.blocks = nn.ModuleList([CausalBlock(*sizes, PROCESSORS[kind]()) for kind in layer_types])
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
        timestep: torch.Tensor,
        return_dict: bool = True,
    ):
        """
        Args:
            hidden_states: `(batch, channels, frames, bins)`.
            encoder_hidden_states: `(batch, text tokens, text_dim)`.
            timestep: `(batch,)`.
        """
        batch, channels, frames, bins = hidden_states.shape
        hidden_states = self.proj_in(hidden_states.flatten(2).transpose(1, 2))
        text = self.text_proj(encoder_hidden_states)
        temb = self.time_proj(timestep.to(hidden_states.dtype)[:, None])
        joint_rope = self.positions(text.shape[1] + hidden_states.shape[1], hidden_states.device)
        rope = tuple(table[text.shape[1] :] for table in joint_rope)

        for block in self.joint_blocks:
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                hidden_states, text = self._gradient_checkpointing_func(block, hidden_states, text, temb, joint_rope)
            else:
                hidden_states, text = block(hidden_states, text, temb, joint_rope)

        for block in self.blocks:
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                hidden_states = self._gradient_checkpointing_func(block, hidden_states, temb, rope, bins)
            else:
                hidden_states = block(hidden_states, temb, rope, bins)

        hidden_states = self.proj_out(self.norm_out(hidden_states))
        output = hidden_states.transpose(1, 2).reshape(batch, channels, frames, bins)
        if not return_dict:
            return (output,)
        return Transformer2DModelOutput(sample=output)
