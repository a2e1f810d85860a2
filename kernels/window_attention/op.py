"""Window attention: the public function. Checks the arguments and picks an implementation.

The State is the last window - 1 keys and values (all of them without a window) and the number of tokens of the document read so
far. A sequence may be split anywhere, also into segments shorter than the window.
"""

import math
from typing import Any

import torch
from torch import Tensor

from baton.kernels.common.chunked_autograd import state_dtype
from baton.kernels.eidetic_attention.joint_attention_launch import use_triton
from baton.kernels.errors import KernelError, expect_dtype, expect_one_precision, expect_positions, expect_state_keys, expect_tensor
from baton.kernels.protocol import State
from baton.kernels.window_attention.chunked import window_attention_chunked
from baton.kernels.window_attention.triton_launch import (
    SHORT,
    full_attention_backward_triton,
    full_attention_triton,
    window_attention_triton,
)

_KERNEL = "window_attention"


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int | None,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
    pos: Tensor | None = None,
    state: State | None = None,
    scale: float | None = None,
    need_final_state: bool = True,
) -> tuple[Tensor, State]:
    """Causal softmax attention over the last `window` tokens of the same document (Beltagy et al. 2020; Vaswani et al. 2017):

        y_t = sum_j softmax_j(scale q_t k_{t-j}) v_{t-j},    0 <= j < window, j <= pos_t, over the tokens that have been read

    With sinks the sum of the softmax's exponentials has exp(sink) as well, so that weights sum to less than 1 (OpenAI 2025,
    "gpt-oss"; Xiao et al. 2023). With a soft cap a score s, which is scale q k, is soft_cap tanh(s / soft_cap) (Gemma Team 2024,
    "Gemma 2", section 2).

    Args:
        q: queries, [batch, T, heads, dim].
        k: keys, [batch, T, key heads, dim]; key heads divides heads, and each serves that many consecutive query heads.
        v: values, [batch, T, key heads, dim].
        window: number of tokens that a query sees, itself included. None: its whole document; the State then grows with every
        token.
        sinks: a logit for each query and head, [batch, T, heads]; None: there are none.
        soft_cap: bound of the scores' size, above 0; sinks are not capped. None: scores are not capped.
        pos: position of each token in its document, int32 or int64 [batch, T]: one more than the token's before, or the start of
            another document. None: no document starts in this segment.
        state: {k, v [batch, window - 1, key heads, dim] in k's dtype, seen int64 [batch]}, returned by an earlier call. None:
            nothing has been read, even if pos says that the document began earlier.
        scale: of the scores; None: dim^-1/2.
        need_final_state: False: the final State is not computed, and {} is returned.

    Tensors are all float64, or any mix of float32, bfloat16 and float16.

    Returns:
        y, [batch, T, heads, dim] in q's dtype, and the final State; rows that are not of the last token's document are 0. Both
        carry exact gradients to q, k, v, sinks and the State's keys and values. Double backward is not supported.

    Raises:
        KernelError: an argument has another shape, dtype or device than stated, or another value, by name; T = 0.
    """
    if not isinstance(q, Tensor):
        raise KernelError(f"{_KERNEL}: q is a {type(q).__name__}, expected a tensor of shape (batch, T, heads, dim)")
    device, axes = q.device, ("batch", "T", "key heads", "dim")
    expect_tensor(_KERNEL, "q", q, ("batch", "T", "heads", "dim"), (-1, -1, -1, -1), device)
    batch, length, heads, dim = q.shape
    expect_tensor(_KERNEL, "k", k, axes, (batch, length, -1, dim), device)
    groups = k.shape[2]
    if heads % groups:
        raise KernelError(f"{_KERNEL}: k has shape {tuple(k.shape)}, expected a number of key heads that divides {heads} heads")
    expect_tensor(_KERNEL, "v", v, axes, (batch, length, groups, dim), device)
    if sinks is not None:
        expect_tensor(_KERNEL, "sinks", sinks, ("batch", "T", "heads"), (batch, length, heads), device)
    expect_one_precision(_KERNEL, q=q, k=k, v=v, **({} if sinks is None else {"sinks": sinks}))
    if window is not None and window < 1:
        raise KernelError(f"{_KERNEL}: window is {window}, expected at least 1, or None for all of the document")
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise KernelError(f"{_KERNEL}: soft_cap is {soft_cap}, expected a number above 0, or None for scores without a cap")
    if pos is not None:
        expect_positions(_KERNEL, pos, batch, length, device)
    fresh = state is None
    if state is None:
        state = empty(k, v, 0 if window is None else window - 1)
    else:
        expect_state_keys(_KERNEL, "state", state, ("k", "v", "seen"))
        check_tail(_KERNEL, state, {"k": k, "v": v}, None if window is None else window - 1)
    scale = dim**-0.5 if scale is None else scale
    given: dict[str, Any] = {"window": window, "pos": pos, "state": state, "scale": scale, "sinks": sinks, "soft_cap": soft_cap}
    if length >= SHORT and use_triton(q, state_dtype(q, k, v)):
        return window_attention_triton(q, k, v, fresh=fresh, need_final_state=need_final_state, **given)
    return window_attention_chunked(q, k, v, need_final_state=need_final_state, **given)


