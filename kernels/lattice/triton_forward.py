"""Triton kernel of Lattice's recurrence token by token, with a head's slots in registers: one step, and the forward pass.

Sizes: D values (d) and M slots (m) per head, H heads; BLOCK_D and BLOCK_M of a program, PARTS parts of d (see `register_tiles`),
BLOCK_T tokens loaded together.

In encoding and similarity, slots do not depend on each other. A program may then hold some of a head's slots, and sums over slots
(outputs, gradients of values and step sizes) are stored as one partial sum per program. Decoding sums over all slots in every step,
so there a program holds all of them. States and arithmetic are float32.

PROJECT: slots are normalized after each step. Without it a slot s has a length, and a step reads its direction s / |s|. A step
divides by one norm per slot in either case, and inv_norm is its inverse: with projection 1 / |u|, u being the unnormalized result
of the step; without it 1 / |s|, at most 1 / MIN_NORM.
"""

import triton
import triton.language as tl

from baton.kernels.lattice.register_tiles import (
    broadcast_parts,
    load_parts,
    scale_parts,
    slot_indices,
    stack,
    store_parts,
    sum_over_d,
    sum_over_slots,
    sum_within_warps,
)
from baton.kernels.lattice.variant import MIN_NORM

DEC, ENC, SIM = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# Below every squared norm, since mu is at least MIN_GATE; slots that do not exist are zeros and stay zeros.
MIN_SQUARE = tl.constexpr(1e-12)
# Without projection 1 / |s| is at most 1 / MIN_NORM of `variant`, and constant there.
MAX_INVERSE_NORM = tl.constexpr(1 / MIN_NORM)


@triton.jit
def load_token(
    t, q, k, v, gamma, mu, pos, T, row, m_in, d_in, PARTS: tl.constexpr, PART_D: tl.constexpr, EVEN_D: tl.constexpr,
    EVEN_T: tl.constexpr, FORGET: tl.constexpr, HAS_POS: tl.constexpr,
):  # fmt: skip
    """Token t: q, k [BLOCK_M], v in parts, gamma, mu, and whether a document starts with it. Past the end: the last token with a
    step size of 0, which changes nothing (with EVEN_T there are none). row: strides of q, k, v, gamma and mu. EVEN_D: all m and d
    exist.
    """
    inside, t = t < T, tl.minimum(t, T - 1)
    if EVEN_D:
        q_t, k_t = tl.load(q + t * row[0]), tl.load(k + t * row[1])
    else:
        q_t = tl.load(q + t * row[0], mask=m_in, other=0.0)
        k_t = tl.load(k + t * row[1], mask=m_in, other=0.0)
    v_t = load_parts(v, t * row[2], PART_D, d_in, PARTS, EVEN_D)
    gamma_t, mu_t = tl.load(gamma + t * row[3]).to(tl.float32), 1.0
    if FORGET:
        mu_t = tl.load(mu + t * row[4]).to(tl.float32)
    if not EVEN_T:
        gamma_t = tl.where(inside, gamma_t, 0.0)
        mu_t = tl.where(inside, mu_t, 1.0)
    starts = (tl.load(pos + t) == 0) & inside if HAS_POS else False
    return q_t, k_t, v_t, gamma_t, mu_t, starts


@triton.jit
def reset_at_start(S, starts, S0_head, slot_offset, apart, inside, PARTS: tl.constexpr):
    """The slots before a token: S, or S0 if a document starts."""
    if starts:
        S = load_parts(S0_head, slot_offset, apart, inside, PARTS, False)
    return S


@triton.jit
def compute_h(S, k_t, v_t, VARIANT: tl.constexpr, PARTS: tl.constexpr, WARPS: tl.constexpr):
    """h in parts; for similarity with the opposite sign of `step_loop`. `negative_c` has it too, so their product is the same."""
    h = ()
    if VARIANT == DEC:
        read_k = sum_over_slots(scale_parts(S, k_t, PARTS), PARTS, WARPS)
    for i in tl.static_range(PARTS):
        if VARIANT == DEC:
            h += (read_k[i] - v_t[i].to(tl.float32),)
        else:
            h += (v_t[i].to(tl.float32),)
    return h


@triton.jit
def negative_c(a, k_t, VARIANT: tl.constexpr):
    """-c, [BLOCK_M]; see `compute_h`."""
    if VARIANT == DEC:
        c = -k_t
    elif VARIANT == ENC:
        c = k_t - a
    else:
        c = k_t
    return c


