"""The gradient of an embedding lookup: the public function, which selects an implementation.

Rows are added to the embedding's gradient in place, so that no dense gradient, mostly zeros, is allocated. Rows of equal ids are
summed in float32 in an order that depends on the ids alone, so equal calls give equal bits.
"""

import torch
from torch import Tensor

from baton.kernels.embedding.triton_launch import add_rows_triton, use_triton
from baton.kernels.errors import KernelError, expect_dtype, expect_tensor

_KERNEL = "add_rows"


def add_rows(into: Tensor, ids: Tensor, rows: Tensor) -> None:
    """into[ids[n]] += rows[n], for all n.

    Args:
        into: [V, d], contiguous, float32 or float64: the dtype of the computation.
        ids: [N] int32 or int64; ids outside 0 .. V - 1 are ignored.
        rows: [N, d], in into's dtype or a less precise one.

    Raises:
        KernelError: another shape, device or dtype; into is not contiguous.
    """
    if not isinstance(into, Tensor) or into.dim() != 2 or not into.is_contiguous():
        raise KernelError(f"{_KERNEL}: into is no contiguous tensor of shape (V, d)")
    expect_tensor(_KERNEL, "ids", ids, ("N",), (-1,), into.device)
    expect_dtype(_KERNEL, "ids", ids, (torch.int32, torch.int64))
    expect_tensor(_KERNEL, "rows", rows, ("N", "d"), (len(ids), into.shape[1]), into.device)
    if use_triton(into):
        add_rows_triton(into, ids, rows)
        return
    here = (ids >= 0) & (ids < len(into))
    into.index_add_(0, ids.where(here, 0), rows.to(into.dtype).where(here[:, None], 0.0))
