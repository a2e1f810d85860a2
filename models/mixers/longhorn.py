"""Longhorn's mixer: an online learner of associations in the gated-scan skeleton.

Source: Liu et al., "Longhorn: State Space Models are Amortized Online Learners", equations of section 3 and algorithm 1; the
reference code for what the paper leaves out (low-rank beta with bias 0, skip). Channels are split over the tensor group.
"""

from torch import Tensor

from baton.kernels.longhorn import recurrence
from baton.kernels.protocol import Inputs
from baton.models import init
from baton.models.gated_scan import GatedScan
from baton.models.mixer import Site
from baton.models.settings.longhorn import LonghornConfig


class Longhorn(GatedScan, settings=LonghornConfig):
    """S = (1 - eps k^2) S + eps u k, y = S q + D u, with eps = beta / (1 + beta |k|^2) and beta = sigmoid(low rank + bias)."""

    config: LonghornConfig
    recurrence = recurrence.Longhorn(gated=True)

    def __init__(self, config: LonghornConfig, site: Site) -> None:
        super().__init__(config, site, step="beta", step_bias=init.constant(0.0))

    def scanned(self, u_BTD: Tensor, step_BTD: Tensor, in_BTN: Tensor, out_BTN: Tensor, z_BTD: Tensor, bias_D: Tensor) -> Inputs:
        return u_BTD, in_BTN, out_BTN, step_BTD, z_BTD, self.D, bias_D
