"""Triton kernels of the generalized delta rule, token by token: columns of the state (values) are independent, so a program owns a
block of them for one head, holds it in registers and loops over time.

At RWKV-7's heads of 64 channels a token costs less than its part of a chunk's products would, and nothing has to be solved.
Arithmetic is fp32. A token past the end is loaded as zeros: its decay is 1, and it changes nothing.

Shapes: r, k, a, b, g [B, T, H, K], v, o [B, T, H, V], pos [B, T], states [B, H, K, V]; a program's block is [BLOCK_K, BLOCK_V].
"""

import triton
import triton.language as tl

from baton.kernels.common.triton_prefetch import LOG2_E, pack_bits, unpack_bits


@triton.jit
def place(K: tl.constexpr, V: tl.constexpr, H: tl.constexpr, BLOCK_V: tl.constexpr):
    """A program's part of the values, its sequence and head, and where the head's state begins. All programs are along one axis of
    the grid: along the others CUDA has 65535 at most, and there are batch times heads."""
    parts = tl.cdiv(V, BLOCK_V)
    bh = tl.program_id(0) // parts
    return tl.program_id(0) % parts, (bh // H).to(tl.int64), (bh % H).to(tl.int64), bh.to(tl.int64) * (K * V)


@triton.jit
def load_bits(base, t, T, row, inside):
    """A row of token t as it lies in memory, so that nothing waits for it; zeros past the end."""
    return pack_bits(tl.load(base + tl.cast(t, tl.int64) * row, mask=inside & (t < T), other=0.0))


@triton.jit
def load_token(t, T, k, v, a, b, g, pos, k_row, v_row, a_row, b_row, g_row, k_in, v_in, HAS_POS: tl.constexpr):
    """Rows k, v, a, b and g of token t, not converted, and whether it is not the first of a document."""
    keeps = t >= 0
    if HAS_POS:
        keeps = tl.load(pos + t, mask=t < T, other=1) != 0
    return (
        load_bits(k, t, T, k_row, k_in),
        load_bits(v, t, T, v_row, v_in),
        load_bits(a, t, T, a_row, k_in),
        load_bits(b, t, T, b_row, k_in),
        load_bits(g, t, T, g_row, k_in),
        keeps,
    )


@triton.jit
def converted(token, k, v, a, b, g):
    """k, v, a, b and the decay in fp32, and whether the token is not the first of a document."""
    decay = tl.exp2(unpack_bits(token[4], g) * LOG2_E)
    return unpack_bits(token[0], k), unpack_bits(token[1], v), unpack_bits(token[2], a), unpack_bits(token[3], b), decay, token[5]


@triton.jit
def advance(S, token, HAS_POS: tl.constexpr):
    """The state after a token, given that before it. token: `converted`."""
    k_t, v_t, a_t, b_t, decay, keeps = token
    if HAS_POS:
        S = tl.where(keeps, S, 0.0)
    read = tl.sum(a_t[:, None] * S, 0)
    return decay[:, None] * S + b_t[:, None] * read[None, :] + k_t[:, None] * v_t[None, :]


@triton.jit(do_not_specialize=["first_checkpoint"])
def generalized_delta_rule_forward_kernel(
    r, k, v, a, b, g, pos, initial, o, final, checkpoints, T, scale, first_checkpoint,
    r_batch, r_row, r_head, k_batch, k_row, k_head, v_batch, v_row, v_head, a_batch, a_row, a_head,
    b_batch, b_row, b_head, g_batch, g_row, g_head,
    K: tl.constexpr, V: tl.constexpr, H: tl.constexpr, HAS_POS: tl.constexpr, INTERVAL: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """o, contiguous; the final state; and the state before every INTERVAL-th token, [B, H, chunks, K, V].

    first_checkpoint: 0, or -1 for no checkpoints, when the program runs; see `diagonal_scan_forward_kernel`.
    """
    part, n, h, state = place(K, V, H, BLOCK_V)
    i, v_i = tl.arange(0, BLOCK_K), part * BLOCK_V + tl.arange(0, BLOCK_V)
    k_in, v_in = i < K, v_i < V
    inside, where = k_in[:, None] & v_in[None, :], i[:, None] * V + v_i[None, :]
    r += n * r_batch + h * r_head + i
    k += n * k_batch + h * k_head + i
    v += n * v_batch + h * v_head + v_i
    a += n * a_batch + h * a_head + i
    b += n * b_batch + h * b_head + i
    g += n * g_batch + h * g_head + i
    o += n * T * (H * V) + h * V + v_i
    pos += n * T
    checkpoints += state * tl.cdiv(T, INTERVAL)
    S = tl.load(initial + state + where, mask=inside, other=0.0)
    token = load_token(0, T, k, v, a, b, g, pos, k_row, v_row, a_row, b_row, g_row, k_in, v_in, HAS_POS)
    r_bits = load_bits(r, 0, T, r_row, k_in)
    for t in range(T):
        if t % INTERVAL == first_checkpoint:
            tl.store(checkpoints + tl.cast(t // INTERVAL, tl.int64) * (K * V) + where, S, mask=inside)
        following = load_token(t + 1, T, k, v, a, b, g, pos, k_row, v_row, a_row, b_row, g_row, k_in, v_in, HAS_POS)
        following_r = load_bits(r, t + 1, T, r_row, k_in)
        S = advance(S, converted(token, k, v, a, b, g), HAS_POS)
        o_t = tl.sum(unpack_bits(r_bits, r)[:, None] * S, 0) * scale
        tl.store(o + tl.cast(t, tl.int64) * (H * V), o_t.to(o.dtype.element_ty), mask=v_in)
        token, r_bits = following, following_r
    tl.store(final + state + where, S, mask=inside)


@triton.jit
def generalized_delta_rule_backward_kernel(
    r, k, v, a, b, g, pos, checkpoints, do, dfinal, scratch, dr, dk, dv, da, db, dg, dinitial, T, scale,
    r_batch, r_row, r_head, k_batch, k_row, k_head, v_batch, v_row, v_head, a_batch, a_row, a_head,
    b_batch, b_row, b_head, g_batch, g_row, g_head, do_batch, do_row, do_head,
    K: tl.constexpr, V: tl.constexpr, H: tl.constexpr, HAS_POS: tl.constexpr, INTERVAL: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Gradients: dv [B, T, H, V]; dr, dk, da, db, dg [parts, B, T, H, K], each part from one block of values; the initial state's.

    From a chunk's checkpoint the states before every GROUP-th token are computed into scratch [programs, INTERVAL / GROUP, BLOCK_K,
    BLOCK_V]; then group by group, from the last one, its states are computed into registers and its tokens are gone through
    backwards.
    """
    part, n, h, state = place(K, V, H, BLOCK_V)
    i, v_i = tl.arange(0, BLOCK_K), part * BLOCK_V + tl.arange(0, BLOCK_V)
    batch = tl.num_programs(0) // (H * tl.cdiv(V, BLOCK_V))
    k_in, v_in = i < K, v_i < V
    inside, where = k_in[:, None] & v_in[None, :], i[:, None] * V + v_i[None, :]
    r += n * r_batch + h * r_head + i
    k += n * k_batch + h * k_head + i
    v += n * v_batch + h * v_head + v_i
    a += n * a_batch + h * a_head + i
    b += n * b_batch + h * b_head + i
    g += n * g_batch + h * g_head + i
    do += n * do_batch + h * do_head + v_i
    pos += n * T
    keys = ((part * batch + n) * T * H + h) * K + i
    dr += keys
    dk += keys
    da += keys
    db += keys
    dg += keys
    dv += (n * T * H + h) * V + v_i
    chunks = tl.cdiv(T, INTERVAL)
    checkpoints += state * chunks
    in_scratch = tl.program_id(0).to(tl.int64) * (INTERVAL // GROUP * BLOCK_K * BLOCK_V)
    in_scratch += tl.arange(0, BLOCK_K)[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    scratch += in_scratch
    dS = tl.load(dfinal + state + where, mask=inside, other=0.0)
    for step in range(chunks):
        c = chunks - 1 - step
        S = tl.load(checkpoints + tl.cast(c, tl.int64) * (K * V) + where, mask=inside, other=0.0)
        groups = tl.cdiv(tl.minimum(T - c * INTERVAL, INTERVAL), GROUP)
        for m in range(groups):
            tl.store(scratch + m * (BLOCK_K * BLOCK_V), S)
            for s in tl.static_range(GROUP):
                t = c * INTERVAL + m * GROUP + s
                token = load_token(t, T, k, v, a, b, g, pos, k_row, v_row, a_row, b_row, g_row, k_in, v_in, HAS_POS)
                S = advance(S, converted(token, k, v, a, b, g), HAS_POS)
        tl.debug_barrier()
        for back in range(groups):
            m = groups - 1 - back
            S = tl.load(scratch + m * (BLOCK_K * BLOCK_V))
            states = (S,)
            for s in tl.static_range(GROUP):
                t = c * INTERVAL + m * GROUP + s
                token = load_token(t, T, k, v, a, b, g, pos, k_row, v_row, a_row, b_row, g_row, k_in, v_in, HAS_POS)
                S = advance(S, converted(token, k, v, a, b, g), HAS_POS)
                states += (S,)
            for s in tl.static_range(GROUP - 1, -1, -1):
                t = c * INTERVAL + m * GROUP + s
                token = load_token(t, T, k, v, a, b, g, pos, k_row, v_row, a_row, b_row, g_row, k_in, v_in, HAS_POS)
                k_t, v_t, a_t, b_t, decay, keeps = converted(token, k, v, a, b, g)
                before, after = states[s], states[s + 1]
                if HAS_POS:
                    before = tl.where(keeps, before, 0.0)
                do_t = unpack_bits(load_bits(do, t, T, do_row, v_in), do) * scale
                r_t = unpack_bits(load_bits(r, t, T, r_row, k_in), r)
                read = tl.sum(a_t[:, None] * before, 0)
                dS += r_t[:, None] * do_t[None, :]
                dread = tl.sum(b_t[:, None] * dS, 0)
                exists = t < T
                to_k, to_v = tl.cast(t, tl.int64) * (H * K), tl.cast(t, tl.int64) * (H * V)
                store_vector(dr + to_k, tl.sum(after * do_t[None, :], 1), k_in & exists)
                store_vector(dk + to_k, tl.sum(dS * v_t[None, :], 1), k_in & exists)
                store_vector(dv + to_v, tl.sum(dS * k_t[:, None], 0), v_in & exists)
                store_vector(da + to_k, tl.sum(before * dread[None, :], 1), k_in & exists)
                store_vector(db + to_k, tl.sum(dS * read[None, :], 1), k_in & exists)
                store_vector(dg + to_k, decay * tl.sum(dS * before, 1), k_in & exists)
                dS = decay[:, None] * dS + a_t[:, None] * dread[None, :]
                if HAS_POS:
                    dS = tl.where(keeps, dS, 0.0)
        tl.debug_barrier()
    tl.store(dinitial + state + where, dS, mask=inside)


@triton.jit
def store_vector(at, x, inside):
    tl.store(at, x.to(at.dtype.element_ty), mask=inside)
