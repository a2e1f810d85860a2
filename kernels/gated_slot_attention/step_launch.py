"""One token of gated slot attention on a GPU: two passes of gated linear attention, as for a whole sequence, which read and write
either State once."""

import torch
from torch import Tensor

from baton.kernels.gated_slot_attention.reference import SLOT_ACTIVATIONS, SlotActivation, activated
from baton.kernels.matrix_step.triton_launch import matrix_step_triton
from baton.kernels.protocol import State


def gsa_step_triton(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, scale: float, slot_activation: SlotActivation,
    gate_logit_normalizer: float | None, pos: Tensor | None, state: State,
) -> tuple[Tensor, State]:  # fmt: skip
    """`op.gated_slot_attention` of one token a sequence, without gradients. The new slots are written over the given ones if those
    are contiguous."""
    dtype, q, k, v, g = q.dtype, *activated((q, k, v, g), gate_logit_normalizer)
    strength = -torch.expm1(g.float())
    scores, k_slots = matrix_step_triton(
        q, k, strength, g, gate="value", scale=scale, pos=pos, state=state["k"], y_dtype=torch.float32
    )
    weights = SLOT_ACTIVATIONS[slot_activation](scores)
    y, v_slots = matrix_step_triton(weights, strength, v, g, gate="key", scale=1.0, pos=pos, state=state["v"], y_dtype=dtype)
    return y, {"k": k_slots, "v": v_slots}
