"""The RG-LRU's public function: checks its arguments."""

from torch import Tensor

from baton.kernels.errors import KernelError, expect_dtype, expect_one_precision, expect_positions, expect_tensor
from baton.kernels.rg_lru.torch_impl import rg_lru_torch

_KERNEL = "rg_lru"


def rg_lru(x: Tensor, log_a: Tensor, *, pos: Tensor | None = None, initial_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The real-gated linear recurrent unit behind its gates (De et al. 2024, arXiv:2402.19427, equation 4), per channel:

        h_t = a_t h_{t-1} + sqrt(1 - a_t^2) x_t        a = exp(log_a)        y = h

    Where pos == 0, h_t = x_t: nothing is before it, and the input is not scaled, as in the released code.

    Args:
        x: input, already multiplied by the input gate, [batch, T, channels].
        log_a: logarithm of the decay, at most 0, [batch, T, channels]. Values above -1e-12 count as that.
        pos: position of each token in its document, int32 or int64 [batch, T]. None: no document starts in this piece.
        initial_state: [batch, channels], float32 (float64 for float64 inputs). None: zero.

    Returns:
        y, [batch, T, channels] in x's dtype, and the final state, [batch, channels], with exact gradients to all tensors.

    Raises:
        KernelError: an argument of another shape, dtype or device than stated, by name; T = 0.
    """
    if not isinstance(x, Tensor):
        raise KernelError(f"{_KERNEL}: x is a {type(x).__name__}, expected a tensor of shape (batch, T, channels)")
    axes = ("batch", "T", "channels")
    expect_tensor(_KERNEL, "x", x, axes, (-1, -1, -1), x.device)
    batch, length, channels = x.shape
    expect_tensor(_KERNEL, "log_a", log_a, axes, (batch, length, channels), x.device)
    dtype = expect_one_precision(_KERNEL, x=x, log_a=log_a)
    if pos is not None:
        expect_positions(_KERNEL, pos, batch, length, x.device)
    if initial_state is not None:
        expect_tensor(_KERNEL, "initial_state", initial_state, ("batch", "channels"), (batch, channels), x.device)
        expect_dtype(_KERNEL, "initial_state", initial_state, (dtype,))
    return rg_lru_torch(x, log_a, pos=pos, initial_state=initial_state)
