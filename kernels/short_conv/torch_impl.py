"""Short causal convolution in PyTorch, on any device.

Shape suffixes: B batch, T time, W width (number of taps), C channels. Tap j reaches back j tokens and has weight_WC[j].

Each tap is one shifted multiply-add over the whole segment, the oldest tap first. The first tokens of a document need no masks:
what taps that reach too far add is overwritten by the bias before the next tap is added. Every output is the same sum in the same
order wherever the sequence is split, and so has the same bits.

The activation is part of the function. The backward pass recomputes its input instead of keeping it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels.common.autocast import without_autocast
from baton.kernels.common.elementwise import LOG2_E, exp2_, padded_buffer


def short_conv_torch(
    x: Tensor, weight: Tensor, bias: Tensor, *, pos: Tensor | None, tail: Tensor | None, silu: bool, need_tail: bool = True
) -> tuple[Tensor, Tensor]:
    """As `op.short_conv`, which checks the arguments."""
    inputs = (x, weight, bias, tail)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs):
        y_BTC, tail_BTC = _ShortConv.apply(*inputs, pos, silu, need_tail)
        return y_BTC, tail_BTC
    with torch.no_grad():
        return _forward(x, weight, bias, tail, pos, silu, need_tail)


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor, tail: Tensor | None, pos: Tensor | None, silu: bool, need_tail: bool
) -> tuple[Tensor, Tensor]:
    sum_BTC = _conv(x, weight, bias, tail, _rows_outside_document(pos, weight.shape[1]))
    if silu:
        sum_BTC.mul_(_sigmoid(sum_BTC))
    rows = weight.shape[1] - 1
    return sum_BTC.to(x.dtype), new_tail(x, tail, rows) if need_tail else x.new_empty(x.shape[0], 0, x.shape[2])


def _rows_outside_document(pos: Tensor | None, width: int) -> list[Tensor | None]:
    """For each tap j, the rows b * T + t where it reaches outside the document (pos < j), or None if there are none."""
    if pos is None:
        return [None] * width
    rows = [(pos < j).reshape(-1).nonzero().squeeze(1) for j in range(1, width)]
    return [None, *(row if row.numel() else None for row in rows)]


def _conv(x: Tensor, weight: Tensor, bias: Tensor, tail: Tensor | None, outside: list[Tensor | None]) -> Tensor:
    """bias + sum over the taps, [B, T, C] in the compute dtype."""
    length, channels = x.shape[1:]
    dtype = _compute_dtype(x)
    x_BTC, weight_WC, width = x.to(dtype), _taps_first(weight, dtype), weight.shape[1]
    tail_BTC = None if tail is None else tail.to(dtype)
    bias_C = bias.to(dtype)
    sum_BTC = torch.empty(x.shape, dtype=dtype, device=x.device).copy_(bias_C)
    for j in reversed(range(width)):
        # outputs 0 .. split-1 read this tap's input from the tail, the others from the segment
        split, rows = min(j, length), outside[j]
        if tail_BTC is not None:
            sum_BTC[:, :split].addcmul_(tail_BTC[:, width - 1 - j : width - 1 - j + split], weight_WC[j])
        sum_BTC[:, split:].addcmul_(x_BTC[:, : length - split], weight_WC[j])
        if rows is not None:
            sum_BTC.view(-1, channels)[rows] = bias_C
    return sum_BTC


def new_tail(x: Tensor, tail: Tensor | None, n: int) -> Tensor:
    """The last n tokens of tail and segment: a copy, so that the segment is not kept alive."""
    batch, length, channels = x.shape
    if length >= n:
        return x[:, length - n :].clone(memory_format=torch.contiguous_format)
    if tail is None:
        tail = x.new_zeros(batch, n, channels)
    return torch.cat((tail[:, length:], x), dim=1)


def _sigmoid(x_BTC: Tensor) -> Tensor:
    """1 / (1 + exp(-x)). The bits of torch.sigmoid depend on an element's position (see elementwise.py)."""
    flat = padded_buffer(x_BTC.numel(), x_BTC, x_BTC.dtype)
    sigmoid_BTC = flat[: x_BTC.numel()].view(x_BTC.shape)
    torch.mul(x_BTC, -LOG2_E, out=sigmoid_BTC)
    exp2_(flat, x_BTC.numel())
    return sigmoid_BTC.add_(1.0).reciprocal_()


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _taps_first(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype).flip(1).t().contiguous()


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        tail: Tensor | None,
        pos: Tensor | None,
        silu: bool,
        need_tail: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # no zeros for the gradient of an unused tail
        ctx.save_for_backward(x, weight, bias, tail, pos)
        ctx.silu = silu
        return _forward(x, weight, bias, tail, pos, silu, need_tail)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BTC: Tensor | None, dtail_out_BTC: Tensor | None) -> tuple[Any, ...]:
        x, weight, bias, tail, pos = ctx.saved_tensors
        dy_BTC = torch.zeros_like(x) if dy_BTC is None else dy_BTC
        with without_autocast(x):
            grads = _backward(x, weight, bias, tail, pos, ctx.silu, dy_BTC, dtail_out_BTC)
        wanted = zip(ctx.needs_input_grad[:4], grads, strict=True)
        return (*(grad if want else None for want, grad in wanted), None, None, None)


