"""The delta rule: the public function, which checks its arguments and selects an implementation.

The state enters and leaves in float32 (float64 for float64 inputs) with exact gradients to both, so a sequence may be split
anywhere, to rounding. Keys and queries are used as given: a key longer than sqrt(2 / beta) makes the state grow, so callers
normalise keys.
"""

from functools import partial

from torch import Tensor

from baton.kernels.common.head_groups import HeadGroups
from baton.kernels.delta_rule.chunked import delta_rule_chunked
from baton.kernels.delta_rule.triton_launch import delta_rule_triton
from baton.kernels.errors import KernelError, expect_dtype, expect_one_precision, expect_positions, expect_tensor
from baton.kernels.gated_linear_attention.triton_launch import use_triton

_KERNEL = "delta_rule"


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    pos: Tensor | None = None,
    initial_state: Tensor | None = None,
    keep_states: bool = False,
) -> tuple[Tensor, Tensor]:
    """The delta rule over a piece of a sequence (DeltaNet), with a decay if g is given: a number per head (Gated DeltaNet), or one
    per channel of the keys (Kimi Delta Attention), where exp(g_t) is a diagonal matrix. Per head:

        S_t = (I - beta_t k_t k_t^T) exp(g_t) S_{t-1} + beta_t k_t v_t^T
        o_t = scale S_t^T q_t

    Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", section 2.2; Yang, Kautz &
    Hatamizadeh 2025, "Gated Delta Networks", equation 10; Kimi Team 2025, "Kimi Linear: An Expressive, Efficient Attention
    Architecture", section 3. The second's state is the transpose of this one. The state decays before the key's old value is erased
    from it. Where pos == 0, S_{t-1} is replaced by 0: a document never sees the state of the one before.

    With |k| = 1 and beta from 0 to 2 no state grows but by what is written; beta = 1 replaces what k recalls by v, beta = 0 and
    g = 0 keep every bit of the state.

    Args:
        q: queries, [batch, T, key_heads, d_key].
        k: keys, [batch, T, key_heads, d_key], normalised by the caller. heads is a multiple of key_heads: head h has the query and
            the key h // (heads / key_heads), as in Qwen3-Next.
        v: values, [batch, T, heads, d_value].
        beta: writing strength, no unit, 0 to 1 (up to 2 where negative eigenvalues are wanted), [batch, T, heads]; not checked.
        g: logarithm of the decay, finite and at most 0, [batch, T, heads] or [batch, T, heads, d_key]; not checked. None: no decay.
        scale: of the output; None: d_key ** -0.5.
        pos: position of each token in its document, int32 or int64 [batch, T], 0 at a document's first token. None: no document
            starts inside this piece.
        initial_state: the state that arrives, [batch, heads, d_key, d_value], float32 (float64 for float64 inputs). None: zero.
        keep_states: on a GPU, keep what tokens write, the states between chunks of them and the scores within for the backward pass
            instead of computing them again; not of a long sequence of few heads, which is cut into pieces. The CPU implementation
            always keeps the states.

    Tensors are float64 all together, or any mix of float32, bfloat16 and float16: then everything is computed in float32.

    Returns:
        o, [batch, T, heads, d_value] in q's dtype, and the state that leaves, [batch, heads, d_key, d_value], float32 or float64.
        Both carry exact gradients to every tensor argument; differentiating twice is refused by autograd with a RuntimeError.

    Raises:
        KernelError: an argument of another shape, dtype or device than stated, by name; T = 0.
    """
    axes = ("batch", "T", "key_heads", "d_key")
    if not isinstance(q, Tensor):
        raise KernelError(f"{_KERNEL}: q is a {type(q).__name__}, expected a tensor of shape ({', '.join(axes)})")
    device = q.device
    expect_tensor(_KERNEL, "q", q, axes, (-1, -1, -1, -1), device)
    batch, length, key_heads, d_key = q.shape
    expect_tensor(_KERNEL, "k", k, axes, (batch, length, key_heads, d_key), device)
    expect_tensor(_KERNEL, "v", v, ("batch", "T", "heads", "d_value"), (batch, length, -1, -1), device)
    heads, d_value = v.shape[2:]
    if heads % key_heads:
        raise KernelError(f"{_KERNEL}: v has {heads} heads, expected the {key_heads} of q and k, or a multiple")
    expect_tensor(_KERNEL, "beta", beta, ("batch", "T", "heads"), (batch, length, heads), device)
    tensors = {"q": q, "k": k, "v": v, "beta": beta}
    if g is not None:
        channels = (d_key,) if isinstance(g, Tensor) and g.ndim == 4 else ()
        along = ("batch", "T", "heads", "d_key")[: 3 + len(channels)]
        expect_tensor(_KERNEL, "g", g, along, (batch, length, heads, *channels), device)
        tensors["g"] = g
    dtype = expect_one_precision(_KERNEL, **tensors)
    if initial_state is not None:
        state_axes, sizes = ("batch", "heads", "d_key", "d_value"), (batch, heads, d_key, d_value)
        expect_tensor(_KERNEL, "initial_state", initial_state, state_axes, sizes, device)
        expect_dtype(_KERNEL, "initial_state", initial_state, (dtype,))
    if pos is not None:
        expect_positions(_KERNEL, pos, batch, length, device)
    if scale is None:
        scale = d_key**-0.5
    implementation = partial(delta_rule_triton, keep_states=keep_states) if use_triton(q, dtype) else delta_rule_chunked
    groups = HeadGroups.of(k, v)
    if groups is None:
        return implementation(q, k, v, beta, g, scale=scale, pos=pos, initial_state=initial_state)
    q, k, v, beta = map(groups.split, (q, k, v, beta))
    g, pos, initial_state = None if g is None else groups.split(g), groups.positions(pos), groups.split_state(initial_state)
    y, S = implementation(q, k, v, beta, g, scale=scale, pos=pos, initial_state=initial_state)
    return groups.joined(y), groups.joined_state(S)
