"""B'MOJO's public functions: the attention over window, fading and eidetic tokens, and the innovation score that selects the last.

Everything remembered is in the State, including the memory in use, which is frozen for `window` tokens counted from the document's
start. A sequence may therefore be split anywhere, and packed documents need no alignment. Equal scores select equal tokens; the
selection is the only part that is not continuous.
"""

from functools import cache
from typing import Literal, get_args

import torch
from torch import Tensor

from baton.kernels.eidetic_attention.chunked import Options, eidetic_attention_chunked, final_state
from baton.kernels.eidetic_attention.joint_attention_launch import use_triton
from baton.kernels.eidetic_attention.triton_launch import eidetic_attention_triton, innovation_triton
from baton.kernels.errors import KernelError, expect_dtype, expect_one_precision, expect_positions, expect_state_keys, expect_tensor
from baton.kernels.protocol import Inputs, State, StateSpec

Norm = Literal["l2", "l1", "max"]

_NORMS = get_args(Norm)
_KERNEL = "eidetic_attention"


def eidetic_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fading_k: Tensor,
    fading_v: Tensor,
    score: Tensor,
    *,
    window: int,
    n_fading: int,
    n_eidetic: int,
    sliding: bool = False,
    pos: Tensor,
    state: State | None = None,
    scale: float | None = None,
    need_final_state: bool = True,
) -> tuple[Tensor, State]:
    """One softmax over three kinds of tokens of the same document (Zancato et al. 2024, Algorithm 1 in chunks of `window` tokens):

        window: the last `window` tokens, by k and v;
        fading: the n_fading outputs of the fading memory before the last multiple of `window`, by fading_k and fading_v;
            with `sliding`, instead, those from 2 window - 1 to window tokens back;
        eidetic: the n_eidetic tokens with the largest scores before the last multiple of `window`, by k and v; ties go to the older
            token.

    Multiples of the window are counted from the document's start; a document's first `window` tokens see only their window. A token
    that is both in the window and in memory counts twice, as in the paper's interleaved form.

    Args:
        q: queries, [batch, T, heads, dim].
        k, v: keys and values of the tokens, [batch, T, key heads, dim]; key heads divides heads.
        fading_k, fading_v: keys and values of the fading memory's outputs, [batch, T, key heads, dim].
        score: innovation of each token, [batch, T], compared in float32 (float64); no gradient flows through it.
        window, n_fading, n_eidetic: numbers of tokens. n_fading is at most the window, and 0 with `sliding`.
        pos: position of each token in its document, int32 or int64 [batch, T].
        state: returned by an earlier call (`state_specs` describes it). None: nothing has been read, even if pos says that the
            document began earlier.
        scale: of the attention scores; None: dim^-1/2.
        need_final_state: False: the final State is not computed, and {} is returned.

    Tensors are all float64, or any mix of float32, bfloat16 and float16.

    Returns:
        y, [batch, T, heads, dim] in q's dtype, and the final State, with exact gradients to all tensors but score.

    Raises:
        KernelError: an argument has another shape, dtype or device than stated, by name; impossible sizes; T = 0.
    """
    fresh = state is None
    inputs, options, state = _checked((q, k, v, fading_k, fading_v, score), window, n_fading, n_eidetic, sliding, pos, state, scale)
    fused = use_triton(q, inputs[-1].dtype)
    if state is None:
        state = {} if fused and not need_final_state else empty(state_specs(options, k, inputs[-1].dtype), len(q), q.device)
    if fused:
        return eidetic_attention_triton(inputs, options, pos=pos, state=state, fresh=fresh, need_final_state=need_final_state)
    return eidetic_attention_chunked(inputs, options, pos=pos, state=state, need_final_state=need_final_state)


def eidetic_attention_final_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fading_k: Tensor,
    fading_v: Tensor,
    score: Tensor,
    *,
    window: int,
    n_fading: int,
    n_eidetic: int,
    sliding: bool = False,
    pos: Tensor,
    state: State | None = None,
) -> State:
    """The State that `eidetic_attention` returns for these arguments, with the same bits, without computing the attention.

    It compares scores and copies the selected rows, in memory that grows with T alone. Plain autograd: exact gradients to all
    copied tensors of the inputs and of the State.

    Raises:
        KernelError: as `eidetic_attention`.
    """
    inputs, options, state = _checked((q, k, v, fading_k, fading_v, score), window, n_fading, n_eidetic, sliding, pos, state, None)
    if state is None:
        state = empty(state_specs(options, k, inputs[-1].dtype), len(q), q.device)
    return final_state(inputs, options, pos=pos, state=state)


