"""The skeleton that Mamba and Longhorn share: projection, short convolution, gated diagonal scan, projection.

Channels (d_inner) are split over the tensor group, so the convolution and the scan need no communication. What mixes all channels
(x_proj: a low-rank code of the step sizes, and the two vectors that all channels of a token share) is row parallel and summed over
the group once; its gradient is summed once on the way back.

Shapes: B batch, T time, M d_model, D this rank's channels, N d_state, R rank of the step sizes, W d_conv.
"""

from abc import abstractmethod

from torch import Tensor

from baton.kernels.protocol import Inputs, LinearRecurrence, State, StateSpec
from baton.kernels.short_conv.recurrence import ShortConv
from baton.models import cached_constants, init
from baton.models.mixer import Mixer, MixerContext
from baton.models.selective_recompute import recompute_in_backward
from baton.models.settings.ssm_block import SSMBlockConfig
from baton.parallel.param_layout import Init, layout_of
from baton.parallel.tensor import ColumnParallelLinear, RowParallelLinear, copy_to_tensor_group

_CONV = ShortConv("silu")


class SSMBlock(Mixer):
    """x [B, T, M], pos [B, T], State {conv [B, W-1, D], scan [B, D, N]} -> y [B, T, M], State.

    A subclass says what the recurrence is: `recurrence`, and `scan_inputs`, its inputs. step: name of its step sizes' projection
    and bias; step_bias: the bias's initial values.
    """

    recurrence: LinearRecurrence
    D: Tensor | None

    def __init__(self, config: SSMBlockConfig, context: MixerContext, *, step: str, step_bias: Init) -> None:
        super().__init__()
        d_inner = config.expand * context.d_model
        self.config, self.compute_dtype, self._step, self._selective = (
            config,
            context.compute_dtype,
            step,
            context.selective_recompute,
        )
        self.dt_rank = config.dt_rank or -(-context.d_model // 16)
        self.in_proj = context.column(2 * d_inner, fused_splits=(("x", d_inner), ("z", d_inner)))
        self.conv_weight = context.split((d_inner, config.d_conv), init.linear(config.d_conv), decay=True)
        self.conv_bias = context.split((d_inner,), init.linear(config.d_conv), decay=False)
        self.x_proj = RowParallelLinear(
            d_inner,
            self.dt_rank + 2 * config.d_state,
            init.linear(d_inner),
            context.megatron,
            compute_dtype=context.compute_dtype,
        )
        # every rank's channels use the same code and vectors: copy_to_tensor_group sums their gradient once for all three
        projection = ColumnParallelLinear(
            self.dt_rank,
            d_inner,
            init.linear(self.dt_rank),
            context.megatron,
            compute_dtype=context.compute_dtype,
            disable_grad_reduce=True,
        )
        self.add_module(f"{step}_proj", projection)
        bias = context.split((d_inner,), step_bias, decay=False) if config.has_step_bias else None
        self.register_parameter(f"{step}_bias", bias)
        self.register_parameter("D", context.split((d_inner,), init.constant(1.0), decay=False) if config.skip else None)
        self.out_proj = context.output(d_inner)

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """What is carried per sequence: the convolution's last inputs and the scan's state (fp32 whatever the matmuls use)."""
        (d_inner,) = layout_of(self.conv_bias).shape
        return (
            StateSpec("conv", (self.config.d_conv - 1, d_inner), self.compute_dtype, tp=1, grad=True),
            StateSpec("scan", (d_inner, self.config.d_state), self.conv_bias.dtype, tp=0, grad=True),
        )

    @abstractmethod
    def scan_inputs(
        self, x_BTD: Tensor, dt_BTD: Tensor, B_BTN: Tensor, C_BTN: Tensor, D_D: Tensor, z_BTD: Tensor, dt_bias_D: Tensor
    ) -> Inputs:
        """The gated recurrence's inputs, given under Mamba's names: Longhorn's beta is dt, its k is B and its q is C. The
        recurrence
        adds dt_bias to dt in fp32: rounding the sum would move Mamba's step sizes in jumps of 3 %."""

    def _or_zeros(self, per_channel: Tensor | None) -> Tensor:
        """A parameter [D], or zeros where the settings leave it out: the kernels read one in any case."""
        like = self.conv_bias
        return cached_constants.zeros(len(like), like.dtype, like.device) if per_channel is None else per_channel

    def forward(self, x_BTM: Tensor, pos_BT: Tensor, state: State | None) -> tuple[Tensor, State]:
        channels = len(self.conv_bias)
        # a carried convolution's inputs may have come from elsewhere
        selective = self._selective and (self.link is None or not self.link.active)
        x_BTD, z_BTD = self.in_proj(x_BTM, (channels, channels))
        conv_inputs = (x_BTD, self.conv_weight, self.conv_bias)
        before = None if state is None else {"tail": state["conv"]}
        x_BTD, tail = self.carry(_CONV, conv_inputs, pos_BT, before)
        with recompute_in_backward(selective) as discard:
            discard(x_BTD, lambda: _CONV.forward_no_state(conv_inputs, pos_BT, before))
            x_BTD, projected = self.x_proj(x_BTD, return_input=True)
            projected = copy_to_tensor_group(projected)
            dt_low_rank_BTR, B_BTN, C_BTN = projected.split([self.dt_rank, self.config.d_state, self.config.d_state], dim=-1)
            dt_proj = getattr(self, f"{self._step}_proj")
            dt_BTD = dt_proj(dt_low_rank_BTR)
            D_D, dt_bias_D = self._or_zeros(self.D), self._or_zeros(getattr(self, f"{self._step}_bias"))
            inputs = self.scan_inputs(x_BTD, dt_BTD, B_BTN, C_BTN, D_D, z_BTD, dt_bias_D)
            (leaf,) = self.recurrence.state_specs(inputs)
            entering = None if state is None else {leaf.name: state["scan"]}
            discard(dt_BTD, lambda: dt_proj(dt_low_rank_BTR))
            y_BTD, scan = self.carry(self.recurrence, inputs, pos_BT, entering)
        return self.out_proj(y_BTD), {"conv": tail["tail"], "scan": scan[leaf.name]}
