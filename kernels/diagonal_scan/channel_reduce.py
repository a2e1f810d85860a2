"""Sums over a block's channels, which the lanes of a warp hold one each.

Plain sums would take a third of the backward pass, so tensor cores add over lanes. A product with ones sums an operand that lies in
the lanes' registers as the block does over the four lanes that hold the same states, and over a lane's own channel and its
partner's. Eight such sums are rounded to bfloat16, transposed, and added by a second product. The first product cuts its operands
to the 10 bits of tf32's fraction, so this form is used for bfloat16 and float16 inputs only. It needs a warp with 32 channels of 16
states, shared by two lanes; everything else, Triton's interpreter, and Triton versions with another layout (`LANE_OWNS_CHANNEL`)
sum plainly.
"""

import struct

import triton
import triton.language as tl

LANE_OWNS_CHANNEL = tuple(int(n) for n in triton.__version__.split(".")[:2]) < (3, 7)
"""Whether this version of Triton gives each lane one channel of a block. Triton 3.9 spreads a channel's states over lanes, so
tensor cores would sum other elements. `tests/kernels/test_compiled.py` checks the layout."""

# registers of a lane's own channel and of its partner's
OWN, OTHER = (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)
# Rows of the first operand: lane / 4, plus 8 for every other register. Columns: lane % 4, plus 4 for the last two registers. The
# ones of the second operand send the two halves of the states to different columns; they are made anew each time to save four
# registers. The two 8 x 8 results are stored transposed.
_FOURS = tl.constexpr(
    "{.reg .b32 z, m0, m1, m2, m3, c0, c1, c2, c3; mov.b32 z, 0;"
    + "".join(f"set.eq.f32.f32 m{n}, $32, 0f{struct.pack('>f', 2 * n).hex()};" for n in range(4))
    + "".join(
        f"mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {{c0, c1, c2, c3}}, "
        f"{{${OWN[2 * i] + 16}, ${OWN[2 * i + 1] + 16}, ${OTHER[2 * i] + 16}, ${OTHER[2 * i + 1] + 16}}}, {{m{i}, m{i}}}, "
        f"{'{z, z, z, z}' if i == 0 else '{c0, c1, c2, c3}'};"
        for i in range(4)
    )
    + "cvt.rn.bf16x2.f32 c0, c1, c0; cvt.rn.bf16x2.f32 c2, c3, c2;"
    + "movmatrix.sync.aligned.m8n8.trans.b16 $0, c0; movmatrix.sync.aligned.m8n8.trans.b16 $1, c2;}"
)


def _eights(pair):
    """Four results of `_FOURS` summed over rows, each in its own columns; a lane keeps one of them, two states in a `pair`."""
    product = "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {c0, c1, c2, c3}, "
    return tl.constexpr(
        "{.reg .pred p; .reg .b32 z, one, c0, c1, c2, c3; mov.b32 z, 0;"
        + "".join(
            f"setp.eq.s32 p, $80, {n}; selp.b32 one, 0x3F803F80, 0, p;"
            f"{product} {{${16 * n + 16}, ${16 * n + 17}}}, {{one}}, {'{z, z, z, z}' if n == 0 else '{c0, c1, c2, c3}'};"
            for n in range(4)
        )
        + f"cvt.rn.{pair}.f32 $0, c2, c0;}}"
    )


_EIGHTS = {"bf16": _eights("bf16x2"), "fp16": _eights("f16x2")}
_OUT, _IN = tl.constexpr(",".join(16 * ["=&r"])), tl.constexpr("," + ",".join(16 * ["r"]))


@triton.constexpr_function
def _eights_in(dtype):
    return _EIGHTS[dtype.name]


@triton.jit
def sum_over_channels(x, WARP_SUMS: tl.constexpr):
    """The sum over the channels of a block [BLOCK_D, S, BLOCK_N / 4 S, 4]: [S, BLOCK_N / 4 S, 4]; with WARP_SUMS, partial sums that
    only `store_channel_sums` reads.
    """
    if WARP_SUMS:
        lane = tl.arange(0, 32)
        column = (lane // 4 - lane % 2).to(tl.float32)[:, None, None, None] + tl.zeros(x.shape, tl.float32)
        return tl.inline_asm_elementwise(_FOURS, _OUT + _IN + _IN, [x, column], dtype=tl.int32, is_pure=True, pack=16)
    else:
        S: tl.constexpr = x.shape[1]
        return tl.sum(tl.reshape(tl.sum(x, 1), x.shape[0] // S, S, x.shape[2], 4), 0)


@triton.jit
def store_channel_sums(
    to, first, second, present, DSTATE: tl.constexpr, BLOCK_T: tl.constexpr, EVEN_T: tl.constexpr, WARP_SUMS: tl.constexpr
):
    """Store two sums over channels for each of BLOCK_T tokens, of which `present` exist, [BLOCK_T, 2, N] from `to` on."""
    if WARP_SUMS:
        lane = tl.arange(0, 32)
        register = 8 * tl.arange(0, 2)[:, None, None] + 4 * tl.arange(0, 2)[None, :, None] + tl.arange(0, 4)[None, None, :]
        columns = (lane // 8)[:, None, None, None] + 0 * register[None, :, :, :]
        pairs = to.to(tl.pointer_type(tl.int32), bitcast=True)
        for s in tl.static_range(0, BLOCK_T, 2):
            sums = tl.inline_asm_elementwise(
                _eights_in(to.dtype.element_ty), _OUT + _IN + _IN + _IN + _IN + _IN,
                [first[s], second[s], first[s + 1], second[s + 1], columns], dtype=tl.int32, is_pure=True, pack=16,
            )  # fmt: skip
            pair = tl.sum(tl.sum(tl.sum(tl.where(register[None, :, :, :] == 0, sums, 0), 3), 2), 1)
            # a lane holds states 2 i and 2 i + 1 of sum number lane % 4
            at = s * DSTATE + lane % 4 * (DSTATE // 2) + lane // 8 + 4 * (lane // 4 % 2)
            if EVEN_T:
                tl.store(pairs + at, pair)
            else:
                tl.store(pairs + at, pair, mask=s + lane % 4 // 2 < present)
    else:
        n = 4 * tl.arange(0, first[0].shape[1])[None, :, None] + tl.arange(0, 4)[None, None, :]
        n += (4 * first[0].shape[1]) * tl.arange(0, first[0].shape[0])[:, None, None]
        for s in tl.static_range(BLOCK_T):
            inside = (n < DSTATE) & (s < present)
            tl.store(to + (2 * s * DSTATE + n), first[s].to(to.dtype.element_ty), mask=inside)
            tl.store(to + (2 * s * DSTATE + DSTATE + n), second[s].to(to.dtype.element_ty), mask=inside)
