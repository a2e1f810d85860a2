"""RWKV-6's recurrence: the public function, which checks its arguments."""

from torch import Tensor

from baton.kernels.errors import KernelError, expect_dtype, expect_one_precision, expect_positions, expect_tensor
from baton.kernels.wkv6.torch_impl import wkv6_torch

_KERNEL = "wkv6"


def wkv6(
    r: Tensor, k: Tensor, v: Tensor, g: Tensor, u: Tensor, *, pos: Tensor | None = None, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """RWKV-6's recurrence over a piece of a sequence. Per head:

        y_t = (S_{t-1} + Diag(u) k_t v_t^T)^T r_t        S_t = Diag(exp(g_t)) S_{t-1} + k_t v_t^T

    Peng et al. 2024, "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence", section 4.2. A token reads the state
    before its own decay and its own k v^T, which it reads by itself, with the weights u. Where pos == 0, S_{t-1} is replaced by 0.

    Nothing is divided by a decay, so a decay may be 0 (g = -150).

    Args:
        r: receptance, what is read, [batch, T, heads, d_key].
        k: keys, [batch, T, heads, d_key].
        v: values, [batch, T, heads, d_value].
        g: log-decays, finite and at most 0, no unit; not checked. [batch, T, heads, d_key].
        u: the bonus of the current token, [heads, d_key].
        pos: position of each token in its document, int32 or int64 [batch, T], 0 at a document's first token. None: no document
            starts inside this piece.
        initial_state: the state that arrives, [batch, heads, d_key, d_value], float32 (float64 for float64 inputs). None: zero.

    Tensors are float64 all together, or any mix of float32, bfloat16 and float16: then everything is computed in float32.

    Returns:
        y, [batch, T, heads, d_value] in r's dtype, and the state that leaves, [batch, heads, d_key, d_value], float32 or float64.
        Both carry exact gradients to every tensor argument.

    Raises:
        KernelError: an argument of another shape, dtype or device than stated, by name; T = 0.
    """
    if not isinstance(r, Tensor):
        raise KernelError(f"{_KERNEL}: r is a {type(r).__name__}, expected a tensor of shape (batch, T, heads, d_key)")
    axes = ("batch", "T", "heads", "d_key")
    expect_tensor(_KERNEL, "r", r, axes, (-1, -1, -1, -1), r.device)
    batch, length, heads, d_key = r.shape
    for name, tensor in (("k", k), ("g", g)):
        expect_tensor(_KERNEL, name, tensor, axes, tuple(r.shape), r.device)
    expect_tensor(_KERNEL, "v", v, ("batch", "T", "heads", "d_value"), (batch, length, heads, -1), r.device)
    expect_tensor(_KERNEL, "u", u, ("heads", "d_key"), (heads, d_key), r.device)
    dtype = expect_one_precision(_KERNEL, r=r, k=k, v=v, g=g, u=u)
    if pos is not None:
        expect_positions(_KERNEL, pos, batch, length, r.device)
    if initial_state is not None:
        sizes = (batch, heads, d_key, v.shape[3])
        expect_tensor(_KERNEL, "initial_state", initial_state, ("batch", "heads", "d_key", "d_value"), sizes, r.device)
        expect_dtype(_KERNEL, "initial_state", initial_state, (dtype,))
    return wkv6_torch(r, k, v, g, u, pos=pos, initial_state=initial_state)
