"""Lattice's mixer: a memory of unit-norm slots that each token rotates, with a gated output.

Source: Karami & Mirrokni 2025 (arXiv 2504.05646, first version), "Lattice: Learning to Efficiently Compress the Memory". Heads are
split over the tensor group: a head's projections, convolutions and slots are on one rank.

Differences from the paper, and choices that it does not specify:

- Of the block, the paper says that q and k come from one projection and have a causal convolution each, and that a GELU gate
  follows the recurrence. The rest of the block is not specified there; the settings say where their defaults come from.
- The paper's final model has a forget gate (table 4, last row). Here forget is false by default, because with projection a forget
  gate is equivalent to a larger step; the models lattice-110m and lattice-340m set it.
- Keys of length 1 (unit_keys) and scaled values (value_scale) are not in the paper. Without them the recurrence is chaotic.
- Each document starts with the initial slots. There is no setting to carry slots from one document to the next.

Misprints in the paper:

- The losses of decoding and encoding have no factor of 1/2, so their gradients have a factor of 2. Equation 5 has it, equations 7,
  10 and 13 do not. The gradient of similarity has none. step_max=2 gives dec and enc the steps of equation 5.
- The proximal step for L1 (equations 17 and 18) names its gradient at S_t. It is at S_(t-1), the slots before the step.
- The text calls table 3 "table 4".
- The ablation (table 4) is said to be of 125M parameters. Its baselines are the 110M rows of table 2.

Shapes: B batch, T time, M d_model, H this rank's heads, K slots, V head_dim, W d_conv.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from baton.kernels.gate import gated
from baton.kernels.lattice import recurrence
from baton.kernels.protocol import State
from baton.kernels.short_conv.recurrence import ShortConv
from baton.models import cached_constants
from baton.models.forward_context import LOCAL, ForwardContext
from baton.models.mixer import Mixer
from baton.models.norm import SplitRMSNorm, unit
from baton.models.settings.lattice import LatticeConfig
from baton.parallel.tensor import ColumnParallelLinear, RowParallelLinear


class Lattice(Mixer, settings=LatticeConfig):
    """q, k = conv(W x), v = scale W_v x, y = W_o (RMSNorm(S q) gelu(W_g x)), S rotated by steps of step_max sigmoid(W_s x + bias).

    x [B, T, M], pos [B, T], State {conv [B, W-1, H K], S [B, H, V, K]} -> y [B, T, M], State. Both convolutions read the same
    inputs and share a tail. A state of None is the initial slots, which are not zero.
    """

    config: LatticeConfig
    in_proj: ColumnParallelLinear
    step_bias: nn.Parameter
    forget_bias: nn.Parameter
    conv_q: nn.Parameter
    conv_k: nn.Parameter
    S0: nn.Parameter
    norm: SplitRMSNorm
    out_proj: RowParallelLinear

    def forward(
        self, x_BTM: Tensor, pos_BT: Tensor, state: State | None, forward_context: ForwardContext = LOCAL
    ) -> tuple[Tensor, State]:
        config, dtype = self.config, self.step_bias.dtype
        qk_BTD, v_BTD, gate_BTD, gamma_BTH, *mu = self.in_proj(x_BTM, self.in_proj.local_splits)
        tail_is_read_again = replace(forward_context, overwrite_states=False)
        q_BTHK, _ = self._convolved(qk_BTD, "conv_q", pos_BT, state, tail_is_read_again)
        k_BTHK, conv = self._convolved(qk_BTD, "conv_k", pos_BT, state, forward_context)
        # biases are added in fp32: in bf16, sums change in coarse steps, and a gate near 1 rounds to 1
        gamma_BTH = torch.sigmoid(gamma_BTH.to(dtype) + self.step_bias)
        if config.step_max != 1.0:
            gamma_BTH = config.step_max * gamma_BTH
        scale = config.head_dim**-0.5 if config.value_scale is None else config.value_scale
        inputs = (
            self._unit(q_BTHK) if config.unit_queries else q_BTHK,
            self._unit(k_BTHK) if config.unit_keys else k_BTHK,
            (scale * v_BTD).unflatten(2, (-1, config.head_dim)),
            gamma_BTH,
            *((torch.sigmoid(mu[0].to(dtype) + self.forget_bias),) if config.forget else ()),
            *((config.sparsity * gamma_BTH,) if config.sparsity else ()),
            self._initial_slots(len(self.step_bias), x_BTM.device),
        )
        update = recurrence.Lattice(config.variant, config.project, forget=config.forget, sparse=bool(config.sparsity))
        o_BTHV, final_state = self.run_recurrence(
            update, inputs, pos_BT, None if state is None else {"S": state["S"]}, forward_context
        )
        o_BTD = o_BTHV.flatten(2)
        if config.output_norm:
            y_BTD = self.norm.gated(o_BTD, gate_BTD, activation="gelu")
        else:
            y_BTD = gated(o_BTD, gate_BTD, activation="gelu", dtype=gate_BTD.dtype)
        return self.out_proj(y_BTD), {"conv": conv, **final_state}

    def _convolved(
        self, x_BTD: Tensor, name: str, pos_BT: Tensor, state: State | None, forward_context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        weight: Tensor = getattr(self, name)
        if self.config.conv_bias:
            bias: Tensor = getattr(self, f"{name}_bias")
        else:
            bias = cached_constants.zeros(weight.shape[0], weight.dtype, weight.device)
        inputs, tail = (x_BTD, weight, bias), None if state is None else {"conv": state["conv"]}
        y_BTD, tail = self.run_recurrence(ShortConv(self.config.conv_activation), inputs, pos_BT, tail, forward_context)
        return y_BTD.unflatten(2, (-1, self.config.slots)), tail["conv"]

    def _initial_slots(self, heads: int, device: torch.device) -> Tensor:
        if self.config.initial_slots == "learned":
            return self.S0
        return cached_constants.eye(self.config.head_dim, self.config.slots, self.step_bias.dtype, device).expand(heads, -1, -1)

    def _unit(self, x_BTHK: Tensor) -> Tensor:
        """x / sqrt(|x|^2 + norm_eps)."""
        return unit(x_BTHK, self.context.norm_eps, precise=self.step_bias.dtype, dtype=x_BTHK.dtype)
