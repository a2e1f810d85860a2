"""Sums over a block's channels, of which the lanes have one each: done plainly they are a third of the backward pass.

The one thing to know: tensor cores add over lanes. Multiplied with ones, an operand that lies in the lanes' registers as the block
does is summed over those of four lanes that have the same states, and over a lane's own channel and the other's. Eight such sums,
rounded to bfloat16 and with rows for columns, a second product adds. Before it, what is summed is cut to the 10 bits of tf32's
fraction; so it is for bfloat16 and float16 alone. It needs a warp that has 32 channels of 16 states, shared by two lanes;
everything else, Triton's interpreter, and a Triton that lays blocks otherwise (`LANES_HAVE_CHANNELS`) sum plainly.
"""

import struct

import triton
import triton.language as tl

LANE_OWNS_CHANNEL = tuple(int(n) for n in triton.__version__.split(".")[:2]) < (3, 7)
"""Whether this Triton is known to give each lane one channel of a block. Triton 3.9 spreads a channel's states over lanes, so that
the sums by tensor cores would be of other elements; `tests/kernels/test_compiled.py` looks at the layout."""

# where a lane's own states and the other channel's are among its registers
OWN, OTHER = (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)
# A's rows are lanes / 4 and, of every other register, 8 more; its columns are lanes % 4 and, of the latter two registers, 4 more.
# B's ones send lanes with the first half of the states and lanes with the second to columns of their own; they are made each time,
# for four registers less would be left to hold states in. The two results of 8 x 8 are left with rows for columns.
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
    """Of four of the former: the sums over rows, each in columns of its own, of which a lane has one's, two states in a `pair`."""
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
    """The sum over channels of a block [BD, S, BN / 4 S, 4]: [S, BN / 4 S, 4] or, for `leave_sums` alone, parts of it."""
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
    """Store two sums over channels of each of STEPS tokens, of which `present` exist: [STEPS, 2, N] from `to` on."""
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
            # a lane has the lane % 4-th sum's: states 2 i and 2 i + 1 of either half
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
