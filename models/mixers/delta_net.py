"""DeltaNet's mixer: the delta rule with normalized keys, after short convolutions.

Source: Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", section 3.3; the released
code for what the paper does not specify (no biases). Heads are split over the tensor group.
"""

from collections.abc import Sequence

from torch import Tensor

from baton.models.delta_rule import DeltaRuleMixer
from baton.models.settings.delta_net import DeltaNetConfig


class DeltaNet(DeltaRuleMixer, settings=DeltaNetConfig):
    """S = (I - beta k k^T) S + beta k v^T, y = W RMSNorm(S^T q / sqrt(d_key)), q and k of length 1, beta = sigmoid(linear)."""

    def log_decay(self, extra: Sequence[Tensor]) -> None:
        return None

    def normed(self, o_BTHV: Tensor, extra: Sequence[Tensor]) -> Tensor:
        return self.norm(o_BTHV, o_BTHV.dtype).flatten(2)
