"""The block that Mamba and Longhorn share: projection, short convolution, gated diagonal scan, projection; and its variants in
tables 1 and 6 of Mamba's paper (settings.ssm_block, `BLOCK`), with functions that S4D's mixer uses, too.

Channels (d_inner) are split over the tensor group, so the convolution and the scan need no communication. x_proj,
which mixes all channels (a low-rank code of the step sizes, and the vectors B and C that all channels of a token share), is row
parallel: its output is summed over the group once, and so is the output's gradient.

Shapes: B batch, T time, M d_model, D this rank's channels, N d_state, R rank of the step sizes, W d_conv.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from baton.kernels.common.selective_recompute import recompute_in_backward
from baton.kernels.gate import gated
from baton.kernels.protocol import Inputs, LinearRecurrence, State
from baton.kernels.short_conv.recurrence import ShortConv
from baton.models import cached_constants
from baton.models.forward_context import LOCAL, ForwardContext
from baton.models.mixer import Mixer
from baton.models.settings.ssm_block import Block, SSMBlockConfig
from baton.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from baton.parallel.tensor_group import copy_to_tensor_group


def convolution_of(block: Block) -> ShortConv:
    return ShortConv() if block == "h3" else ShortConv("silu")


def parts_of(block: Block, projected: Sequence[Tensor]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What the convolution reads, what its output is multiplied by (None: nothing), and what the state space model's output is
    gated with (None: nothing), all [B, T, D]. projected: by in_proj."""
    if block == "h3":
        q_BTD, k_BTD, v_BTD = projected
        return k_BTD, v_BTD, q_BTD
    x_BTD, *z_BTD = projected
    return x_BTD, None, z_BTD[0] if z_BTD else None


def gated_output(block: Block, y_BTD: Tensor, gate_BTD: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The state space model's output y behind the block's gate, in dtype."""
    if gate_BTD is None:
        return y_BTD.to(dtype)
    return y_BTD.to(dtype) * gate_BTD if block == "h3" else gated(y_BTD, gate_BTD, dtype=dtype)


class SSMBlock(Mixer):
    """x [B, T, M], pos [B, T], State {conv [B, W-1, D], h or S [B, D, N]} -> y [B, T, M], State.

    A subclass defines the recurrence and the order of its inputs (`scan_inputs`); its settings name the step sizes (`step_name`)
    and the recurrence's State (`state_name`).
    """

    config: SSMBlockConfig
    in_proj: ColumnParallelLinear
    conv_weight: nn.Parameter
    conv_bias: nn.Parameter
    x_proj: RowParallelLinear
    out_proj: RowParallelLinear

    @property
    @abstractmethod
    def recurrence(self) -> LinearRecurrence:
        """The scan, gated with z in Mamba's block alone, whose inputs `scan_inputs` arranges."""

    @abstractmethod
    def scan_inputs(
        self, x_BTD: Tensor, dt_BTD: Tensor, B_BTN: Tensor, C_BTN: Tensor, D_D: Tensor, z_BTD: Tensor | None, dt_bias_D: Tensor
    ) -> Inputs:
        """The recurrence's inputs, under Mamba's names: Longhorn's beta is dt, its k is B and its q is C.

        The recurrence adds dt_bias to dt in fp32: rounding the sum to bf16 would move Mamba's step sizes in jumps of 3 %.
        """

    def shared_inputs(self, projected: Tensor) -> Mapping[str, Tensor]:
        """The step sizes' low-rank code "step" [B, T, R], "B" and "C" [B, T, N], those that x_proj gives."""
        widths = self.config.shared_widths(self.context.d_model)
        return dict(zip(widths, projected.split(list(widths.values()), dim=-1), strict=True))

    def scan(
        self,
        x_BTD: Tensor,
        dt_BTD: Tensor,
        shared: Mapping[str, Tensor],
        gate_BTD: Tensor | None,
        pos_BT: Tensor,
        state: State | None,
        forward_context: ForwardContext,
    ) -> tuple[Tensor, State]:
        """Outputs [B, T, D] of the recurrence behind the gate, and its State."""
        D_D, dt_bias_D = self._or_zeros("D"), self._or_zeros(f"{self.config.step_name}_bias")
        inside = self.config.form == "mamba"  # the recurrence has the gate in it
        inputs = self.scan_inputs(x_BTD, dt_BTD, shared["B"], shared["C"], D_D, gate_BTD if inside else None, dt_bias_D)
        y_BTD, state = self.run_recurrence(self.recurrence, inputs, pos_BT, state, forward_context)
        return y_BTD if inside else gated_output(self.config.form, y_BTD, gate_BTD, x_BTD.dtype), state

    def _projected_steps(self, shared: Mapping[str, Tensor], x_BTD: Tensor) -> Callable[[], Tensor]:
        """A function that makes dt [B, T, D] without its bias, zeros where no input decides it. It does not keep x."""
        if "step" not in shared:
            return partial(torch.zeros, x_BTD.shape, dtype=x_BTD.dtype, device=x_BTD.device)
        return partial(self.get_submodule(f"{self.config.step_name}_proj"), shared["step"])

    def _or_zeros(self, name: str) -> Tensor:
        """The parameter [D], or zeros where the settings leave it out: the kernels read one in any case."""
        like, parameter = self.conv_bias, self._parameters.get(name)
        return cached_constants.zeros(len(like), like.dtype, like.device) if parameter is None else parameter

    def forward(
        self, x_BTM: Tensor, pos_BT: Tensor, state: State | None, forward_context: ForwardContext = LOCAL
    ) -> tuple[Tensor, State]:
        config = self.config
        # with a link the convolution's tail may come from another rank, which recomputation would have to ask again
        selective = self.context.selective_recompute and forward_context.link is None
        convolved_BTD, factor_BTD, gate_BTD = parts_of(config.form, self.in_proj(x_BTM, self.in_proj.local_splits))
        conv, conv_inputs = convolution_of(config.form), (convolved_BTD, self.conv_weight, self.conv_bias)
        initial_tail = None if state is None else {"conv": state["conv"]}
        x_BTD, tail = self.run_recurrence(conv, conv_inputs, pos_BT, initial_tail, forward_context)
        convolve = partial(conv.forward_no_state, conv_inputs, pos_BT, initial_tail)
        with recompute_in_backward(selective) as discard:
            discard(x_BTD, convolve)
            if factor_BTD is not None:
                x_BTD = x_BTD * factor_BTD
                discard(x_BTD, lambda: convolve() * factor_BTD)
            shared: Mapping[str, Tensor] = {}
            if config.shared_widths(self.context.d_model):
                x_BTD, projected = self.x_proj(x_BTD, return_input=True)
                # every rank's channels use the same dt code, B and C: their gradient is summed once for all three
                shared = self.shared_inputs(copy_to_tensor_group(projected))
            projected_steps = self._projected_steps(shared, x_BTD)
            dt_BTD = projected_steps()
            initial_state = None if state is None else {config.state_name: state[config.state_name]}
            discard(dt_BTD, projected_steps)
            y_BTD, final_state = self.scan(x_BTD, dt_BTD, shared, gate_BTD, pos_BT, initial_state, forward_context)
        return self.out_proj(y_BTD), {**tail, **final_state}
