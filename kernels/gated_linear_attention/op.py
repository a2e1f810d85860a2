"""Gated linear attention: the public function, which checks its arguments and selects an implementation.

The state enters and leaves in float32 (float64 for float64 inputs) with exact gradients to both, so a sequence may be split
anywhere: outputs, states and gradients are equal to rounding.
"""

from functools import partial
from typing import get_args

from torch import Tensor

from baton.kernels.common.head_groups import HeadGroups
from baton.kernels.errors import KernelError, expect_dtype, expect_one_precision, expect_positions, expect_tensor
from baton.kernels.gated_linear_attention.chunked import gla_chunked
from baton.kernels.gated_linear_attention.reference import Gate
from baton.kernels.gated_linear_attention.triton_launch import gla_triton, use_triton

_GATES = get_args(Gate)
_KERNEL = "gated_linear_attention"


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    gate: Gate,
    scale: float = 1.0,
    pos: Tensor | None = None,
    initial_state: Tensor | None = None,
    keep_states: bool = False,
) -> tuple[Tensor, Tensor]:
    """Gated linear attention over a piece of a sequence (Yang et al. 2023, section 4.1; per head):

        S_t = Diag(a_t) S_{t-1} Diag(b_t) + k_t v_t^T        y_t = scale S_t^T q_t

    with a_t = exp(g_t), b_t = 1 for gate "key" (GLA; HGRN2 with k = 1 - a), a_t = 1, b_t = exp(g_t) for "value", both one number
    per head for "scalar" (RetNet; Mamba-2), and no decay for "none" (linear attention). The output sees its own token. Where
    pos == 0, S_{t-1} is replaced by 0: a document never sees the state of the one before it.

    Args:
        q: queries, [batch, T, query_heads, d_key]. query_heads is a multiple of heads, the group: query head h reads the state of
            head h // group, which is kept and computed once. Or it is key_heads, or 1: queries are shared as keys are.
        k: keys, [batch, T, key_heads, d_key]. heads is a multiple of key_heads: head h has the key h // (heads / key_heads). 1 key
            head: every head's key, as in Mamba-2; more: those of its groups.
        v: values, [batch, T, heads, d_value].
        g: log-decays, finite and at most 0, no unit; not checked. [batch, T, heads, d_key] for gate "key", [batch, T, heads,
            d_value] for "value", [batch, T, heads] for "scalar", None for "none".
        gate: what a log-decay belongs to.
        scale: of the outputs, 1 / sqrt(d_key) in most models.
        pos: position of each token in its document, int32 or int64 [batch, T], 0 at a document's first token. None: no document
            starts inside this piece.
        initial_state: the state that arrives, [batch, heads, d_key, d_value], float32 (float64 for float64 inputs). None: zero.
        keep_states: on a GPU, keep the states between chunks of tokens, and what decays by key have multiplied, for the backward
            pass, which otherwise computes them again. The CPU implementation always keeps them.

    Tensors are float64 all together, or any mix of float32, bfloat16 and float16: then everything is computed in float32.

    Returns:
        y, [batch, T, query_heads, d_value] in q's dtype, and the state that leaves, [batch, heads, d_key, d_value], float32 or
        float64. Both carry exact gradients to every tensor argument; differentiating twice is refused by autograd with a
        RuntimeError.

    Raises:
        KernelError: an argument of another shape, dtype or device than stated, by name; an unknown gate; T = 0.
    """
    if gate not in _GATES:
        raise KernelError(f"{_KERNEL}: gate is {gate!r}, expected one of {_GATES}")
    expect_attention(_KERNEL, q, k, v, shared=True)
    batch, length, heads, d_value = v.shape
    d_key, device = k.shape[3], q.device
    tensors = {"q": q, "k": k, "v": v}
    if gate == "none":
        if g is not None:
            raise KernelError(f"{_KERNEL}: g is given, expected None for gate 'none'")
    else:
        axes = {"key": ("d_key",), "value": ("d_value",), "scalar": ()}[gate]
        sizes = {"key": (d_key,), "value": (d_value,), "scalar": ()}[gate]
        expect_tensor(_KERNEL, "g", g, ("batch", "T", "heads", *axes), (batch, length, heads, *sizes), device)
        assert g is not None
        tensors["g"] = g
    dtype = expect_one_precision(_KERNEL, **tensors)
    if initial_state is not None:
        sizes = (batch, heads, d_key, d_value)
        expect_tensor(_KERNEL, "initial_state", initial_state, ("batch", "heads", "d_key", "d_value"), sizes, device)
        expect_dtype(_KERNEL, "initial_state", initial_state, (dtype,))
    if pos is not None:
        expect_positions(_KERNEL, pos, batch, length, device)
    implementation = partial(gla_triton, keep_states=keep_states) if use_triton(q, dtype) else gla_chunked
    groups = HeadGroups.of(k, v)
    if groups is None:
        return implementation(q, k, v, g, gate=gate, scale=scale, pos=pos, initial_state=initial_state)
    q, k, v = map(groups.split, (q, k, v))
    g, pos, initial_state = None if g is None else groups.split(g), groups.positions(pos), groups.split_state(initial_state)
    y, S = implementation(q, k, v, g, gate=gate, scale=scale, pos=pos, initial_state=initial_state)
    return groups.joined(y), groups.joined_state(S)


def expect_attention(kernel: str, q: Tensor, k: Tensor, v: Tensor, *, shared: bool) -> None:
    """Refuse q, k, v unless they are [batch, T, heads, d_key], twice, and [batch, T, heads, d_value], q's heads a multiple of v's.

    shared: q and k may have fewer heads, each for consecutive ones of v's.

    Raises:
        KernelError: naming the argument, its shape and the expected one.
    """
    if not isinstance(q, Tensor):
        raise KernelError(f"{kernel}: q is a {type(q).__name__}, expected a tensor of shape (batch, T, query_heads, d_key)")
    expect_tensor(kernel, "q", q, ("batch", "T", "query_heads", "d_key"), (-1, -1, -1, -1), q.device)
    batch, length, query_heads, d_key = q.shape
    expect_tensor(kernel, "k", k, ("batch", "T", "heads", "d_key"), (batch, length, -1, d_key), q.device)
    expect_tensor(kernel, "v", v, ("batch", "T", "heads", "d_value"), (batch, length, -1, -1), q.device)
    heads, key_heads = v.shape[2], k.shape[2]
    or_fewer, or_those = (", or a divisor", f", 1 or the {key_heads} of k") if shared else ("", "")
    if key_heads != heads and not (shared and heads % key_heads == 0):
        raise KernelError(f"{kernel}: k has {key_heads} heads, expected the {heads} of v{or_fewer}")
    if query_heads % heads and not (shared and query_heads in (1, key_heads)):
        raise KernelError(f"{kernel}: q has {query_heads} heads, expected a multiple of the {heads} of v{or_those}")
