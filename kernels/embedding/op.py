"""The public function of an embedding's gradient: picks an implementation.

The one thing to know: rows are added where they belong, so no dense gradient, of zeros mostly, is made and added in turn. Rows of
equal ids are summed in float32 in an order that hangs on nothing but the ids: equal calls give equal bits.
"""

import torch
from torch import Tensor

from baton.kernels.embedding.triton_launch import add_rows_triton, use_triton
from baton.kernels.errors import KernelError, expect_dtype, expect_tensor

_KERNEL = "add_rows"


def add_rows(into: Tensor, ids: Tensor, rows: Tensor) -> None:
    """into[ids[n]] += rows[n], of all n.

    Args:
        into: [V, d], contiguous, float32 or float64: what is computed in.
        ids: [N] int32 or int64; one that is no row of `into` counts nothing, whatever it is.
        rows: [N, d], in into's dtype or a less precise one.

    Raises:
        KernelError: shapes, devices or dtypes other than these; into is not contiguous.
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
