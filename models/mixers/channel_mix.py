"""RWKV's channel mixing, an MLP with token shift: W_out relu(W_in (x_t + mix (x_{t-1} - x_t)))^2, in RWKV-6 multiplied by a gate.

Source: Peng et al. 2025, "RWKV-7 'Goose' with Expressive Dynamic State Evolution", section 4.2, and for the gate Peng et al. 2024,
"Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence", section 4. The authors draw initial values of W_in from
orthogonal matrices and set W_out to zero; here both are drawn as those of all mixers, and the initial mix does not depend on the
layer. Hidden features are split over the tensor group. Every rank has the gate's whole projection and computes the gate of all
tokens, or with sequence parallelism of its own.

Shapes: B batch, T time, M d_model.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from baton.kernels.gate import gated
from baton.kernels.protocol import State
from baton.models.forward_context import LOCAL, ForwardContext
from baton.models.mixer import Mixer
from baton.models.replicated_linear import ReplicatedLinear
from baton.models.settings.channel_mix import ChannelMixConfig
from baton.models.token_shift import difference, mixed
from baton.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from baton.parallel.tensor_group import own_tokens


class ChannelMix(Mixer, settings=ChannelMixConfig):
    """x [B, T, M], pos [B, T], State {shift [B, 1, M]} -> y [B, T, M], State.

    With receptance the output is multiplied by sigmoid(W (x_t + mix_r (x_{t-1} - x_t))).
    """

    config: ChannelMixConfig
    shift_mix: nn.ParameterDict
    in_proj: ColumnParallelLinear
    out_proj: RowParallelLinear
    receptance_proj: ReplicatedLinear

    def forward(
        self, x_BTM: Tensor, pos_BT: Tensor, state: State | None, forward_context: ForwardContext = LOCAL
    ) -> tuple[Tensor, State]:
        mix_M = self.shift_mix["k"]
        delta_BTM, final_state = difference(self, x_BTM, pos_BT, state, forward_context, mix_M)
        hidden = F.relu(self.in_proj(mixed(x_BTM, delta_BTM, mix_M)))
        y: Tensor = self.out_proj(hidden.square())
        if not self.config.receptance:
            return y, final_state
        own, delta = (own_tokens(x) if self.context.sequence_parallel else x for x in (x_BTM, delta_BTM))
        receptance = self.receptance_proj(mixed(own, delta, self.shift_mix["r"]))
        return gated(y, receptance, activation="sigmoid"), final_state
