"""The block: x + mixer(norm(x)), with the residual stream in fp32."""

import torch
import torch.nn.functional as F
from megatron.core import ModelParallelConfig
from torch import Tensor, nn

from baton.kernels.protocol import State
from baton.models import init
from baton.models.config import ModelConfig
from baton.models.mixers.registry import build_mixer
from baton.parallel.layout import ParameterLayout, declare


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, in the weight's type (fp32)."""

    def __init__(self, d_model: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = declare(nn.Parameter(torch.empty(d_model)), ParameterLayout((d_model,), init.constant(1.0), decay=False))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class Block(nn.Module):
    """x [B, T, d_model] fp32, pos [B, T], State or None -> x, State."""

    def __init__(self, config: ModelConfig, megatron: ModelParallelConfig, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        # one residual add per block: n_layers of them in the whole model
        self.mixer = build_mixer(config.d_model, config.n_layers, config.mixer, megatron, compute_dtype)

    def forward(self, x: Tensor, pos: Tensor, state: State | None) -> tuple[Tensor, State]:
        y, state = self.mixer(self.norm(x), pos, state)
        return x + y, state
