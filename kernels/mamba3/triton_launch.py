"""Mamba-3's turned queries and keys, and its outputs, on a GPU: launches the kernels of `triton_kernels` and `product_kernels`;
their gradients.

Only the arguments are kept for the backward pass. Sums over tokens are computed in chunks by the kernels, and over chunks by
`rotation.arriving_sums`.

Shape suffixes: B batch, T time, C chunks, L tokens of one, G groups, H heads, J inputs and outputs of a head, N d_state, R pairs of
states that turn, D head_dim.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels.common import launch_utils
from baton.kernels.common.autocast import without_autocast
from baton.kernels.common.launch_utils import LazyModule
from baton.kernels.mamba3.rotation import CHUNK, arriving_sums, chunked_positions, split_into_chunks
from baton.kernels.protocol import State

_kernels = LazyModule("baton.kernels.mamba3.triton_kernels")
_product_kernels = LazyModule("baton.kernels.mamba3.product_kernels")

PAIRS = 16  # of a block
WARPS = 8
_ENTRIES = 4096  # of a program that computes outputs
_STEP_COLUMNS = 16  # of a head's state in a program: they do not depend on the batch, which would make a sequence's bits do so


def rotated_triton(
    B: Tensor, C: Tensor, dt: Tensor, theta: Tensor, B_bias: Tensor, C_bias: Tensor, pos: Tensor | None
) -> tuple[Tensor, ...]:
    """As `rotation.rotated` in float32, with q and k of all tokens rounded to B's dtype."""
    next_q, first, k, own, _, cos, sin = _Rotated.apply(B, C, dt, theta, B_bias, C_bias, launch_utils.int32_positions(pos))
    return next_q, first, k, own, cos, sin


def rotated_of_several_triton(
    B: Tensor, C: Tensor, dt: Tensor, theta: Tensor, B_bias: Tensor, C_bias: Tensor, pos: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """As `rotation.rotated_of_several` in float32, with q and k of all tokens rounded to B's dtype. The products of a token's next
    token's q_i with its k_j are those of i < j alone, [B, T, H, J (J - 1) / 2], row after row, and are 0 where a document ends."""
    found: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor] = _Rotated.apply(
        B, C, dt, theta, B_bias, C_bias, launch_utils.int32_positions(pos)
    )
    return found


def output_triton(read: Tensor, x: Tensor, decay: Tensor, skip: Tensor, first: Tensor | None) -> Tensor:
    """y_t = decay_t read_{t-1} + skip_t x_t, in x's dtype.

    Args:
        read: what each token's next one reads, [B, T, H, D].
        x: [B, T, H, D], which may be columns of wider rows.
        decay, skip: float32 [B, T, H].
        first: what the first token reads, float32 [B, H, D]. None: nothing.
    """
    y: Tensor = _Mamba3Output.apply(read, x, decay, skip, first)
    return y


