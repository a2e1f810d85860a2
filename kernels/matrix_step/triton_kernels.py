"""Triton kernel of one token a sequence for recurrences with a matrix State: decoding.

A State is read once, changed and written over itself, and the output is made of what is in registers. A program has all rows of
some columns (values) of one head's State: columns are independent, but for a decay, a key and a query that they share. Arithmetic
is fp32. Sums over rows depend on the State's shape alone, so a sequence has the same bits in every batch.

Shapes: q [B, query heads, K], k [B, key heads, K], v [B, H, V], y [B, query heads or H, V], pos [B], State [B, H, K, V], of which
a program has [BLOCK_K, BLOCK_V].
"""

import triton
import triton.language as tl

from baton.kernels.common.triton_prefetch import LOG2_E

NONE, SCALAR, KEY, VALUE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def load_row(base, inside):
    return tl.load(base, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def matrix_step_kernel(
    q, k, v, g, beta, bonus, pos, state, y, scale, q_batch, q_head, k_batch, k_head, v_batch, v_head, g_batch, g_head, beta_batch,
    beta_head,
    K: tl.constexpr, V: tl.constexpr, H: tl.constexpr, G: tl.constexpr, Q_SHARE: tl.constexpr, K_SHARE: tl.constexpr,
    GATE: tl.constexpr, DELTA: tl.constexpr, BONUS: tl.constexpr, HAS_POS: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """y, contiguous, and the State in place.

    G: query heads that read a head's State. Q_SHARE, K_SHARE: heads that share a query, and a key. GATE: what g is a log-decay of,
    [B, H], [B, H, K] or [B, H, V]. DELTA: what the decayed State recalls of k is taken from v, and beta [B, H] times the rest is
    written. BONUS: the State is read before it decays, and the token's own v with bonus [H, K], as in RWKV-6; G is 1 then.
    """
    # all programs are along one axis of the grid: along the others CUDA has 65535 at most
    parts = tl.cdiv(V, BLOCK_V)
    bh = tl.program_id(0) // parts
    n, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    i, j = tl.arange(0, BLOCK_K), tl.program_id(0) % parts * BLOCK_V + tl.arange(0, BLOCK_V)
    k_in, v_in = i < K, j < V
    inside = k_in[:, None] & v_in[None, :]
    state += bh.to(tl.int64) * (K * V) + i[:, None] * V + j[None, :]
    # every load comes before the first store, behind which the compiler could not move it
    S = tl.load(state, mask=inside, other=0.0)
    k_t = load_row(k + n * k_batch + h // K_SHARE * k_head + i, k_in)
    v_t = load_row(v + n * v_batch + h * v_head + j, v_in)
    q += n * q_batch + h // Q_SHARE * (G * q_head) + i
    q_t = load_row(q, k_in)
    y += (n * H + h) * (G * V) + j
    g += n * g_batch + h * g_head
    if GATE == SCALAR:
        decay = tl.exp2(tl.load(g).to(tl.float32) * LOG2_E)
    elif GATE == KEY:
        decay = tl.exp2(load_row(g + i, k_in) * LOG2_E)[:, None]
    elif GATE == VALUE:
        decay = tl.exp2(load_row(g + j, v_in) * LOG2_E)[None, :]
    if HAS_POS:
        S = tl.where(tl.load(pos + n) != 0, S, 0.0)
    if BONUS:
        own = tl.sum(q_t * load_row(bonus + h * K + i, k_in) * k_t, 0)
        y_t = scale * (tl.sum(q_t[:, None] * S, 0) + own * v_t)
    if GATE != NONE:
        S *= decay
    if DELTA:
        strength = tl.load(beta + n * beta_batch + h * beta_head).to(tl.float32)
        v_t = strength * (v_t - tl.sum(k_t[:, None] * S, 0))
    S += k_t[:, None] * v_t[None, :]
    for reader in tl.static_range(G):
        following = load_row(q + (reader + 1) * q_head, k_in & (reader + 1 < G))
        if not BONUS:
            y_t = scale * tl.sum(q_t[:, None] * S, 0)
        tl.store(y + reader * V, y_t.to(y.dtype.element_ty), mask=v_in)
        q_t = following
    tl.store(state, S, mask=inside)
