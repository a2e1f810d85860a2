"""The skeleton that DeltaNet and Gated DeltaNet share: projections, short convolutions, delta rule, norm per head, projection.

Heads are split over the tensor group: all of one head's channels, its convolutions and its state are one rank's business, so
nothing is communicated between the two projections. Each of q, k and v has a convolution and a tail of its own, as a tail that held
all three would not split by heads.

Shapes: B batch, T time, M d_model, H this rank's heads, K d_key, V d_value, W d_conv.
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from baton.kernels.delta_rule.recurrence import DeltaRule
from baton.kernels.protocol import State, StateSpec
from baton.kernels.short_conv.recurrence import ShortConv
from baton.models import cached_constants, init
from baton.models.mixer import Mixer, MixerContext
from baton.models.norm import HeadRMSNorm, unit
from baton.models.settings.delta_rule import DeltaRuleConfig

_CONV = ShortConv("silu")


class DeltaRuleMixer(Mixer):
    """x [B, T, M], pos [B, T], State {conv_q, conv_k [B, W-1, H K], conv_v [B, W-1, H V], S [B, H, K, V]} -> y [B, T, M], State.

    A subclass says what else is projected (extra: names and whole widths, multiples of the heads) and what that is for: `log_decay`
    and `gate`.
    """

    def __init__(self, config: DeltaRuleConfig, context: MixerContext, *, extra: Sequence[tuple[str, int]] = ()) -> None:
        super().__init__()
        self.config, self.compute_dtype = config, context.compute_dtype
        self.heads = config.head_count(context.d_model)
        keys, values = self.heads * config.d_key, self.heads * config.d_value
        parts = (("q", keys), ("k", keys), ("v", values), ("beta", self.heads), *extra)
        self.in_proj = context.column(sum(width for _, width in parts), fused_splits=parts)
        self._widths = [width // context.tensor_size for _, width in parts]
        self.conv_weights = nn.ParameterDict(
            {name: context.split((width, config.d_conv), init.linear(config.d_conv), decay=True) for name, width in parts[:3]}
        )
        self.norm = HeadRMSNorm(config.d_value, context.norm_eps)
        self.out_proj = context.output(values)

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """What is carried per sequence: the convolutions' last inputs and the state (fp32 whatever the matmuls use)."""
        d_key, d_value, tail = self.config.d_key, self.config.d_value, self.config.d_conv - 1
        widths = {"q": self.heads * d_key, "k": self.heads * d_key, "v": self.heads * d_value}
        convs = (StateSpec(f"conv_{name}", (tail, width), self.compute_dtype, tp=1, grad=True) for name, width in widths.items())
        return (*convs, StateSpec("S", (self.heads, d_key, d_value), self.norm.weight.dtype, tp=0, grad=True))

    @abstractmethod
    def log_decay(self, extra: Sequence[Tensor]) -> Tensor | None:
        """log a [B, T, H], at most 0, from the extra projections, in fp32; None: the state does not decay."""

    @abstractmethod
    def gate(self, o_BTHV: Tensor, extra: Sequence[Tensor]) -> Tensor:
        """The normalised outputs, gated by the extra projections or as they are."""

    def forward(self, x_BTM: Tensor, pos_BT: Tensor, state: State | None) -> tuple[Tensor, State]:
        config, dtype = self.config, self.norm.weight.dtype
        q_BTD, k_BTD, v_BTD, beta_BTH, *extra = self.in_proj(x_BTM, self._widths)
        leaving: State = {}

        def mixed(name: str, u_BTD: Tensor) -> Tensor:
            weight, leaf = self.conv_weights[name], f"conv_{name}"
            # the papers' convolutions have no bias
            bias = cached_constants.zeros(weight.shape[0], weight.dtype, weight.device)
            inputs, tail = (u_BTD, weight, bias), None if state is None else {"tail": state[leaf]}
            out_BTD, own = self.carry(_CONV, inputs, pos_BT, tail)
            leaving[leaf] = own["tail"]
            return out_BTD.unflatten(2, (-1, config.d_value if name == "v" else config.d_key))

        log_decay, beta_BTH = self.log_decay(extra), torch.sigmoid(beta_BTH.to(dtype))
        inputs = (
            self._unit(mixed("q", q_BTD)),
            self._unit(mixed("k", k_BTD)),
            mixed("v", v_BTD),
            beta_BTH if config.beta_max == 1.0 else config.beta_max * beta_BTH,
            *(() if log_decay is None else (log_decay,)),
        )
        recurrence = DeltaRule(gated=log_decay is not None)
        o_BTHV, own = self.carry(recurrence, inputs, pos_BT, None if state is None else {"S": state["S"]})
        leaving |= own
        return self.out_proj(self.gate(self.norm(o_BTHV), extra).flatten(2)), leaving

    def _unit(self, x_BTHK: Tensor) -> Tensor:
        """x / sqrt(|x|^2 + norm_eps)."""
        precise = self.norm.weight.dtype
        return unit(x_BTHK, self.norm.eps, precise=precise, dtype=x_BTHK.dtype if self.config.key_dtype == "compute" else precise)
