"""Scaling of each head's vector on a GPU: launches the kernels of `triton_kernels` and defines their gradient."""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels.common import launch_utils
from baton.kernels.common.launch_utils import LazyModule
from baton.kernels.compile.aot import on_gpu

_kernels = LazyModule("baton.kernels.head_scale.triton_kernels")

_ENTRIES = 4096  # of a program


def use_triton(x: Tensor, scale: Tensor) -> bool:
    """Whether these kernels apply: on a GPU, computing in float32."""
    return on_gpu(x) and scale.dtype == torch.float32 and x.dtype != torch.float64


def head_scale_triton(x: Tensor, scale: Tensor) -> Tensor:
    """As `op.head_scale`, which checks the arguments."""
    y: Tensor = _HeadScale.apply(x, scale)
    return y


@cache
def launch_sizes(width: int) -> Mapping[str, int]:
    """Constants of a launch for heads of this width."""
    block = launch_utils.next_power_of_2(width)
    return MappingProxyType({"D": width, "BR": max(1, _ENTRIES // block), "BD": block, "num_warps": 4})


class _HeadScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        scale, sizes = scale.contiguous(), launch_sizes(x.shape[-1])
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rows = launch_utils.as_rows(x, x.shape[-2] * x.shape[-1])
        _kernels.head_scale_forward_kernel[(-(-scale.numel() // sizes["BR"]),)](
            rows, scale, y, scale.numel(), rows.stride(0), H=x.shape[-2], **sizes
        )
        # x and not its rows: as columns of a fused projection it takes no memory of its own
        ctx.save_for_backward(x, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, scale = ctx.saved_tensors
        sizes, dscale = launch_sizes(x.shape[-1]), torch.empty_like(scale)
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rows, dy_rows = (launch_utils.as_rows(of, x.shape[-2] * x.shape[-1]) for of in (x, dy))
        _kernels.head_scale_backward_kernel[(-(-scale.numel() // sizes["BR"]),)](
            rows, scale, dy_rows, dx, dscale, scale.numel(), rows.stride(0), dy_rows.stride(0), H=x.shape[-2], **sizes
        )
        return dx, dscale
