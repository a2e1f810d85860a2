"""The mixer of test-time training (TTT-Linear, TTT-MLP): a model per head that gradient steps train on the sequence.

Source: Sun et al. 2024 (arXiv:2407.04620), "Learning to (Learn at Test Time): RNNs with Expressive Hidden States", and the authors'
code for the block with a Mamba backbone: q and k are convolutions of one projection, and a GELU gate follows. Heads are split over
the tensor group.

Differences from the authors' code:

- The norm before the gate is RMSNorm over all heads, as in Baton's other mixers, instead of LayerNorm.
- The gate is GELU itself instead of its tanh approximation. The inner MLP has the approximation, whose derivative is a part of the
  model.
- token_scale is the sum of the code's 1 / n and of its learned difference from it.
- A document begins with the initial weights, in the first token of a mini-batch.

Shapes: B batch, T time, M d_model, H this rank's heads, D head_dim, K tokens of a mini-batch, W d_conv.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.kernels.protocol import State
from baton.kernels.rotary import rotary
from baton.kernels.short_conv.recurrence import ShortConv
from baton.kernels.ttt import recurrence
from baton.kernels.ttt.reference import NORM_EPS
from baton.models.forward_context import LOCAL, ForwardContext
from baton.models.mixer import Mixer
from baton.models.norm import SplitRMSNorm
from baton.models.settings.ttt import TTTConfig
from baton.parallel.tensor import ColumnParallelLinear, RowParallelLinear


class TTT(Mixer, settings=TTTConfig):
    """q, k = rotated conv(W x), z = f(q), y = W_o (RMSNorm(q + LayerNorm(z)) gelu(W_g x)); f is trained on each token with a step
    of base_lr / head_dim sigmoid(W_s x + bias) max(0, token_scale_n) after n tokens of the mini-batch.

    x [B, T, M], pos [B, T], State {conv [B, W-1, H D], W1, b1 (, W2, b2), W1_grad, ...} -> y [B, T, M], State.
    """

    config: TTTConfig
    in_proj: ColumnParallelLinear
    conv_q: nn.Parameter
    conv_q_bias: nn.Parameter
    conv_k: nn.Parameter
    conv_k_bias: nn.Parameter
    step_bias: nn.Parameter
    token_scale: nn.Parameter
    inner_norm_weight: nn.Parameter
    inner_norm_bias: nn.Parameter
    norm: SplitRMSNorm
    out_proj: RowParallelLinear

    def forward(
        self, x_BTM: Tensor, pos_BT: Tensor, state: State | None, forward_context: ForwardContext = LOCAL
    ) -> tuple[Tensor, State]:
        config, dtype = self.config, self.step_bias.dtype
        qk_BTD, v_BTD, gate_BTD, step_BTH = self.in_proj(x_BTM, self.in_proj.local_splits)
        tail_is_read_again = replace(forward_context, overwrite_states=False)
        q_BTHD, _ = self._convolved(qk_BTD, "conv_q", pos_BT, state, tail_is_read_again)
        k_BTHD, conv = self._convolved(qk_BTD, "conv_k", pos_BT, state, forward_context)
        q_BTHD, k_BTHD = rotary(q_BTHD, k_BTHD, pos_BT % config.mini_batch, config.rates)
        weights = config.weight_shapes(self.context.d_model)
        inputs = (
            q_BTHD,
            k_BTHD,
            v_BTD.unflatten(2, (-1, config.head_dim)),
            config.learning_rate / config.head_dim * torch.sigmoid(step_BTH.to(dtype) + self.step_bias),
            self.token_scale.clamp(min=0.0),
            self.inner_norm_weight,
            self.inner_norm_bias,
            *(getattr(self, name) for name in weights),
        )
        names = (*weights, *(f"{name}_grad" for name in weights))
        initial = None if state is None else {name: state[name] for name in names}
        z_BTHD, trained = self.run_recurrence(recurrence.TTT(config.model), inputs, pos_BT, initial, forward_context)
        unit_BTHD = F.layer_norm(z_BTHD.to(dtype), (config.head_dim,), eps=NORM_EPS)
        o_BTHD = q_BTHD + unit_BTHD * self.inner_norm_weight + self.inner_norm_bias
        y_BTD = self.norm.gated(o_BTHD.flatten(2), gate_BTD, activation="gelu")
        return self.out_proj(y_BTD), {"conv": conv, **trained}

    def _convolved(
        self, x_BTD: Tensor, name: str, pos_BT: Tensor, state: State | None, forward_context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        inputs = (x_BTD, getattr(self, name), getattr(self, f"{name}_bias"))
        tail = None if state is None else {"conv": state["conv"]}
        y_BTD, tail = self.run_recurrence(ShortConv(), inputs, pos_BT, tail, forward_context)
        return y_BTD.unflatten(2, (-1, self.config.head_dim)), tail["conv"]
