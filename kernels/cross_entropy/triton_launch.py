"""Vocabulary-parallel cross-entropy on a GPU: launches the kernels of `triton_kernels`."""

import torch
from torch import Tensor

from baton.kernels.common import launch_utils
from baton.kernels.common.launch_utils import LazyModule
from baton.kernels.compile.aot import on_gpu

_kernels = LazyModule("baton.kernels.cross_entropy.triton_kernels")

COLUMNS = 4096  # of a step


def use_triton(logits: Tensor) -> bool:
    """Whether these kernels apply: on a GPU, computing in float32."""
    return on_gpu(logits) and logits.dtype != torch.float64


def partial_sums_triton(logits: Tensor, labels: Tensor, first: int, columns: int = COLUMNS) -> tuple[Tensor, Tensor, Tensor]:
    """As `op.partial_sums`. columns: of a step, a power of two."""
    logits, labels = launch_utils.contiguous_last_dim(logits), labels.contiguous()
    largest, total, own = torch.empty(3, len(logits), dtype=torch.float32, device=logits.device)
    _kernels.cross_entropy_sums_kernel[(len(logits),)](
        logits, labels, largest, total, own, first, logits.stride(0), V=logits.shape[1], BV=columns, num_warps=8
    )
    return largest, total, own


def gradient_triton(
    logits: Tensor, labels: Tensor, first: int, largest: Tensor, total: Tensor, columns: int = COLUMNS
) -> Tensor:  # fmt: skip
    """As `op.gradient`. columns: of a program, a power of two."""
    rows = launch_utils.contiguous_last_dim(logits)
    _kernels.cross_entropy_gradient_kernel[(len(rows), -(-rows.shape[1] // columns))](
        rows, labels.contiguous(), largest.contiguous(), total.contiguous(), first, rows.stride(0), V=rows.shape[1], BV=columns,
        num_warps=8,
    )  # fmt: skip
    return logits if rows is logits else logits.copy_(rows)
