import torch.nn as nn
from backend import dispatch_attention_fn


class Processor:
    def __call__(self, attn, query, key, value):
        out = dispatch_attention_fn(query, key, value)
        return out + query


class Model(nn.Module):
    def __init__(self, heads=4):
        self.blocks = nn.ModuleList()
        self.proj_out = nn.Linear(1, 1)

    def forward(self, hidden_states):
        for block in self.blocks:
            hidden_states = block(hidden_states)
        hidden_states = self.proj_out(hidden_states)
        return hidden_states
