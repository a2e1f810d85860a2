"""RWKV-6's time mixing: a token shift that depends on the token, a decay per key channel, a bonus for the current token, a norm per
head, an output gate.

Source: Peng et al. 2024, "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence", section 4, and the authors' code
for initial values. Differences: initial values do not depend on the layer (those of the first one; the bonus of a middle one,
without its zigzag); projections are drawn as those of all mixers, not from orthogonal matrices and zeros; the norm in front of the
mixer is the block's RMSNorm, not LayerNorm. Heads are split over the tensor group; every rank computes the token shift.

Shapes: B batch, T time, M d_model, H this rank's heads, K d_key, V d_value, D this rank's channels of all heads, R low rank.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.kernels.gate import gated
from baton.kernels.protocol import State
from baton.kernels.wkv6.recurrence import WKV6
from baton.models.forward_context import LOCAL, ForwardContext
from baton.models.mixer import Mixer
from baton.models.replicated_linear import ReplicatedLinear
from baton.models.settings.rwkv6 import RWKV6Config
from baton.models.token_shift import difference, mixed
from baton.parallel.tensor import ColumnParallelLinear, RowParallelLinear

_STRONGEST = 5.0
"""The largest log(-g). The decay exp(-exp(5)) is 0 in float32, and so is its gradient; g itself must stay finite."""


class RWKV6(Mixer, settings=RWKV6Config):
    """x [B, T, M], pos [B, T], State {shift [B, 1, M], S [B, H, K, V]} -> y [B, T, M], State.

    With delta = x_{t-1} - x_t, x^z = x_t + (shift_mix_z + W_z tanh(W_code (x_t + shift_mix_x delta))_z) delta for z of r, w, k, v
    and g, and r, k, v, gate the projections of x^r, x^k, x^v, x^g, per head:

        S_t = Diag(exp(-exp(decay_bias + W2 tanh(W1 x^w)))) S_{t-1} + k v^T
        y = W (GroupNorm((S_{t-1} + Diag(bonus) k v^T)^T r) silu(gate))
    """

    config: RWKV6Config
    shift_mix: nn.ParameterDict
    mix_code_proj: ReplicatedLinear
    mix_r_proj: ReplicatedLinear
    mix_w_proj: ReplicatedLinear
    mix_k_proj: ReplicatedLinear
    mix_v_proj: ReplicatedLinear
    mix_g_proj: ReplicatedLinear
    r_proj: ColumnParallelLinear
    k_proj: ColumnParallelLinear
    v_proj: ColumnParallelLinear
    gate_proj: ColumnParallelLinear
    decay_code_proj: ReplicatedLinear
    decay_proj: ColumnParallelLinear
    decay_bias: nn.Parameter
    bonus: nn.Parameter
    norm_weight: nn.Parameter
    norm_bias: nn.Parameter
    out_proj: RowParallelLinear

    def forward(
        self, x_BTM: Tensor, pos_BT: Tensor, state: State | None, forward_context: ForwardContext = LOCAL
    ) -> tuple[Tensor, State]:
        config, dtype, precise = self.config, x_BTM.dtype, self.bonus.dtype
        delta_BTM, final_state = difference(self, x_BTM, pos_BT, state, forward_context, self.bonus)
        x = self._mixed(x_BTM, delta_BTM)
        r_BTHK = self.r_proj(x["r"]).unflatten(2, (-1, config.d_key))
        k_BTHK = self.k_proj(x["k"]).unflatten(2, (-1, config.d_key))
        v_BTHV = self.v_proj(x["v"]).unflatten(2, (-1, config.d_value))
        gate_BTD = self.gate_proj(x["g"])
        code_BTR = self.decay_code_proj.for_own_heads(torch.tanh(self.decay_code_proj(x["w"])))
        # the bias is added in fp32: in bf16 its rounding would change the decays
        rate_BTD = self.decay_proj(code_BTR).to(precise) + self.decay_bias
        g_BTHK = -torch.exp(rate_BTD.clamp(max=_STRONGEST)).unflatten(2, (-1, config.d_key))
        inputs = r_BTHK, k_BTHK, v_BTHV, g_BTHK, self.bonus.view(-1, config.d_key)
        before = None if state is None else {"S": state["S"]}
        o_BTHV, S = self.run_recurrence(WKV6(), inputs, pos_BT, before, forward_context)
        o_BTHV = F.layer_norm(o_BTHV.to(precise), (config.d_value,), eps=config.d_value * self.context.norm_eps)
        o_BTD = torch.addcmul(self.norm_bias, o_BTHV.flatten(2), self.norm_weight)
        return self.out_proj(gated(o_BTD, gate_BTD, dtype=dtype)), final_state | S

    def _mixed(self, x_BTM: Tensor, delta_BTM: Tensor) -> dict[str, Tensor]:
        """What each projection reads, by its letter."""
        code = torch.tanh(self.mix_code_proj(mixed(x_BTM, delta_BTM, self.shift_mix["x"])))
        codes = code.split(self.config.mix_low_rank_dim, dim=-1)
        found = {}
        for name, code_BTR in zip(self.config.mixes, codes, strict=True):
            mix_M: Tensor = self.shift_mix[name]
            added_BTM = self.get_submodule(f"mix_{name}_proj")(code_BTR)
            # rounded to the dtype of the result, for the backward pass keeps it
            found[name] = mixed(x_BTM, delta_BTM, (added_BTM.to(mix_M.dtype) + mix_M).to(x_BTM.dtype))
        return found
