"""The mixer of gated slot attention (GSA): softmax attention over a fixed number of slots that are updated with gates.

Source: Zhang et al. 2024, "Gated Slot Attention for Efficient Linear-Time Sequence Modeling", equations 8 and 9. Heads are split
over the tensor group.

The paper does not specify a scale of the scores; there is none here, as in the released code. There is no convolution and no bias.

Misprints in the paper: equation 7 has the gates alpha and 1 of keys and values in the wrong order, in both passes; the backward
pass of algorithm 1 swaps the two values of GATE_K relative to its forward pass, and its formulas of dK and dV lack factors of the
decay. Equations 3 and 4, ABC without a gate, only add to the slots; the weighted mean that the released code computes under that
name also rescales their content. ABC is not implemented here in either form.

Shapes: B batch, T time, M d_model, H this rank's heads, V head_dim, D H * V.
"""

import torch.nn.functional as F
from torch import Tensor

from baton.kernels.compile.aot import on_gpu
from baton.kernels.gated_slot_attention.recurrence import GatedSlotAttention
from baton.kernels.protocol import State
from baton.models.feature_map import FEATURE_MAPS
from baton.models.forward_context import LOCAL, ForwardContext
from baton.models.mixer import Mixer
from baton.models.norm import SplitRMSNorm
from baton.models.selective_recompute import recompute_in_backward
from baton.models.settings.gsa import GSAConfig
from baton.parallel.tensor import ColumnParallelLinear, RowParallelLinear


class GSA(Mixer, settings=GSAConfig):
    """Slots a key + (1 - a) k, a value + (1 - a) v; y = W RMSNorm(silu(softmax(keys q) values)); a = sigmoid(.)^(1 / normalizer).

    q, k and v are linear, then silu; feature_map, value_activation and output_activation are other activations, or none.

    x [B, T, M], pos [B, T], State {k [B, kv_heads, head_dim, slots], v [B, kv_heads, slots, head_dim]} -> y [B, T, M], State.
    """

    config: GSAConfig
    in_proj: ColumnParallelLinear
    norm: SplitRMSNorm
    out_proj: RowParallelLinear

    def forward(
        self, x_BTM: Tensor, pos_BT: Tensor, state: State | None, forward_context: ForwardContext = LOCAL
    ) -> tuple[Tensor, State]:
        # with a link the initial slots may come from another rank, and recomputation would have to receive them again
        selective = self.context.selective_recompute and forward_context.link is None
        *qkv, g = self.in_proj(x_BTM, self.in_proj.local_splits)
        normalizer: float | None = self.config.gate_logit_normalizer
        if not self.config.fused:
            mapped = FEATURE_MAPS[self.config.feature_map]
            qkv = [mapped(qkv[0]), mapped(qkv[1]), qkv[2] if self.config.value_activation is None else F.silu(qkv[2])]
            # float32 from here on: bfloat16 has no values between 0.996 and 1
            g, normalizer = F.logsigmoid(g.to(self.norm.weight.dtype)) / self.config.gate_logit_normalizer, None
        inputs = (*(x.unflatten(2, (-1, self.config.head_dim)) for x in qkv), g.unflatten(2, (-1, self.config.slots)))
        recurrence = GatedSlotAttention(
            self.config.slot_activation,
            gate_logit_normalizer=normalizer,
            recompute_activations=selective and self.config.fused,
        )
        o_BTHV, state = self.run_recurrence(recurrence, inputs, pos_BT, state, forward_context)
        o_BTD = o_BTHV.flatten(2)
        # on a CPU the norm saves copies of its input anyway, and several ranks would have to repeat an all-reduce
        with recompute_in_backward(selective and self.context.tensor_size == 1 and on_gpu(o_BTD)) as discard:
            silu = self.config.output_activation is not None
            normed = self.norm(o_BTD, o_BTD.dtype, silu=silu)
            discard(normed, lambda: self.norm(o_BTD, o_BTD.dtype, silu=silu))
            return self.out_proj(normed), state
