"""mLSTM in PyTorch around gated linear attention, whose Triton kernels a GPU runs.

The normalizer's n is what the memory C would hold of a value that is always 1. So values get a further component, 1, keys are
multiplied by their input gates, and one pass of gated linear attention reads C^T q and n^T q.

In bfloat16 on a GPU the products of keys and gates are rounded like the keys themselves, and so are C^T q and n^T q. Where the
terms of n^T q cancel, outputs are as inexact as these roundings make it, and as the rounding of q and k made it before.

Shape suffixes: B batch, T time, H heads, K d_key, V d_value.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from baton.kernels.common.chunked_autograd import state_dtype
from baton.kernels.compile.aot import on_gpu
from baton.kernels.gated_linear_attention.op import gated_linear_attention
from baton.kernels.head_scale import head_scale
from baton.kernels.matrix_step.triton_launch import matrix_step_triton
from baton.kernels.protocol import Inputs


def mlstm_torch(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, g: Tensor, *, scale: float, pos: Tensor | None, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `op.mlstm`, which checks the arguments."""
    dtype = state_dtype(q, k, v, i, g)
    inputs = attention_inputs(q, k, v, i, g)
    read_BTHV, C_BHKV = gated_linear_attention(*inputs, gate="scalar", scale=scale, pos=pos, initial_state=initial_state)
    return normalized(read_BTHV.to(dtype)).to(q.dtype), C_BHKV


def mlstm_step(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, g: Tensor, *, scale: float, pos: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token a sequence on a GPU, in float32, without gradients. The new state is written over the given one if that is
    contiguous."""
    k, v = k * i.float().exp()[..., None], pad(v, (0, 1), value=1.0)
    read_BTHV, C_BHKV = matrix_step_triton(q, k, v, g, gate="scalar", scale=scale, pos=pos, state=state, y_dtype=torch.float32)
    return normalized(read_BTHV).to(q.dtype), C_BHKV


def normalized(read_BTHV: Tensor) -> Tensor:
    """C^T q divided by the normalizer of n^T q, its last column."""
    return read_BTHV[..., :-1] / read_BTHV[..., -1:].abs().clamp(min=1.0)


def attention_inputs(q: Tensor, k: Tensor, v: Tensor, i: Tensor, g: Tensor) -> Inputs:
    """q, k, v and g of the gated linear attention that has the same state."""
    dtype = state_dtype(q, k, v, i, g)
    gate_BTH = i.to(dtype).exp()
    # a GPU's matrix units take 16 bits, but not float16's, whose largest number is exp(11)
    if on_gpu(q) and torch.float16 not in (q.dtype, k.dtype, v.dtype):
        return q, head_scale(k, gate_BTH), pad(v, (0, 1), value=1.0), g
    return q.to(dtype), k * gate_BTH[..., None], pad(v.to(dtype), (0, 1), value=1.0), g
