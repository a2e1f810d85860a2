"""Mamba-3's recurrence in PyTorch around gated linear attention, whose Triton kernels a GPU runs.

A token enters the state twice, with lam dt of its own and with (1 - lam) dt of the next token. So S_t, the state h_t with both, is
gated linear attention's with x scaled by their sum, and the last token of a piece has the first part alone. A token reads the state
before it, as the token before leaves it, and itself with the first part: it has nothing of the next token, not even a rounding, and
no decay is divided by. Where a token reads with the q of the next one, outputs are the next token's.

Shape suffixes: B batch, T time, H heads, N d_state, P head_dim, R pairs of states that turn.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from baton.kernels.common.chunked_autograd import state_dtype
from baton.kernels.common.selective_recompute import of_one_call, recompute_in_backward
from baton.kernels.gated_linear_attention.op import gated_linear_attention
from baton.kernels.gated_linear_attention.triton_launch import use_triton
from baton.kernels.head_scale import head_scale
from baton.kernels.mamba3.rotation import rotated, turned
from baton.kernels.mamba3.transitions import written
from baton.kernels.mamba3.triton_launch import output_triton, rotated_triton
from baton.kernels.protocol import State


def mamba3_torch(
    x: Tensor, B: Tensor, C: Tensor, dt: Tensor, g: Tensor, lam: Tensor, theta: Tensor, B_bias: Tensor, C_bias: Tensor, D: Tensor,
    *, pos: Tensor | None, initial_state: State | None, recompute_activations: bool = False,
) -> tuple[Tensor, State]:  # fmt: skip
    """As `op.mamba3`, which checks the arguments."""
    dtype = state_dtype(x, B, C, dt, g, lam, theta, B_bias, C_bias, D)
    on_gpu = use_triton(x, dtype)
    if on_gpu:
        next_BTHN, first_BHN, k_BTHN, own_BTH, cos_BHR, sin_BHR = rotated_triton(B, C, dt, theta, B_bias, C_bias, pos)
    else:
        next_BTHN, first_BHN, k_BTHN, own_BTH, cos_BHR, sin_BHR = rotated(B, C, dt, theta, B_bias, C_bias, pos, dtype)
    dt_BTH, lam_BTH, decay_BTH = dt.to(dtype), lam.to(dtype), g.to(dtype).exp()
    after_BTH, before_BTH = lam_BTH * dt_BTH, (1 - lam_BTH) * dt_BTH
    if pos is not None:
        starts_BT1 = (pos == 0).unsqueeze(-1)
        decay_BTH, before_BTH = decay_BTH.masked_fill(starts_BT1, 0.0), before_BTH.masked_fill(starts_BT1, 0.0)
    scale_BTH = after_BTH + pad(before_BTH[:, 1:], (0, 0, 0, 1))
    v_BTHP = head_scale(x, scale_BTH)
    S_BHNP = None
    if initial_state is not None:
        S_BHNP = initial_state["h"] + before_BTH[:, 0, :, None, None] * written(initial_state["k"], initial_state["x"])
    with recompute_in_backward(recompute_activations and on_gpu) as discard:
        turned_again = of_one_call(lambda: rotated_triton(B, C, dt, theta, B_bias, C_bias, pos)[:3:2], 2)
        for made, again in zip((next_BTHN, k_BTHN), turned_again, strict=True):
            discard(made, again)
        discard(v_BTHP, lambda: head_scale(x, scale_BTH))
        read_BTHP, last_BHNP = gated_linear_attention(next_BTHN, k_BTHN, v_BTHP, g, gate="scalar", pos=pos, initial_state=S_BHNP)
    # no matrix product, which autocast would round
    first_BHP = None if S_BHNP is None else (first_BHN[..., None] * S_BHNP).sum(2)
    skip_BTH = after_BTH * own_BTH + D.to(dtype)
    if on_gpu:
        y_BTHP = output_triton(read_BTHP, x, decay_BTH, skip_BTH, first_BHP)
    else:
        read_BTHP = pad(read_BTHP[:, :-1].to(dtype), (0, 0, 0, 0, 1, 0))
        if first_BHP is not None:
            read_BTHP = read_BTHP + pad(first_BHP[:, None], (0, 0, 0, 0, 0, x.shape[1] - 1))
        y_BTHP = (decay_BTH[..., None] * read_BTHP + skip_BTH[..., None] * x).to(x.dtype).contiguous()
    last_BHNP = turned(last_BHNP.transpose(2, 3), cos_BHR[:, :, None], -sin_BHR[:, :, None]).transpose(2, 3)
    last_k_BHN = B[:, -1].to(dtype).repeat_interleave(x.shape[2] // B.shape[2], 1) + B_bias
    last_x_BHP = x[:, -1].to(dtype).clone(memory_format=torch.contiguous_format)
    return y_BTHP, {"h": last_BHNP.contiguous(), "k": last_k_BHN.contiguous(), "x": last_x_BHP}
