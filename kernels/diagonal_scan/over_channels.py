"""Sums over a block's channels, of which the lanes have one each: done plainly they are a third of the backward pass.

The one thing to know: tensor cores add over lanes. Multiplied with ones, an operand that lies in the lanes' registers as the block
does is summed over those of four lanes that have the same states, and over a lane's own channels and the other's, two states an
instruction; what eight such sums are, three exchanges between lanes add. Products are cut to the 10 bits of tf32's fraction for it,
so it is for bfloat16 and float16 alone. It needs a warp that has 32 channels of 16 states, shared by two lanes; everything else, and
Triton's interpreter, sums plainly.
"""

import struct

import triton
import triton.language as tl

# where a lane's own states and the other channel's are among its registers
OWN, OTHER = (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)
# A's rows are lanes / 4 and, of every other register, 8 more; its columns are lanes % 4 and, of the latter two registers, 4 more. B's
# ones send lanes with the first half of the states and lanes with the second to columns of their own; they are made each time, for
# four registers less would be left to hold states in.
_QUADS = tl.constexpr(
    "{.reg .b32 z, m0, m1, m2, m3; mov.b32 z, 0;"
    + "".join(f"set.eq.f32.f32 m{n}, $32, 0f{struct.pack('>f', 2 * n).hex()};" for n in range(4))
    + "".join(
        f"mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {{$0, $1, $2, $3}}, "
        f"{{${OWN[2 * i] + 16}, ${OWN[2 * i + 1] + 16}, ${OTHER[2 * i] + 16}, ${OTHER[2 * i + 1] + 16}}}, {{m{i}, m{i}}}, "
        f"{'{z, z, z, z}' if i == 0 else '{$0, $1, $2, $3}'};"
        for i in range(4)
    )
    + "}"
)
_EXCHANGE = "shfl.sync.bfly.b32 s{n}, s{n}, {lanes}, 31, -1; add.f32 k{n}, k{n}, s{n};"


def _halves(bit, mine, other, n):
    """Lanes that have the bit keep `other` and give `mine`, the others the other way round; then both have a sum."""
    give = f"selp.b32 s{n}, {mine}, {other}, p{bit}; selp.b32 k{n}, {other}, {mine}, p{bit};"
    return give + _EXCHANGE.format(n=n, lanes=bit)


_LANES = tl.constexpr(
    "{.reg .pred p16, p8, p4; .reg .b32 l, b, k0, k1, k2, k3, s0, s1, s2, s3; mov.b32 l, $48;"
    + "".join(f"and.b32 b, l, {bit}; setp.ne.u32 p{bit}, b, 0;" for bit in (16, 8, 4))
    + "".join(_halves(16, f"${16 + n}", f"${32 + n}", n) for n in range(4))
    + "".join(_halves(8, f"k{n}", f"k{n + 2}", n) for n in range(2))
    + _halves(4, "k0", "k1", 0)
    + "mov.b32 $0, k0;}"
)
_OUT, _IN = tl.constexpr(",".join(16 * ["=&r"])), tl.constexpr("," + ",".join(16 * ["r"]))


@triton.jit
def over_channels(x, WARP_SUMS: tl.constexpr):
    """The sum over channels of a block [BD, S, BN / 4 S, 4]: [S, BN / 4 S, 4] or, for `leave_sums` alone, parts of it."""
    if WARP_SUMS:
        lane = tl.arange(0, 32)
        column = (lane // 4 - lane % 2).to(tl.float32)[:, None, None, None] + tl.zeros(x.shape, tl.float32)
        return tl.inline_asm_elementwise(_QUADS, _OUT + _IN + _IN, [x, column], dtype=tl.float32, is_pure=True, pack=16)
    else:
        S: tl.constexpr = x.shape[1]
        return tl.sum(tl.reshape(tl.sum(x, 1), x.shape[0] // S, S, x.shape[2], 4), 0)


@triton.jit
def leave_sums(to, sums, present, N: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr, WARP_SUMS: tl.constexpr):
    """Store the sums over channels of STEPS tokens, of which `present` exist, behind `to`, 2 N apart."""
    if WARP_SUMS:
        lane = tl.arange(0, 32)
        # as the exchanges leave them: a lane has a token's sum of a state
        at = 2 * (lane % 4) + lane // 8 % 2 + 8 * (lane // 4 % 2)
        register = 8 * tl.arange(0, 2)[:, None, None] + 4 * tl.arange(0, 2)[None, :, None] + tl.arange(0, 4)[None, None, :]
        for s in tl.static_range(0, STEPS, 2):
            lanes = lane[:, None, None, None] + 0 * register[None, :, :, :]
            both = tl.inline_asm_elementwise(
                _LANES, _OUT + _IN + _IN + _IN, [sums[s], sums[s + 1], lanes], dtype=tl.int32, is_pure=True, pack=16
            )
            first = tl.sum(tl.sum(tl.sum(tl.where(register[None, :, :, :] == 0, both, 0), 3), 2), 1).to(tl.float32, bitcast=True)
            token = s + lane // 16
            if EVEN:
                tl.store(to + token * (2 * N) + at, first.to(to.dtype.element_ty))
            else:
                tl.store(to + token * (2 * N) + at, first.to(to.dtype.element_ty), mask=token < present)
    else:
        n = 4 * tl.arange(0, sums[0].shape[1])[None, :, None] + tl.arange(0, 4)[None, None, :]
        n += (4 * sums[0].shape[1]) * tl.arange(0, sums[0].shape[0])[:, None, None]
        for s in tl.static_range(STEPS):
            tl.store(to + s * (2 * N) + n, sums[s].to(to.dtype.element_ty), mask=(n < N) & (s < present))
