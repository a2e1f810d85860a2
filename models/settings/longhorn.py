"""Settings of Longhorn."""

from typing import Literal

from baton.models.settings.footprint import Footprint
from baton.models.settings.gated_scan import GatedScanConfig


class LonghornConfig(GatedScanConfig):
    """The online learner of Longhorn (Liu et al.), diagonal form."""

    kind: Literal["longhorn"] = "longhorn"

    def footprint(self, d_model: int) -> Footprint:
        # the decay 2, its limit 1, what is added 2, the step 2, the output 2
        return self.skeleton(d_model, "beta", 9)
