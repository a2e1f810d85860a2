"""Mamba-3's recurrence: the public function, which checks its arguments."""

from torch import Tensor

from baton.kernels.mamba3.arguments import expect_arguments
from baton.kernels.mamba3.torch_impl import mamba3_torch
from baton.kernels.protocol import State

_KERNEL = "mamba3"


def mamba3(
    x: Tensor, B: Tensor, C: Tensor, dt: Tensor, g: Tensor, lam: Tensor, theta: Tensor, B_bias: Tensor, C_bias: Tensor, D: Tensor,
    *, pos: Tensor | None = None, initial_state: State | None = None,
    recompute_activations: bool = False,
) -> tuple[Tensor, State]:  # fmt: skip
    """Mamba-3's recurrence over a piece of a sequence. Per head, with k = B + B_bias and q = C + C_bias:

        h_t = exp(g_t) R_t (h_{t-1} + (1 - lam_t) dt_t k_{t-1} x_{t-1}^T) + lam_t dt_t k_t x_t^T        y_t = h_t^T q_t + D x_t

    Lahoti et al. 2026, "Mamba-3: Improved Sequence Modeling using State Space Principles" (arXiv:2603.15569): the trapezoidal rule,
    of one input and one output, and complex states, of which R_t turns pair r = (2 r, 2 r + 1) by -dt_t theta_{t,r}. With theta of
    fewer than d_state / 2 pairs the states behind them are real. The authors' code (mamba_ssm) carries the angle that has passed,
    modulo 2 pi, and turns q and k by it; here the state that is carried is turned, so that no angle grows with the sequence: h is
    the state as its last token sees it. Where pos == 0, h_{t-1} and k_{t-1} are replaced by 0.

    Args:
        x: [batch, T, heads, head_dim].
        B: what is written of x, without its bias, [batch, T, groups, d_state]. Heads are a multiple of groups, whose consecutive
            heads share B and C.
        C: what is read, without its bias, as B.
        dt: step sizes, at least 0, [batch, T, heads].
        g: log-decays, dt times a rate, finite and at most 0; not checked. [batch, T, heads].
        lam: the share of a token's own input in the trapezoidal rule, 0 to 1, [batch, T, heads]. 1: Euler's rule, as in Mamba-2.
        theta: angles in radians per unit of dt, shared by all heads, [batch, T, pairs], 1 to d_state / 2 pairs.
        B_bias: added to B of each head, [heads, d_state].
        C_bias: added to C of each head, [heads, d_state].
        D: the skip, [heads].
        pos: position of each token in its document, int32 or int64 [batch, T], 0 at a document's first token. None: no document
            starts inside this piece.
        initial_state: {h [batch, heads, d_state, head_dim], and of the token before k [batch, heads, d_state] and x [batch, heads,
            head_dim]}, float32 (float64 for float64 inputs). None: zero.
        recompute_activations: on a GPU, compute turned queries and keys, and what is written, again in the backward pass instead of
            keeping them.

    Tensors are float64 all together, or any mix of float32, bfloat16 and float16: then everything is computed in float32, on
    a GPU with turned q and k rounded to B's dtype.

    Returns:
        y, [batch, T, heads, head_dim] in x's dtype, and the State that leaves, as initial_state. Both carry exact gradients to
        every tensor argument; differentiating twice is refused by autograd with a RuntimeError.

    Raises:
        KernelError: an argument of another shape, dtype or device than stated, by name; a State with other
            keys; T = 0.
    """
    inputs = {"x": x, "B": B, "C": C, "dt": dt, "g": g, "lam": lam, "theta": theta, "B_bias": B_bias, "C_bias": C_bias, "D": D}
    expect_arguments(_KERNEL, inputs, pos, initial_state)
    return mamba3_torch(
        x, B, C, dt, g, lam, theta, B_bias, C_bias, D, pos=pos, initial_state=initial_state,
        recompute_activations=recompute_activations,
    )  # fmt: skip
