"""Feature maps of linear attention, applied to queries and keys.

With elu + 1 (Katharopoulos et al. 2020) and relu no product of a query and a key is negative, as in softmax attention; transformers
are converted with relu (Zhang et al. 2024, section 4.2). Each mixer's default is its paper's.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from baton.models.settings.linear_attention import FeatureMap

FEATURE_MAPS: dict[FeatureMap, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "silu": F.silu,
    "relu": F.relu,
    "elu": lambda x: F.elu(x) + 1,
}
