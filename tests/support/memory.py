"""Measures the largest tensor that a computation allocates."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Within this context, `numel` is the size of the largest tensor that any operation returned, autograd's included."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().nbytes():
                self.numel = max(self.numel, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result
