"""Mamba's mixer: a selective state space model, in the block of `models.ssm_block`.

Source: Gu & Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", section 3 and appendix. Channels are
split over the tensor group.

Differences from the paper:

- The released code adds a bias to the convolution and a skip D x to the output; algorithm 2 has neither. skip=false removes D x.
- The released code draws the initial step sizes log-uniformly, with a floor of 1e-4; section 3.6 draws them uniformly from
  [0.001, 0.1]. dt_init=uniform is the paper's.
- The input matrix is discretized by Euler's rule, as in the released code; discretization=zoh is equation 4.
- projection_norm_eps normalizes the step sizes' low-rank code, B and C, as FalconMamba (Zuo et al. 2024) and, with weights, Jamba
  (Lieber et al. 2024) do.

The blocks of tables 1 and 6 are the setting block: without the gate, or H3's (Fu et al. 2023) with heads of one channel. There the
scan's input is conv(k) v, from which dt, B and C are computed, and its output is multiplied by q. The paper says neither what H3's
selective parameters are computed from nor how wide its heads are.

The ablations of tables 7 and 8 are settings. selective says what is computed from the token; A_init has all initial values but
the complex one. A B or C that is a parameter has the shape of algorithm 1, a row for each channel, with which the model has the
parameter counts of tables 9 and 10. The kernels read a B and a C that all channels share, so the scan then runs over
d_inner * d_state channels of one state each (`Mamba._scan_apart`).

A misprint in the paper: table 8 gives a random initial value as A ~ exp(N(0, 1)). A must be negative, so it is -exp(N(0, 1)).

Shapes: B batch, T time, D this rank's channels (d_inner), N d_state.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.kernels.protocol import Inputs, State
from baton.kernels.rms_norm import rms_norm
from baton.kernels.selective_scan.recurrence import SelectiveScan
from baton.models import cached_constants
from baton.models.forward_context import ForwardContext
from baton.models.norm import unweighted
from baton.models.settings.mamba import MambaConfig
from baton.models.ssm_block import SSMBlock, gated_output


class Mamba(SSMBlock, settings=MambaConfig):
    """h = exp(dt A) h + dt B x, y = <C, h> + D x, with dt = softplus(low rank + dt_bias) and A = -exp(A_log)."""

    config: MambaConfig

    A_log: nn.Parameter
    dt_bias: nn.Parameter
    B: nn.Parameter
    C: nn.Parameter
    D: nn.Parameter
    dt_norm: nn.Parameter
    B_norm: nn.Parameter
    C_norm: nn.Parameter

    @property
    def recurrence(self) -> SelectiveScan:
        gated = self.config.block == "mamba"
        return SelectiveScan(self.config.discretization, gated=gated, activated=not gated)

    def shared_inputs(self, projected: Tensor) -> Mapping[str, Tensor]:
        parts, eps = super().shared_inputs(projected), self.config.projection_norm_eps
        if eps is None:
            return parts
        precise = torch.promote_types(projected.dtype, torch.float32)
        if not self.config.projection_norm_weights:
            return {name: unweighted(x, eps, precise=precise, dtype=projected.dtype) for name, x in parts.items()}
        weights = {"step": self.dt_norm, "B": self.B_norm, "C": self.C_norm}
        return {name: rms_norm(x, weights[name], eps, dtype=projected.dtype) for name, x in parts.items()}

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
        if not self.config.static:
            return super().scan(x_BTD, dt_BTD, shared, gate_BTD, pos_BT, state, forward_context)
        y_BTD, h_BDN = self._scan_apart(x_BTD, dt_BTD, shared, pos_BT, state, forward_context)
        return gated_output(self.config.block, y_BTD, gate_BTD, x_BTD.dtype), {"h": h_BDN}

    def _scan_apart(
        self,
        x_BTD: Tensor,
        dt_BTD: Tensor,
        shared: Mapping[str, Tensor],
        pos_BT: Tensor,
        state: State | None,
        forward_context: ForwardContext,
    ) -> tuple[Tensor, Tensor]:
        """y [B, T, D] before the gate and the final state [B, D, N], every state h_dn scanned as a channel of its own.

        B x is the scan's input, the scan's B and C are 1, and C sums its outputs over n.
        """
        precise, d_state = torch.promote_types(x_BTD.dtype, self.A_log.dtype), self.config.d_state
        B, C = (getattr(self, name) if name in self.config.static else shared[name].to(precise)[:, :, None] for name in "BC")
        x_BTD1 = x_BTD.to(precise)[..., None]
        dt_BTD1 = F.softplus(dt_BTD.to(precise) + self.dt_bias)[..., None]
        ones_BT1 = cached_constants.full(1, 1.0, precise, x_BTD.device).expand(*x_BTD.shape[:2], 1)
        A = -torch.exp(self.A_log).reshape(-1, 1)
        inputs = (
            (B * x_BTD1).flatten(2),
            dt_BTD1.expand(-1, -1, -1, d_state).flatten(2),
            ones_BT1,
            ones_BT1,
            A,
            cached_constants.zeros(len(A), precise, x_BTD.device),
        )
        initial = None if state is None else {"h": state["h"].reshape(len(x_BTD), -1, 1)}
        recurrence = SelectiveScan(self.config.discretization)
        h_BTE, final = self.run_recurrence(recurrence, inputs, pos_BT, initial, forward_context)
        y_BTD = (h_BTE.unflatten(2, (-1, d_state)) * C).sum(-1)
        if self.config.skip:
            y_BTD = y_BTD + self.D * x_BTD1.squeeze(-1)
        h = final["h"]  # a placeholder if it is not wanted
        return y_BTD, h.reshape(len(x_BTD), -1, d_state) if forward_context.need_final_state else h

    def scan_inputs(
        self, x_BTD: Tensor, dt_BTD: Tensor, B_BTN: Tensor, C_BTN: Tensor, D_D: Tensor, z_BTD: Tensor | None, dt_bias_D: Tensor
    ) -> Inputs:
        z = () if z_BTD is None else (z_BTD,)
        return x_BTD, dt_BTD, B_BTN, C_BTN, *z, -torch.exp(self.A_log), D_D, dt_bias_D
