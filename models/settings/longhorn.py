"""Settings of Longhorn."""

from typing import Literal

from baton.models.settings.gated_scan import GatedScanConfig


class LonghornConfig(GatedScanConfig):
    """The online learner of Longhorn (Liu et al.), diagonal form."""

    kind: Literal["longhorn"] = "longhorn"
