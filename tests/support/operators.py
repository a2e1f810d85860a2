"""Counts PyTorch operators and the elements that they read and write."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Counted(TorchDispatchMode):
    """Operators that are no views, and the numbers that they read and write."""

    def __init__(self):
        super().__init__()
        self.launches = self.moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not (func.is_view or func.name().startswith(("aten::empty", "aten::new_empty", "aten::detach"))):
            self.launches += 1
            self.moved += sum(x.numel() for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor))
        return out
