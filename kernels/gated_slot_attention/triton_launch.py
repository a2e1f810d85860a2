"""Gated slot attention on a GPU: two passes of gated linear attention, one over the slots' keys and one over the slots' values.

The passes share the gate alpha; a slot's write strength is 1 - alpha. The slot activation amplifies the error of a score by the
score's magnitude, so intermediate results between the passes are not rounded: write strengths, scores and the gradients of slot
weights are float32, and products with write strengths within a chunk use them with twice bfloat16's precision.

The slots' scores and the scores within chunks are saved for the backward pass; write strengths, slot weights and, unless they are
to be kept, the states between chunks are recomputed. For projected inputs (gate_logit_normalizer), the kernels that write the
gradients include the derivatives of the activations and write into adjacent views like the inputs'.
"""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels.common import launch_utils
from baton.kernels.common.adjacent_views import empty_like_heads
from baton.kernels.common.launch_utils import LazyModule
from baton.kernels.gate.triton_launch import activate_columns
from baton.kernels.gated_linear_attention.launch_args import QKV, Gradients, Kept, LaunchConfig, Side
from baton.kernels.gated_linear_attention.triton_launch import LinearAttentionLaunch, gla_final_state_triton, launch_config_for
from baton.kernels.gated_slot_attention.reference import SlotActivation
from baton.kernels.protocol import State
from baton.kernels.shared_gradient import claim, gradients_like

_kernels = LazyModule("baton.kernels.gated_slot_attention.triton_kernels")

_ENTRIES = 2048  # of a program that computes slot by slot


def gsa_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    scale: float,
    slot_activation: SlotActivation,
    gate_logit_normalizer: float | None = None,
    recompute_activations: bool = False,
    keep_states: bool = False,
    pos: Tensor | None,
    initial_state: State | None,
    config: LaunchConfig | None = None,
) -> tuple[Tensor, State]:
    """As `op.gated_slot_attention`, which checks the arguments. Products are of bfloat16 where q, k and v have 16 bits. config: of
    both passes."""
    first = {"k": None, "v": None} if initial_state is None else initial_state
    options = scale, slot_activation, gate_logit_normalizer, recompute_activations, keep_states
    y, keys, values = _Gsa.apply(q, k, v, g, first["k"], first["v"], *options, launch_utils.int32_positions(pos), config)
    return y, {"k": keys, "v": values}


def gsa_final_state_triton(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    gate_logit_normalizer: float | None = None,
    pos: Tensor | None,
    config: LaunchConfig | None = None,
) -> State:
    """The final slots of a span that starts with zero slots, without queries, outputs and gradients."""
    if gate_logit_normalizer is not None:
        (k, v), (g,) = _activated(k, v), _activated(g, gate_logit_normalizer=gate_logit_normalizer)
    write, low = write_strength(g), QKV(k, k, v).low
    return {
        "k": gla_final_state_triton(k, write, g, gate="value", pos=pos, config=config, low=low),
        "v": gla_final_state_triton(write, v, g, gate="key", pos=pos, config=config, low=low),
    }


