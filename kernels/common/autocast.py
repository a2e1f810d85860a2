"""Autocast, which operators disable: they choose the dtypes of their matmuls themselves."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Disables autocast on x's device inside the context. The meta device has no autocast."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
