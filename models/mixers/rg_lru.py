"""Griffin's recurrent block: a gated branch beside a convolution and the real-gated linear recurrent unit (RG-LRU).

Source: De et al. 2024 (arXiv:2402.19427), "Griffin: Mixing Gated Linear Recurrences with Local Attention for Efficient Language
Models", sections 2.3 and 2.4. Channels are split over the tensor group, whole blocks of the gates' weights to a rank.

Differences from the paper, and choices that it does not specify:

- At the first token of a document the input is not scaled by sqrt(1 - a^2), as in the released code (RecurrentGemma).
- The gates have biases, as in equations 1 and 2; the projections have none. RecurrentGemma's have, and its GELU is the tanh
  approximation.
- The derivative of the square root is exact, and finite because a < 1. The released code clips it at 1000.

Shapes: B batch, T time, M d_model, D this rank's channels (lru_width), H this rank's blocks, K channels of a block, W d_conv.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.kernels.gate import gated
from baton.kernels.protocol import State
from baton.kernels.rg_lru import recurrence
from baton.kernels.short_conv.recurrence import ShortConv
from baton.models.forward_context import LOCAL, ForwardContext
from baton.models.mixer import Mixer
from baton.models.settings.rg_lru import RGLRUConfig
from baton.parallel.tensor import ColumnParallelLinear, RowParallelLinear


class RGLRU(Mixer, settings=RGLRUConfig):
    """h = a h + sqrt(1 - a^2) i x, a = sigmoid(Lambda)^(c r), r and i gates of x, y = W (h gelu(W_g x)).

    x [B, T, M], pos [B, T], State {conv [B, W-1, D], h [B, D]} -> y [B, T, M], State.
    """

    config: RGLRUConfig
    in_proj: ColumnParallelLinear
    conv_weight: nn.Parameter
    conv_bias: nn.Parameter
    W_a: nn.Parameter
    b_a: nn.Parameter
    W_x: nn.Parameter
    b_x: nn.Parameter
    Lambda: nn.Parameter
    out_proj: RowParallelLinear

    def forward(
        self, x_BTM: Tensor, pos_BT: Tensor, state: State | None, forward_context: ForwardContext = LOCAL
    ) -> tuple[Tensor, State]:
        x_BTD, gate_BTD = self.in_proj(x_BTM, self.in_proj.local_splits)
        tail = None if state is None else {"conv": state["conv"]}
        conv_inputs = (x_BTD, self.conv_weight, self.conv_bias)
        x_BTD, tail = self.run_recurrence(ShortConv(), conv_inputs, pos_BT, tail, forward_context)
        r_BTD, i_BTD = self._gate(x_BTD, self.W_a, self.b_a), self._gate(x_BTD, self.W_x, self.b_x)
        log_a_BTD = self.config.c * F.logsigmoid(self.Lambda) * r_BTD
        inputs = ((i_BTD * x_BTD).to(x_BTD.dtype), log_a_BTD)
        initial = None if state is None else {"h": state["h"]}
        y_BTD, h = self.run_recurrence(recurrence.RGLRU(), inputs, pos_BT, initial, forward_context)
        return self.out_proj(gated(y_BTD, gate_BTD, activation="gelu", dtype=gate_BTD.dtype)), {**tail, **h}

    def _gate(self, x_BTD: Tensor, weight_HKK: Tensor, bias_D: Tensor) -> Tensor:
        """sigmoid(W x + b) for a block-diagonal W, in the parameters' dtype; the product is in x's."""
        x_BTHK = x_BTD.unflatten(2, (len(weight_HKK), -1))
        logits_BTHK = torch.einsum("bthi,hij->bthj", x_BTHK, weight_HKK.to(x_BTD.dtype))
        return torch.sigmoid(logits_BTHK.flatten(2).to(bias_D.dtype) + bias_D)
