"""The generalized delta rule: the public function, which checks its arguments.

The state enters and leaves in float32 (float64 for float64 inputs) with exact gradients to both, so a sequence may be split
anywhere, to rounding. a and b are used as given: the state grows where a transition diag(exp(g)) + b a^T has a norm above 1, so
callers bound them, as RWKV-7 does with a = -k / |k| and b = -alpha a, alpha at most 1.
"""

from torch import Tensor

from baton.kernels.errors import KernelError, expect_dtype, expect_one_precision, expect_positions, expect_tensor
from baton.kernels.generalized_delta_rule.chunk_launch import decays_allow_chunks, generalized_delta_rule_chunks_triton
from baton.kernels.generalized_delta_rule.chunked import generalized_delta_rule_chunked
from baton.kernels.generalized_delta_rule.triton_launch import generalized_delta_rule_triton, use_triton

_KERNEL = "generalized_delta_rule"


def generalized_delta_rule(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor,
    *,
    scale: float = 1.0,
    pos: Tensor | None = None,
    initial_state: Tensor | None = None,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence of RWKV-7 over a piece of a sequence, whose transition is diagonal plus low rank (DPLR). Per head:

        S_t = (Diag(exp(g_t)) + b_t a_t^T) S_{t-1} + k_t v_t^T
        o_t = scale S_t^T r_t

    Peng et al. 2025, "RWKV-7 'Goose' with Expressive Dynamic State Evolution", equations 2 and 17, whose state is the transpose of
    this one. a reads the state before it decays. Where pos == 0, S_{t-1} is replaced by 0: a document never sees the state of the
    one before. With a = k, b = -beta exp(g) k and beta k for k it is the delta rule with a decay per head.

    Args:
        r: what reads the state (receptance, a query), [batch, T, heads, d_key].
        k: keys under which values are written, [batch, T, heads, d_key].
        v: values, [batch, T, heads, d_value].
        a: what reads the state for b to write it, [batch, T, heads, d_key]; not checked.
        b: where that is written, [batch, T, heads, d_key]; not checked.
        g: logarithm of the decay, finite and at most 0, [batch, T, heads, d_key]; not checked.
        scale: of the output.
        pos: position of each token in its document, int32 or int64 [batch, T], 0 at a document's first token. None: no document
            starts inside this piece.
        initial_state: the state that arrives, [batch, heads, d_key, d_value], float32 (float64 for float64 inputs). None: zero.
        lower_bound: what no g is below, for RWKV-7 -exp(-1/2); not checked. None: not known. With a bound of -4 or more a GPU
            computes the sequence in chunks of tokens, else token by token.

    Tensors are float64 all together, or any mix of float32, bfloat16 and float16: then everything is computed in float32, but for
    matmuls in chunks, which take bfloat16 if r, k and v are 16-bit.

    Returns:
        o, [batch, T, heads, d_value] in r's dtype, and the state that leaves, [batch, heads, d_key, d_value], float32 or float64.
        Both carry exact gradients to every tensor argument; differentiating twice is refused by autograd with a RuntimeError.

    Raises:
        KernelError: an argument of another shape, dtype or device than stated, by name; T = 0.
    """
    axes = ("batch", "T", "heads", "d_key")
    if not isinstance(r, Tensor):
        raise KernelError(f"{_KERNEL}: r is a {type(r).__name__}, expected a tensor of shape ({', '.join(axes)})")
    device = r.device
    expect_tensor(_KERNEL, "r", r, axes, (-1, -1, -1, -1), device)
    batch, length, heads, d_key = r.shape
    for name, x in (("k", k), ("a", a), ("b", b), ("g", g)):
        expect_tensor(_KERNEL, name, x, axes, (batch, length, heads, d_key), device)
    expect_tensor(_KERNEL, "v", v, ("batch", "T", "heads", "d_value"), (batch, length, heads, -1), device)
    dtype = expect_one_precision(_KERNEL, r=r, k=k, v=v, a=a, b=b, g=g)
    if initial_state is not None:
        state_axes, sizes = ("batch", "heads", "d_key", "d_value"), (batch, heads, d_key, v.shape[3])
        expect_tensor(_KERNEL, "initial_state", initial_state, state_axes, sizes, device)
        expect_dtype(_KERNEL, "initial_state", initial_state, (dtype,))
    if pos is not None:
        expect_positions(_KERNEL, pos, batch, length, device)
    if use_triton(k, dtype):
        if decays_allow_chunks(lower_bound):
            return generalized_delta_rule_chunks_triton(r, k, v, a, b, g, scale=scale, pos=pos, initial_state=initial_state)
        return generalized_delta_rule_triton(r, k, v, a, b, g, scale=scale, pos=pos, initial_state=initial_state)
    return generalized_delta_rule_chunked(r, k, v, a, b, g, scale=scale, pos=pos, initial_state=initial_state)
