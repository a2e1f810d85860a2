"""mLSTM: the public function, which checks its arguments.

The paper and its code keep a running maximum m of the log gates and store C and n divided by exp(m), so that input gates of any
size can be exponentiated. m cancels from the outputs: max(|n^T q|, exp(-m)) of the divided n is exp(-m) max(|n^T q|, 1) of n
itself. C and n are kept undivided here. A factor costs a floating-point number no digits, only range, and gates that are soft-
capped, as those of xLSTM 7B at exp(15), leave float32 plenty: even 1e7 tokens of them in a state that forgets nothing are below
1e14 times a key. In return the state that leaves is linear in the one that arrives, with the forget gates for a transition, so
that it splits over chunks and ranks, in any order, by additions alone. No maximum, and no number that the State is divided by,
depends on the split.
"""

from torch import Tensor

from baton.kernels.errors import KernelError, expect_dtype, expect_one_precision, expect_positions, expect_tensor
from baton.kernels.mlstm.torch_impl import mlstm_torch

_KERNEL = "mlstm"


def mlstm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    g: Tensor,
    *,
    scale: float = 1.0,
    pos: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """mLSTM over a piece of a sequence. Per head, with scale q for q:

        C_t = exp(g_t) C_{t-1} + exp(i_t) k_t v_t^T        n_t = exp(g_t) n_{t-1} + exp(i_t) k_t
        h_t = C_t^T q_t / max(|n_t^T q_t|, 1)

    Beck et al. 2024, "xLSTM: Extended Long Short-Term Memory", equations 19 to 27, with C transposed. The output sees its own
    token. Where pos == 0, C_{t-1} and n_{t-1} are replaced by 0.

    Args:
        q: queries, [batch, T, heads, d_key].
        k: keys, [batch, T, heads, d_key].
        v: values, [batch, T, heads, d_value].
        i: logarithms of the input gates, of either sign, [batch, T, heads]. Not checked: above 30 float32 may overflow.
        g: logarithms of the forget gates, finite and at most 0, [batch, T, heads]; not checked. log(sigmoid) in xLSTM 7B.
        scale: of the queries, 1 / sqrt(d_key) in the papers (whose first one divides the keys).
        pos: position of each token in its document, int32 or int64 [batch, T], 0 at a document's first token. None: no document
            starts inside this piece.
        initial_state: the state that arrives, [batch, heads, d_key, d_value + 1], C and n as its last column, float32 (float64 for
            float64 inputs). None: zero.

    Tensors are float64 all together, or any mix of float32, bfloat16 and float16: then everything is computed in float32.

    Returns:
        h, [batch, T, heads, d_value] in q's dtype, and the state that leaves, [batch, heads, d_key, d_value + 1], float32 or
        float64. Both carry exact gradients to every tensor argument.

    Raises:
        KernelError: an argument of another shape, dtype or device than stated, by name; T = 0.
    """
    if not isinstance(q, Tensor):
        raise KernelError(f"{_KERNEL}: q is a {type(q).__name__}, expected a tensor of shape (batch, T, heads, d_key)")
    axes = ("batch", "T", "heads", "d_key")
    expect_tensor(_KERNEL, "q", q, axes, (-1, -1, -1, -1), q.device)
    batch, length, heads, d_key = q.shape
    expect_tensor(_KERNEL, "k", k, axes, tuple(q.shape), q.device)
    expect_tensor(_KERNEL, "v", v, ("batch", "T", "heads", "d_value"), (batch, length, heads, -1), q.device)
    for name, gate in (("i", i), ("g", g)):
        expect_tensor(_KERNEL, name, gate, axes[:3], (batch, length, heads), q.device)
    dtype = expect_one_precision(_KERNEL, q=q, k=k, v=v, i=i, g=g)
    if pos is not None:
        expect_positions(_KERNEL, pos, batch, length, q.device)
    if initial_state is not None:
        sizes = (batch, heads, d_key, v.shape[3] + 1)
        expect_tensor(_KERNEL, "initial_state", initial_state, ("batch", "heads", "d_key", "d_value + 1"), sizes, q.device)
        expect_dtype(_KERNEL, "initial_state", initial_state, (dtype,))
    return mlstm_torch(q, k, v, i, g, scale=scale, pos=pos, initial_state=initial_state)
