"""Mamba-3's recurrence with several inputs and outputs per head, in PyTorch around gated linear attention, whose Triton kernels a
GPU runs; there what is as wide as q, k or v is computed by kernels, too (`triton_launch`, `mamba3.triton_launch`).

As in `mamba3.torch_impl`, a token is written with the step sizes of its own and of the next token, and is read with the q of the
next one. A token with J inputs is J tokens of gated linear attention, of which the first decays. Each of them reads the state with
one of the next token's J queries, so that it misses what the later ones of the same token write: `ranks.mixed` adds that, and what
a token reads of itself. (All J queries could be read at the last of the J, with J times the work of reading.)

Shape suffixes: B batch, T time, H heads, J inputs and outputs of a head (and the same again), N d_state, P head_dim, R pairs of
states that turn.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from baton.kernels.common.chunked_autograd import state_dtype
from baton.kernels.common.selective_recompute import of_one_call, recompute_in_backward
from baton.kernels.gated_linear_attention.op import gated_linear_attention
from baton.kernels.head_scale import head_scale
from baton.kernels.mamba3.rotation import rotated_of_several, turned
from baton.kernels.mamba3.transitions import written
from baton.kernels.mamba3.triton_launch import rotated_of_several_triton
from baton.kernels.mamba3_mimo.ranks import mixed
from baton.kernels.mamba3_mimo.triton_launch import inputs_triton, output_triton, use_triton
from baton.kernels.protocol import State


def mamba3_mimo_torch(
    x: Tensor, B: Tensor, C: Tensor, dt: Tensor, g: Tensor, lam: Tensor, theta: Tensor, B_bias: Tensor, C_bias: Tensor, D: Tensor,
    mimo_x: Tensor, *, pos: Tensor | None, initial_state: State | None, recompute_activations: bool = False,
) -> tuple[Tensor, State]:  # fmt: skip
    """As `op.mamba3_mimo`, which checks the arguments."""
    inputs, length = mimo_x.shape[1], x.shape[1]
    dtype = state_dtype(x, B, C, dt, g, lam, theta, B_bias, C_bias, D, mimo_x)
    mimo_x, D = mimo_x.to(dtype), D.to(dtype)
    on_gpu, angles = use_triton(x, mimo_x), (dt, theta, B_bias, C_bias, pos)
    next_BTJHN, first_BHJN, k_BTJHN, own_BTHJJ, later, cos_BHR, sin_BHR = (
        rotated_of_several_triton(B, C, *angles) if on_gpu else rotated_of_several(B, C, *angles, dtype)
    )
    dt_BTH, lam_BTH, decay_BTH = dt.to(dtype), lam.to(dtype), g.to(dtype).exp()
    after_BTH, before_BTH = lam_BTH * dt_BTH, (1 - lam_BTH) * dt_BTH
    tokens = None
    if pos is not None:
        starts_BT1 = (pos == 0).unsqueeze(-1)
        decay_BTH, before_BTH = decay_BTH.masked_fill(starts_BT1, 0.0), before_BTH.masked_fill(starts_BT1, 0.0)
        tokens = (pos.unsqueeze(-1) * inputs + torch.arange(inputs, dtype=pos.dtype, device=pos.device)).flatten(1)
    scale_BTH = after_BTH + pad(before_BTH[:, 1:], (0, 0, 0, 1))
    if on_gpu:
        v_BTJHP = inputs_triton(x, scale_BTH, mimo_x)
    else:
        scaled_BTHP = head_scale(x, scale_BTH)
        v_BTJHP = (scaled_BTHP[:, :, None] * mimo_x.transpose(0, 1)).to(x.dtype)
    S_BHNP = None
    if initial_state is not None:
        S_BHNP = initial_state["h"] + before_BTH[:, 0, :, None, None] * written(initial_state["k"], initial_state["x"])
    g_BTJH = pad(g[:, :, None], (0, 0, 0, inputs - 1))
    q, k, v, decays = (x.flatten(1, 2) for x in (next_BTJHN, k_BTJHN, v_BTJHP, g_BTJH))
    with recompute_in_backward(recompute_activations and on_gpu) as discard:
        turned_again = of_one_call(lambda: tuple(x.flatten(1, 2) for x in rotated_of_several_triton(B, C, *angles)[:3:2]), 2)
        for made, again in zip((q, k), turned_again, strict=True):
            discard(made, again)
        discard(v, lambda: inputs_triton(x, scale_BTH, mimo_x).flatten(1, 2))
        read, last_BHNP = gated_linear_attention(q, k, v, decays, gate="scalar", pos=tokens, initial_state=S_BHNP)
    read_BTJHP, first_BJHP = read.unflatten(1, (length, inputs)), None
    if S_BHNP is not None:
        # no matrix product, which autocast would round
        first_BJHP = torch.stack([(q_BHN[..., None] * S_BHNP).sum(2) for q_BHN in first_BHJN.unbind(2)], dim=1)
    factors = mimo_x, decay_BTH, after_BTH, D, own_BTHJJ, later, first_BJHP
    y_BTJHP = output_triton(read_BTJHP, x, scale_BTH, *factors) if on_gpu else _output(read_BTJHP, x, scaled_BTHP, *factors)
    last_BHNP = turned(last_BHNP.transpose(2, 3), cos_BHR[:, :, None], -sin_BHR[:, :, None]).transpose(2, 3)
    last_k_BHJN = B[:, -1].to(dtype).repeat_interleave(x.shape[2] // B.shape[2], 1) + B_bias
    last_v_BHJP = x[:, -1, :, None].to(dtype) * mimo_x
    leaving = {"h": last_BHNP.contiguous(), "k": last_k_BHJN.contiguous(), "x": last_v_BHJP.contiguous()}
    return y_BTJHP, leaving


def _output(
    read: Tensor, x: Tensor, scaled: Tensor, mimo_x: Tensor, decay: Tensor, after: Tensor, D: Tensor, own: Tensor,
    later: Tensor | None, first: Tensor | None,
) -> Tensor:  # fmt: skip
    """As `triton_launch.output_triton`, of x times `scale`, and with `later` [B, T, H, J, J]."""
    read_BTJHP, inputs = read.to(mimo_x.dtype), mimo_x.shape[1]
    if later is not None:
        read_BTJHP = read_BTJHP + mixed(later, scaled, mimo_x)
    read_BTJHP = pad(read_BTJHP[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0))
    if first is not None:
        read_BTJHP = read_BTJHP + pad(first[:, None], (0, 0, 0, 0, 0, 0, 0, x.shape[1] - 1))
    itself_BTHJJ = after[..., None, None] * own + torch.diag_embed(D[:, None].expand(-1, inputs))
    y_BTJHP = decay[:, :, None, :, None] * read_BTJHP + mixed(itself_BTHJJ, x, mimo_x)
    return y_BTJHP.to(x.dtype).contiguous()
