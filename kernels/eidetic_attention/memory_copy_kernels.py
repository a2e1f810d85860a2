"""What memories hold are copies of rows, in Triton: made, and their gradients given back.

The one thing to know: a row that is chosen at one publication is kept over those that follow until it is evicted, for good. So its
copies are a chain: the first is written down for the row, and for each copy the next. A row's gradient is the sum along its chain,
in the order of publications, in float32: whoever computes the row's gradient walks the chain, and nothing is added in memory.

Shape suffixes as in `joint_attention_kernels`.
"""

import triton
import triton.language as tl


@triton.jit
def tile_of(base, at, inside, ROW: tl.constexpr, K: tl.constexpr, BD: tl.constexpr):
    """Rows `at`, [rows, BD]; zeros of what does not exist. ROW: elements between rows."""
    x = tl.arange(0, BD)
    return tl.load(base + at[:, None].to(tl.int64) * ROW + x[None, :], mask=inside[:, None] & (x < K)[None, :], other=0.0)


@triton.jit
def leave_tile(to, at, inside, value, ROW: tl.constexpr, K: tl.constexpr, BD: tl.constexpr):
    """As `tile_of`."""
    x = tl.arange(0, BD)
    tl.store(
        to + at[:, None].to(tl.int64) * ROW + x[None, :], value.to(to.dtype.element_ty), mask=inside[:, None] & (x < K)[None, :]
    )


@triton.jit
def instead(value, base, at, inside, ROW: tl.constexpr, channel, C: tl.constexpr):
    """Rows `at` where they are inside, else those of value."""
    mask = inside[:, None] & (channel < C)[None, :]
    return tl.load(base + at[:, None].to(tl.int64) * ROW + channel[None, :], mask=mask, other=value)


@triton.jit
def memory_copy_kernel(
    k, v, fading_k, fading_v, best_k, best_v, tail_k, tail_v, frozen_k, frozen_v, row, begin, memory_k, memory_v, first,
    fading_first, later, T, memories,
    C: tl.constexpr, ROW: tl.constexpr, FADING_ROW: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr, EIDETIC: tl.constexpr,
    FADING: tl.constexpr, OLD: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Copies of rows, [B, P, M, C], zeros where row [B, P, M] is -1, and where they are: first, fading_first, of each row's first
    copy; later, [B, P, M], of each copy's next one; as s M + m; -1: there is none. Sources: `joint_attention_launch.Sources`; k, v:
    histories."""
    M: tl.constexpr = EIDETIC + FADING
    E: tl.constexpr = EIDETIC * OLD
    TAIL: tl.constexpr = FADING * OLD
    config: tl.constexpr = (M + BM - 1) // BM
    s, b = tl.program_id(0) // config, tl.program_id(2).to(tl.int64)
    m, c = tl.program_id(0) % config * BM + tl.arange(0, BM), tl.program_id(1) * BC + tl.arange(0, BC)
    of_memory = (b * memories + s) * M
    r = tl.load(row + of_memory + m, mask=m < M, other=-1)
    chosen, fades = (r >= 0) & (s >= OLD) & (m < EIDETIC), (r >= 0) & (s >= OLD) & (m >= EIDETIC)
    found_k, found_v = tl.zeros([BM, BC], memory_k.dtype.element_ty), tl.zeros([BM, BC], memory_v.dtype.element_ty)
    if EIDETIC > 0:
        at, inside = N + r - E, chosen & (r >= E)
        found_k = instead(found_k, k + b * (N + T) * ROW, at, inside, ROW, c, C)
        found_v = instead(found_v, v + b * (N + T) * ROW, at, inside, ROW, c, C)
    if FADING > 0:
        at, inside = r - TAIL, fades & (r >= TAIL)
        found_k = instead(found_k, fading_k + b * T * FADING_ROW, at, inside, FADING_ROW, c, C)
        found_v = instead(found_v, fading_v + b * T * FADING_ROW, at, inside, FADING_ROW, c, C)
    if OLD > 0:
        found_k = instead(found_k, best_k + b * E * C, r, chosen & (r < E), C, c, C)
        found_v = instead(found_v, best_v + b * E * C, r, chosen & (r < E), C, c, C)
        found_k = instead(found_k, tail_k + b * TAIL * C, r, fades & (r < TAIL), C, c, C)
        found_v = instead(found_v, tail_v + b * TAIL * C, r, fades & (r < TAIL), C, c, C)
        found_k = instead(found_k, frozen_k + b * M * C, r, (r >= 0) & (s < OLD), C, c, C)
        found_v = instead(found_v, frozen_v + b * M * C, r, (r >= 0) & (s < OLD), C, c, C)
    to, mask = (of_memory + m)[:, None] * C + c[None, :], (m < M)[:, None] & (c < C)[None, :]
    tl.store(memory_k + to, found_k, mask=mask)
    tl.store(memory_v + to, found_v, mask=mask)
    if tl.program_id(1) == 0:
        after = tl.full([BM], -1, tl.int32)
        if EIDETIC > 0:
            # a row is chosen for the first time at the first publication behind it, or never; entries: at that of the first window
            token, reach = tl.maximum(r - E, -1), tl.load(begin + b * memories + s) - WINDOW
            tl.store(first + b * (E + T) + r, s * M + m, mask=chosen & (token >= reach))
            j = tl.arange(0, BE)
            there = (j < EIDETIC) & (s + 1 < memories)
            following = tl.load(row + of_memory + M + j, mask=there, other=-1)
            same = (following[None, :] == r[:, None]) & chosen[:, None]
            place = tl.max(tl.where(same, j[None, :], -1), 1)
            after = tl.where(place >= 0, (s + 1) * M + place, -1)
        if FADING > 0:
            tl.store(fading_first + b * (TAIL + T) + r, s * M + m, mask=fades)
        tl.store(later + of_memory + m, after, mask=m < M)


@triton.jit
def with_copies(of_k, of_v, at, later, dmemory_k, dmemory_v, ROW: tl.constexpr, K: tl.constexpr, BD: tl.constexpr):
    """Gradients of rows and of all their copies. at: of each row the first one; -1: none."""
    while tl.max(at, 0) >= 0:
        of_k += tile_of(dmemory_k, at, at >= 0, ROW, K, BD)
        of_v += tile_of(dmemory_v, at, at >= 0, ROW, K, BD)
        at = tl.load(later + at, mask=at >= 0, other=-1)
    return of_k, of_v


@triton.jit
def memory_copy_backward_kernel(
    first, later, dmemory_k, dmemory_v, dk, dv, rows, known, skipped, copies,
    G: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, INTO: tl.constexpr,
):  # fmt: skip
    """dk, dv of rows that are read nowhere but in memories, [B, rows, G, K]; INTO: elements between rows. first: [B, known], of
    these rows after those skipped; copies: of a lane, P M."""
    g, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    r = tl.program_id(0) * BK + tl.arange(0, BK)
    at, of_copies = tl.load(first + b * known + skipped + r, mask=r < rows, other=-1), (b * copies * G + g) * K
    of_k, of_v = tl.zeros([BK, BD], tl.float32), tl.zeros([BK, BD], tl.float32)
    of_k, of_v = with_copies(
        of_k, of_v, at, later + b * copies, dmemory_k + of_copies, dmemory_v + of_copies, G * K, K, BD
    )  # fmt: skip
    of_rows = b * rows * INTO + g * K
    leave_tile(dk + of_rows, r, r < rows, of_k, INTO, K, BD)
    leave_tile(dv + of_rows, r, r < rows, of_v, INTO, K, BD)