def _checked(
    inputs: Inputs, window: int, n_fading: int, n_eidetic: int, sliding: bool, pos: Tensor, state: State | None, scale: float | None
) -> tuple[Inputs, Options, State | None]:
    """The arguments of `eidetic_attention`, checked: the score in the dtype of comparisons, the options, and the State."""
    q, k, v, fading_k, fading_v, score = inputs
    if not isinstance(q, Tensor):
        raise KernelError(f"{_KERNEL}: q is a {type(q).__name__}, expected a tensor of shape (batch, T, heads, dim)")
    if window < 1 or n_eidetic < 0 or not 0 <= n_fading <= (0 if sliding else window):
        raise KernelError(
            f"{_KERNEL}: window={window}, n_fading={n_fading}, n_eidetic={n_eidetic}, sliding={sliding}; expected a window of at "
            f"least 1, n_fading between 0 and the window (0 with sliding) and n_eidetic of at least 0"
        )
    device, axes = q.device, ("batch", "T", "key heads", "dim")
    expect_tensor(_KERNEL, "q", q, ("batch", "T", "heads", "dim"), (-1, -1, -1, -1), device)
    batch, length, heads, dim = q.shape
    expect_tensor(_KERNEL, "k", k, axes, (batch, length, -1, dim), device)
    groups = k.shape[2]
    if heads % groups:
        raise KernelError(f"{_KERNEL}: k has shape {tuple(k.shape)}, expected a number of key heads that divides {heads} heads")
    for name, tensor in (("v", v), ("fading_k", fading_k), ("fading_v", fading_v)):
        expect_tensor(_KERNEL, name, tensor, axes, (batch, length, groups, dim), device)
    expect_tensor(_KERNEL, "score", score, ("batch", "T"), (batch, length), device)
    dtype = expect_one_precision(_KERNEL, q=q, k=k, v=v, fading_k=fading_k, fading_v=fading_v, score=score)
    expect_positions(_KERNEL, pos, batch, length, device)
    options = Options(window, n_fading, n_eidetic, sliding, dim**-0.5 if scale is None else scale)
    expected = state_specs(options, k, dtype)
    inputs = (q, k, v, fading_k, fading_v, score.detach().to(dtype))
    if state is None:
        return inputs, options, None
    expect_state_keys(_KERNEL, "state", state, [leaf.name for leaf in expected])
    for leaf in expected:
        state_axes = ("batch", "rows", "key heads", "dim")[: 1 + len(leaf.shape)]
        expect_tensor(_KERNEL, f"state {leaf.name}", state[leaf.name], state_axes, (batch, *leaf.shape), device)
        expect_dtype(_KERNEL, f"state {leaf.name}", state[leaf.name], (leaf.dtype,))
    return inputs, options, {leaf.name: state[leaf.name] for leaf in expected}


def state_specs(options: Options, k: Tensor, score_dtype: torch.dtype) -> tuple[StateSpec, ...]:
    """The State: tails of window and fading tokens, the best tokens so far, and the memory in use; heads are split over the tensor
    group.
    """
    return _state_specs(options, tuple(k.shape[2:]), k.dtype, score_dtype)


@cache
def _state_specs(options: Options, heads: tuple[int, ...], dtype: torch.dtype, score_dtype: torch.dtype) -> tuple[StateSpec, ...]:
    specs: list[StateSpec] = []

    def rows(names: tuple[str, ...], n: int, *, tail: bool = False) -> None:
        specs.extend(StateSpec(name, (n, *heads), dtype, tp=1, grad=True, tail=tail) for name in names)

    rows(("k", "v"), options.window - 1, tail=True)
    specs.append(StateSpec("seen", (), torch.int64, tp=None, grad=False))
    if options.fading_rows:
        rows(("fading_k", "fading_v"), options.fading_rows, tail=True)
    if options.n_eidetic:
        rows(("best_k", "best_v"), options.n_eidetic)
        specs.append(StateSpec("score", (options.n_eidetic,), score_dtype, tp=None, grad=False))
        specs.append(StateSpec("where", (options.n_eidetic,), torch.int64, tp=None, grad=False))
    if options.n_eidetic + options.n_fading:
        rows(("frozen_k", "frozen_v"), options.n_eidetic + options.n_fading)
        specs.append(StateSpec("frozen", (options.n_eidetic + options.n_fading,), torch.bool, tp=None, grad=False))
    return tuple(specs)


