"""Selective scan: the public function. Checks the arguments and picks an implementation.

The state is passed in and returned in fp32 (float64 for float64 inputs), with exact gradients to both, so a sequence may be split
anywhere. In PyTorch, y and the states then keep every bit. The Triton kernels, which split long sequences themselves, and all
gradients agree to rounding.
"""

from typing import Literal, get_args

import torch.nn.functional as F
from torch import Tensor

from baton.kernels.diagonal_scan.triton_launch import ScanInputs, diagonal_scan_triton, use_triton
from baton.kernels.errors import KernelError, expect_dtype, expect_one_precision, expect_positions, expect_tensor
from baton.kernels.gate import gated
from baton.kernels.selective_scan.chunked import selective_scan_chunked

Discretization = Literal["euler", "zoh"]

_DISCRETIZATIONS = get_args(Discretization)
_KERNEL = "selective_scan"


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    *,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    pos: Tensor | None = None,
    initial_state: Tensor | None = None,
    discretization: Discretization = "euler",
) -> tuple[Tensor, Tensor]:
    """Mamba's recurrence over a segment of a sequence (Gu & Dao 2023, equations 2 and 4; per channel d and state index n):

        h_t = exp(dt_t A) h_{t-1} + phi_t B_t x_t        phi = dt (euler) or expm1(dt A) / A (zoh)
        y_t = (sum_n C_t h_t + D x_t) silu(z_t)

    Where pos == 0, exp(...) is replaced by 0: a document never sees the state of the one before it. The order of the arguments is
    that of mamba_ssm's `selective_scan_fn`, which calls x `u` and dt `delta`.

    Args:
        x: input, [batch, T, channels].
        dt: step sizes, no unit, [batch, T, channels]; >= 0 if dt_softplus is False.
        A: state matrix, diagonal, [channels, d_state], strictly negative (A = -exp(A_log)); not checked.
        B: input projection, shared by the channels, [batch, T, d_state].
        C: output projection, shared by the channels, [batch, T, d_state].
        D: skip weight per channel, [channels].
        z: gate, [batch, T, channels]. None: y is not gated.
        dt_bias: added to dt per channel, before the softplus and in the compute dtype, [channels]. None: 0.
        dt_softplus: whether the step sizes are softplus(dt + dt_bias) instead of dt + dt_bias.
        pos: position of each token in its document, int32 or int64 [batch, T], 0 at a document's first token. None: no document
            starts in this segment.
        initial_state: [batch, channels, d_state], float32 (float64 for float64 inputs). None: zero.
        discretization: of the input term: "euler", as in the released models, or "zoh", the paper's equation 4.

    Tensors are all float64, or any mix of float32, bfloat16 and float16; the mix is computed in float32, on a GPU by Triton
    kernels.

    Returns:
        y, [batch, T, channels] in x's dtype, and the final state, [batch, channels, d_state], float32 or float64. Both carry exact
        gradients to every tensor argument. Double backward is not supported; autograd raises a RuntimeError.

    Raises:
        KernelError: an argument has another shape, dtype or device than stated, by name; T = 0.
    """
    if not isinstance(x, Tensor):
        raise KernelError(f"{_KERNEL}: x is a {type(x).__name__}, expected a tensor of shape (batch, T, channels)")
    device = x.device
    expect_tensor(_KERNEL, "x", x, ("batch", "T", "channels"), (-1, -1, -1), device)
    batch, length, channels = x.shape
    expect_tensor(_KERNEL, "A", A, ("channels", "d_state"), (channels, -1), device)
    d_state = A.shape[1]
    expect_tensor(_KERNEL, "dt", dt, ("batch", "T", "channels"), (batch, length, channels), device)
    expect_tensor(_KERNEL, "B", B, ("batch", "T", "d_state"), (batch, length, d_state), device)
    expect_tensor(_KERNEL, "C", C, ("batch", "T", "d_state"), (batch, length, d_state), device)
    expect_tensor(_KERNEL, "D", D, ("channels",), (channels,), device)
    given = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D}
    if z is not None:
        expect_tensor(_KERNEL, "z", z, ("batch", "T", "channels"), (batch, length, channels), device)
        given["z"] = z
    if dt_bias is not None:
        expect_tensor(_KERNEL, "dt_bias", dt_bias, ("channels",), (channels,), device)
        given["dt_bias"] = dt_bias
    compute_dtype = expect_one_precision(_KERNEL, **given)
    if initial_state is not None:
        expect_tensor(_KERNEL, "initial_state", initial_state, ("batch", "channels", "d_state"), (batch, channels, d_state), device)
        expect_dtype(_KERNEL, "initial_state", initial_state, (compute_dtype,))
    if pos is not None:
        expect_positions(_KERNEL, pos, batch, length, device)
    if discretization not in _DISCRETIZATIONS:
        raise KernelError(f"{_KERNEL}: discretization is {discretization!r}, expected one of {_DISCRETIZATIONS}")
    if use_triton(x, compute_dtype):
        inputs = ScanInputs(x, dt, A, B, C, D, z, dt_bias)
        return diagonal_scan_triton(inputs, pos=pos, initial_state=initial_state, activate=dt_softplus, zoh=discretization == "zoh")
    if dt_bias is not None:
        dt = dt.to(compute_dtype) + dt_bias.to(compute_dtype)
    if dt_softplus:
        dt = F.softplus(dt.to(compute_dtype))
    y, h = selective_scan_chunked(x, dt, A, B, C, D, pos=pos, initial_state=initial_state, zoh=discretization == "zoh")
    return (y if z is None else gated(y, z)), h