@triton.jit
def unnormalized_slots(S, h, a, weight, mu_t, FORGET: tl.constexpr, PARTS: tl.constexpr):
    """u of the slots, in parts."""
    U = ()
    for i in tl.static_range(PARTS):
        # h - S a before scaling: with a large step the result would otherwise be a difference of two large multiples of S
        tangent = (h[i][None, :] - S[i] * a[:, None]) * weight[:, None]
        U += (mu_t * S[i] + tangent if FORGET else S[i] + tangent,)
    return U


@triton.jit
def inverse_norm(S, PARTS: tl.constexpr):
    """1 / |s|, at most MAX_INVERSE_NORM, [BLOCK_M]."""
    square = sum_over_d(S, S, PARTS)
    smallest: tl.constexpr = 1.0 / (MAX_INVERSE_NORM * MAX_INVERSE_NORM)
    return tl.where(square > smallest, tl.rsqrt(tl.maximum(square, smallest)), MAX_INVERSE_NORM)


@triton.jit
def next_slots(S, h, a, inv_norm, weight, mu_t, FORGET: tl.constexpr, PROJECT: tl.constexpr, PARTS: tl.constexpr):
    """The slots after a token, in parts, where inv_norm is known. weight: of h, [BLOCK_M]."""
    if PROJECT:
        S = scale_parts(unnormalized_slots(S, h, a, weight, mu_t, FORGET, PARTS), inv_norm, PARTS)
    else:
        S = unnormalized_slots(S, h, a * inv_norm, weight, mu_t, FORGET, PARTS)
    return S


@triton.jit
def lattice_step(
    S, row, VARIANT: tl.constexpr, FORGET: tl.constexpr, PROJECT: tl.constexpr, PARTS: tl.constexpr, WARPS: tl.constexpr
):
    """The slots after a token; h in parts; a, the product of h and the slots' directions, and inv_norm, [BLOCK_M]."""
    k_t = row[1].to(tl.float32)
    if PROJECT:
        h = compute_h(S, k_t, row[2], VARIANT, PARTS, WARPS)
        a = sum_over_d(S, broadcast_parts(h, PARTS), PARTS)
        U = unnormalized_slots(S, h, a, row[3] * negative_c(a, k_t, VARIANT), row[4], FORGET, PARTS)
        inv_norm = tl.rsqrt(tl.maximum(sum_over_d(U, U, PARTS), MIN_SQUARE))
        S_next = scale_parts(U, inv_norm, PARTS)
    else:
        inv_norm = inverse_norm(S, PARTS)
        h = compute_h(S, inv_norm * k_t, row[2], VARIANT, PARTS, WARPS)
        a = inv_norm * sum_over_d(S, broadcast_parts(h, PARTS), PARTS)
        weight = row[3] * inv_norm * negative_c(a, k_t, VARIANT)
        S_next = unnormalized_slots(S, h, a * inv_norm, weight, row[4], FORGET, PARTS)
    return S_next, h, a, inv_norm


