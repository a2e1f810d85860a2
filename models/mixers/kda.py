"""Kimi Delta Attention's mixer: the delta rule with a decay per key channel and token, and with a gated output.

Source: Kimi Team 2025, "Kimi Linear: An Expressive, Efficient Attention Architecture", section 4; flash-linear-attention's layer
for the decay's form and initial values, which are Mamba-2's. Heads are split over the tensor group; every rank computes the
low-rank codes of the decay and of the gate.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from baton.models.delta_rule import DeltaRuleMixer
from baton.models.replicated_linear import ReplicatedLinear
from baton.models.settings.kda import KDAConfig
from baton.parallel.tensor import ColumnParallelLinear


class KDA(DeltaRuleMixer, settings=KDAConfig):
    """S = (I - beta k k^T) Diag(a) S + beta k v^T, y = W (RMSNorm(S^T q / sqrt(d_key)) sigmoid(low rank of x)), a = exp(-exp(A_log)
    softplus(low rank of x + dt_bias)); the rest as in DeltaNet."""

    config: KDAConfig
    decay_code_proj: ReplicatedLinear
    decay_proj: ColumnParallelLinear
    gate_code_proj: ReplicatedLinear
    gate_proj: ColumnParallelLinear
    A_log: nn.Parameter
    dt_bias: nn.Parameter
    gate_bias: nn.Parameter

    def projected(self, x_BTM: Tensor) -> Sequence[Tensor]:
        decay_code = self.decay_code_proj.for_own_heads(self.decay_code_proj(x_BTM))
        gate_code = self.gate_code_proj.for_own_heads(self.gate_code_proj(x_BTM))
        return (*super().projected(x_BTM), self.decay_proj(decay_code), self.gate_proj(gate_code))

    def log_decay(self, extra: Sequence[Tensor]) -> Tensor:
        # the bias is added in fp32: in bf16 its rounding would change the decays in steps of 3 %
        logits_BTHK = (extra[0].to(self.dt_bias.dtype) + self.dt_bias).unflatten(2, (-1, self.config.d_key))
        return -self.A_log.exp()[:, None] * F.softplus(logits_BTHK)

    def normed(self, o_BTHV: Tensor, extra: Sequence[Tensor]) -> Tensor:
        z_BTV = (extra[1] + self.gate_bias).to(extra[1].dtype) if self.config.gate_bias else extra[1]
        return self.norm.gated(o_BTHV, z_BTV, activation="sigmoid")
