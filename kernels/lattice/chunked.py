"""Lattice's recurrence in PyTorch, on any device.

It is computed in one of two exact forms. Encoding and similarity with projection run a whole chunk in coordinates (`qr_chunk`).
Decoding, whose steps couple the slots, runs without projection, thresholds, and chunks in which a document starts run token by
token (`sequential`). With projection, entering and initial slots are normalized once, before the first chunk: in either form,
gradients then have no component along them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from baton.kernels.common.chunked_autograd import run_chunked, state_dtype
from baton.kernels.lattice.qr_chunk import QRBasis, qr_basis, run_qr_chunk
from baton.kernels.lattice.sequential import run_sequential
from baton.kernels.lattice.step_loop import DocumentStarts, Tokens
from baton.kernels.lattice.variant import MIN_GATE, UpdateRule, slot_norms
from baton.kernels.protocol import Inputs, State

# Tokens per chunk, measured on one core with 4 to 48 heads x lanes and d, m of 32 to 128. A slot has as many coordinates as its
# chunk has tokens, and 32 cost more than 16. Token by token only memory matters: 64 exceed the cache.
_SEQUENTIAL_CHUNK, _QR_CHUNK = 32, 16


class Options(NamedTuple):
    """An update rule, and which of the optional inputs are present."""

    rule: UpdateRule
    forget: bool
    sparse: bool

    @property
    def num_time_inputs(self) -> int:
        return 4 + self.forget + self.sparse


class Prepared(NamedTuple):
    """What is known of a chunk before its state arrives.

    Attributes:
        tokens: its inputs.
        qr: basis of its values, or None if it runs token by token.
        starts: of documents, or None if there are none in it.
        lanes: batch, heads.
    """

    tokens: Tokens
    qr: QRBasis | None
    starts: DocumentStarts | None
    lanes: tuple[int, int]


def lattice_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    S0: Tensor,
    *,
    mu: Tensor | None,
    tau: Tensor | None,
    rule: UpdateRule,
    pos: Tensor | None,
    initial_state: Tensor | None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As `op.lattice`, which checks the arguments; chunk: tokens per chunk."""
    options = Options(rule, mu is not None, tau is not None)
    inputs = apply_limits(options, (q, k, v, gamma, *(x for x in (mu, tau) if x is not None), S0))
    S = initial_slots(options, inputs, pos, initial_state)
    dtype = q.dtype  # the step function lives as long as the graph and must not hold q

    def step(piece: Inputs, pos: Tensor | None, state: State) -> tuple[Tensor, State]:
        y, S = run_chunk(options, prepare(options, piece, pos), state["S"])
        return y.to(dtype), {"S": S}

    y, state = run_chunked(step, inputs, options.num_time_inputs, pos=pos, state={"S": S}, chunk=chunk or chunk_length(options))
    return y, state["S"]


def chunk_length(options: Options) -> int:
    """Tokens per chunk, a function of the options alone."""
    return _QR_CHUNK if _uses_qr(options) else _SEQUENTIAL_CHUNK


def apply_limits(options: Options, inputs: Inputs) -> Inputs:
    """The inputs (q, k, v, gamma, mu if present, tau if present, S0); with projection, mu is clamped and S0 normalized."""
    dtype = state_dtype(*inputs)
    S0 = inputs[-1].to(dtype)
    if not options.rule.project:
        return (*inputs[:-1], S0)
    gates = tuple(mu.to(dtype).clamp(min=MIN_GATE) for mu in inputs[4 : 4 + options.forget])
    return (*inputs[:4], *gates, *inputs[4 + options.forget : -1], S0 / slot_norms(S0))


def initial_slots(options: Options, inputs: Inputs, pos: Tensor | None, initial_state: Tensor | None) -> Tensor:
    """The slots before the first token, [batch, heads, d, m], for inputs from `apply_limits`."""
    S0 = inputs[-1].expand(inputs[0].shape[0], *inputs[-1].shape)
    if initial_state is None:
        return S0
    if pos is not None:
        # before the division: an initial state that is not used may hold any values
        initial_state = torch.where((pos[:, 0] == 0)[:, None, None, None], S0, initial_state)
    return initial_state / slot_norms(initial_state) if options.rule.project else initial_state


def prepare(options: Options, inputs: Inputs, pos: Tensor | None) -> Prepared:
    """Everything about a chunk of inputs from `apply_limits` that does not depend on the state."""
    dtype = state_dtype(*inputs)
    q, k, v, gamma, *optional, S0 = inputs
    batch, length, heads, _ = q.shape

    def time_first(x: Tensor) -> Tensor:
        return x.to(dtype).transpose(0, 1).reshape(length, batch * heads, *x.shape[3:]).contiguous()

    gates = [time_first(x)[..., None, None] for x in (gamma, *optional)]
    mu = gates[1] if options.forget else None
    tau = gates[-1] if options.sparse else None
    tokens = Tokens(time_first(q).unsqueeze(2), time_first(k).unsqueeze(2), time_first(v).unsqueeze(3), gates[0], mu, tau)
    starts = None
    if pos is not None:
        mask = (pos == 0).t()
        # on a GPU this synchronizes, once per chunk
        starting = mask.any(1).tolist()
        if any(starting):
            mask = mask[:, :, None].expand(length, batch, heads).reshape(length, batch * heads, 1, 1)
            slots = S0.expand(batch, *S0.shape).reshape(batch * heads, *S0.shape[1:])
            starts = DocumentStarts(mask, starting, slots)
    qr = None
    if _uses_qr(options) and not (starts and any(starts.tokens[1:])):
        qr = qr_basis(options.rule, tokens.v)
    return Prepared(tokens, qr, starts, (batch, heads))


def run_chunk(options: Options, prepared: Prepared, S: Tensor) -> tuple[Tensor, Tensor]:
    """A chunk's outputs [batch, L, heads, d], in the compute dtype, and final slots [batch, heads, d, m]."""
    tokens, qr, starts, (batch, heads) = prepared
    S = S.reshape(batch * heads, *S.shape[2:])
    if qr is None:
        y, S = run_sequential(options.rule, tokens, starts, S)
    else:
        if starts is not None:
            S = torch.where(starts.mask[0], starts.slots, S)
        y, S = run_qr_chunk(options.rule, qr, tokens, S)
    y = y.view(len(y), batch, heads, -1).transpose(0, 1)
    return y, S.view(batch, heads, *S.shape[1:])


def _uses_qr(options: Options) -> bool:
    return options.rule.project and options.rule.variant != "dec" and not options.sparse
