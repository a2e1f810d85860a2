"""The selective scan in vectorised PyTorch, on any device: what runs on a CPU.

The one thing to know: a chunk of a few tokens is expanded to [tokens, batch, d_state, channels] in buffers that stay in cache and
are used again by the next chunk; within it the recurrence is one fused multiply-add per token. So nothing of size T x channels x
d_state ever exists, no cumulated decay is divided by, and outputs and states have the same bits for every chunk size and cut.

The backward pass keeps only the inputs and the states at the chunks' borders, and recomputes a chunk before walking it backwards
(papers: Mamba section 3.3 and appendix D for the recomputation).

Shape suffixes: B batch, T time, L time within a chunk, D channels, N d_state. Inside, time comes first, so that a step is
contiguous, and channels last, so that what all channels share (B_t, C_t) is a scalar of the inner loop.
"""

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels.elementwise import LOG2_E, exp2_, padded_buffer

# Elements of one expanded buffer (tokens x batch x channels x d_state). Measured on 1 and 2 cores; see chunk_length.
_CHUNK_ELEMENTS = 1 << 19
_CHUNK_LENGTHS = (16, 32)

# Below this |delta A|, d phi / d A of the zero-order hold is a power series: the closed form cancels
_SERIES_BOUND = 0.03
_SERIES = (1 / 2, 1 / 3, 1 / 8, 1 / 30, 1 / 144, 1 / 840, 1 / 5760, 1 / 45360)


def chunk_length(batch: int, channels: int, d_state: int) -> int:
    """Tokens per chunk, a function of shapes alone: the longest whose expanded buffers stay in cache, but at least 16, so that the
    border states kept for the backward pass are no larger than d_state / 16 activations."""
    fitting = [length for length in _CHUNK_LENGTHS if length * batch * channels * d_state <= _CHUNK_ELEMENTS]
    return max(fitting, default=_CHUNK_LENGTHS[0])


