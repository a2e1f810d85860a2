"""Mixers by the kind that a configuration names. A test of every mixer runs over this table."""

import torch
from megatron.core import ModelParallelConfig
from torch import nn

from baton.models.config import LonghornConfig, MambaConfig
from baton.models.mixers.longhorn import Longhorn
from baton.models.mixers.mamba import Mamba

MIXERS = {"mamba": (MambaConfig, Mamba), "longhorn": (LonghornConfig, Longhorn)}


def build_mixer(
    d_model: int,
    residual_adds: int,
    config: MambaConfig | LonghornConfig,
    megatron: ModelParallelConfig,
    compute_dtype: torch.dtype,
) -> nn.Module:
    """The mixer of config.kind. residual_adds: how often the whole model adds to its residual stream; scales the output's init."""
    _, mixer = MIXERS[config.kind]
    return mixer(d_model, residual_adds, config, megatron, compute_dtype)
