"""RWKV-7's channel mixing, an MLP with token shift: W_out relu(W_in (x_t + mix (x_{t-1} - x_t)))^2.

Source: Peng et al. 2025, "RWKV-7 'Goose' with Expressive Dynamic State Evolution", section 4.2. The authors draw initial values of
W_in from orthogonal matrices and set W_out to zero; here both are drawn as those of all mixers, and the initial mix does not depend
on the layer. Hidden features are split over the tensor group.

Shapes: B batch, T time, M d_model.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from baton.kernels.protocol import State
from baton.models.forward_context import LOCAL, ForwardContext
from baton.models.mixer import Mixer
from baton.models.settings.channel_mix import ChannelMixConfig
from baton.models.token_shift import difference, mixed
from baton.parallel.tensor import ColumnParallelLinear, RowParallelLinear


class ChannelMix(Mixer, settings=ChannelMixConfig):
    """x [B, T, M], pos [B, T], State {shift [B, 1, M]} -> y [B, T, M], State."""

    shift_mix: nn.ParameterDict
    in_proj: ColumnParallelLinear
    out_proj: RowParallelLinear

    def forward(
        self, x_BTM: Tensor, pos_BT: Tensor, state: State | None, forward_context: ForwardContext = LOCAL
    ) -> tuple[Tensor, State]:
        mix_M = self.shift_mix["k"]
        delta_BTM, final_state = difference(self, x_BTM, pos_BT, state, forward_context, mix_M)
        hidden = F.relu(self.in_proj(mixed(x_BTM, delta_BTM, mix_M)))
        return self.out_proj(hidden.square()), final_state
