"""The block that Mamba and Longhorn share: projection, short convolution, gated diagonal scan, projection.

Channels (d_inner) are split over the tensor group, so the convolution and the scan need no communication. x_proj,
which mixes all channels (a low-rank code of the step sizes, and the vectors B and C that all channels of a token share), is row
parallel: its output is summed over the group once, and so is the output's gradient.

Shapes: B batch, T time, M d_model, D this rank's channels, N d_state, R rank of the step sizes, W d_conv.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from baton.kernels.protocol import Inputs, LinearRecurrence, State
from baton.kernels.short_conv.recurrence import ShortConv
from baton.models import cached_constants
from baton.models.forward_context import LOCAL, ForwardContext
from baton.models.mixer import Mixer
from baton.models.selective_recompute import recompute_in_backward
from baton.models.settings.ssm_block import SSMBlockConfig
from baton.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from baton.parallel.tensor_group import copy_to_tensor_group

_CONV = ShortConv("silu")


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
        """The gated scan, whose inputs `scan_inputs` arranges."""

    @abstractmethod
    def scan_inputs(
        self, x_BTD: Tensor, dt_BTD: Tensor, B_BTN: Tensor, C_BTN: Tensor, D_D: Tensor, z_BTD: Tensor, dt_bias_D: Tensor
    ) -> Inputs:
        """The gated recurrence's inputs, under Mamba's names: Longhorn's beta is dt, its k is B and its q is C.

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
        z_BTD: Tensor,
        pos_BT: Tensor,
        state: State | None,
        forward_context: ForwardContext,
    ) -> tuple[Tensor, State]:
        """Outputs [B, T, D] of the gated recurrence, and its State."""
        D_D, dt_bias_D = self._or_zeros("D"), self._or_zeros(f"{self.config.step_name}_bias")
        inputs = self.scan_inputs(x_BTD, dt_BTD, shared["B"], shared["C"], D_D, z_BTD, dt_bias_D)
        return self.run_recurrence(self.recurrence, inputs, pos_BT, state, forward_context)

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
        x_BTD, z_BTD = self.in_proj(x_BTM, self.in_proj.local_splits)
        conv_inputs = (x_BTD, self.conv_weight, self.conv_bias)
        initial_tail = None if state is None else {"conv": state["conv"]}
        x_BTD, tail = self.run_recurrence(_CONV, conv_inputs, pos_BT, initial_tail, forward_context)
        with recompute_in_backward(selective) as discard:
            discard(x_BTD, lambda: _CONV.forward_no_state(conv_inputs, pos_BT, initial_tail))
            shared: Mapping[str, Tensor] = {}
            if config.shared_widths(self.context.d_model):
                x_BTD, projected = self.x_proj(x_BTD, return_input=True)
                # every rank's channels use the same dt code, B and C: their gradient is summed once for all three
                shared = self.shared_inputs(copy_to_tensor_group(projected))
            projected_steps = self._projected_steps(shared, x_BTD)
            dt_BTD = projected_steps()
            initial_state = None if state is None else {config.state_name: state[config.state_name]}
            discard(dt_BTD, projected_steps)
            y_BTD, final_state = self.scan(x_BTD, dt_BTD, shared, z_BTD, pos_BT, initial_state, forward_context)
        return self.out_proj(y_BTD), {**tail, **final_state}
