"""A small joint-attention transformer of this project's own, as a third-party class that `verify` loads by its path.

It has what Wan lacks: a text stream, a padding mask and two outputs.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass
class MaskedOutput:
    sample: torch.Tensor
    text: torch.Tensor


class JointAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, width)
        self.to_k = nn.Linear(width, width)  # its bias has no gradient under softmax, only rounding
        self.to_v = nn.Linear(width, width)
        self.to_out = nn.Linear(width, width)

    def forward(self, tokens, mask):
        query, key, value = (
            project(tokens).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.to_q, self.to_k, self.to_v)
        )
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.to_out(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = JointAttention(width, heads)
        self.gate = nn.Parameter(torch.zeros(width))

    def forward(self, hidden_states, text, mask):
        tokens = torch.cat([text, hidden_states], dim=1)
        normed = self.norm(tokens.float()).type_as(tokens)
        tokens = tokens + self.gate * self.attention(normed, mask)
        return tokens[:, text.shape[1] :], tokens[:, : text.shape[1]]


class MaskedTransformer(nn.Module):
    _supports_gradient_checkpointing = True

    def __init__(self, channels: int = 4, width: int = 32, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.proj_in = nn.Linear(channels, width)
        self.text_in = nn.Linear(channels, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.proj_out = nn.Linear(width, channels)
        self.gradient_checkpointing = False

    def enable_gradient_checkpointing(self):
        self.gradient_checkpointing = True

    def forward(self, hidden_states, text, text_mask, return_dict=True):
        ones = text_mask.new_ones(text_mask.shape[0], hidden_states.shape[1])
        mask = torch.cat([text_mask, ones], dim=1)[:, None, None, :].bool()
        hidden_states = self.proj_in(hidden_states)
        text = self.text_in(text)
        for block in self.blocks:
            if self.gradient_checkpointing:
                hidden_states, text = checkpoint(block, hidden_states, text, mask, use_reentrant=False)
            else:
                hidden_states, text = block(hidden_states, text, mask)
        hidden_states = self.proj_out(hidden_states)
        if not return_dict:
            return hidden_states, text
        return MaskedOutput(sample=hidden_states, text=text)