def selective_scan_chunked(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    *,
    pos: Tensor | None,
    initial_state: Tensor | None,
    zoh: bool,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As `op.selective_scan`, which checks the arguments; `chunk` is the number of tokens per chunk."""
    length = chunk or chunk_length(u.shape[0], u.shape[2], A.shape[1])
    inputs = (u, delta, A, B, C, D, initial_state)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        y_BTD, final_BDN = _SelectiveScan.apply(*inputs, pos, zoh, length)
        return y_BTD, final_BDN
    with torch.no_grad():
        y_BTD, final_BDN, _ = _forward(u, delta, A, B, C, D, initial_state, _Starts(pos, length), zoh, length, keep_borders=False)
    return y_BTD, final_BDN


class _Starts:
    """Where documents start, chunk by chunk: row numbers t * batch + b of a chunk's [L * B, N * D] decays."""

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
        # one wait for the device per call, not one per chunk
        cuts = torch.searchsorted(rows, edges).tolist()
        for number, (begin, end) in enumerate(itertools.pairwise(cuts)):
            self.rows.append(rows[begin:end] - number * chunk * batch if end > begin else None)

    def forget(self, decay_LBND: Tensor, number: int) -> None:
        """Zero the decay of every token of chunk `number` that starts a document."""
        rows = self.rows[number] if self.rows else None
        if rows is not None:
            decay_LBND.view(-1, decay_LBND[0, 0].numel()).index_fill_(0, rows, 0.0)


class _Chunk:
    """The expanded quantities of one chunk at a time, in buffers that all chunks share."""

    def __init__(self, u: Tensor, A: Tensor, chunk: int, starts: _Starts, zoh: bool) -> None:
        self.batch, length, self.channels = u.shape
        self.d_state = A.shape[1]
        self.starts, self.zoh, self.chunk = starts, zoh, min(chunk, length)
        dtype = torch.float64 if u.dtype == torch.float64 else torch.float32
        self.dtype = dtype
        self.A_ND = A.t().to(dtype).contiguous()
        self.A_log2e_ND = self.A_ND * LOG2_E
        self.step = self.batch * self.channels * self.d_state
        self.decay_flat = padded_buffer(self.chunk * self.step, u, dtype)
        # one token more than the chunk: its first entry is the state that arrives
        self.h_flat = torch.empty((self.chunk + 1) * self.step, dtype=dtype, device=u.device)
        self.phi_flat = torch.empty(self.chunk * self.step if zoh else 0, dtype=dtype, device=u.device)

    def expanded(self, flat: Tensor, tokens: int) -> Tensor:
        """The first `tokens` tokens of a flat buffer, [tokens, B, N, D]."""
        return flat[: tokens * self.step].view(tokens, self.batch, self.d_state, self.channels)

    def load(self, x_BTX: Tensor, begin: int, end: int) -> Tensor:
        """A chunk of an input, time first and contiguous, in the dtype of the computation."""
        return x_BTX[:, begin:end].transpose(0, 1).to(self.dtype).contiguous()

    def scan(self, number: int, u_LBD: Tensor, delta_LBD: Tensor, B_LBN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Decays [L, B, N, D], states [L + 1, B, N, D] (the first arrived and is already in place), phi [L, B, N, D] (zoh)."""
        tokens = u_LBD.shape[0]
        decay_LBND = self.expanded(self.decay_flat, tokens)
        h_LBND = self.expanded(self.h_flat, tokens + 1)
        torch.mul(delta_LBD[:, :, None, :], self.A_log2e_ND, out=decay_LBND)
        exp2_(self.decay_flat, tokens * self.step)
        self.starts.forget(decay_LBND, number)
        phi_LBND = self.expanded(self.phi_flat, tokens if self.zoh else 0)
        if self.zoh:
            torch.mul(delta_LBD[:, :, None, :], self.A_ND, out=phi_LBND)
            phi_LBND.expm1_().div_(self.A_ND)
            torch.mul(u_LBD[:, :, None, :], B_LBN[:, :, :, None], out=h_LBND[1:])
            h_LBND[1:].mul_(phi_LBND)
        else:
            torch.mul((u_LBD * delta_LBD)[:, :, None, :], B_LBN[:, :, :, None], out=h_LBND[1:])
        decays, states = decay_LBND.unbind(), h_LBND.unbind()
        for t in range(tokens):
            states[t + 1].addcmul_(decays[t], states[t])
        return decay_LBND, h_LBND, phi_LBND


def _forward(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    initial_state: Tensor | None,
    starts: _Starts,
    zoh: bool,
    chunk: int,
    keep_borders: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """y [B, T, D], final state [B, D, N] and, if asked for, the state that enters each chunk, [chunks, B, N, D]."""
    length = u.shape[1]
    work = _Chunk(u, A, chunk, starts, zoh)
    D_D = D.to(work.dtype)
    h_BND = work.expanded(work.h_flat, 1)[0]
    if initial_state is None:
        h_BND.zero_()
    else:
        h_BND.copy_(initial_state.transpose(1, 2))
    borders = u.new_empty(-(-length // chunk), *h_BND.shape, dtype=work.dtype) if keep_borders else None
    y_BTD = torch.empty_like(u, memory_format=torch.contiguous_format)
    for number, begin in enumerate(range(0, length, chunk)):
        end = min(begin + chunk, length)
        if borders is not None:
            borders[number].copy_(h_BND)
        u_LBD = work.load(u, begin, end)
        _, h_LBND, _ = work.scan(number, u_LBD, work.load(delta, begin, end), work.load(B, begin, end))
        h_BND.copy_(h_LBND[-1])
        # not a batched matmul, whose bits may depend on how many tokens it is given
        y_LBD = h_LBND[1:].mul_(work.load(C, begin, end)[:, :, :, None]).sum(2)
        y_BTD[:, begin:end] = y_LBD.addcmul_(u_LBD, D_D).transpose(0, 1)
    return y_BTD, h_BND.transpose(1, 2).contiguous(), borders


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        delta: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor,
        initial_state: Tensor | None,
        pos: Tensor | None,
        zoh: bool,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        starts = _Starts(pos, chunk)
        y_BTD, final_BDN, borders = _forward(u, delta, A, B, C, D, initial_state, starts, zoh, chunk, keep_borders=True)
        ctx.save_for_backward(u, delta, A, B, C, D, borders)
        ctx.starts, ctx.zoh, ctx.chunk = starts, zoh, chunk
        return y_BTD, final_BDN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BTD: Tensor, dfinal_BDN: Tensor) -> tuple[Any, ...]:
        u, delta, A, B, C, D, borders = ctx.saved_tensors
        # an autocast region around backward() must not turn the fp32 reductions into bf16
        with torch.autocast(u.device.type, enabled=False):
            grads = _backward(u, delta, A, B, C, D, borders, ctx.starts, ctx.zoh, ctx.chunk, dy_BTD, dfinal_BDN)
        wanted = zip(ctx.needs_input_grad[:7], grads, strict=True)
        return (*(grad if want else None for want, grad in wanted), None, None, None)


def _backward(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    borders: Tensor,
    starts: _Starts,
    zoh: bool,
    chunk: int,
    dy_BTD: Tensor,
    dfinal_BDN: Tensor,
) -> tuple[Tensor, ...]:
    """Gradients of u, delta, A, B, C, D and initial_state, walking the chunks from the last to the first.

    The adjoint of the recurrence, with lam_t = dLoss/dh_t: lam_t = C_t dy_t + decay_{t+1} lam_{t+1}, started by the final
    state's cotangent.
    """
    length = u.shape[1]
    work = _Chunk(u, A, chunk, starts, zoh)
    A_ND = work.A_ND
    D_D = D.to(work.dtype)
    lam_flat = torch.empty(work.chunk * work.step, dtype=work.dtype, device=u.device)
    du, ddelta, dB, dC = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (u, delta, B, C))
    dA_ND, dD_D = torch.zeros_like(A_ND), torch.zeros_like(D_D)
    # decay and lam of the token behind the chunk: the final state's cotangent arrives as from a token with decay 1
    edge_lam_BND = dfinal_BDN.transpose(1, 2).contiguous()
    edge_decay_BND = torch.ones_like(edge_lam_BND)
    for number in reversed(range(len(borders))):
        begin = number * chunk
        end = min(begin + chunk, length)
        u_LBD, delta_LBD, dy_LBD = work.load(u, begin, end), work.load(delta, begin, end), work.load(dy_BTD, begin, end)
        B_LBN, C_LBN = work.load(B, begin, end), work.load(C, begin, end)
        tokens = end - begin
        work.expanded(work.h_flat, 1).copy_(borders[number])
        decay_LBND, h_LBND, phi_LBND = work.scan(number, u_LBD, delta_LBD, B_LBN)

        lam_LBND = work.expanded(lam_flat, tokens)
        torch.mul(dy_LBD[:, :, None, :], C_LBN[:, :, :, None], out=lam_LBND)
        lams, decays = lam_LBND.unbind(), decay_LBND.unbind()
        lams[-1].addcmul_(edge_decay_BND, edge_lam_BND)
        for t in range(tokens - 2, -1, -1):
            lams[t].addcmul_(decays[t + 1], lams[t + 1])
        edge_decay_BND.copy_(decays[0])
        edge_lam_BND.copy_(lams[0])

        dC[:, begin:end] = _over_channels(dy_LBD, h_LBND[1:]).transpose(0, 1)
        h_before_LBND = h_LBND[:-1]
        if zoh:
            du_LBD, ddelta_LBD, dB_LBN, dA_chunk_ND = _zoh_gradients(
                u_LBD, delta_LBD, B_LBN, A_ND, decay_LBND, h_before_LBND, phi_LBND, lam_LBND
            )
        else:
            du_LBD, ddelta_LBD, dB_LBN, dA_chunk_ND = _euler_gradients(
                u_LBD, delta_LBD, B_LBN, A_ND, decay_LBND, h_before_LBND, lam_LBND
            )
        du[:, begin:end] = du_LBD.addcmul_(dy_LBD, D_D).transpose(0, 1)
        ddelta[:, begin:end] = ddelta_LBD.transpose(0, 1)
        dB[:, begin:end] = dB_LBN.transpose(0, 1)
        dA_ND += dA_chunk_ND
        dD_D += (dy_LBD * u_LBD).sum((0, 1))
    dinitial_BDN = (edge_decay_BND * edge_lam_BND).transpose(1, 2).contiguous()
    return du, ddelta, dA_ND.t().to(A.dtype), dB, dC, dD_D.to(D.dtype), dinitial_BDN


def _euler_gradients(
    u_LBD: Tensor, delta_LBD: Tensor, B_LBN: Tensor, A_ND: Tensor, decay_LBND: Tensor, h_before_LBND: Tensor, lam_LBND: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of u (without the skip), delta, B and A in one chunk. Overwrites decay and lam."""
    dB_LBN = _over_channels(u_LBD * delta_LBD, lam_LBND)
    along_B_LBD = _over_states(B_LBN, lam_LBND)
    through_decay_LBND = decay_LBND.mul_(h_before_LBND).mul_(lam_LBND)
    ddelta_LBD = torch.mul(through_decay_LBND, A_ND, out=lam_LBND).sum(2).addcmul_(u_LBD, along_B_LBD)
    dA_ND = through_decay_LBND.mul_(delta_LBD[:, :, None, :]).sum((0, 1))
    return along_B_LBD.mul_(delta_LBD), ddelta_LBD, dB_LBN, dA_ND


def _zoh_gradients(
    u_LBD: Tensor,
    delta_LBD: Tensor,
    B_LBN: Tensor,
    A_ND: Tensor,
    decay_LBND: Tensor,
    h_before_LBND: Tensor,
    phi_LBND: Tensor,
    lam_LBND: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `_euler_gradients` for phi = expm1(delta A) / A. Overwrites decay, phi and lam."""
    delta_LB1D = delta_LBD[:, :, None, :]
    # d phi / d delta: exp(delta A) also where a document starts, where the decay itself was set to 0
    slope_LBND = (phi_LBND * A_ND).add_(1.0)
    through_decay_LBND = decay_LBND.mul_(h_before_LBND).mul_(lam_LBND)
    ddelta_LBD = (through_decay_LBND * A_ND).sum(2).addcmul_(u_LBD, _over_states(B_LBN, slope_LBND * lam_LBND))
    dA_ND = through_decay_LBND.mul_(delta_LB1D).sum((0, 1))
    through_phi_LBND = _phi_by_A(delta_LB1D, A_ND, slope_LBND, phi_LBND).mul_(lam_LBND).mul_(B_LBN[:, :, :, None])
    dA_ND += through_phi_LBND.mul_(u_LBD[:, :, None, :]).sum((0, 1))
    lam_LBND.mul_(phi_LBND)
    return _over_states(B_LBN, lam_LBND), ddelta_LBD, _over_channels(u_LBD, lam_LBND), dA_ND


def _phi_by_A(delta_LB1D: Tensor, A_ND: Tensor, slope_LBND: Tensor, phi_LBND: Tensor) -> Tensor:
    """d phi / d A = (delta exp(x) - phi) / A with x = delta A; near x = 0, delta^2 sum_k x^k (k + 1) / (k + 2)!."""
    closed_LBND = (delta_LB1D * slope_LBND).sub_(phi_LBND).div_(A_ND)
    x_LBND = delta_LB1D * A_ND
    near_LBND = x_LBND > -_SERIES_BOUND
    series_LBND = torch.full_like(x_LBND, _SERIES[-1])
    for coefficient in reversed(_SERIES[:-1]):
        series_LBND.mul_(x_LBND).add_(coefficient)
    return torch.where(near_LBND, series_LBND.mul_(delta_LB1D).mul_(delta_LB1D), closed_LBND)


def _over_channels(x_LBD: Tensor, y_LBND: Tensor) -> Tensor:
    """sum_d x y, [L, B, N]."""
    tokens, batch, d_state, channels = y_LBND.shape
    return torch.bmm(
        x_LBD.reshape(tokens * batch, 1, channels), y_LBND.reshape(tokens * batch, d_state, channels).transpose(1, 2)
    ).view(tokens, batch, d_state)


def _over_states(x_LBN: Tensor, y_LBND: Tensor) -> Tensor:
    """sum_n x y, [L, B, D]."""
    tokens, batch, d_state, channels = y_LBND.shape
    return torch.bmm(x_LBN.reshape(tokens * batch, 1, d_state), y_LBND.reshape(tokens * batch, d_state, channels)).view(
        tokens, batch, channels
    )