class _Gsa(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, first_k: Tensor | None, first_v: Tensor | None,
        scale: float, slot_activation: SlotActivation, gate_logit_normalizer: float | None, recompute_activations: bool,
        keep_states: bool, pos: Tensor | None, config: LaunchConfig | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        given = (q, k, v, g)
        made: tuple[Tensor | None, ...] = (None,) * 4
        if gate_logit_normalizer is not None:
            (q, k, v), (g,) = _activated(q, k, v), _activated(g, gate_logit_normalizer=gate_logit_normalizer)
            made = (None, None, None, g) if recompute_activations else (q, k, v, g)
        write, low = write_strength(g), QKV(q, k, v).low
        of_keys = _keys(q, k, write, g, scale, pos, config, low)
        scores, keys, kept_k = of_keys.forward(first_k, torch.float32, keep_states=keep_states)
        weights = slot_weights(scores, slot_activation, q.dtype)
        of_values = _values(weights, write, v, g, pos, config, low)
        y, values, kept_v = of_values.forward(first_v, q.dtype, keep_states=keep_states)
        ctx.save_for_backward(*given, *made, first_k, first_v, scores, pos, *kept_k.tensors, *kept_v.tensors)
        ctx.scale, ctx.slot_activation, ctx.gate_logit_normalizer, ctx.config = (
            scale,
            slot_activation,
            gate_logit_normalizer,
            config,
        )
        ctx.places = claim(*given)
        ctx.set_materialize_grads(False)
        return y, keys, values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dkeys: Tensor | None, dvalues: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        given, made, (first_k, first_v, scores, pos), kept = saved[:4], saved[4:8], saved[8:12], saved[12:]
        kept_k, kept_v = Kept.of(kept[: len(kept) // 2]), Kept.of(kept[len(kept) // 2 :])
        q, k, v, g = given
        keys, values, into = dict[str, Any](), dict[str, Any](), None
        if ctx.gate_logit_normalizer is not None:
            into_q, into_k, into_v, into = gradients_like(given, ctx.places, empty_like_heads)
            keys = {"into": Gradients(into_q, into_k), "projected": Side(q, k)}
            values = {"into": Gradients(v=into_v), "projected": Side(None, v)}
            q, k, v = _activated(q, k, v) if made[0] is None else made[:3]
            g = made[3]
        if dy is None:
            dy = q.new_zeros(*q.shape[:3], v.shape[3])
        write, low = write_strength(g), QKV(q, k, v).low
        of_values = _values(slot_weights(scores, ctx.slot_activation, q.dtype), write, v, g, pos, ctx.config, low)
        # of weights and strengths only differences reach what they are made of
        dweights, dwrite_v, dv, dg_v, dfirst_v = of_values.backward(
            first_v, kept_v, launch_utils.contiguous_last_dim(dy), dvalues, wide="q", **values
        )
        dscores = slot_weights_backward(scores, dweights, ctx.slot_activation)
        of_keys = _keys(q, k, write, g, ctx.scale, pos, ctx.config, low)
        dq, dk, dwrite_k, dg_k, dfirst_k = of_keys.backward(first_k, kept_k, dscores, dkeys, **keys)
        dgates = _gates_backward(g, dg_k, dg_v, dwrite_k, dwrite_v, given[3], into, ctx.gate_logit_normalizer)
        grads = (dq, dk, dv, dgates, dfirst_k, dfirst_v)
        return (*(grad if want else None for want, grad in zip(ctx.needs_input_grad[:6], grads, strict=True)), *(None,) * 7)


def _activated(*projected: Tensor, gate_logit_normalizer: float | None = None) -> list[Tensor]:
    """Of [B, T, heads, width] each, as `activate`."""
    made = activate_columns(*(x.flatten(2) for x in projected), logs=gate_logit_normalizer)
    return [y.unflatten(2, x.shape[2:]) for x, y in zip(projected, made, strict=True)]


def _keys(
    q: Tensor, k: Tensor, write: Tensor, g: Tensor, scale: float, pos: Tensor | None, config: LaunchConfig | None, low: bool
) -> LinearAttentionLaunch:
    """The pass that writes keys to slots and computes the queries' scores."""
    given = QKV.of(q, k, write)
    return LinearAttentionLaunch("value", scale, pos, g, given, config or launch_config_for("value", given), low=low)


def _values(
    weights: Tensor, write: Tensor, v: Tensor, g: Tensor, pos: Tensor | None, config: LaunchConfig | None, low: bool
) -> LinearAttentionLaunch:
    """The pass that writes values to slots and reads them with the slots' weights."""
    given = QKV.of(weights, write, v)
    return LinearAttentionLaunch("key", 1.0, pos, g, given, config or launch_config_for("key", given), low=low)


@cache
def _sizes(slots: int) -> Mapping[str, int]:
    """A launch's over [..., slots]."""
    width = launch_utils.next_power_of_2(slots)
    return MappingProxyType({"M": slots, "BR": max(1, _ENTRIES // width), "BM": width, "num_warps": 4})


def _rows(x: Tensor) -> tuple[tuple[int], Mapping[str, int]]:
    """Grid and sizes of a launch over [..., slots]."""
    sizes = _sizes(x.shape[-1])
    return (-(-(x.numel() // sizes["M"]) // sizes["BR"]),), sizes


def write_strength(g: Tensor) -> Tensor:
    """1 - alpha in float32, computed from log alpha, because alpha rounds to 1 for gates close to 1."""
    gates = g.contiguous()
    out, (grid, sizes) = torch.empty_like(gates, dtype=torch.float32), _rows(gates)
    _kernels.gsa_write_strength_kernel[grid](gates, out, gates.numel() // sizes["M"], **sizes)
    return out


def slot_weights(scores: Tensor, slot_activation: SlotActivation, dtype: torch.dtype) -> Tensor:
    """The slots' weights in a query's output."""
    out, (grid, sizes) = torch.empty_like(scores, dtype=dtype), _rows(scores)
    _kernels.gsa_slot_weights_kernel[grid](
        scores, out, scores.numel() // sizes["M"], SLOT_ACTIVATION=_activation_code(slot_activation), **sizes
    )
    return out


def slot_weights_backward(scores: Tensor, dweights: Tensor, slot_activation: SlotActivation) -> Tensor:
    """Gradient of the scores, float32."""
    out, (grid, sizes) = torch.empty_like(scores), _rows(scores)
    _kernels.gsa_slot_weights_backward_kernel[grid](
        scores, dweights, out, scores.numel() // sizes["M"], SLOT_ACTIVATION=_activation_code(slot_activation), **sizes
    )
    return out


def _gates_backward(
    g: Tensor, dg_k: Tensor, dg_v: Tensor, dwrite_k: Tensor, dwrite_v: Tensor,
    given: Tensor, into: Tensor | None, gate_logit_normalizer: float | None,
) -> Tensor:  # fmt: skip
    """The gradient of the gates that were given, in their dtype; into: memory for it, in which tokens are rows."""
    gates = g.contiguous()
    raw, out = launch_utils.contiguous_last_dim(given.flatten(2).flatten(0, 1)), torch.empty_like(gates) if into is None else into
    grid, sizes = _rows(gates)
    _kernels.gsa_gates_backward_kernel[grid](
        gates, dg_k, dg_v, dwrite_k, dwrite_v, raw, out, gates.numel() // sizes["M"],
        gate_logit_normalizer or 1.0, raw.stride(0), out.stride(1),
        H=gates.shape[2], LOGS=gate_logit_normalizer is not None, **sizes,
    )  # fmt: skip
    return out


@cache
def _activation_code(slot_activation: SlotActivation) -> int:
    kernels = _kernels
    value: int = getattr(kernels, slot_activation.upper()).value
    return value
