"""Gated slot attention as a sequential loop over time: the definition.

Shape suffixes: B batch, T time, H heads of k, v and the states, G query heads per head, K d_key, M slots, V d_value.

Gradients are plain autograd. It keeps both states per token for the backward pass; use it for short sequences.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, silu

from baton.kernels.protocol import Inputs, State

SlotActivation = Literal["softmax", "identity", "silu", "relu", "relu2"]
"""The activation that turns scores of slots into weights; softmax is over the slots, the others are elementwise."""

SLOT_ACTIVATIONS: dict[SlotActivation, Callable[[Tensor], Tensor]] = {
    "softmax": lambda scores: scores.softmax(-1),
    "identity": lambda scores: scores,
    "silu": silu,
    "relu": torch.relu,
    "relu2": lambda scores: torch.relu(scores).square(),
}


def activated(inputs: Inputs, gate_logit_normalizer: float | None) -> Inputs:
    """(..., g), which with a gate_logit_normalizer are given as projected: silu of what is before,
    log(sigmoid) / gate_logit_normalizer of the gates,
    in float32 at least. Differentiable."""
    if gate_logit_normalizer is None:
        return inputs
    *projected, gates = inputs
    precise = gates.to(torch.promote_types(gates.dtype, torch.float32))
    return *(silu(x) for x in projected), logsigmoid(precise) / gate_logit_normalizer


def gsa_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float = 1.0,
    slot_activation: SlotActivation = "softmax",
    gate_logit_normalizer: float | None = None,
    pos: Tensor | None = None,
    initial_state: State | None = None,
) -> tuple[Tensor, State]:
    """Gated slot attention (Zhang et al. 2024, equations 6 and 8), in the promoted dtype; shapes as in `op`, nothing is checked.

        k_t = k_{t-1} Diag(a_t) + key_t w_t^T        v_t = Diag(a_t) v_{t-1} + w_t value_t^T        w_t = 1 - a_t
        y_t = v_t^T slot_activation(scale k_t^T q_t)

    on states k [B, H, K, M] and v [B, H, M, V] (the paper's slots of keys, transposed, and of values), which are replaced by 0
    before a token where pos == 0.
    """
    q, k, v, g = activated((q, k, v, g), gate_logit_normalizer)
    batch, length, heads, d_key = k.shape
    slots, d_value = g.shape[3], v.shape[3]
    q_BTHGK = q.unflatten(2, (heads, -1))
    k_BHKM = k.new_zeros(batch, heads, d_key, slots) if initial_state is None else initial_state["k"]
    v_BHMV = k.new_zeros(batch, heads, slots, d_value) if initial_state is None else initial_state["v"]
    y_BTHV = []
    for t in range(length):
        if pos is not None:
            starts = (pos[:, t] == 0)[:, None, None, None]
            k_BHKM, v_BHMV = k_BHKM.masked_fill(starts, 0.0), v_BHMV.masked_fill(starts, 0.0)
        keep_BHM, write_BHM = g[:, t].exp(), -torch.expm1(g[:, t])
        k_BHKM = keep_BHM[:, :, None, :] * k_BHKM + k[:, t, :, :, None] * write_BHM[:, :, None, :]
        v_BHMV = keep_BHM[:, :, :, None] * v_BHMV + write_BHM[:, :, :, None] * v[:, t, :, None, :]
        scores_BHGM = scale * torch.einsum("bhgk,bhkm->bhgm", q_BTHGK[:, t].to(k_BHKM.dtype), k_BHKM)
        y_BTHV.append(torch.einsum("bhgm,bhmv->bhgv", SLOT_ACTIVATIONS[slot_activation](scores_BHGM), v_BHMV).flatten(1, 2))
    return torch.stack(y_BTHV, dim=1), {"k": k_BHKM, "v": v_BHMV}
