"""Mamba's mixer: a selective state space in the gated-scan skeleton.

Source: Gu & Dao, "Mamba", section 3 and appendix; the released code for what the paper leaves out (convolution bias, skip,
initial values). Channels are split over the tensor group.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.selective_scan.op import selective_scan
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
        self.A_log = site.split((config.expand * site.d_model, config.d_state), init.log_arange, decay=False)

    def scan(
        self, u_BTD: Tensor, step_BTD: Tensor, in_BTN: Tensor, out_BTN: Tensor, pos_BT: Tensor, state_BDN: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return selective_scan(
            u_BTD,
            F.softplus(step_BTD),
            -torch.exp(self.A_log),
            in_BTN,
            out_BTN,
            self.D,
            pos=pos_BT,
            initial_state=state_BDN,
            discretization=self.config.discretization,
        )