def _backward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    tail: Tensor | None,
    pos: Tensor | None,
    silu: bool,
    dy_BTC: Tensor,
    dtail_out_BTC: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, bias and tail. Tap j at time t adds weight_WC[j] g_t to the gradient of the input at time t - j."""
    batch, length, channels = x.shape
    width, dtype = weight.shape[1], _compute_dtype(x)
    n = width - 1
    outside = _rows_outside_document(pos, width)
    # on a CPU, new memory costs more than arithmetic: products share one buffer and g is updated in place
    product_BTC = torch.empty(x.shape, dtype=dtype, device=x.device)
    if silu:
        g_BTC = _conv(x, weight, bias, tail, outside)
        sigmoid_BTC = _sigmoid(g_BTC)
        # silu'(s) = sigmoid (1 + s - s sigmoid); 1 comes last, or it would drown in a large s
        torch.mul(g_BTC, sigmoid_BTC, out=product_BTC)
        g_BTC.sub_(product_BTC).add_(1.0).mul_(sigmoid_BTC).mul_(dy_BTC)
    else:
        g_BTC = torch.empty(x.shape, dtype=dtype, device=x.device).copy_(dy_BTC)
    x_BTC, weight_WC = x.to(dtype), _taps_first(weight, dtype)
    tail_BTC = None if tail is None else tail.to(dtype)
    dbias_C = g_BTC.sum((0, 1))
    dx_BTC = g_BTC * weight_WC[0]
    dtail_BTC = torch.zeros(batch, n, channels, dtype=dtype, device=x.device)
    dweight_WC = torch.empty_like(weight_WC)
    dweight_WC[0] = torch.mul(g_BTC, x_BTC, out=product_BTC).sum((0, 1))
    for j in range(1, width):
        split, rows = min(j, length), outside[j]
        from_tail, from_piece = slice(n - j, n - j + split), slice(0, length - split)
        if rows is not None:
            # where tap j reaches outside the document, tap j + 1 does too
            g_BTC.view(-1, channels).index_fill_(0, rows, 0.0)
        dtail_BTC[:, from_tail].addcmul_(g_BTC[:, :split], weight_WC[j])
        dx_BTC[:, from_piece].addcmul_(g_BTC[:, split:], weight_WC[j])
        dweight_WC[j] = torch.mul(g_BTC[:, split:], x_BTC[:, from_piece], out=product_BTC[:, from_piece]).sum((0, 1))
        if tail_BTC is not None:
            dweight_WC[j] += (g_BTC[:, :split] * tail_BTC[:, from_tail]).sum((0, 1))
    if dtail_out_BTC is not None:
        # the new tail is a copy of the last n tokens of tail and segment
        from_x = min(n, length)
        dx_BTC[:, length - from_x :] += dtail_out_BTC[:, n - from_x :]
        dtail_BTC[:, length:] += dtail_out_BTC[:, : n - from_x]
    dweight = dweight_WC.flip(0).t()
    return dx_BTC.to(x.dtype), dweight.to(weight.dtype), dbias_C.to(bias.dtype), dtail_BTC.to(x.dtype)
