"""Mamba-3's recurrence with several inputs and outputs per head: the public function, which checks its arguments."""

from torch import Tensor

from baton.kernels.mamba3.arguments import expect_arguments
from baton.kernels.mamba3_mimo.torch_impl import mamba3_mimo_torch
from baton.kernels.protocol import State

_KERNEL = "mamba3_mimo"


def mamba3_mimo(
    x: Tensor, B: Tensor, C: Tensor, dt: Tensor, g: Tensor, lam: Tensor, theta: Tensor, B_bias: Tensor, C_bias: Tensor, D: Tensor,
    mimo_x: Tensor, *, pos: Tensor | None = None, initial_state: State | None = None,
    recompute_activations: bool = False,
) -> tuple[Tensor, State]:  # fmt: skip
    """Mamba-3's recurrence with `rank` inputs and outputs per head over a piece of a sequence. Per head, with k_j = B_j + B_bias_j,
    q_j = C_j + C_bias_j and v_j = x * mimo_x_j:

        h_t = exp(g_t) R_t (h_{t-1} + (1 - lam_t) dt_t W_{t-1}) + lam_t dt_t W_t        W_t = sum_j k_{t,j} v_{t,j}^T
        y_{t,j} = h_t^T q_{t,j} + D v_{t,j}

    Lahoti et al. 2026, "Mamba-3: Improved Sequence Modeling using State Space Principles" (arXiv:2603.15569), its MIMO form. The
    state is as large as that of one input, and is read and written `rank` times a token. With rank 1 and mimo_x = 1 this is
    `mamba3.op`'s recurrence, where lam, R and D are explained. Pair r of states that turn is (2 r, 2 r + 1) here too; the authors'
    code (mamba_ssm) pairs r with r + d_state / 2 if there are several inputs. Where pos == 0, h_{t-1} and W_{t-1} count as 0.

    Args:
        x: [batch, T, heads, head_dim].
        B: what is written of each input, without its bias, [batch, T, groups, rank, d_state]. Heads are a multiple of groups, whose
            consecutive heads share B and C.
        C: what each output reads, without its bias, as B.
        dt: step sizes, at least 0, [batch, T, heads].
        g: log-decays, dt times a rate, finite and at most 0; not checked. [batch, T, heads].
        lam: the share of a token's own input in the trapezoidal rule, 0 to 1, [batch, T, heads].
        theta: angles in radians per unit of dt, shared by all heads, [batch, T, pairs], 1 to d_state / 2 pairs.
        B_bias: added to B of each head, [heads, rank, d_state].
        C_bias: added to C of each head, [heads, rank, d_state].
        D: the skip, [heads].
        mimo_x: makes the inputs of x, [heads, rank, head_dim].
        pos: position of each token in its document, int32 or int64 [batch, T], 0 at a document's first token. None: no document
            starts inside this piece.
        initial_state: {h [batch, heads, d_state, head_dim], and of the token before k [batch, heads, rank, d_state] and, as x, v
            [batch, heads, rank, head_dim]}, float32 (float64 for float64 inputs). None: zero.
        recompute_activations: on a GPU, compute turned queries and keys, and what is written, again in the backward pass instead of
            keeping them.

    Tensors are float64 all together, or any mix of float32, bfloat16 and float16: then everything is computed in float32, on
    a GPU with turned q and k rounded to B's dtype, and v to x's.

    Returns:
        y, [batch, T, rank, heads, head_dim] in x's dtype, and the State that leaves, as initial_state. Both carry exact gradients
        to every tensor argument; differentiating twice is refused by autograd with a RuntimeError.

    Raises:
        KernelError: an argument of another shape, dtype or device than stated, by name; a State with other
            keys; T = 0.
    """
    inputs = {"x": x, "B": B, "C": C, "dt": dt, "g": g, "lam": lam, "theta": theta, "B_bias": B_bias, "C_bias": C_bias, "D": D}
    expect_arguments(_KERNEL, inputs | {"mimo_x": mimo_x}, pos, initial_state, rank=("rank",))
    return mamba3_mimo_torch(
        x, B, C, dt, g, lam, theta, B_bias, C_bias, D, mimo_x, pos=pos, initial_state=initial_state,
        recompute_activations=recompute_activations,
    )  # fmt: skip
