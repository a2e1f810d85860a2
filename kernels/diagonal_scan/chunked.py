"""Diagonal scan in PyTorch, on any device: h = decay h + add, y = sum_n C h + D x.

A recurrence supplies decay and add, and their gradients, as a subclass of `RecurrenceTerms`. Inputs have Mamba's names; Longhorn's
q is C.

Shape suffixes: B batch, T time, L time within a chunk, D channels, N d_state. Inside a chunk, time comes first, so that a step is
contiguous, and channels last, so that what all channels share (C, a key) is a scalar of the inner loop.

A chunk of a few tokens is expanded to [tokens, batch, d_state, channels] in buffers that stay in cache and are reused by the next
chunk. Within it the recurrence is one fused multiply-add per token. Nothing of size T x channels x d_state is ever allocated,
nothing is divided by a cumulative decay, and outputs and states have the same bits for every chunk size and every split of a
sequence.

The backward pass keeps only the inputs and the states at chunk boundaries, and recomputes each chunk (Gu & Dao 2023, section 3.3
and appendix D).
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels.common.autocast import without_autocast
from baton.kernels.common.elementwise import padded_buffer

# Elements of one expanded buffer (tokens x batch x channels x d_state). Measured on 1 and 2 cores; see chunk_length.
_CHUNK_ELEMENTS = 1 << 19
_CHUNK_LENGTHS = (16, 32)


def chunk_length(batch: int, channels: int, d_state: int) -> int:
    """Tokens per chunk, a function of shapes alone: the longest whose expanded buffers stay in cache, but at least 16, so that the
    checkpointed states are no larger than d_state / 16 activations.
    """
    fitting = [length for length in _CHUNK_LENGTHS if length * batch * channels * d_state <= _CHUNK_ELEMENTS]
    return max(fitting, default=_CHUNK_LENGTHS[0])


class ChunkBuffers:
    """Buffers for the expanded tensors of one chunk, reused by all chunks. h begins with the chunk's initial state."""

    def __init__(self, x_BTD: Tensor, d_state: int, chunk: int) -> None:
        self.batch, length, self.channels = x_BTD.shape
        self.d_state, self.chunk = d_state, min(chunk, length)
        self.dtype = torch.float64 if x_BTD.dtype == torch.float64 else torch.float32
        self.step = self.batch * self.channels * d_state
        self.decay_flat = padded_buffer(self.chunk * self.step, x_BTD, self.dtype)
        self.h_flat = torch.empty((self.chunk + 1) * self.step, dtype=self.dtype, device=x_BTD.device)

    def expanded(self, flat: Tensor, tokens: int) -> Tensor:
        """The first `tokens` tokens of a flat buffer, [tokens, B, N, D]."""
        return flat[: tokens * self.step].view(tokens, self.batch, self.d_state, self.channels)

    def load(self, x_BTX: Tensor, begin: int, end: int) -> Tensor:
        """A chunk of an input, time first and contiguous, in the compute dtype."""
        return x_BTX[:, begin:end].transpose(0, 1).to(self.dtype).contiguous()


class RecurrenceTerms(ABC):
    """decay and add of a recurrence. Constructed anew for each forward and each backward pass, from the recurrence's `parameters`.

    `time_inputs` holds a chunk of each input along time except C, [L, B, channels or d_state], contiguous, in the compute dtype.
    The first is x, which D multiplies.
    """

    @abstractmethod
    def __init__(self, buffers: ChunkBuffers, parameters: Sequence[Tensor]) -> None: ...

    @abstractmethod
    def compute(self, time_inputs: Sequence[Tensor], decay_LBND: Tensor, add_LBND: Tensor) -> None:
        """Write decay (a view of the start of `buffers.decay_flat`) and add. The caller then zeroes decay at document starts."""

    @abstractmethod
    def gradients(
        self, time_inputs: Sequence[Tensor], decay_LBND: Tensor, h_before_LBND: Tensor, dh_LBND: Tensor
    ) -> tuple[Tensor, ...]:
        """Gradients of `time_inputs` (of x without the D term), given dh = dLoss/dh: dLoss/ddecay = dh h_before and dLoss/dadd =
        dh.

        decay is the one that the scan used and h_before the state before each token (never h - add divided by decay); both are 0
        where a document starts. Attributes that `compute` set for these tokens are still valid. The last three arguments may be
        overwritten.
        """

    def parameter_gradients(self) -> tuple[Tensor, ...]:
        """Gradients of `parameters`, summed over all calls of `gradients`, each in its parameter's shape and dtype."""
        return ()


