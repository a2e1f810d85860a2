"""Lattice's mixer: a memory of slots that each token turns, read and gated.

Source: Karami & Mirrokni 2025 (arXiv 2504.05646, first version), "Lattice: Learning to Efficiently Compress the Memory". Heads are
split over the tensor group: their projections, convolutions and slots are one rank's business.

Differences from the paper, and what it leaves open:

- Of the block it says that q and k come from one projection and have a causal convolution each, and that a GELU gate is behind the
  recurrence. Everything else of the block is open there; the settings say what the defaults follow.
- The final model has a forget gate (table 4, last row). Here forget is false by default, since with projection a forget gate is
  exactly a larger step; the models lattice-110m and lattice-340m set it.
- Keys of length 1 (unit_keys) and scaled values (value_scale) are ours. Without them steps are chaotic.
- Each document begins with the initial slots. There is no setting to carry slots from one document into the next.

Misprints in the paper:

- The losses of decoding and encoding have no factor of 1/2, so their gradients have a factor of 2. Equation 5 has it, equations 7,
  10 and 13 do not. The gradient of similarity has none. step_max=2 gives dec and enc the steps of equation 5.
- The proximal step for L1 (equations 17 and 18) names its gradient at S_t. It is at S_(t-1), the slots before the step.
- The text calls table 3 "table 4".
- The ablation (table 4) is said to be of 125M parameters. Its baselines are the 110M rows of table 2.

Shapes: B batch, T time, M d_model, H this rank's heads, K slots, V head_dim, W d_conv.
"""

import torch
from torch import Tensor

from baton.kernels.gate import gated
from baton.kernels.lattice import recurrence
from baton.kernels.protocol import State, StateSpec
from baton.kernels.short_conv.recurrence import ShortConv
from baton.models import cached_constants, init
from baton.models.mixer import Mixer, MixerContext
from baton.models.norm import SplitRMSNorm, unit
from baton.models.settings.lattice import LatticeConfig


class Lattice(Mixer, settings=LatticeConfig):
    """q, k = conv(W x), v = scale W_v x, y = W_o (RMSNorm(S q) gelu(W_g x)), S turned by steps of step_max sigmoid(W_s x + bias).

    x [B, T, M], pos [B, T], State {conv [B, W-1, H K], S [B, H, V, K]} -> y [B, T, M], State. Both convolutions read the same
    inputs and share a tail. A state of None is the initial slots, which are not zero.
    """

    def __init__(self, config: LatticeConfig, context: MixerContext) -> None:
        super().__init__()
        self.config, self.compute_dtype, self.norm_eps = config, context.compute_dtype, context.norm_eps
        self.heads = config.head_count(context.d_model)
        keys, values = self.heads * config.slots, self.heads * config.head_dim
        parts = [("qk", keys), ("v", values), ("gate", values), ("step", self.heads)]
        self.step_bias = context.split((self.heads,), init.constant(config.step_bias), decay=False)
        if config.forget:
            parts.append(("forget", self.heads))
            self.forget_bias = context.split((self.heads,), init.constant(config.forget_bias), decay=False)
        self.in_proj = context.column(sum(width for _, width in parts), fused_splits=parts)
        self._widths = [width // context.tensor_size for _, width in parts]
        self.conv_q, self.conv_k = (context.split((keys, config.d_conv), init.linear(config.d_conv), decay=True) for _ in "qk")
        if config.initial_slots == "learned":
            self.S0 = context.split((self.heads, config.head_dim, config.slots), _orthonormal, decay=False)
        self.norm = SplitRMSNorm(values, context) if config.output_norm else None
        self.out_proj = context.output(values)

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """What is carried per sequence: the convolutions' last inputs and the slots (fp32 whatever the matmuls use)."""
        config = self.config
        return (
            StateSpec("conv", (config.d_conv - 1, self.heads * config.slots), self.compute_dtype, tp=1, grad=True),
            StateSpec("S", (self.heads, config.head_dim, config.slots), self.step_bias.dtype, tp=0, grad=True),
        )

    def forward(self, x_BTM: Tensor, pos_BT: Tensor, state: State | None) -> tuple[Tensor, State]:
        config, dtype = self.config, self.step_bias.dtype
        qk_BTD, v_BTD, gate_BTD, step_BTH, *forget = self.in_proj(x_BTM, self._widths)
        q_BTHK, conv = self._convolved(qk_BTD, self.conv_q, pos_BT, state)
        k_BTHK, _ = self._convolved(qk_BTD, self.conv_k, pos_BT, state)
        # biases are added in fp32: rounded to bf16 they would move in jumps, and a gate near 1 would be 1
        step_BTH = torch.sigmoid(step_BTH.to(dtype) + self.step_bias)
        if config.step_max != 1.0:
            step_BTH = config.step_max * step_BTH
        scale = config.head_dim**-0.5 if config.value_scale is None else config.value_scale
        inputs = (
            self._unit(q_BTHK) if config.unit_queries else q_BTHK,
            self._unit(k_BTHK) if config.unit_keys else k_BTHK,
            (scale * v_BTD).unflatten(2, (-1, config.head_dim)),
            step_BTH,
            *((torch.sigmoid(forget[0].to(dtype) + self.forget_bias),) if config.forget else ()),
            *((config.sparsity * step_BTH,) if config.sparsity else ()),
            self._initial_slots(len(self.step_bias), x_BTM.device),
        )
        update = recurrence.Lattice(config.variant, config.project, forget=config.forget, sparse=bool(config.sparsity))
        o_BTHV, leaving = self.carry(update, inputs, pos_BT, None if state is None else {"S": state["S"]})
        o_BTD = o_BTHV.flatten(2)
        y_BTD = gated(o_BTD if self.norm is None else self.norm(o_BTD, dtype), gate_BTD, activation="gelu", dtype=gate_BTD.dtype)
        return self.out_proj(y_BTD), {"conv": conv, **leaving}

    def _convolved(self, u_BTD: Tensor, weight: Tensor, pos_BT: Tensor, state: State | None) -> tuple[Tensor, Tensor]:
        bias = cached_constants.zeros(weight.shape[0], weight.dtype, weight.device)
        inputs, tail = (u_BTD, weight, bias), None if state is None else {"tail": state["conv"]}
        out_BTD, tail = self.carry(ShortConv(self.config.conv_activation), inputs, pos_BT, tail)
        return out_BTD.unflatten(2, (-1, self.config.slots)), tail["tail"]

    def _initial_slots(self, heads: int, device: torch.device) -> Tensor:
        if self.config.initial_slots == "learned":
            return self.S0
        return cached_constants.eye(self.config.head_dim, self.config.slots, self.step_bias.dtype, device).expand(heads, -1, -1)

    def _unit(self, x_BTHK: Tensor) -> Tensor:
        """x / sqrt(|x|^2 + norm_eps)."""
        return unit(x_BTHK, self.norm_eps, precise=self.step_bias.dtype, dtype=x_BTHK.dtype)


def _orthonormal(w: Tensor, g: torch.Generator) -> None:
    """Q of a Gaussian matrix per head, signed so that it is uniform among all that have orthonormal columns (Mezzadri 2007)."""
    q, r = torch.linalg.qr(torch.empty_like(w).normal_(generator=g))
    w.copy_(q * torch.diagonal(r, dim1=-2, dim2=-1).sign().unsqueeze(-2))
