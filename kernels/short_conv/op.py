"""Short causal convolution: the public function. Checks the arguments and picks an implementation.

The tail is the State. It holds inputs, not outputs, in their own dtype, so passing it on loses nothing. A sequence may be split
anywhere, also into segments shorter than the tail.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from baton.kernels.errors import KernelError, expect_dtype, expect_one_precision, expect_positions, expect_tensor
from baton.kernels.rms_norm import rms_norm
from baton.kernels.short_conv.torch_impl import short_conv_torch
from baton.kernels.short_conv.triton_launch import short_conv_triton, unit_of_kernels, use_triton

Activation = Literal["silu"]

_ACTIVATIONS = get_args(Activation)
_KERNEL = "short_conv"


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    pos: Tensor | None = None,
    tail: Tensor | None = None,
    activation: Activation | None = None,
    unit_width: int | None = None,
    unit_eps: float = 0.0,
    need_tail: bool = True,
) -> tuple[Tensor, Tensor]:
    """Causal depthwise convolution over a segment of a sequence (Gu & Dao 2023, figure 3; mamba's conv1d), with W = width:

        y_t = bias + sum_j weight[:, W-1-j] x_{t-j},    0 <= j < W, over the taps inside the document: pos_t >= j

    Args:
        x: input, [batch, T, channels].
        weight: taps, oldest first as in torch's conv1d, [channels, width].
        bias: [channels].
        pos: position of each token in its document, int32 or int64 [batch, T]: from one token to the next it rises by 1, or is 0
            again; not checked, and on a GPU a document's start is overlooked where it rises by more. None: every tap is valid; no
            document starts in this segment or close before it.
        tail: the width - 1 inputs before this segment, oldest first, [batch, width - 1, channels] in x's dtype. None: zeros.
        activation: "silu" for y * sigmoid(y) on the output, or None.
        unit_width: channels of a head, of which each becomes y / sqrt(|y|^2 + unit_eps), as queries and keys of the delta rule are
            normalized; computed behind the activation and, on a GPU with heads of up to 256 channels, a power of two, before the
            result is rounded. None: there are no heads.
        unit_eps: added to the sum of squares.
        need_tail: False: the new tail is not computed and has no rows.

    Tensors are all float64, or any mix of float32, bfloat16 and float16; the mix is computed in float32, on a GPU by Triton
    kernels.

    Returns:
        y, [batch, T, channels] in x's dtype, and the new tail, [batch, width - 1, channels] in x's dtype: the last width - 1 tokens
        of tail and segment. Both carry exact gradients to x, weight, bias and tail. Double backward is not supported; autograd
        raises a RuntimeError.

    Raises:
        KernelError: an argument has another shape, dtype or device than stated, by name; T = 0; heads do not divide the channels.
    """
    if not isinstance(x, Tensor):
        raise KernelError(f"{_KERNEL}: x is a {type(x).__name__}, expected a tensor of shape (batch, T, channels)")
    device = x.device
    expect_tensor(_KERNEL, "x", x, ("batch", "T", "channels"), (-1, -1, -1), device)
    batch, length, channels = x.shape
    expect_tensor(_KERNEL, "weight", weight, ("channels", "width"), (channels, -1), device)
    width = weight.shape[1]
    expect_tensor(_KERNEL, "bias", bias, ("channels",), (channels,), device)
    expect_one_precision(_KERNEL, x=x, weight=weight, bias=bias)
    if tail is not None:
        expect_tensor(_KERNEL, "tail", tail, ("batch", "width - 1", "channels"), (batch, width - 1, channels), device)
        expect_dtype(_KERNEL, "tail", tail, (x.dtype,))
    if pos is not None:
        expect_positions(_KERNEL, pos, batch, length, device)
    if activation is not None and activation not in _ACTIVATIONS:
        raise KernelError(f"{_KERNEL}: activation is {activation!r}, expected None or one of {_ACTIVATIONS}")
    if unit_width is not None and (unit_width < 1 or channels % unit_width):
        raise KernelError(f"{_KERNEL}: unit_width is {unit_width}, expected a divisor of the {channels} channels")
    silu = activation == "silu"
    if not use_triton(x):
        y, leaving = short_conv_torch(x, weight, bias, pos=pos, tail=tail, silu=silu, need_tail=need_tail)
        return unit_heads(y, unit_width, unit_eps), leaving
    unit = unit_of_kernels(unit_width, unit_eps)
    y, leaving = short_conv_triton(x, weight, bias, pos=pos, tail=tail, silu=silu, unit=unit, need_tail=need_tail)
    return y if unit else unit_heads(y, unit_width, unit_eps), leaving


def unit_heads(y: Tensor, width: int | None, eps: float) -> Tensor:
    """y / sqrt(|y|^2 + eps) over each head of `width` channels of [..., channels], rounded to y's dtype; None: y."""
    if width is None:
        return y
    precise = torch.promote_types(y.dtype, torch.float32)
    weight = torch.full((width,), width**-0.5, dtype=precise, device=y.device)
    return rms_norm(y.unflatten(-1, (-1, width)), weight, eps / width, dtype=y.dtype).flatten(-2)