class _Inputs(NamedTuple):
    """Inputs of a scan: time_inputs [B, T, channels or d_state] each, C [B, T, N], D [channels]."""

    terms: type[RecurrenceTerms]
    time_inputs: tuple[Tensor, ...]
    C: Tensor
    D: Tensor
    parameters: tuple[Tensor, ...]


def diagonal_scan_chunked(
    terms: type[RecurrenceTerms],
    time_inputs: tuple[Tensor, ...],
    C_BTN: Tensor,
    D_D: Tensor,
    parameters: tuple[Tensor, ...] = (),
    *,
    pos: Tensor | None,
    initial_state: Tensor | None,
    chunk: int | None,
) -> tuple[Tensor, Tensor]:
    """Run a recurrence whose arguments its `op` has checked.

    Args:
        terms: the recurrence.
        time_inputs: its inputs along time, [batch, T, channels or d_state]; the first is x, [batch, T, channels].
        C_BTN: output projection, [batch, T, d_state].
        D_D: skip weight of x per channel, [channels].
        parameters: inputs without a time dimension.
        pos: int [batch, T]; the state is reset where it is 0. None: nowhere.
        initial_state: [batch, channels, d_state] in float32 (float64 for float64 inputs), or None for zero.
        chunk: tokens per chunk; None: `chunk_length`.

    Returns:
        y, [batch, T, channels] in x's dtype, and the final state, [batch, channels, d_state], with exact gradients to all tensors.
    """
    batch, _, channels = time_inputs[0].shape
    length = chunk or chunk_length(batch, channels, C_BTN.shape[2])
    tensors = (*time_inputs, C_BTN, D_D, *parameters)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*tensors, initial_state)):
        y_BTD, final_BDN = _DiagonalScan.apply(terms, len(time_inputs), length, pos, initial_state, *tensors)
        return y_BTD, final_BDN
    inputs = _Inputs(terms, time_inputs, C_BTN, D_D, parameters)
    with torch.no_grad():
        y_BTD, final_BDN, _ = _forward(inputs, initial_state, _DocumentStarts(pos, length), length, keep_checkpoints=False)
    return y_BTD, final_BDN


class _DocumentStarts:
    """Document starts by chunk: row numbers t * batch + b of a chunk's [L * B, N * D] decays."""

    def __init__(self, pos: Tensor | None, chunk: int) -> None:
        self.rows: list[Tensor | None] = []
        if pos is None:
            return
        batch, length = pos.shape
        rows = (pos == 0).t().reshape(-1).nonzero().squeeze(1)
        if length <= chunk:
            self.rows.append(rows if rows.numel() else None)
            return
        edges = torch.arange(0, length + chunk, chunk, device=pos.device) * batch
        # synchronizes with the device once per call, not once per chunk
        cuts = torch.searchsorted(rows, edges).tolist()
        for number, (begin, end) in enumerate(itertools.pairwise(cuts)):
            self.rows.append(rows[begin:end] - number * chunk * batch if end > begin else None)

    def zero_at_starts(self, x_LBND: Tensor, number: int) -> None:
        """Zero the row of every token of chunk `number` that starts a document."""
        rows = self.rows[number] if self.rows else None
        if rows is not None:
            x_LBND.view(-1, x_LBND[0, 0].numel()).index_fill_(0, rows, 0.0)


