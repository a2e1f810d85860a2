"""Gated slot attention in vectorised PyTorch, on any device: the CPU implementation.

A chunk is two passes of gated linear attention with one gate (Zhang et al. 2024, equation 7): keys written to the slots, decaying
along that pass's values, and values read from the slots, decaying along its keys. The decays are computed once, by
`gated_linear_attention.chunk_math`; `common.chunked_autograd` loops over chunks.
"""

from functools import partial

import torch
from torch import Tensor

from baton.kernels.common.autocast import without_autocast
from baton.kernels.common.chunked_autograd import run_chunked, state_dtype
from baton.kernels.common.launch_utils import next_power_of_2
from baton.kernels.gated_linear_attention.chunk_math import (
    ChannelDecay,
    extended,
    extended_positions,
    grouped,
    heads_first,
    ungrouped,
)
from baton.kernels.gated_linear_attention.chunked import CHUNK
from baton.kernels.gated_slot_attention.reference import SLOT_ACTIVATIONS, SlotActivation, activated
from baton.kernels.protocol import Inputs, State


def gsa_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float,
    slot_activation: SlotActivation,
    gate_logit_normalizer: float | None = None,
    pos: Tensor | None,
    initial_state: State | None,
    chunk: int = CHUNK,
) -> tuple[Tensor, State]:
    """As `op.gated_slot_attention`, which checks the arguments; `chunk` is the number of tokens per chunk."""
    inputs = (q, k, v, g)
    dtype = state_dtype(*inputs)
    state = empty_state(k, v, g, dtype) if initial_state is None else initial_state
    step = partial(_step, scale=scale, slot_activation=slot_activation, gate_logit_normalizer=gate_logit_normalizer, dtype=dtype)
    return run_chunked(step, inputs, len(inputs), pos=pos, state={"k": state["k"], "v": state["v"]}, chunk=chunk)


def empty_state(k: Tensor, v: Tensor, g: Tensor, dtype: torch.dtype) -> State:
    """Slots that nothing was written to, {k [batch, heads, d_key, slots], v [batch, heads, slots, d_value]}."""
    batch, _, heads, d_key = k.shape
    slots, d_value = g.shape[3], v.shape[3]
    return {
        "k": k.new_zeros(batch, heads, d_key, slots, dtype=dtype),
        "v": k.new_zeros(batch, heads, slots, d_value, dtype=dtype),
    }


def gsa_final_state(
    k: Tensor, v: Tensor, g: Tensor, *, gate_logit_normalizer: float | None = None, pos: Tensor | None, chunk: int = CHUNK
) -> State:
    """What a span adds to slots of zeros: neither queries nor link nor outputs, and without gradients."""
    inputs = (k, v, g)
    dtype = state_dtype(*inputs)
    state = empty_state(*inputs, dtype)
    with torch.no_grad(), without_autocast(k):
        for begin in range(0, k.shape[1], chunk):
            span = slice(begin, begin + chunk)
            block = _Block(
                activated(tuple(x[:, span] for x in inputs), gate_logit_normalizer), None if pos is None else pos[:, span], dtype
            )
            state = block.write(state)
    return state


def _step(
    inputs: Inputs,
    pos: Tensor | None,
    state: State,
    scale: float,
    slot_activation: SlotActivation,
    gate_logit_normalizer: float | None,
    dtype: torch.dtype,
) -> tuple[Tensor, State]:
    inputs = activated(inputs, gate_logit_normalizer)
    q, length = inputs[0], inputs[0].shape[1]
    block = _Block(inputs[1:], pos, dtype)
    queries = grouped(extended(q, block.k.shape[2]), block.k.shape[1], dtype)
    scores = block.decay.read_values(queries, block.k, block.strength, state["k"])
    y = block.decay.read_keys(SLOT_ACTIVATIONS[slot_activation](scale * scores), block.strength, block.v, state["v"])
    return ungrouped(y[:, :, :length], q.dtype), block.write(state)


class _Block:
    """A chunk's k, v and write strength, heads first, and the decay that both states share."""

    def __init__(self, inputs: Inputs, pos: Tensor | None, dtype: torch.dtype) -> None:
        length = next_power_of_2(inputs[0].shape[1])
        self.k, self.v, g = (heads_first(extended(x, length), dtype) for x in inputs)
        self.decay = ChannelDecay(g, extended_positions(pos, length))
        # 1 - alpha itself would lose the gates that matter most, those that keep nearly all
        self.strength = -torch.expm1(g)

    def write(self, state: State) -> State:
        """The slots after the chunk."""
        return {
            "k": self.decay.write_values(self.k, self.strength, state["k"]),
            "v": self.decay.write_keys(self.strength, self.v, state["v"]),
        }
