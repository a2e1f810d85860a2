"""Triton kernels that copy rows into memories, and that collect the gradients of the copies.

Shape suffixes: see `joint_attention_kernels`.

A row that is selected at one publication stays selected until it is evicted for good. Its copies therefore form a chain: the first
copy is recorded for the row, and the next one for each copy. A row's gradient is the sum along its chain in the order of
publications, in float32. The program that computes the row's gradient follows the chain; nothing is added in memory.
"""

import triton
import triton.language as tl


@triton.jit
def load_tile(base, at, inside, ROW: tl.constexpr, K: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows `at` of base, [rows, BLOCK_D]; zeros where they do not exist. ROW: elements between rows."""
    x = tl.arange(0, BLOCK_D)
    return tl.load(base + at[:, None].to(tl.int64) * ROW + x[None, :], mask=inside[:, None] & (x < K)[None, :], other=0.0)


@triton.jit
def store_tile(to, at, inside, value, ROW: tl.constexpr, K: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store rows; see `load_tile`."""
    x = tl.arange(0, BLOCK_D)
    tl.store(
        to + at[:, None].to(tl.int64) * ROW + x[None, :], value.to(to.dtype.element_ty), mask=inside[:, None] & (x < K)[None, :]
    )


@triton.jit
def load_or_keep(value, base, at, inside, ROW: tl.constexpr, channel, C: tl.constexpr):
    """Rows `at` where inside, else the rows of value."""
    mask = inside[:, None] & (channel < C)[None, :]
    return tl.load(base + at[:, None].to(tl.int64) * ROW + channel[None, :], mask=mask, other=value)


@triton.jit
def memory_copy_kernel(
    k, v, fading_k, fading_v, best_k, best_v, tail_k, tail_v, frozen_k, frozen_v, row, begin, memory_k, memory_v, first,
    fading_first, later, T, memories,
    C: tl.constexpr, ROW: tl.constexpr, FADING_ROW: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr, EIDETIC: tl.constexpr,
    FADING: tl.constexpr, HAS_STATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Copies of rows, [B, P, M, C], zeros where row [B, P, M] is -1, and where they are: first and fading_first, each row's first
    copy; later [B, P, M], each copy's next one. Copies are numbered s M + m; -1: none. Sources:
    `joint_attention_launch.MemorySources`; k, v: histories.
    """
    M: tl.constexpr = EIDETIC + FADING
    E: tl.constexpr = EIDETIC * HAS_STATE
    TAIL: tl.constexpr = FADING * HAS_STATE
    config: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    s, b = tl.program_id(0) // config, tl.program_id(2).to(tl.int64)
    m, c = tl.program_id(0) % config * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    memory_offset = (b * memories + s) * M
    r = tl.load(row + memory_offset + m, mask=m < M, other=-1)
    is_eidetic, is_fading = (r >= 0) & (s >= HAS_STATE) & (m < EIDETIC), (r >= 0) & (s >= HAS_STATE) & (m >= EIDETIC)
    k_m, v_m = tl.zeros([BLOCK_M, BLOCK_C], memory_k.dtype.element_ty), tl.zeros([BLOCK_M, BLOCK_C], memory_v.dtype.element_ty)
    if EIDETIC > 0:
        at, inside = N + r - E, is_eidetic & (r >= E)
        k_m = load_or_keep(k_m, k + b * (N + T) * ROW, at, inside, ROW, c, C)
        v_m = load_or_keep(v_m, v + b * (N + T) * ROW, at, inside, ROW, c, C)
    if FADING > 0:
        at, inside = r - TAIL, is_fading & (r >= TAIL)
        k_m = load_or_keep(k_m, fading_k + b * T * FADING_ROW, at, inside, FADING_ROW, c, C)
        v_m = load_or_keep(v_m, fading_v + b * T * FADING_ROW, at, inside, FADING_ROW, c, C)
    if HAS_STATE > 0:
        k_m = load_or_keep(k_m, best_k + b * E * C, r, is_eidetic & (r < E), C, c, C)
        v_m = load_or_keep(v_m, best_v + b * E * C, r, is_eidetic & (r < E), C, c, C)
        k_m = load_or_keep(k_m, tail_k + b * TAIL * C, r, is_fading & (r < TAIL), C, c, C)
        v_m = load_or_keep(v_m, tail_v + b * TAIL * C, r, is_fading & (r < TAIL), C, c, C)
        k_m = load_or_keep(k_m, frozen_k + b * M * C, r, (r >= 0) & (s < HAS_STATE), C, c, C)
        v_m = load_or_keep(v_m, frozen_v + b * M * C, r, (r >= 0) & (s < HAS_STATE), C, c, C)
    to, mask = (memory_offset + m)[:, None] * C + c[None, :], (m < M)[:, None] & (c < C)[None, :]
    tl.store(memory_k + to, k_m, mask=mask)
    tl.store(memory_v + to, v_m, mask=mask)
    if tl.program_id(1) == 0:
        after = tl.full([BLOCK_M], -1, tl.int32)
        if EIDETIC > 0:
            # a row is chosen for the first time at the first publication behind it, or never; entries: at that of the first window
            token, reach = tl.maximum(r - E, -1), tl.load(begin + b * memories + s) - WINDOW
            tl.store(first + b * (E + T) + r, s * M + m, mask=is_eidetic & (token >= reach))
            j = tl.arange(0, BLOCK_E)
            there = (j < EIDETIC) & (s + 1 < memories)
            following = tl.load(row + memory_offset + M + j, mask=there, other=-1)
            same = (following[None, :] == r[:, None]) & is_eidetic[:, None]
            place = tl.max(tl.where(same, j[None, :], -1), 1)
            after = tl.where(place >= 0, (s + 1) * M + place, -1)
        if FADING > 0:
            tl.store(fading_first + b * (TAIL + T) + r, s * M + m, mask=is_fading)
        tl.store(later + memory_offset + m, after, mask=m < M)


@triton.jit
def add_copy_gradients(dk_acc, dv_acc, at, later, dmemory_k, dmemory_v, ROW: tl.constexpr, K: tl.constexpr, BLOCK_D: tl.constexpr):
    """dk_acc and dv_acc of rows plus the gradients of all their copies. at: the first copy of each row; -1: none."""
    while tl.max(at, 0) >= 0:
        dk_acc += load_tile(dmemory_k, at, at >= 0, ROW, K, BLOCK_D)
        dv_acc += load_tile(dmemory_v, at, at >= 0, ROW, K, BLOCK_D)
        at = tl.load(later + at, mask=at >= 0, other=-1)
    return dk_acc, dv_acc


@triton.jit
def memory_copy_backward_kernel(
    first, later, dmemory_k, dmemory_v, dk, dv, rows, known, skipped, copies,
    G: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, DK_ROW: tl.constexpr, DV_ROW: tl.constexpr,
):  # fmt: skip
    """dk, dv of rows that are read in memories only, [B, rows, G, K]; DK_ROW, DV_ROW: elements between rows. first: [B, known], of
    these rows after the first `skipped` ones; copies: of a lane, P M.
    """
    g, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    r = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    at, copy_offset = tl.load(first + b * known + skipped + r, mask=r < rows, other=-1), (b * copies * G + g) * K
    dk_acc, dv_acc = tl.zeros([BLOCK_K, BLOCK_D], tl.float32), tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dk += b * rows * DK_ROW + g * K
    dv += b * rows * DV_ROW + g * K
    dk_acc, dv_acc = add_copy_gradients(
        dk_acc, dv_acc, at, later + b * copies, dmemory_k + copy_offset, dmemory_v + copy_offset, G * K, K, BLOCK_D
    )  # fmt: skip
    store_tile(dk, r, r < rows, dk_acc, DK_ROW, K, BLOCK_D)
    store_tile(dv, r, r < rows, dv_acc, DV_ROW, K, BLOCK_D)
