"""The block that DeltaNet, Gated DeltaNet and Kimi Delta Attention share: projections, short convolutions, delta rule, norm per
head, projection.

Heads are split over the tensor group; a head of queries and keys goes with the heads of values that it serves. All channels of a
head, its convolutions and its state are on one rank, so nothing is communicated between the two projections. q, k and v have a
convolution and a tail each, because one tail for all three would not split by heads.

Shapes: B batch, T time, M d_model, H this rank's heads of values, Q of queries and keys, K d_key, V d_value, W d_conv.
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from baton.kernels.delta_rule.recurrence import DeltaRule
from baton.kernels.protocol import State
from baton.kernels.short_conv.recurrence import ShortConv
from baton.models import cached_constants
from baton.models.forward_context import LOCAL, ForwardContext
from baton.models.mixer import Mixer
from baton.models.norm import HeadRMSNorm, unit
from baton.models.settings.delta_rule import DeltaRuleConfig
from baton.parallel.tensor import ColumnParallelLinear, RowParallelLinear


class DeltaRuleMixer(Mixer):
    """x [B, T, M], pos [B, T], State {conv_q, conv_k [B, W-1, Q K], conv_v [B, W-1, H V], S [B, H, K, V]} -> y [B, T, M], State.

    A subclass's settings declare further fused projections (`gates`), or it has others (`projected`); `log_decay` and `normed` read
    them as `extra`.
    """

    config: DeltaRuleConfig
    in_proj: ColumnParallelLinear
    conv_weights: nn.ParameterDict
    norm: HeadRMSNorm
    out_proj: RowParallelLinear

    def projected(self, x_BTM: Tensor) -> Sequence[Tensor]:
        """q, k, v and beta, and the extra projections."""
        return self.in_proj(x_BTM, self.in_proj.local_splits)

    @abstractmethod
    def log_decay(self, extra: Sequence[Tensor]) -> Tensor | None:
        """The log decay g [B, T, H] or, of channels, [B, T, H, K], at most 0, from the extra projections, in fp32; None: the state
        does not decay."""

    @abstractmethod
    def normed(self, o_BTHV: Tensor, extra: Sequence[Tensor]) -> Tensor:
        """The outputs behind the norm, gated by the extra projections or as they are, [B, T, H V]."""

    def forward(
        self, x_BTM: Tensor, pos_BT: Tensor, state: State | None, forward_context: ForwardContext = LOCAL
    ) -> tuple[Tensor, State]:
        config, dtype = self.config, self.norm.weight.dtype
        q_BTD, k_BTD, v_BTD, beta_BTH, *extra = self.projected(x_BTM)
        final_state: State = {}

        def convolved(name: str, x_BTD: Tensor, *, unit_length: bool = False) -> Tensor:
            """unit_length: x / sqrt(|x|^2 + norm_eps) of each head, in the dtype of normalized keys."""
            weight, key = self.conv_weights[name], f"conv_{name}"
            fused = unit_length and config.key_dtype == "compute"
            conv = ShortConv("silu", config.d_key, self.norm.eps) if fused else ShortConv("silu")
            # the papers' convolutions have no bias
            bias = cached_constants.zeros(weight.shape[0], weight.dtype, weight.device)
            inputs, tail = (x_BTD, weight, bias), None if state is None else {"conv": state[key]}
            y_BTD, final_tail = self.run_recurrence(conv, inputs, pos_BT, tail, forward_context)
            final_state[key] = final_tail["conv"]
            y_BTHD = y_BTD.unflatten(2, (-1, config.d_value if name == "v" else config.d_key))
            return unit(y_BTHD, self.norm.eps, precise=dtype, dtype=dtype) if unit_length and not fused else y_BTHD

        g, beta_BTH = self.log_decay(extra), torch.sigmoid(beta_BTH.to(dtype))
        inputs = (
            convolved("q", q_BTD, unit_length=True),
            convolved("k", k_BTD, unit_length=True),
            convolved("v", v_BTD),
            beta_BTH if config.beta_max == 1.0 else config.beta_max * beta_BTH,
            *(() if g is None else (g,)),
        )
        by_channel = g is not None and g.ndim == 4
        recurrence = DeltaRule(gated=g is not None, by_channel=by_channel, keep_states=self.context.keep_states)
        o_BTHV, S = self.run_recurrence(recurrence, inputs, pos_BT, None if state is None else {"S": state["S"]}, forward_context)
        final_state |= S
        return self.out_proj(self.normed(o_BTHV, extra)), final_state
