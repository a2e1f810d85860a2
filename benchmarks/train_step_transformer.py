"""The Transformer that train_step.py compares with: Llama's layers in plain PyTorch, for torch.compile.

PyTorch's attention, RMSNorm, rotary positions, SwiGLU, no biases; all documents of a row are one to it, which saves it their mask.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.models.config import ModelConfig


class Transformer(nn.Module):
    """Tokens and labels, int64 [B, T], to the mean loss. tokens: at most so many a sequence."""

    def __init__(self, model: ModelConfig, tokens: int) -> None:
        super().__init__()
        own: Any
        own, mlp = model.mixers.values()
        self.embedding = nn.Embedding(model.padded_vocab_size, model.d_model)
        self.layers = nn.ModuleList(_Layer(model, own, mlp) for _ in range(model.n_layers))
        self.norm = nn.RMSNorm(model.d_model, model.norm_eps)
        self.head = nn.Linear(model.d_model, model.padded_vocab_size, bias=False)
        for matrix in (x for x in self.parameters() if x.dim() == 2):
            nn.init.normal_(matrix, std=0.02)
        if model.tie_embeddings:
            self.head.weight = self.embedding.weight
        frequencies = own.rope_theta ** (-torch.arange(0, own.head_dim, 2) / own.head_dim)
        angles = torch.outer(torch.arange(tokens), frequencies)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    @classmethod
    def has(cls, model: ModelConfig) -> bool:
        """Whether a model is one of these: full attention with rotary positions and an MLP in each layer, and no more."""
        kinds = [settings.kind for settings in model.mixers.values()]
        if kinds != ["attention", "swiglu"] or any(len(layer) != 2 for layer in model.layers):
            return False
        own: Any = model.mixers[model.layers[0][0]]
        plain = type(own)(heads=own.heads, head_dim=own.head_dim, kv_heads=own.kv_heads, rope_theta=own.rope_theta)
        return bool(own == plain and own.window is None and own.rope_theta)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


class _Layer(nn.Module):
    def __init__(self, model: ModelConfig, own: Any, mlp: Any) -> None:
        super().__init__()
        width, self.dim, self.heads, self.kv_heads = model.d_model, own.head_dim, own.heads, own.kv_heads or own.heads
        self.norms = nn.ModuleList(nn.RMSNorm(width, model.norm_eps) for _ in range(2))
        self.qkv = nn.Linear(width, (self.heads + 2 * self.kv_heads) * self.dim, bias=False)
        self.out = nn.Linear(self.heads * self.dim, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * mlp.width(width), bias=False)
        self.down = nn.Linear(mlp.width(width), width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, _ = x.shape
        heads = self.qkv(self.norms[0](x)).view(B, T, -1, self.dim).transpose(1, 2)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        q, k = (_turned(z, cos[:T], sin[:T]) for z in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv_heads != self.heads)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, -1))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
