"""S4D's recurrence, a chunk of tokens at a time: a convolution inside the chunk, and powers of the diagonal for the State.

The convolution's kernel K_l = 2 Re <C, a^l>, l < L, and the powers a^l are computed once for all chunks, as the model is the same
at every token. Complex numbers are pairs of real ones (re, im). No exponent is above 0.

Shape suffixes: B batch, L tokens of a chunk, P powers 0 .. L, D channels, N d_state.
"""

import torch
from torch import Tensor

from baton.kernels.common.chunked_autograd import run_chunked, state_dtype
from baton.kernels.protocol import Inputs, State

CHUNK = 16


def s4d_chunked(
    x: Tensor, log_decay: Tensor, angle: Tensor, C: Tensor, *, pos: Tensor | None, initial_state: Tensor, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """As `op.s4d`, which checks the arguments."""
    dtype = state_dtype(x, log_decay, angle, C)
    log_decay, angle, C = (tensor.to(dtype) for tensor in (log_decay, angle, C))
    powers_PDN2 = powers(log_decay, angle, chunk)
    re, im = powers_PDN2.unbind(-1)
    # what y reads of the two parts of a^l h
    read_PDN2 = 2 * torch.stack((C[..., 0] * re - C[..., 1] * im, -C[..., 0] * im - C[..., 1] * re), dim=-1)
    kernel_PD = read_PDN2[..., 0].sum(-1)
    y, state = run_chunked(
        _step, (x, powers_PDN2, read_PDN2, kernel_PD), 1, pos=pos, state={"h": initial_state}, chunk=min(chunk, x.shape[1])
    )
    return y, state["h"]


def powers(log_decay: Tensor, angle: Tensor, last: int) -> Tensor:
    """Powers 0 .. last of exp(log_decay + i angle), [last + 1, D, N, 2]."""
    exponent = torch.arange(last + 1, dtype=angle.dtype, device=angle.device)[:, None, None]
    size, turn = (exponent * log_decay).exp(), exponent * angle
    return torch.stack((size * turn.cos(), size * turn.sin()), dim=-1)


def _step(inputs: Inputs, pos: Tensor | None, state: State) -> tuple[Tensor, State]:
    x, powers_PDN2, read_PDN2, kernel_PD = inputs
    x_BLD, h_BDN2 = x.to(powers_PDN2.dtype), state["h"]
    length = x.shape[1]
    at_L = torch.arange(length, device=x.device)
    distance_LL = at_L[:, None] - at_L
    if pos is None:
        seen_BLL, sees_state_BL = (distance_LL >= 0)[None], torch.ones_like(at_L, dtype=torch.bool)[None]
    else:
        seen_BLL, sees_state_BL = (distance_LL >= 0) & (distance_LL <= pos[:, :, None]), pos > at_L
    pairs_BLLD = kernel_PD[distance_LL.clamp(min=0)] * seen_BLL[..., None]
    y_BLD = (pairs_BLLD * x_BLD[:, None]).sum(2)
    from_state_BLD = torch.einsum("ldnc,bdnc->bld", read_PDN2[1 : length + 1], h_BDN2)
    y_BLD = y_BLD + from_state_BLD * sees_state_BL[..., None]
    added_BDN2 = torch.einsum("ldnc,bld->bdnc", powers_PDN2[:length].flip(0), x_BLD * seen_BLL[:, -1, :, None])
    kept_BDN2 = times(powers_PDN2[length], h_BDN2) * sees_state_BL[:, -1, None, None, None]
    return y_BLD.to(x.dtype), {"h": added_BDN2 + kept_BDN2}


def times(a: Tensor, b: Tensor) -> Tensor:
    """The product of complex numbers in pairs [..., 2]."""
    return torch.stack((a[..., 0] * b[..., 0] - a[..., 1] * b[..., 1], a[..., 0] * b[..., 1] + a[..., 1] * b[..., 0]), dim=-1)
