"""RWKV-7's time mixing: token shift, the generalized delta rule, a norm per head, a bonus for the current token, an output gate.

Source: Peng et al. 2025, "RWKV-7 'Goose' with Expressive Dynamic State Evolution", section 4.1, and the authors' code for initial
values. Differences: initial values do not depend on the layer and are those of the authors' first one; projections are drawn as
those of all mixers, not from orthogonal matrices and zeros; the norm in front of the mixer is the block's RMSNorm, not LayerNorm.
Heads are split over the tensor group; every rank computes the token shift and the low-rank codes.

Shapes: B batch, T time, M d_model, H this rank's heads, K d_key, V d_value.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.kernels.generalized_delta_rule.recurrence import GeneralizedDeltaRule
from baton.kernels.protocol import State
from baton.models.forward_context import LOCAL, ForwardContext
from baton.models.mixer import Mixer
from baton.models.norm import unit
from baton.models.replicated_linear import ReplicatedLinear
from baton.models.settings.rwkv7 import V_FIRST, RWKV7Config
from baton.models.token_shift import difference, mixed
from baton.parallel.tensor import ColumnParallelLinear, RowParallelLinear

_STRONGEST = math.exp(-0.5)
"""The largest -g: no decay is below exp(-exp(-0.5)) = 0.545 (the paper's equation 12)."""

_UNIT_EPS = 1e-12
"""Added to a key's squared norm, for keys that are 0."""


class RWKV7(Mixer, settings=RWKV7Config):
    """x [B, T, M], pos [B, T], State {shift [B, 1, M], S [B, H, K, V]} -> y [B, T, M], State.

    With x^z = x_t + shift_mix_z (x_{t-1} - x_t) for z of r, w, k, v, a, g, lora(x) = W2 act(W1 x), and per head:

        g = -exp(-0.5) sigmoid(decay_bias + lora_tanh(x^w)),  a = sigmoid(rate_bias + lora(x^a)),  c = k k_k / |k k_k|
        S = (Diag(exp(g)) - (a c) c^T) S + k' v^T,   k' = k (1 + (a - 1) k_a)
        y = W ((GroupNorm(S^T r) + (r_k k')^T r v) lora_sigmoid(x^g))

    where r, k, v are projections of x^r, x^k, x^v; with value_residual "later", v = v + sigmoid(residual_bias + lora(x^v))
    (v_first - v).
    """

    config: RWKV7Config
    shift_mix: nn.ParameterDict
    r_proj: ColumnParallelLinear
    k_proj: ColumnParallelLinear
    v_proj: ColumnParallelLinear
    decay_code_proj: ReplicatedLinear
    decay_proj: ColumnParallelLinear
    rate_code_proj: ReplicatedLinear
    rate_proj: ColumnParallelLinear
    gate_code_proj: ReplicatedLinear
    gate_proj: ColumnParallelLinear
    residual_code_proj: ReplicatedLinear
    residual_proj: ColumnParallelLinear
    decay_bias: nn.Parameter
    rate_bias: nn.Parameter
    residual_bias: nn.Parameter
    k_k: nn.Parameter
    k_a: nn.Parameter
    r_k: nn.Parameter
    norm_weight: nn.Parameter
    norm_bias: nn.Parameter
    out_proj: RowParallelLinear

    def forward(
        self, x_BTM: Tensor, pos_BT: Tensor, state: State | None, forward_context: ForwardContext = LOCAL
    ) -> tuple[Tensor, State]:
        config, dtype, precise = self.config, x_BTM.dtype, self.k_k.dtype
        delta_BTM, final_state = difference(self, x_BTM, pos_BT, state, forward_context, self.k_k)
        x = {name: mixed(x_BTM, delta_BTM, mix_M) for name, mix_M in self.shift_mix.items()}
        r_BTHK = self.r_proj(x["r"]).unflatten(2, (-1, config.d_key))
        k_BTD = self.k_proj(x["k"])
        v_BTHV = self._values(x["v"], forward_context).unflatten(2, (-1, config.d_value))
        # biases are added in fp32: in bf16 their rounding would change decays and rates
        decay = self._low_rank("decay", torch.tanh(self.decay_code_proj(x["w"])))
        g_BTD = -_STRONGEST * torch.sigmoid(decay.to(precise) + self.decay_bias)
        a_BTD = torch.sigmoid(self._low_rank("rate", self.rate_code_proj(x["a"])).to(precise) + self.rate_bias)
        gate_BTD = self._low_rank("gate", torch.sigmoid(self.gate_code_proj(x["g"])))

        def heads(x_BTD: Tensor) -> Tensor:
            return x_BTD.unflatten(2, (-1, config.d_key))

        c_BTHK = unit(heads(k_BTD * self.k_k), _UNIT_EPS, precise=precise, dtype=dtype)
        k_BTHK = heads((k_BTD * torch.addcmul(1 - self.k_a, a_BTD, self.k_a)).to(dtype))
        inputs = r_BTHK, k_BTHK, v_BTHV, c_BTHK, -(heads(a_BTD) * c_BTHK), heads(g_BTD)
        before = None if state is None else {"S": state["S"]}
        o_BTHV, S = self.run_recurrence(GeneralizedDeltaRule(lower_bound=-_STRONGEST), inputs, pos_BT, before, forward_context)
        o_BTHV = F.layer_norm(o_BTHV.to(precise), (config.d_value,), eps=config.d_value * self.context.norm_eps)
        o_BTD = torch.addcmul(self.norm_bias, o_BTHV.flatten(2), self.norm_weight)
        bonus_BTHV = (r_BTHK * k_BTHK * self.r_k).sum(-1, keepdim=True) * v_BTHV
        return self.out_proj(((o_BTD + bonus_BTHV.flatten(2)) * gate_BTD).to(dtype)), final_state | S

    def _low_rank(self, name: str, code_BTR: Tensor) -> Tensor:
        own = getattr(self, f"{name}_code_proj").for_own_heads(code_BTR)
        found: Tensor = getattr(self, f"{name}_proj")(own)
        return found

    def _values(self, x_BTM: Tensor, forward_context: ForwardContext) -> Tensor:
        v_BTD: Tensor = self.v_proj(x_BTM)
        if self.config.value_residual == "first":
            forward_context.hand_on(V_FIRST, v_BTD)
        if self.config.value_residual != "later":
            return v_BTD
        share = self._low_rank("residual", self.residual_code_proj(x_BTM)).to(self.residual_bias.dtype) + self.residual_bias
        first_BTD = forward_context.handed_on(V_FIRST, v_BTD)
        return torch.addcmul(v_BTD.to(share.dtype), torch.sigmoid(share), first_BTD - v_BTD).to(v_BTD.dtype)
