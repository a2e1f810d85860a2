"""The public function of test-time training: checks its arguments."""

import torch
from torch import Tensor

from baton.kernels.errors import KernelError, expect_dtype, expect_one_precision, expect_positions, expect_state_keys, expect_tensor
from baton.kernels.protocol import State
from baton.kernels.ttt.chunked import ttt_chunked
from baton.kernels.ttt.reference import state_names

_KERNEL = "ttt"


def ttt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lr: Tensor,
    step_scale: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    *weights: Tensor,
    pos: Tensor,
    initial_state: State | None = None,
) -> tuple[Tensor, State]:
    """Test-time training (TTT-Linear and TTT-MLP; Sun et al. 2024, arXiv:2407.04620, sections 2.3 to 2.7), per head.

    The state is a model f, linear or an MLP with one hidden layer and GELU (tanh approximation). It is trained on each token by a
    gradient step of the inner loss

        l_t(f) = |LayerNorm(f(k_t)) - (v_t - k_t)|^2 / 2

    and read with y_t = f_t(q_t). The tokens of a mini-batch, positions m K .. m K + K - 1 of a document, take their gradients at
    the weights W' before it; after n of them the weights are

        W_t = W' - step_scale[n - 1] sum_s lr_s grad l_s(W'),  s in the mini-batch up to t

    A document begins with the weights given. They, the LayerNorm and the step sizes have exact gradients too.

    Args:
        q, k, v: [batch, T, heads, d].
        lr: each token's inner learning rate, [batch, T, heads].
        step_scale: factor of the steps after each number of tokens of a mini-batch, [K]; its length is the mini-batch's.
        norm_weight, norm_bias: of the inner loss's LayerNorm, [heads, d].
        weights: W [heads, d, d] and b [heads, d] of a linear model, or W1 [heads, d, hidden], b1 [heads, hidden],
            W2 [heads, hidden, d] and b2 [heads, d] of an MLP.
        pos: position of each token in its document, int32 or int64 [batch, T].
        initial_state: as returned, in float32 (float64 for float64 inputs): for each of the weights its difference from the initial
            one at the beginning of the mini-batch, under W1, b1 (W2, b2), and the sum of lr grad in the mini-batch, under
            W1_grad, ..., [batch, heads, ...]. None: zeros.

    Returns:
        y, [batch, T, heads, d] in q's dtype, before any norm, and the final state, with exact gradients to all tensors.

    Raises:
        KernelError: an argument of another shape, dtype or device than stated, by name; T = 0.
    """
    if not isinstance(q, Tensor):
        raise KernelError(f"{_KERNEL}: q is a {type(q).__name__}, expected a tensor of shape (batch, T, heads, d)")
    axes: tuple[str, ...] = ("batch", "T", "heads", "d")
    expect_tensor(_KERNEL, "q", q, axes, (-1, -1, -1, -1), q.device)
    batch, length, heads, d = q.shape
    for name, x in (("k", k), ("v", v)):
        expect_tensor(_KERNEL, name, x, axes, (batch, length, heads, d), q.device)
    expect_tensor(_KERNEL, "lr", lr, axes[:3], (batch, length, heads), q.device)
    expect_tensor(_KERNEL, "step_scale", step_scale, ("tokens of a mini-batch",), (-1,), q.device)
    for name, x in (("norm_weight", norm_weight), ("norm_bias", norm_bias)):
        expect_tensor(_KERNEL, name, x, ("heads", "d"), (heads, d), q.device)
    if len(weights) not in (2, 4):
        raise KernelError(f"{_KERNEL}: {len(weights)} weights, expected W and b of a linear model or W1, b1, W2 and b2 of an MLP")
    given = dict(zip(state_names(len(weights) // 2), weights, strict=False))
    hidden = d
    for name, x in given.items():
        if name == "W1":
            expect_tensor(_KERNEL, name, x, ("heads", "d", "outputs"), (heads, d, d if len(weights) == 2 else -1), q.device)
            hidden = x.shape[2]
        else:
            shapes = {"b1": (heads, hidden), "W2": (heads, hidden, d), "b2": (heads, d)}
            expect_tensor(_KERNEL, name, x, ("heads", *(f"{name}'s" for _ in shapes[name][1:])), shapes[name], q.device)
    others = {"q": q, "k": k, "v": v, "lr": lr, "step_scale": step_scale, "norm_weight": norm_weight, "norm_bias": norm_bias}
    dtype = expect_one_precision(_KERNEL, **others, **given)
    expect_positions(_KERNEL, pos, batch, length, q.device)
    names, like = state_names(len(weights) // 2), (*weights, *weights)
    if initial_state is None:
        initial_state = {
            name: torch.zeros(batch, *w.shape, dtype=dtype, device=q.device) for name, w in zip(names, like, strict=True)
        }
    expect_state_keys(_KERNEL, "initial_state", initial_state, names)
    for name, w in zip(names, like, strict=True):
        axes = ("batch", *(f"{name}'s" for _ in w.shape))
        expect_tensor(_KERNEL, f"initial_state {name}", initial_state[name], axes, (batch, *w.shape), q.device)
        expect_dtype(_KERNEL, f"initial_state {name}", initial_state[name], (dtype,))
    return ttt_chunked((*others.values(), *weights), pos=pos, state={name: initial_state[name] for name in names})