def empty(expected: tuple[StateSpec, ...], batch: int, device: torch.device) -> State:
    """The State before anything is read: zeros, and -1 for the positions of entries."""
    fills = {"where": -1}
    return {
        leaf.name: torch.full((batch, *leaf.shape), fills.get(leaf.name, 0), dtype=leaf.dtype, device=device) for leaf in expected
    }


def innovation(
    y: Tensor, weights: Tensor, pos: Tensor, tail: Tensor, *, norm: Norm = "l2", need_tail: bool = True
) -> tuple[Tensor, Tensor]:
    """The error with which the previous outputs predict each output (Zancato et al. 2024, section 3.2, which leaves norm and
    weights open):

        score_t = norm(y_t - sum_j weights_{j-1} y_{t-j}),    1 <= j <= k, over outputs of the same document

    Args:
        y: outputs of the fading memory, [batch, T, channels]; computed in float32 (float64 for float64), without a gradient.
        weights: of the previous outputs, nearest first, [k].
        pos: int32 or int64 [batch, T].
        tail: the k outputs before this segment, oldest first, [batch, k, channels] in y's dtype; zeros where nothing has been read.
        norm: over the channels: "l2", the root mean square; "l1", the mean absolute value; "max", the largest absolute value.
        need_tail: False: the new tail is not computed and has no rows.

    Returns:
        score [batch, T], float32 or float64, and the new tail, 0 where it is not of the last token's document.

    The score is an operator of its own, torch.ops.baton.innovation, so that activation recomputation can be told to keep it.

    Raises:
        KernelError: an argument has another shape or dtype than stated; an unknown norm.
    """
    if norm not in _NORMS:
        raise KernelError(f"innovation: norm is {norm!r}, expected one of {', '.join(_NORMS)}")
    if not isinstance(y, Tensor):
        raise KernelError(f"innovation: y is a {type(y).__name__}, expected a tensor of shape (batch, T, channels)")
    expect_tensor("innovation", "y", y, ("batch", "T", "channels"), (-1, -1, -1), y.device)
    batch, length, channels = y.shape
    expect_tensor("innovation", "weights", weights, ("k",), (-1,), y.device)
    k = weights.shape[0]
    expect_tensor("innovation", "tail", tail, ("batch", "k", "channels"), (batch, k, channels), y.device)
    expect_dtype("innovation", "tail", tail, (y.dtype,))
    expect_positions("innovation", pos, batch, length, y.device)
    y, tail = y.detach(), tail.detach()
    score: Tensor = torch.ops.baton.innovation(y, weights.detach(), pos, tail, norm)
    if not need_tail:
        return score, y[:, :0]
    ends = y if length >= k else torch.cat((tail, y), dim=1)
    own = torch.arange(k, 0, -1, device=y.device) <= pos[:, -1:] + 1
    return score, ends[:, ends.shape[1] - k :].masked_fill(~own[:, :, None], 0.0)


# no custom_op: it checks for aliases and gradients in each call, and there are none
_LIBRARY = torch.library.Library("baton", "FRAGMENT")
_LIBRARY.define("innovation(Tensor y, Tensor weights, Tensor pos, Tensor tail, str norm) -> Tensor")


@torch.library.impl(_LIBRARY, "innovation", "CompositeExplicitAutograd")
def _innovation(y: Tensor, weights: Tensor, pos: Tensor, tail: Tensor, norm: str) -> Tensor:
    """The score of `innovation`, which checks the arguments."""
    dtype = torch.float64 if y.dtype == torch.float64 else torch.float32
    return innovation_triton(y, weights, pos, tail, norm) if use_triton(y, dtype) else _score(y, weights, pos, tail, norm, dtype)


def _score(y: Tensor, weights: Tensor, pos: Tensor, tail: Tensor, norm: str, dtype: torch.dtype) -> Tensor:
    length, k = y.shape[1], weights.shape[0]
    rows = torch.cat((tail, y), dim=1)
    error = y.to(dtype, copy=True)
    for j in range(1, k + 1):
        previous = rows[:, k - j : k - j + length].to(dtype)
        error.addcmul_(previous.masked_fill((pos < j)[:, :, None], 0.0), weights[j - 1].to(dtype), value=-1)
    if norm == "max":
        return error.abs().amax(-1)
    return error.abs().mean(-1) if norm == "l1" else error.square().mean(-1).sqrt()
