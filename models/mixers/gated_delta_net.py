"""Gated DeltaNet's mixer: DeltaNet with a decay per head and token, and with a gated output.

Source: Yang, Kautz & Hatamizadeh 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule", section 3.4; Mamba-2's code, to
which the paper refers, for the decay's initial values. Heads are split over the tensor group.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from baton.models.delta_rule import DeltaRuleMixer
from baton.models.settings.gated_delta_net import GatedDeltaNetConfig


class GatedDeltaNet(DeltaRuleMixer, settings=GatedDeltaNetConfig):
    """S = a (I - beta k k^T) S + beta k v^T, y = W (RMSNorm(S^T q / sqrt(d_key)) silu(W_g x)), a = exp(-exp(A_log) softplus(W_a x
    + dt_bias)); the rest as in DeltaNet."""

    config: GatedDeltaNetConfig
    A_log: nn.Parameter
    dt_bias: nn.Parameter

    def log_decay(self, extra: Sequence[Tensor]) -> Tensor:
        # the bias is added in fp32: in bf16 its rounding would change the decays in steps of 3 %
        return -self.A_log.exp() * F.softplus(extra[0].to(self.dt_bias.dtype) + self.dt_bias)

    def normed(self, o_BTHV: Tensor, extra: Sequence[Tensor]) -> Tensor:
        return self.norm.gated(o_BTHV, extra[1])
