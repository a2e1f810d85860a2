"""S4D's public function: checks its arguments."""

import torch
from torch import Tensor

from baton.kernels.errors import KernelError, expect_dtype, expect_one_precision, expect_positions, expect_tensor
from baton.kernels.s4d.chunked import s4d_chunked

_KERNEL = "s4d"


def s4d(
    x: Tensor, log_decay: Tensor, angle: Tensor, C: Tensor, *, pos: Tensor | None = None, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A time-invariant state space model with a complex diagonal (S4D; Gu et al. 2022, arXiv:2206.11893), per channel d:

        h_t = exp(log_decay + i angle) h_{t-1} + x_t        y_t = 2 Re sum_n C_n h_tn

    It is discretized by the caller: log_decay + i angle is dt A, and C contains the discretized B. Each n stands for a conjugate
    pair of states, hence the factor of 2. Where pos == 0, h_{t-1} counts as 0.

    Args:
        x: input, [batch, T, channels].
        log_decay: at most 0, [channels, d_state].
        angle: radians per token, [channels, d_state].
        C: real and imaginary parts, [channels, d_state, 2].
        pos: position of each token in its document, int32 or int64 [batch, T]. None: no document starts in this piece.
        initial_state: real and imaginary parts, [batch, channels, d_state, 2], float32 (float64 for float64 inputs). None: zero.

    Returns:
        y, [batch, T, channels] in x's dtype, and the final state, [batch, channels, d_state, 2], with exact gradients to all
        tensors.

    Raises:
        KernelError: an argument of another shape, dtype or device than stated, by name; T = 0.
    """
    if not isinstance(x, Tensor):
        raise KernelError(f"{_KERNEL}: x is a {type(x).__name__}, expected a tensor of shape (batch, T, channels)")
    expect_tensor(_KERNEL, "x", x, ("batch", "T", "channels"), (-1, -1, -1), x.device)
    batch, length, channels = x.shape
    expect_tensor(_KERNEL, "log_decay", log_decay, ("channels", "d_state"), (channels, -1), x.device)
    states = log_decay.shape[1]
    expect_tensor(_KERNEL, "angle", angle, ("channels", "d_state"), (channels, states), x.device)
    expect_tensor(_KERNEL, "C", C, ("channels", "d_state", "2"), (channels, states, 2), x.device)
    dtype = expect_one_precision(_KERNEL, x=x, log_decay=log_decay, angle=angle, C=C)
    if pos is not None:
        expect_positions(_KERNEL, pos, batch, length, x.device)
    if initial_state is None:
        initial_state = torch.zeros(batch, channels, states, 2, dtype=dtype, device=x.device)
    axes = ("batch", "channels", "d_state", "2")
    expect_tensor(_KERNEL, "initial_state", initial_state, axes, (batch, channels, states, 2), x.device)
    expect_dtype(_KERNEL, "initial_state", initial_state, (dtype,))
    return s4d_chunked(x, log_decay, angle, C, pos=pos, initial_state=initial_state)
