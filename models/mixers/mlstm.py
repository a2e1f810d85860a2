"""mLSTM as a layer of xLSTM 7B: a matrix memory with exponential input gates and a normalizer, a norm per head, an output gate.

Source: Beck et al. 2024, "xLSTM: Extended Long Short-Term Memory", section 2.3, and Beck et al. 2025, "xLSTM 7B: A Recurrent LLM
for Fast and Efficient Inference", section 3, for the layer around it: no convolution, no up-projection (a sub-block `swiglu`
follows), soft-capped gates, LayerNorm per head with a weight per channel, initial values of the gates. Differences to the released
code: it adds 1e-6 to the normalizer in units of its running maximum, which `kernels.mlstm.op` does without; projections are drawn
as those of all mixers. Heads are split over the tensor group.

Shapes: B batch, T time, M d_model, H this rank's heads, K d_key, V d_value, D this rank's channels of all heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.kernels.gated_norm import gated_norm
from baton.kernels.mlstm.recurrence import MLSTM
from baton.kernels.protocol import State
from baton.models.forward_context import LOCAL, ForwardContext
from baton.models.mixer import Mixer
from baton.models.settings.mlstm import MLSTMConfig
from baton.parallel.tensor import ColumnParallelLinear, RowParallelLinear


class MLSTMMixer(Mixer, settings=MLSTMConfig):
    """x [B, T, M], pos [B, T], State {C [B, heads, K, V + 1], n its last column} -> y [B, T, M], State.

    C = f C + i k v^T, n = f n + i k, y = W (LayerNorm(C^T q / max(|n^T q|, 1)) sigmoid(W_g x)), q divided by sqrt(K), per head
    i = exp(cap(linear + bias)), f = sigmoid(cap(linear + bias)), cap(x) = gate_soft_cap tanh(x / gate_soft_cap).
    """

    config: MLSTMConfig
    in_proj: ColumnParallelLinear
    gates_proj: ColumnParallelLinear
    input_gate_bias: nn.Parameter
    forget_gate_bias: nn.Parameter
    norm_weight: nn.Parameter
    out_proj: RowParallelLinear

    def forward(
        self, x_BTM: Tensor, pos_BT: Tensor, state: State | None, forward_context: ForwardContext = LOCAL
    ) -> tuple[Tensor, State]:
        _, d_key, d_value = self.config.head_sizes(self.context.d_model)
        precise = self.norm_weight.dtype
        q, k, v, gate_BTD = self.in_proj(x_BTM, self.in_proj.local_splits)
        i, f = self.gates_proj(x_BTM, self.gates_proj.local_splits)
        # the biases are added in fp32: in bf16 their rounding would change the gates
        i_BTH = self._capped(i.to(precise) + self.input_gate_bias)
        g_BTH = F.logsigmoid(self._capped(f.to(precise) + self.forget_gate_bias))
        inputs = (
            q.unflatten(2, (-1, d_key)),
            k.unflatten(2, (-1, d_key)),
            v.unflatten(2, (-1, d_value)),
            i_BTH,
            g_BTH,
        )
        h_BTHV, final_state = self.run_recurrence(MLSTM(scale=d_key**-0.5), inputs, pos_BT, state, forward_context)
        weight, eps = self.norm_weight.view(-1, d_value), self.context.norm_eps
        y_BTD = gated_norm(h_BTHV, gate_BTD, weight, eps, activation="sigmoid", center=True, dtype=x_BTM.dtype)
        return self.out_proj(y_BTD), final_state

    def _capped(self, logits: Tensor) -> Tensor:
        cap = self.config.gate_soft_cap
        return cap * torch.tanh(logits / cap)