def step_triton(
    x: Tensor, B: Tensor, C: Tensor, dt: Tensor, g: Tensor, lam: Tensor, theta: Tensor, B_bias: Tensor, C_bias: Tensor, D: Tensor,
    *, pos: Tensor | None, state: State,
) -> tuple[Tensor, State]:  # fmt: skip
    """One token a sequence, as `op.mamba3`, without gradients; nothing is checked. The new State is written over the given one
    where that is contiguous."""
    x, B, C = (launch_utils.contiguous_last_dim(of) for of in (x, B, C))
    dt, g, lam, theta, B_bias, C_bias, D = (of.to(torch.float32).contiguous() for of in (dt, g, lam, theta, B_bias, C_bias, D))
    h, k, last_x = (state[name].contiguous() for name in ("h", "k", "x"))
    (batch, _, heads, width), (groups, states) = x.shape, B.shape[2:]
    y, pairs = torch.empty(x.shape, dtype=x.dtype, device=x.device), launch_utils.next_power_of_2((states + 1) // 2)
    columns = min(_STEP_COLUMNS, launch_utils.next_power_of_2(width))
    _kernels.mamba3_step_kernel[(-(-width // columns) * batch * heads,)](
        x, B, C, dt, g, lam, theta, B_bias, C_bias, D, _or(launch_utils.int32_positions(pos), dt), h, k, last_x, y,
        *(of.stride(n) for of in (x, B, C) for n in (0, 2)), theta.shape[2], N=states, H=heads, S=heads // groups, WIDTH=width,
        HAS_POS=pos is not None, P=pairs, BD=columns, num_warps=4,
    )  # fmt: skip
    torch.add(B[:, 0].to(torch.float32).repeat_interleave(heads // groups, 1), B_bias, out=k)
    return y, {"h": h, "k": k, "x": last_x}


def block_pairs(states: int, inputs: int = 1) -> int:
    """Pairs of a block, of so many states of each of so many inputs whose blocks a program has at once."""
    return min(PAIRS if inputs == 1 else PAIRS // 2, launch_utils.next_power_of_2((states + 1) // 2))


def output_sizes(heads: int, width: int) -> dict[str, int]:
    """Constants of the launches that compute outputs."""
    block = launch_utils.next_power_of_2(width)
    return {"H": heads, "D": width, "BR": max(1, _ENTRIES // block), "BD": block, "num_warps": 4}


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, B: Tensor, C: Tensor, dt: Tensor, theta: Tensor, B_bias: Tensor, C_bias: Tensor, pos: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        B, C = (launch_utils.contiguous_last_dim(x.flatten(3)) for x in (B, C))
        dt, theta, B_bias, C_bias = (x.to(torch.float32).contiguous() for x in (dt, theta, B_bias, C_bias))
        given, (batch, length, heads), pairs = (B, C, dt, theta, B_bias, C_bias), dt.shape, theta.shape[2]
        (_, *rank, states), chunks = B_bias.shape, -(-length // CHUNK)
        constants = _constants(given, pos)
        arriving, new, precise = _arriving_angles(dt, theta, pos, chunks, constants), B.new_empty, dt.new_empty
        constants["EARLIER"] = arriving is not None
        k, next_q = (new(batch, length, *rank, heads, states) for _ in range(2))
        first, own = precise(batch, heads, *rank, states), precise(batch, length, heads, *rank, *rank)
        cos, sin = (precise(batch, heads, pairs) for _ in range(2))
        _kernels.mamba3_rotate_kernel[(heads * chunks, batch)](
            *given, _or(pos, dt), _or(arriving, dt), k, next_q, first, own, cos, sin, length, *launch_utils.strides(B, C),
            **_sizes(given), **constants,
        )  # fmt: skip
        ctx.save_for_backward(*given, pos, arriving)
        return next_q, first, k, own, _later_products(given, pos, own), cos, sin

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dnext: Tensor, dfirst: Tensor, dk: Tensor, down: Tensor, dlater: Tensor | None, dcos: Tensor, dsin: Tensor
    ) -> tuple[Tensor | None, ...]:
        *given, pos, arriving = ctx.saved_tensors
        B, C, dt, theta, B_bias, _ = given
        (batch, length, heads), groups, pairs, inputs = dt.shape, B.shape[2], theta.shape[2], _inputs(B_bias)
        constants = _constants(given, pos, inputs)
        chunks, turning = -(-length // CHUNK), -(-pairs // constants["P"])
        grid = (-(-((B_bias.shape[-1] + 1) // 2) // constants["P"]) * chunks, batch * groups)
        dnext, dk = (launch_utils.contiguous_last_dim(x.flatten(1, -3)) for x in (dnext, dk))
        dfirst, down, dcos, dsin = (x.contiguous() for x in (dfirst, down, dcos, dsin))
        dB, dC = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (B, C))
        # the second half is of products of several inputs
        parts, new = (1 if inputs == 1 else 2), dt.new_empty
        biases, edges_BCHR = new(parts, batch, chunks, *B_bias.shape, 2), new(batch, chunks, heads, pairs)
        ddt, dtheta = new(parts, turning, batch, length, heads), new(parts, groups, batch, length, pairs)
        dB_own, dC_own = dB, dC
        if inputs > 1:
            assert dlater is not None
            dB_own, dC_own = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (B, C))
            _product_kernels.mimo_products_backward_kernel[grid](
                *given, _or(pos, dt), down, dlater.contiguous(), dB_own, dC_own, biases[1], ddt[1], dtheta[1], length,
                *launch_utils.strides(B, C), **_sizes(given), **constants,
            )  # fmt: skip
        _kernels.mamba3_rotate_backward_kernel[grid](
            *given, _or(pos, dt), _or(arriving, dt), dnext, dfirst, dk, down, dcos, dsin, dB_own, dC_own, dB, dC, biases[0],
            edges_BCHR, ddt[0], dtheta[0], length, *launch_utils.strides(B, C, dnext, dk), **_sizes(given), **constants,
            EARLIER=arriving is not None,
        )  # fmt: skip
        ddt_BTH, dtheta_BTR = ddt.sum((0, 1)), dtheta.sum((0, 1))
        if chunks > 1:
            arriving_BCHR, apart_BCL = arriving_sums(edges_BCHR, chunked_positions(pos, dt), backward=True)
            dt_BCLH, theta_BCLR = (split_into_chunks(x).masked_fill(apart_BCL[..., None], 0.0) for x in (dt, theta))
            with without_autocast(dt):
                ddt_BTH = ddt_BTH + (theta_BCLR @ arriving_BCHR.mT).flatten(1, 2)[:, :length]
                dtheta_BTR = dtheta_BTR + (dt_BCLH @ arriving_BCHR).flatten(1, 2)[:, :length]
        own_shape = (*dt.shape[:2], groups, *B_bias.shape[1:])
        return dB.view(own_shape), dC.view(own_shape), ddt_BTH, dtheta_BTR, *biases.sum((0, 1, 2)).unbind(-1), None


class _Mamba3Output(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, read: Tensor, x: Tensor, decay: Tensor, skip: Tensor, first: Tensor | None) -> Tensor:
        read, decay, skip = read.contiguous(), decay.contiguous(), skip.contiguous()
        first = None if first is None else first.contiguous()
        (_, length, heads, width), rows = x.shape, decay.numel()
        sizes = output_sizes(heads, width) | {"HAS_FIRST": first is not None}
        y, of_x = torch.empty(x.shape, dtype=x.dtype, device=x.device), launch_utils.as_rows(x, heads * width)
        _kernels.mamba3_output_kernel[(-(-rows // sizes["BR"]),)](
            read, of_x, decay, skip, _or(first, decay), y, rows, length, of_x.stride(0), **sizes
        )
        # x and not its rows: as columns of a projection it takes no memory of its own
        ctx.save_for_backward(read, x, decay, skip, first)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        read, x, decay, skip, first = ctx.saved_tensors
        (_, length, heads, width), rows = x.shape, decay.numel()
        sizes = output_sizes(heads, width) | {"HAS_FIRST": first is not None}
        of_x, of_dy = (launch_utils.as_rows(of, heads * width) for of in (x, dy))
        dread, dx = torch.empty_like(read), torch.empty(x.shape, dtype=x.dtype, device=x.device)
        ddecay, dskip = torch.empty_like(decay), torch.empty_like(skip)
        dfirst = None if first is None else torch.empty_like(first)
        _kernels.mamba3_output_backward_kernel[(-(-rows // sizes["BR"]),)](
            read, of_x, decay, skip, _or(first, decay), of_dy, dread, dx, ddecay, dskip, _or(dfirst, decay), rows, length,
            of_x.stride(0), of_dy.stride(0), **sizes,
        )  # fmt: skip
        return dread, dx, ddecay, dskip, dfirst


def _inputs(bias: Tensor) -> int:
    """J, which a bias [H, N] of heads with one input does not have."""
    return bias.shape[1:-1].numel()


def _constants(given: Sequence[Tensor], pos: Tensor | None, inputs: int = 1) -> dict[str, int]:
    """Of launches for B, C, dt, theta and biases. inputs: whose blocks a program has at once."""
    _, _, dt, theta, bias, _ = given
    pairs = block_pairs(bias.shape[-1], inputs)
    return {"R": theta.shape[2], "H": dt.shape[2], "HAS_POS": pos is not None, "L": CHUNK, "P": pairs, "num_warps": WARPS}


def _sizes(given: Sequence[Tensor]) -> dict[str, int]:
    """Besides `_constants`, where q and k are turned or multiplied."""
    B, *_, bias = given
    return {"N": bias.shape[-1], "S": len(bias) // B.shape[2], "J": _inputs(bias)}


def _later_products(given: Sequence[Tensor], pos: Tensor | None, own: Tensor) -> Tensor | None:
    """Of several inputs: writes the products of q and k of each token to `own`, and returns those with the next token's q."""
    B, C, dt, *_, bias = given
    inputs, (batch, length, heads) = _inputs(bias), dt.shape
    if inputs == 1:
        return None
    later = dt.new_empty(batch, length, heads, inputs * (inputs - 1) // 2)
    _product_kernels.mimo_products_kernel[(heads * -(-length // CHUNK), batch)](
        *given, _or(pos, dt), own, later, length, *launch_utils.strides(B, C), **_sizes(given), **_constants(given, pos, inputs)
    )
    return later


def _arriving_angles(dt: Tensor, theta: Tensor, pos: Tensor | None, chunks: int, constants: dict[str, int]) -> Tensor | None:
    """What each chunk has of the chunks before it of the document of its first token, [B, C, H, R] in float64. None: one chunk."""
    if chunks == 1:
        return None
    (batch, length, heads), pairs = dt.shape, theta.shape[2]
    edges_BCHR = dt.new_empty(batch, chunks, heads, pairs, dtype=torch.float64)
    _kernels.mamba3_angle_edges_kernel[(heads * chunks, batch)](dt, theta, _or(pos, dt), edges_BCHR, length, **constants)
    return arriving_sums(edges_BCHR, chunked_positions(pos, dt), backward=False)[0].contiguous()


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    """A pointer in place of an absent tensor, which is not read."""
    return other if x is None else x