@triton.jit
def lattice_loop(
    S, begin, end, q, k, v, gamma, mu, pos, S0_head, y, checkpoints, slot_offset, inside, m, d, m_in, d_in, T, strides,
    first_checkpoint, D: tl.constexpr, M: tl.constexpr, H: tl.constexpr, VARIANT: tl.constexpr, FORGET: tl.constexpr,
    PROJECT: tl.constexpr, HAS_POS: tl.constexpr, EVEN_T: tl.constexpr, BLOCK_T: tl.constexpr, CHECKPOINT_INTERVAL: tl.constexpr,
    BLOCK_D: tl.constexpr, PARTS: tl.constexpr, WARPS: tl.constexpr, EVEN_D: tl.constexpr,
):  # fmt: skip
    """The slots after the tokens from begin to end, given those before. begin: a multiple of BLOCK_T. first_checkpoint: see
    `lattice_forward_kernel`. Pointers are those of the program's sequence, head and slots.
    """
    PART_D: tl.constexpr = BLOCK_D // PARTS
    rows = ()
    for s in tl.static_range(BLOCK_T):
        rows += load_token(
            begin + s, q, k, v + d, gamma, mu, pos, T, strides, m_in, d_in, PARTS, PART_D, EVEN_D, EVEN_T, FORGET, HAS_POS
        )
    for t0 in range(begin, end, BLOCK_T):
        if t0 % CHECKPOINT_INTERVAL == first_checkpoint:
            store_parts(checkpoints + t0 // CHECKPOINT_INTERVAL * (D * M), slot_offset, PART_D, S, inside, PARTS, EVEN_D)
        next_rows, y_parts = (), ()
        for s in tl.static_range(BLOCK_T):
            t = t0 + BLOCK_T + s
            next_rows += load_token(
                t, q, k, v + d, gamma, mu, pos, T, strides, m_in, d_in, PARTS, PART_D, EVEN_D, EVEN_T, FORGET, HAS_POS
            )
        for s in tl.static_range(BLOCK_T):
            row = rows[6 * s : 6 * s + 6]
            S = reset_at_start(S, row[5], S0_head, slot_offset, PART_D, inside, PARTS)
            S, _h, _a, _inv_norm = lattice_step(S, row, VARIANT, FORGET, PROJECT, PARTS, WARPS)
            S_q = scale_parts(S, row[0].to(tl.float32), PARTS)
            for i in tl.static_range(PARTS):
                y_parts += (tl.sum(S_q[i], 0) if WARPS == 1 else sum_within_warps(S_q[i], WARPS),)
        out = stack(y_parts, BLOCK_T * PARTS)
        if WARPS > 1:
            out = tl.sum(out, 0)
        column = tl.arange(0, BLOCK_T * PARTS)
        to = y + (t0 + column // PARTS).to(tl.int64) * (H * D) + column % PARTS * PART_D
        if EVEN_D and EVEN_T:
            tl.store(to[None, :] + d[:, None], out.to(y.dtype.element_ty))
        else:
            exists = (d[:, None] + column % PARTS * PART_D < D) & (t0 + column // PARTS < T)
            tl.store(to[None, :] + d[:, None], out.to(y.dtype.element_ty), mask=exists)
        rows = next_rows
    return S


@triton.jit(do_not_specialize=["first_checkpoint"])
def lattice_forward_kernel(
    q, k, v, gamma, mu, pos, S_initial, S0, y, checkpoints, S_final, T,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, gamma_batch, gamma_row, gamma_head,
    mu_batch, mu_row, mu_head, first_checkpoint,
    D: tl.constexpr, M: tl.constexpr, H: tl.constexpr, VARIANT: tl.constexpr, FORGET: tl.constexpr, PROJECT: tl.constexpr,
    HAS_POS: tl.constexpr, EVEN_T: tl.constexpr, BLOCK_T: tl.constexpr, CHECKPOINT_INTERVAL: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, PARTS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """y [parts, B, T, H, D], summed over the slots of each program; the slots before every CHECKPOINT_INTERVAL-th token, [B, H,
    checkpoints, M, D]; and the final slots, [B, H, M, D].

    first_checkpoint: 0, or -1 for no checkpoints, a number and not a constexpr: one program computes both, so that they have the
    same bits; see `diagonal_scan_forward_kernel`.

    S_initial: [B, H, M, D]. S0: the slots that documents start with, [H, M, D].
    """
    p, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    batch = tl.num_programs(1) // H
    m, d, inside, d_in, m_in = slot_indices(p, D, M, BLOCK_D, BLOCK_M, PARTS)
    EVEN_D: tl.constexpr = D == BLOCK_D and M % BLOCK_M == 0
    PART_D: tl.constexpr = BLOCK_D // PARTS
    slot_offset = m[:, None] * D + d[None, :]
    q += b * q_batch + h * q_head + m
    k += b * k_batch + h * k_head + m
    v += b * v_batch + h * v_head
    gamma += b * gamma_batch + h * gamma_head
    mu += b * mu_batch + h * mu_head
    pos += b * T
    y += ((p * batch + b) * T * H + h) * D
    head = bh.to(tl.int64) * (D * M)
    strides = (q_row, k_row, v_row, gamma_row, mu_row)
    S = load_parts(S_initial + head, slot_offset, PART_D, inside, PARTS, EVEN_D)
    checkpoints += bh.to(tl.int64) * tl.cdiv(T, CHECKPOINT_INTERVAL) * (D * M)
    S0_head = S0 + h * (D * M)
    S = lattice_loop(
        S, 0, T, q, k, v, gamma, mu, pos, S0_head, y, checkpoints, slot_offset, inside, m, d, m_in, d_in, T, strides,
        first_checkpoint, D, M, H, VARIANT, FORGET, PROJECT, HAS_POS, EVEN_T, BLOCK_T, CHECKPOINT_INTERVAL, BLOCK_D, PARTS, WARPS,
        EVEN_D,
    )  # fmt: skip
    store_parts(S_final + head, slot_offset, PART_D, S, inside, PARTS, EVEN_D)
