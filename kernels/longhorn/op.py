"""Longhorn: the public function. Checks the arguments and picks an implementation.

The state is passed in and returned in fp32 (float64 for float64 inputs), with exact gradients to both, so a sequence may be split
anywhere. In PyTorch, y and the states then keep every bit. The Triton kernels, which split long sequences themselves, and all
gradients agree to rounding.
"""

from torch import Tensor

from baton.kernels.diagonal_scan.triton_launch import ScanInputs, diagonal_scan_triton, use_triton
from baton.kernels.errors import KernelError, expect_dtype, expect_one_precision, expect_positions, expect_tensor
from baton.kernels.gate import gated
from baton.kernels.longhorn.chunked import longhorn_chunked

_KERNEL = "longhorn"


def longhorn(
    x: Tensor,
    k: Tensor,
    q: Tensor,
    beta: Tensor,
    D: Tensor,
    *,
    z: Tensor | None = None,
    beta_bias: Tensor | None = None,
    beta_sigmoid: bool = False,
    pos: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Longhorn's recurrence over a segment of a sequence (Liu et al. 2024, Algorithm 1; per channel i and state index n):

        S_t[i, n] = (1 - eps_i k_n^2) S_{t-1}[i, n] + eps_i x_i k_n        eps_i = beta_i / (1 + beta_i |k|^2)
        y_t[i] = (sum_n S_t[i, n] q_n + D_i x_i) silu(z_t[i])

    Where pos == 0, the decay 1 - eps k^2 is replaced by 0: a document never sees the state of the one before it. The decay lies
    between 1 / (1 + beta |k|^2) and 1 for any key, so keys need no normalization; a key of 0 changes nothing.

    Args:
        x: values, [batch, T, channels].
        k: keys, shared by the channels, [batch, T, d_state].
        q: queries, shared by the channels, [batch, T, d_state].
        beta: write strength per channel, no unit, [batch, T, channels]; 0 to 1 if beta_sigmoid is False; not checked.
        D: skip weight per channel, [channels] (in the authors' code, not in the paper's algorithm; zeros turn it off).
        z: gate, [batch, T, channels]. None: y is not gated.
        beta_bias: added to beta per channel, before the sigmoid and in the compute dtype, [channels]. None: 0.
        beta_sigmoid: whether the write strength is sigmoid(beta + beta_bias) instead of beta + beta_bias.
        pos: position of each token in its document, int32 or int64 [batch, T], 0 at a document's first token. None: no document
            starts in this segment.
        initial_state: [batch, channels, d_state], float32 (float64 for float64 inputs). None: zero.

    Tensors are all float64, or any mix of float32, bfloat16 and float16; the mix is computed in float32, on a GPU by Triton
    kernels.

    Returns:
        y, [batch, T, channels] in x's dtype, and the final state, [batch, channels, d_state], float32 or float64. Both carry exact
        gradients to every tensor argument. Double backward is not supported; autograd raises a RuntimeError.

    Raises:
        KernelError: an argument has another shape, dtype or device than stated, by name; T = 0.
    """
    if not isinstance(x, Tensor):
        raise KernelError(f"{_KERNEL}: x is a {type(x).__name__}, expected a tensor of shape (batch, T, channels)")
    device = x.device
    expect_tensor(_KERNEL, "x", x, ("batch", "T", "channels"), (-1, -1, -1), device)
    batch, length, channels = x.shape
    expect_tensor(_KERNEL, "k", k, ("batch", "T", "d_state"), (batch, length, -1), device)
    d_state = k.shape[2]
    expect_tensor(_KERNEL, "q", q, ("batch", "T", "d_state"), (batch, length, d_state), device)
    expect_tensor(_KERNEL, "beta", beta, ("batch", "T", "channels"), (batch, length, channels), device)
    expect_tensor(_KERNEL, "D", D, ("channels",), (channels,), device)
    given = {"x": x, "k": k, "q": q, "beta": beta, "D": D}
    if z is not None:
        expect_tensor(_KERNEL, "z", z, ("batch", "T", "channels"), (batch, length, channels), device)
        given["z"] = z
    if beta_bias is not None:
        expect_tensor(_KERNEL, "beta_bias", beta_bias, ("channels",), (channels,), device)
        given["beta_bias"] = beta_bias
    compute_dtype = expect_one_precision(_KERNEL, **given)
    if initial_state is not None:
        expect_tensor(_KERNEL, "initial_state", initial_state, ("batch", "channels", "d_state"), (batch, channels, d_state), device)
        expect_dtype(_KERNEL, "initial_state", initial_state, (compute_dtype,))
    if pos is not None:
        expect_positions(_KERNEL, pos, batch, length, device)
    if use_triton(x, compute_dtype):
        inputs = ScanInputs(x, beta, None, k, q, D, z, beta_bias)
        return diagonal_scan_triton(inputs, pos=pos, initial_state=initial_state, activate=beta_sigmoid)
    if beta_bias is not None:
        beta = beta.to(compute_dtype) + beta_bias.to(compute_dtype)
    if beta_sigmoid:
        beta = beta.to(compute_dtype).sigmoid()
    y, S = longhorn_chunked(x, k, q, beta, D, pos=pos, initial_state=initial_state)
    return (y if z is None else gated(y, z)), S
