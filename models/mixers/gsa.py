"""The mixer of gated slot attention (GSA): softmax attention over a fixed number of slots that are updated with gates.

Source: Zhang et al. 2024, "Gated Slot Attention for Efficient Linear-Time Sequence Modeling", equations 8 and 9. Heads are split
over the tensor group.

The paper does not specify a scale of the scores; there is none here, as in the released code. There is no convolution and no bias.

Misprints in the paper: equation 7 has the gates alpha and 1 of keys and values in the wrong order, in both passes; the backward
pass of algorithm 1 swaps the two values of GATE_K relative to its forward pass, and its formulas of dK and dV lack factors of the
decay. Equations 3 and 4, ABC without a gate, only add to the slots; the weighted mean that the released code computes under that
name also rescales their content. gate=abc is the weighted mean: with weights w = exp(projection) and sums z of them, the slots'
decay is z_(t-1) / z_t. gate=data_independent has a parameter for the projection. Both are ablations of table 2.

Shapes: B batch, T time, M d_model, H this rank's heads, V head_dim, D H * V.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.kernels.common.selective_recompute import recompute_in_backward
from baton.kernels.compile.aot import on_gpu
from baton.kernels.gate import log_sigmoid
from baton.kernels.gated_linear_attention.recurrence import GatedLinearAttention
from baton.kernels.gated_slot_attention.recurrence import GatedSlotAttention
from baton.kernels.protocol import State
from baton.models.feature_map import FEATURE_MAPS
from baton.models.forward_context import LOCAL, ForwardContext
from baton.models.mixer import Mixer
from baton.models.norm import SplitRMSNorm
from baton.models.settings.gsa import GSAConfig
from baton.parallel.tensor import ColumnParallelLinear, RowParallelLinear

_LARGEST = 30.0  # bound of the logits of abc's weights: sums of exp(30) over a million tokens are far below float32's largest


class GSA(Mixer, settings=GSAConfig):
    """Slots a key + (1 - a) k, a value + (1 - a) v; y = W RMSNorm(silu(softmax(keys q) values)); a = sigmoid(.)^(1 / normalizer).

    q, k and v are linear, then silu; feature_map, value_activation and output_activation are other activations, or none.

    x [B, T, M], pos [B, T], State {k [B, kv_heads, head_dim, slots], v [B, kv_heads, slots, head_dim]} -> y [B, T, M], State.
    """

    config: GSAConfig
    in_proj: ColumnParallelLinear
    decay_bias: nn.Parameter
    norm: SplitRMSNorm
    out_proj: RowParallelLinear

    def forward(
        self, x_BTM: Tensor, pos_BT: Tensor, state: State | None, forward_context: ForwardContext = LOCAL
    ) -> tuple[Tensor, State]:
        # with a link the initial slots may come from another rank, and recomputation would have to receive them again
        selective = self.context.selective_recompute and forward_context.link is None
        q, k, v, *alpha = self.in_proj(x_BTM, self.in_proj.local_splits)
        qkv = [q, k, v]
        normalizer: float | None = self.config.gate_logit_normalizer
        if not self.config.fused:
            mapped = FEATURE_MAPS[self.config.feature_map]
            qkv = [mapped(qkv[0]), mapped(qkv[1]), qkv[2] if self.config.value_activation is None else F.silu(qkv[2])]
            normalizer = None
        g, sums = self._gates(alpha, x_BTM, pos_BT, state, forward_context)
        inputs = (*(x.unflatten(2, (-1, self.config.head_dim)) for x in qkv), g.unflatten(2, (-1, self.config.slots)))
        recurrence = GatedSlotAttention(
            self.config.slot_activation,
            gate_logit_normalizer=normalizer,
            recompute_activations=selective and self.config.fused,
            keep_states=self.context.keep_states,
        )
        slots = None if state is None else {"k": state["k"], "v": state["v"]}
        o_BTHV, slots = self.run_recurrence(recurrence, inputs, pos_BT, slots, forward_context)
        o_BTD = o_BTHV.flatten(2)
        # on a CPU the norm saves copies of its input anyway, and several ranks would have to repeat an all-reduce
        with recompute_in_backward(selective and self.context.tensor_size == 1 and on_gpu(o_BTD)) as discard:
            silu = self.config.output_activation is not None
            normed = self.norm(o_BTD, o_BTD.dtype, silu=silu)
            discard(normed, lambda: self.norm(o_BTD, o_BTD.dtype, silu=silu))
            return self.out_proj(normed), {**slots, **sums}

    def _gates(
        self, alpha: list[Tensor], x_BTM: Tensor, pos_BT: Tensor, state: State | None, forward_context: ForwardContext
    ) -> tuple[Tensor, State]:
        """Log decays of the slots [B, T, H * slots], or what the kernels make them of, and the sums of weights of abc."""
        config, dtype = self.config, self.norm.weight.dtype
        if config.fused:
            return alpha[0], {}
        # float32 from here on: bfloat16 has no values between 0.996 and 1
        if config.gate == "data_dependent":
            return log_sigmoid(alpha[0], divisor=config.gate_logit_normalizer), {}
        if config.gate == "data_independent":
            g = F.logsigmoid(self.decay_bias) / config.gate_logit_normalizer
            return g.expand(*x_BTM.shape[:2], -1), {}
        w_BTHN = torch.exp(alpha[0].to(dtype).clamp(-_LARGEST, _LARGEST)).unflatten(2, (-1, config.slots))
        one_BTH1 = torch.ones_like(w_BTHN[..., :1])
        initial = None if state is None else {"S": state["z"]}
        sums = GatedLinearAttention("none")
        z_BTHN, final = self.run_recurrence(sums, (one_BTH1, one_BTH1, w_BTHN), pos_BT, initial, forward_context)
        # at a document's first token the ratio is 1 and nothing is kept, of which the logarithm and its gradient are infinite
        share_BTHN = (w_BTHN / z_BTHN).clamp(max=1 - 1e-6)
        return torch.log1p(-share_BTHN).flatten(2), {"z": final["S"]}
