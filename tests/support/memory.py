"""Measures the largest tensor that a computation allocates, and how many bytes are in memory at once."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
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


class MostBytes(TorchDispatchMode):
    """Within this context, `bytes` is the most that the tensors which operations returned took at once."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._held = {place: (ref, nbytes) for place, (ref, nbytes) in self._held.items() if not ref.expired()}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self._held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.bytes = max(self.bytes, sum(nbytes for _, nbytes in self._held.values()))
        return result
