"""Mamba's mixer: a selective state space in the gated-scan skeleton.

Source: Gu & Dao, "Mamba", section 3 and appendix; the released code for what the paper leaves out (convolution bias, skip,
initial values). Channels are split over the tensor group.
"""

import torch
from torch import Tensor

from baton.kernels.protocol import Inputs
from baton.kernels.selective_scan.recurrence import SelectiveScan
from baton.models import init
from baton.models.gated_scan import GatedScan
from baton.models.mixer import Site
from baton.models.settings.mamba import MambaConfig


class Mamba(GatedScan, settings=MambaConfig):
    """h = exp(delta A) h + delta B u, y = <C, h> + D u, with delta = softplus(low rank + bias) and A = -exp(A_log)."""

    config: MambaConfig

    def __init__(self, config: MambaConfig, site: Site) -> None:
        step_bias = init.inverse_softplus_log_uniform(config.dt_min, config.dt_max, config.dt_floor)
        super().__init__(config, site, step="dt", step_bias=step_bias)
        self.recurrence = SelectiveScan(config.discretization, gated=True)
        self.A_log = site.split((config.expand * site.d_model, config.d_state), init.log_arange, decay=False)

    def scanned(self, u_BTD: Tensor, step_BTD: Tensor, in_BTN: Tensor, out_BTN: Tensor, z_BTD: Tensor, bias_D: Tensor) -> Inputs:
        return u_BTD, step_BTD, in_BTN, out_BTN, z_BTD, -torch.exp(self.A_log), self.D, bias_D