class _Chunk(ChunkBuffers):
    """Buffers together with the recurrence that fills them."""

    def __init__(self, inputs: _Inputs, chunk: int, starts: _DocumentStarts) -> None:
        super().__init__(inputs.time_inputs[0], inputs.C.shape[2], chunk)
        self.starts = starts
        self.terms = inputs.terms(self, inputs.parameters)

    def scan(self, number: int, time_inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Decays [L, B, N, D] and states [L + 1, B, N, D]; the first state is the chunk's initial one, already in place."""
        tokens = time_inputs[0].shape[0]
        decay_LBND = self.expanded(self.decay_flat, tokens)
        h_LBND = self.expanded(self.h_flat, tokens + 1)
        self.terms.compute(time_inputs, decay_LBND, h_LBND[1:])
        self.starts.zero_at_starts(decay_LBND, number)
        decays, states = decay_LBND.unbind(), h_LBND.unbind()
        for t in range(tokens):
            states[t + 1].addcmul_(decays[t], states[t])
        return decay_LBND, h_LBND


def _forward(
    inputs: _Inputs, initial_state: Tensor | None, starts: _DocumentStarts, chunk: int, keep_checkpoints: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """y [B, T, D], the final state [B, D, N] and, if keep_checkpoints, the initial state of each chunk, [chunks, B, N, D]."""
    x_BTD = inputs.time_inputs[0]
    length = x_BTD.shape[1]
    work = _Chunk(inputs, chunk, starts)
    D_D = inputs.D.to(work.dtype)
    h_BND = work.expanded(work.h_flat, 1)[0]
    if initial_state is None:
        h_BND.zero_()
    else:
        h_BND.copy_(initial_state.transpose(1, 2))
    checkpoints = x_BTD.new_empty(-(-length // chunk), *h_BND.shape, dtype=work.dtype) if keep_checkpoints else None
    y_BTD = torch.empty_like(x_BTD, memory_format=torch.contiguous_format)
    for number, begin in enumerate(range(0, length, chunk)):
        end = min(begin + chunk, length)
        if checkpoints is not None:
            checkpoints[number].copy_(h_BND)
        time_inputs = [work.load(x, begin, end) for x in inputs.time_inputs]
        _, h_LBND = work.scan(number, time_inputs)
        h_BND.copy_(h_LBND[-1])
        # no batched matmul: its bits may depend on the number of tokens
        y_LBD = h_LBND[1:].mul_(work.load(inputs.C, begin, end)[:, :, :, None]).sum(2)
        y_BTD[:, begin:end] = y_LBD.addcmul_(time_inputs[0], D_D).transpose(0, 1)
    return y_BTD, h_BND.transpose(1, 2).contiguous(), checkpoints


class _DiagonalScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        terms: type[RecurrenceTerms],
        num_time_inputs: int,
        chunk: int,
        pos: Tensor | None,
        initial_state: Tensor | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        starts = _DocumentStarts(pos, chunk)
        ctx.terms, ctx.num_time_inputs, ctx.chunk, ctx.starts = terms, num_time_inputs, chunk, starts
        y_BTD, final_BDN, checkpoints = _forward(
            _unflatten(terms, num_time_inputs, tensors), initial_state, starts, chunk, keep_checkpoints=True
        )
        ctx.save_for_backward(*tensors, checkpoints)
        return y_BTD, final_BDN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BTD: Tensor, dfinal_BDN: Tensor) -> tuple[Any, ...]:
        *tensors, checkpoints = ctx.saved_tensors
        inputs = _unflatten(ctx.terms, ctx.num_time_inputs, tensors)
        # an autocast region around backward() must not turn the fp32 reductions into bf16
        with without_autocast(dy_BTD):
            grads = _backward(inputs, checkpoints, ctx.starts, ctx.chunk, dy_BTD, dfinal_BDN)
        wanted = zip(ctx.needs_input_grad[4:], grads, strict=True)
        return (None, None, None, None, *(grad if want else None for want, grad in wanted))


def _unflatten(terms: type[RecurrenceTerms], num_time_inputs: int, tensors: Sequence[Tensor]) -> _Inputs:
    C_BTN, D_D, *parameters = tensors[num_time_inputs:]
    return _Inputs(terms, tuple(tensors[:num_time_inputs]), C_BTN, D_D, tuple(parameters))


def _backward(
    inputs: _Inputs, checkpoints: Tensor, starts: _DocumentStarts, chunk: int, dy_BTD: Tensor, dfinal_BDN: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of initial_state, time_inputs, C, D and parameters, from the last chunk to the first.

    The adjoint recurrence, with dh_t = dLoss/dh_t, is dh_t = C_t dy_t + decay_{t+1} dh_{t+1}, started by the final state's
    cotangent.
    """
    length = inputs.time_inputs[0].shape[1]
    work = _Chunk(inputs, chunk, starts)
    D_D = inputs.D.to(work.dtype)
    dh_flat = torch.empty(work.chunk * work.step, dtype=work.dtype, device=dy_BTD.device)
    dtime_inputs = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs.time_inputs]
    dC = torch.empty_like(inputs.C, memory_format=torch.contiguous_format)
    dD_D = torch.zeros_like(D_D)
    # decay and dh of the token after the chunk: the final state's cotangent acts like a token with decay 1
    # always a copy, since it is overwritten: contiguous() does not copy a cotangent that already has this layout
    next_dh_BND = dfinal_BDN.transpose(1, 2).clone(memory_format=torch.contiguous_format)
    next_decay_BND = torch.ones_like(next_dh_BND)
    for number in reversed(range(len(checkpoints))):
        begin = number * chunk
        end = min(begin + chunk, length)
        time_inputs = [work.load(x, begin, end) for x in inputs.time_inputs]
        x_LBD, dy_LBD, C_LBN = time_inputs[0], work.load(dy_BTD, begin, end), work.load(inputs.C, begin, end)
        work.expanded(work.h_flat, 1).copy_(checkpoints[number])
        decay_LBND, h_LBND = work.scan(number, time_inputs)

        dh_LBND = work.expanded(dh_flat, end - begin)
        torch.mul(dy_LBD[:, :, None, :], C_LBN[:, :, :, None], out=dh_LBND)
        dhs, decays = dh_LBND.unbind(), decay_LBND.unbind()
        dhs[-1].addcmul_(next_decay_BND, next_dh_BND)
        for t in range(end - begin - 2, -1, -1):
            dhs[t].addcmul_(decays[t + 1], dhs[t + 1])
        next_decay_BND.copy_(decays[0])
        next_dh_BND.copy_(dhs[0])

        dC[:, begin:end] = sum_over_channels(dy_LBD, h_LBND[1:]).transpose(0, 1)
        h_before_LBND = h_LBND[:-1]
        starts.zero_at_starts(h_before_LBND, number)
        dx_LBD, *dothers = work.terms.gradients(time_inputs, decay_LBND, h_before_LBND, dh_LBND)
        for grad, grad_LBX in zip(dtime_inputs, (dx_LBD.addcmul_(dy_LBD, D_D), *dothers), strict=True):
            grad[:, begin:end] = grad_LBX.transpose(0, 1)
        dD_D += (dy_LBD * x_LBD).sum((0, 1))
    dinitial_BDN = (next_decay_BND * next_dh_BND).transpose(1, 2).contiguous()
    return dinitial_BDN, *dtime_inputs, dC, dD_D.to(inputs.D.dtype), *work.terms.parameter_gradients()


def sum_over_channels(x_LBD: Tensor, y_LBND: Tensor) -> Tensor:
    """sum_d x y, [L, B, N]."""
    tokens, batch, d_state, channels = y_LBND.shape
    return torch.bmm(
        x_LBD.reshape(tokens * batch, 1, channels), y_LBND.reshape(tokens * batch, d_state, channels).transpose(1, 2)
    ).view(tokens, batch, d_state)


def sum_over_states(x_LBN: Tensor, y_LBND: Tensor) -> Tensor:
    """sum_n x y, [L, B, D]."""
    tokens, batch, d_state, channels = y_LBND.shape
    return torch.bmm(x_LBN.reshape(tokens * batch, 1, d_state), y_LBND.reshape(tokens * batch, d_state, channels)).view(
        tokens, batch, channels
    )