def full_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor | None, sinks: Tensor | None = None, *, soft_cap: float | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Attention without a window of the last T of N + T tokens, outside of autograd, for callers that keep the keys elsewhere.

    q: [batch, T, heads, dim]. k, v: [batch, N + T, key heads, dim], all of the tokens that were read. pos: of the queries, [batch,
    T]. sinks: [batch, T, heads] or None. soft_cap: as of `window_attention`. Returns y, [batch, T, heads, dim], and what
    `full_attention_backward` reads besides the arguments and y.
    """
    scale = q.shape[-1] ** -0.5
    if use_triton(q, state_dtype(q, k, v)):
        y, lse = full_attention_triton(q, k, v, pos, sinks, scale=scale, soft_cap=soft_cap)
        return y, (lse,)
    with torch.no_grad():
        return _full_attention_chunked(q, k, v, pos, sinks, soft_cap=soft_cap), ()


def full_attention_backward(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor | None, y: Tensor, saved: tuple[Tensor, ...], dy: Tensor,
    sinks: Tensor | None = None, *, soft_cap: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of q, k, v and, if there are any, sinks of `full_attention_forward`, in their shapes and dtypes, for the gradient
    dy of y."""
    if saved:
        (lse,) = saved
        return full_attention_backward_triton(q, k, v, pos, y, lse, dy, sinks, scale=q.shape[-1] ** -0.5, soft_cap=soft_cap)
    with torch.enable_grad():
        q, k, v, *given = (x.detach().requires_grad_() for x in (q, k, v, *(() if sinks is None else (sinks,))))
        y = _full_attention_chunked(q, k, v, pos, *given, soft_cap=soft_cap)
        return torch.autograd.grad(y, (q, k, v, *given), dy)


def _full_attention_chunked(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor | None, sinks: Tensor | None = None, *, soft_cap: float | None
) -> Tensor:
    n = k.shape[1] - q.shape[1]
    state = {"k": k[:, :n], "v": v[:, :n], "seen": torch.full((q.shape[0],), n, dtype=torch.int64, device=q.device)}
    given: dict[str, Any] = {"pos": pos, "state": state, "scale": q.shape[-1] ** -0.5, "sinks": sinks, "soft_cap": soft_cap}
    return window_attention_chunked(q, k[:, n:], v[:, n:], window=None, need_final_state=False, **given)[0]


def empty(k: Tensor, v: Tensor, rows: int) -> State:
    """The State before anything is read, with `rows` rows of keys and values."""
    batch = k.shape[0]
    return {
        "k": k.new_zeros(batch, rows, *k.shape[2:]),
        "v": v.new_zeros(batch, rows, *v.shape[2:]),
        "seen": torch.zeros(batch, dtype=torch.int64, device=k.device),
    }


def check_tail(kernel: str, state: State, rows_like: dict[str, Tensor], rows: int | None) -> None:
    """Raise a KernelError unless the tails of a State have `rows` rows like `rows_like`, and `seen` is a count per lane.

    rows None: any number of rows, the same in all tails.
    """
    for name, like in rows_like.items():
        if rows is None:
            given = state[name]
            rows = given.shape[1] if isinstance(given, Tensor) and given.dim() == 4 else 0
        batch, _, heads, dim = like.shape
        axes = ("batch", "rows", "key heads", "dim")
        expect_tensor(kernel, f"state {name}", state[name], axes, (batch, rows, heads, dim), like.device)
        expect_dtype(kernel, f"state {name}", state[name], (like.dtype,))
    expect_tensor(kernel, "state seen", state["seen"], ("batch",), (batch,), like.device)
    expect_dtype(kernel, "state seen", state["seen"], (torch.int64,))
