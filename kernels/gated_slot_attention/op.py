"""Gated slot attention: the public function, which checks its arguments and selects an implementation.

Both states enter and leave in float32 (float64 for float64 inputs) with exact gradients to both, so a sequence may be split
anywhere: outputs, states and gradients are equal to rounding. Neither state depends on q or on the slot activation.
"""

from functools import partial
from typing import get_args

from torch import Tensor

from baton.kernels.errors import KernelError, expect_dtype, expect_one_precision, expect_positions, expect_state_keys, expect_tensor
from baton.kernels.gated_linear_attention.op import expect_attention
from baton.kernels.gated_linear_attention.triton_launch import use_triton
from baton.kernels.gated_slot_attention.chunked import gsa_chunked
from baton.kernels.gated_slot_attention.reference import SlotActivation
from baton.kernels.gated_slot_attention.triton_launch import gsa_triton
from baton.kernels.protocol import State

_SLOT_ACTIVATIONS = get_args(SlotActivation)
_KERNEL = "gated_slot_attention"


def gated_slot_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float = 1.0,
    slot_activation: SlotActivation = "softmax",
    gate_logit_normalizer: float | None = None,
    recompute_activations: bool = False,
    keep_states: bool = False,
    pos: Tensor | None = None,
    initial_state: State | None = None,
) -> tuple[Tensor, State]:
    """Gated slot attention over a piece of a sequence (Zhang et al. 2024, equations 6 and 8; per head, slot i):

        key_i = alpha_i key_i + (1 - alpha_i) k_t        value_i = alpha_i value_i + (1 - alpha_i) v_t
        y_t = sum_i p_i value_i        p = slot_activation(scale (q_t . key_1, ..., q_t . key_slots))

    The output sees its own token. Where pos == 0, all slots are replaced by 0 first: a document never sees the slots of the one
    before it. With slots of 0 at its start, each slot is a sub-convex combination of the document's keys and values.

    Args:
        q: queries, [batch, T, query_heads, d_key]. query_heads is a multiple of heads, the group: query head h reads the slots of
            head h // group. Slots are kept and computed once per head, not per query head.
        k: keys, [batch, T, heads, d_key].
        v: values, [batch, T, heads, d_value].
        g: logarithm of what each slot keeps, finite and at most 0, no unit, [batch, T, heads, slots]; not checked. What it
            takes in, 1 - alpha, is computed from the logarithm: pass it in float32, whatever k and v are in.
        scale: of the scores; the authors train with 1.
        slot_activation: weights out of scores: softmax over the slots, identity, silu, relu or relu2 (the square of relu).
        gate_logit_normalizer: if given (more than 0), q, k, v and g are projections without activations: the function applies silu
            to q, k and v (rounded to their dtypes) and uses log(sigmoid(g)) / gate_logit_normalizer (always in float32). On a GPU,
            inputs that are adjacent columns of one tensor get gradients that are adjacent columns, too. None: q, k, v and g are
            used as given.
        recompute_activations: recompute the activations of q, k and v in the backward pass instead of saving them. The CPU
            implementation always does.
        keep_states: on a GPU, keep the slots between chunks of tokens, and what decays of the slots' values have multiplied, for
            the backward pass, which otherwise computes them again. The CPU implementation always keeps them.
        pos: position of each token in its document, int32 or int64 [batch, T], 0 at a document's first token. None: no document
            starts inside this piece.
        initial_state: the slots that arrive, {k [batch, heads, d_key, slots], v [batch, heads, slots, d_value]}, float32 (float64
            for float64 inputs). None: zero.

    Tensors are float64 all together, or any mix of float32, bfloat16 and float16: then everything is computed in float32.

    Returns:
        y, [batch, T, query_heads, d_value] in q's dtype, and the slots that leave, shapes as initial_state, float32 or float64.
        Both carry exact gradients to every tensor argument; differentiating twice is refused by autograd with a RuntimeError.

    Raises:
        KernelError: an argument of another shape, dtype or device than stated, by name; an unknown slot_activation; a
            gate_logit_normalizer that is not positive; T = 0.
    """
    if slot_activation not in _SLOT_ACTIVATIONS:
        raise KernelError(f"{_KERNEL}: slot_activation is {slot_activation!r}, expected one of {_SLOT_ACTIVATIONS}")
    if gate_logit_normalizer is not None and not gate_logit_normalizer > 0:
        raise KernelError(f"{_KERNEL}: gate_logit_normalizer is {gate_logit_normalizer}, expected more than 0, or None")
    expect_attention(_KERNEL, q, k, v, shared=False)
    batch, length, heads, d_key = k.shape
    d_value, device = v.shape[3], q.device
    expect_tensor(_KERNEL, "g", g, ("batch", "T", "heads", "slots"), (batch, length, heads, -1), device)
    slots = g.shape[3]
    dtype = expect_one_precision(_KERNEL, q=q, k=k, v=v, g=g)
    if initial_state is not None:
        expect_state_keys(_KERNEL, "initial_state", initial_state, ("k", "v"))
        axes, sizes = ("batch", "heads", "d_key", "slots"), (batch, heads, d_key, slots)
        expect_tensor(_KERNEL, "initial_state k", initial_state["k"], axes, sizes, device)
        axes, sizes = ("batch", "heads", "slots", "d_value"), (batch, heads, slots, d_value)
        expect_tensor(_KERNEL, "initial_state v", initial_state["v"], axes, sizes, device)
        for name, leaf in initial_state.items():
            expect_dtype(_KERNEL, f"initial_state {name}", leaf, (dtype,))
    if pos is not None:
        expect_positions(_KERNEL, pos, batch, length, device)
    implementation = gsa_chunked
    if use_triton(q, dtype):
        implementation = partial(gsa_triton, recompute_activations=recompute_activations, keep_states=keep_states)
    return implementation(
        q,
        k,
        v,
        g,
        scale=scale,
        slot_activation=slot_activation,
        gate_logit_normalizer=gate_logit_normalizer,
        pos=pos,
        initial_state=initial_state,
    )
