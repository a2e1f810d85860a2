"""AdamW's update of a flat partition of parameters, whose gradients are tensors of their own.

Source: Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2, in the form of torch.optim.AdamW: decay
first, then the step. Computed in float32, also where the moments are kept in bfloat16: they are rounded to nearest behind the step
that uses them. On a GPU one launch reads and writes everything once, 28 bytes a number (20), and scales the gradients on the way:
PyTorch's operators take a flat copy of the gradients and another pass for the scale. It also writes the copies in the compute dtype
that the next step's matmuls read, 2 bytes a number where a cast moves 6.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baton.kernels.adamw.triton_launch import prepare_triton
from baton.kernels.errors import REDUCED_DTYPES, KernelError, expect_dtype, expect_tensor

_KERNEL = "prepare_adamw"


@dataclass(frozen=True)
class AdamWStep:
    """Settings of one update. step: number of the update, from 1. grad_scale: factor of the gradients."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    step: int
    grad_scale: float = 1.0

    def scalars(self) -> tuple[float, ...]:
        """What multiplies what: gradients, parameters, exp_avg and the gradient added to it, exp_avg_sq and the square added to it,
        the root of exp_avg_sq; eps; the update."""
        (b1, b2), t = self.betas, self.step
        shrink = 1.0 - self.lr * self.weight_decay
        return self.grad_scale, shrink, b1, 1.0 - b1, b2, 1.0 - b2, 1.0 / math.sqrt(1.0 - b2**t), self.eps, self.lr / (1.0 - b1**t)


def prepare_adamw(
    parameters: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grads: Sequence[Tensor],
    starts: Sequence[int],
    copies: Sequence[Tensor | None] | None = None,
) -> Callable[[AdamWStep], None]:
    """Returns a function that updates parameters and both moments in place. Elements without a gradient stay as they are.

    Checks and tables of addresses, which take the host longest, are made here: the gradients may still be computed, and it is
    enough if the function is called once they are there.

    Args:
        parameters: contiguous float32 [n]; exp_avg, exp_avg_sq: likewise, or both bfloat16.
        grads: contiguous float32, of any shape; starts: where the elements of each begin in the flat tensors. They do not overlap.
        copies: for each gradient what receives its new parameters, rounded to nearest: contiguous, of its shape, all bfloat16 or
            all float16; or None. None for all: nothing does.

    Raises:
        KernelError: a tensor of another shape or dtype than stated, or that is not contiguous; a gradient beyond the end.
    """
    for name, x in (("parameters", parameters), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        expect_tensor(_KERNEL, name, x, ("n",), (parameters.numel(),), parameters.device)
        allowed = {"parameters": (torch.float32,), "exp_avg": (torch.float32, torch.bfloat16), "exp_avg_sq": (exp_avg.dtype,)}
        expect_dtype(_KERNEL, name, x, allowed[name])
        if not x.is_contiguous():
            raise KernelError(f"{_KERNEL}: {name} is not contiguous")
    for grad, start in zip(grads, starts, strict=True):
        if grad.dtype != torch.float32 or grad.device != parameters.device or not grad.is_contiguous():
            raise KernelError(f"{_KERNEL}: a gradient is {grad.dtype} on {grad.device}, expected contiguous float32, as parameters")
        if start < 0 or start + grad.numel() > parameters.numel():
            raise KernelError(f"{_KERNEL}: a gradient covers [{start}, {start + grad.numel()}) of {parameters.numel()} elements")
    copies = [None] * len(grads) if copies is None else copies
    dtypes = {x.dtype for x in copies if x is not None}
    if len(dtypes) > 1:
        raise KernelError(f"{_KERNEL}: copies of {len(dtypes)} dtypes, expected one")
    for grad, copy in zip(grads, copies, strict=True):
        if copy is None:
            continue
        expect_tensor(_KERNEL, "a copy", copy, tuple(map(str, grad.shape)), grad.shape, parameters.device)
        expect_dtype(_KERNEL, "a copy", copy, REDUCED_DTYPES)
        if not copy.is_contiguous():
            raise KernelError(f"{_KERNEL}: a copy is not contiguous")
    prepare = prepare_triton if parameters.is_cuda else _prepare
    update = prepare(parameters, exp_avg, exp_avg_sq, grads, starts, copies)
    return lambda settings: update(settings.scalars())


def launch_forms(device: torch.device, moments_dtype: torch.dtype, compute_dtype: torch.dtype) -> None:
    """Launch each form of the kernel with moments of a dtype on a few elements, for compiling it ahead of a run. compute_dtype: of
    copies, torch.float32: there are none."""
    # memory of their own: of rows of one tensor only the first would be aligned
    parameters, grad = (torch.zeros(8, device=device) for _ in range(2))
    exp_avg, exp_avg_sq = (torch.zeros(8, device=device, dtype=moments_dtype) for _ in range(2))
    # groups without a matmul's weight have none
    copies = [None] if compute_dtype == torch.float32 else [None, torch.zeros(8, device=device, dtype=compute_dtype)]
    for copy in copies:
        for length in (8, 1):  # aligned, or not
            of_copy = None if copy is None else copy[:length]
            update = prepare_triton(parameters, exp_avg, exp_avg_sq, [grad[:length]], [0], [of_copy])
            update(AdamWStep(1e-3, (0.9, 0.999), 1e-8, 0.0, 1).scalars())


def _prepare(*tensors_and_starts: Any) -> Callable[[tuple[float, ...]], None]:
    return partial(_adamw_step, *tensors_and_starts)


@torch.no_grad()
def _adamw_step(
    parameters: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grads: Sequence[Tensor],
    starts: Sequence[int],
    copies: Sequence[Tensor | None],
    scalars: tuple[float, ...],
) -> None:
    scale, shrink, b1, b1_rest, b2, b2_rest, root, eps, rate = scalars
    for grad, start, copy in zip(grads, starts, copies, strict=True):
        p, m, v = (x[start : start + grad.numel()] for x in (parameters, exp_avg, exp_avg_sq))
        g = scale * grad.reshape(-1)
        new_m = m.float().mul(b1).add_(g, alpha=b1_rest)
        new_v = v.float().mul(b2).addcmul_(g, g, value=b2_rest)
        p.mul_(shrink).addcdiv_(new_m, new_v.sqrt().mul_(root).add_(eps), value=-rate)
        m.copy_(new_m)
        v.copy_(new_v)
        if copy is not None:
            copy.view(-1).copy_(p)
