"""Gated linear attention in vectorised PyTorch, on any device: the CPU implementation.

A chunk takes three matrix products (queries with keys, scores with values, queries with the entering state) with decays between 0
and 1. `chunk_math` computes the decays, `common.chunked_autograd` loops over chunks.
"""

from functools import partial

import torch
from torch import Tensor

from baton.kernels.common.autocast import without_autocast
from baton.kernels.common.chunked_autograd import run_chunked, state_dtype
from baton.kernels.common.launch_utils import next_power_of_2
from baton.kernels.gated_linear_attention.chunk_math import (
    ChannelDecay,
    ScalarDecay,
    extended,
    extended_positions,
    grouped,
    heads_first,
    ungrouped,
)
from baton.kernels.gated_linear_attention.reference import Gate
from baton.kernels.protocol import Inputs, State

# Measured on one core, forwards and backwards, for d_key and d_value of 32 to 512 and 4 to 64 heads, with every gate: the fastest
# of 16, 32, 64 and 128, or within an eighth of it. The states kept for the backward pass shrink with it as well.
CHUNK = 64


def gla_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    *,
    gate: Gate,
    scale: float,
    pos: Tensor | None,
    initial_state: Tensor | None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """As `op.gated_linear_attention`, which checks the arguments; `chunk` is the number of tokens per chunk."""
    inputs = (q, k, v) if g is None else (q, k, v, g)
    dtype = state_dtype(*inputs)
    step = partial(_step, gate=gate, scale=scale, dtype=dtype)
    state = {"S": empty_state(k, v, dtype) if initial_state is None else initial_state}
    y, leaving = run_chunked(step, inputs, len(inputs), pos=pos, state=state, chunk=chunk)
    return y, leaving["S"]


def empty_state(k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """The state of nothing read yet, [batch, heads, d_key, d_value]."""
    return k.new_zeros(k.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=dtype)


def gla_final_state(k: Tensor, v: Tensor, g: Tensor | None, *, gate: Gate, pos: Tensor | None, chunk: int = CHUNK) -> Tensor:
    """What a span adds to a state of zeros, [batch, heads, d_key, d_value], without queries, outputs and gradients."""
    inputs = (k, v) if g is None else (k, v, g)
    dtype = state_dtype(*inputs)
    S = empty_state(k, v, dtype)
    with torch.no_grad(), without_autocast(k):
        for begin in range(0, k.shape[1], chunk):
            span = slice(begin, begin + chunk)
            block = _Block(tuple(x[:, span] for x in inputs), None if pos is None else pos[:, span], gate, dtype)
            S = block.write(block.k, block.v, S)
    return S


def _step(inputs: Inputs, pos: Tensor | None, state: State, gate: Gate, scale: float, dtype: torch.dtype) -> tuple[Tensor, State]:
    q, length = inputs[0], inputs[0].shape[1]
    block, S = _Block(inputs[1:], pos, gate, dtype), state["S"]
    y = block.read(block.queries(q), block.k, block.v, S)
    return ungrouped(scale * y[:, :, :length], q.dtype), {"S": block.write(block.k, block.v, S)}


class _Block:
    """A chunk's k and v, heads first, and how a state is read and written over them with this gate.

    A head that all share stays one where the decay is a number: its scores are then computed once.
    """

    def __init__(self, inputs: Inputs, pos: Tensor | None, gate: Gate, dtype: torch.dtype) -> None:
        self.dtype, self.by_channel = dtype, gate in ("key", "value")
        if self.by_channel:
            length = next_power_of_2(inputs[0].shape[1])
            inputs, pos = tuple(extended(x, length) for x in inputs), extended_positions(pos, length)
        k, self.v, *gates = (heads_first(x, dtype) for x in inputs)
        self.k = self._own(k)
        if self.by_channel:
            decay = ChannelDecay(gates[0], pos)
            self.read = decay.read_keys if gate == "key" else decay.read_values
            self.write = decay.write_keys if gate == "key" else decay.write_values
        else:
            same = ScalarDecay(gates[0] if gates else self.v.new_zeros(1, 1, self.v.shape[2]), pos)
            self.read, self.write = same.read, same.write

    def queries(self, q_BLHK: Tensor) -> Tensor:
        """By the head they read, [B, H or 1, L, G, K]."""
        heads = 1 if q_BLHK.shape[2] == 1 else self.v.shape[1]
        return self._own(grouped(extended(q_BLHK, self.v.shape[2]), heads, self.dtype))

    def _own(self, x_BH: Tensor) -> Tensor:
        return x_BH.expand(-1, self.v.shape[1], *(-1,) * (x_BH.ndim - 2)) if self.by_channel else x_BH
