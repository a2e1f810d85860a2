"""Queries and keys of Mamba-3, turned, and its outputs, in Triton: forward and backward; and a step of decoding.

Shape suffixes: B batch, T time, C chunks of L tokens, G groups, H heads (S of a group), J inputs of a head, which turn alike, N
d_state, R pairs of states that turn, P pairs of a block, D head_dim.

Angles are sums over the tokens of a document. A tile sums within its chunk; what the chunks before have of the chunk's first
document is added (`arriving`). Entries 2 r and 2 r + 1 of N are a pair, and the pairs behind the first R turn by nothing.
"""

import math

import triton
import triton.language as tl

from baton.kernels.common.triton_prefetch import LOG2_E

QUARTERS = tl.constexpr(2 / math.pi)  # of a turn, in a radian


@triton.jit
def sums_in_chunk(x, document, documents, HAS_POS: tl.constexpr, BACKWARDS: tl.constexpr):
    """Sums of x [L, P] over the tokens of the same document up to each, or from it on. document: of each token, by its number."""
    if HAS_POS:
        found = tl.zeros_like(x)
        for one in range(documents):
            own = (document == one)[:, None]
            found = tl.where(own, tl.cumsum(tl.where(own, x, 0.0), 0, reverse=BACKWARDS), found)
        return found
    else:
        return tl.cumsum(x, 0, reverse=BACKWARDS)


@triton.jit
def documents_of(pos, t, l, T, HAS_POS: tl.constexpr):
    """Of tokens t their numbers l of a chunk: positions, documents by number, and how many there are."""
    if HAS_POS:
        at = tl.load(pos + t, mask=t < T, other=1)
        document = tl.cumsum(((at == 0) & (l > 0)).to(tl.int32), 0)
        return at, document, tl.max(document, 0) + 1
    else:
        return l + 1, l * 0, 1


@triton.jit
def load_tile(base, t, row, x, inside, N: tl.constexpr):
    """Columns x [2 P] of rows t, [L, 2 P]; zeros outside."""
    return tl.load(base + t[:, None].to(tl.int64) * row + x[None, :], mask=inside[:, None] & (x < N)[None, :], other=0.0)


@triton.jit
def pairs_of(tile, P: tl.constexpr):
    """In float32 the first and the second of each pair, [L, P]."""
    return tl.split(tl.reshape(tile.to(tl.float32), [tile.shape[0], P, 2]))


@triton.jit
def load_pairs(base, t, row, x, inside, N: tl.constexpr, P: tl.constexpr):
    """As `pairs_of`, of `load_tile`."""
    return pairs_of(load_tile(base, t, row, x, inside, N), P)


@triton.jit
def load_vector(base, x, N: tl.constexpr, P: tl.constexpr):
    """Of [N], in float32: the first and the second of each pair, [1, P]."""
    return tl.split(tl.reshape(tl.load(base + x, mask=x < N, other=0.0).to(tl.float32), [1, P, 2]))


@triton.jit
def store_pairs(to, t, row, x, inside, N: tl.constexpr, P: tl.constexpr, first, second):
    """Stores as `load_pairs` loads."""
    tile = tl.reshape(tl.join(first, second), [t.shape[0], 2 * P])
    where = to + t[:, None].to(tl.int64) * row + x[None, :]
    tl.store(where, tile.to(to.dtype.element_ty), mask=inside[:, None] & (x < N)[None, :])


@triton.jit
def cos_sin(angle):
    """Cosine and sine in float32 of float64 angles: series around the nearest quarter turn, to which float64 reduces angles of many
    turns. The library's functions do that a second time, with memory for angles that float32 cannot tell apart."""
    quarters = tl.floor(angle * QUARTERS + 0.5)
    x = ((angle * QUARTERS - quarters) / QUARTERS).to(tl.float32)
    z = x * x
    sin = x + x * z * (-1 / 6 + z * (1 / 120 + z * (-1 / 5040 + z * (1 / 362880))))
    cos = 1.0 + z * (-1 / 2 + z * (1 / 24 + z * (-1 / 720 + z * (1 / 40320 + z * (-1 / 3628800)))))
    odd, half = quarters - 2 * tl.floor(quarters / 2), quarters - 4 * tl.floor(quarters / 4)
    swapped = odd > 0.5
    found_cos, found_sin = tl.where(swapped, sin, cos), tl.where(swapped, cos, sin)
    return tl.where((half > 0.5) & (half < 2.5), -found_cos, found_cos), tl.where(half > 1.5, -found_sin, found_sin)


@triton.jit
def angles_of(dt_l, theta_lp, arriving, r, at, l, document, documents, R, HAS_POS: tl.constexpr, EARLIER: tl.constexpr):
    """Cosine and sine [L, P] of the sums of dt theta, which are float64. arriving: of the chunk and head."""
    angle = sums_in_chunk(dt_l[:, None] * theta_lp.to(tl.float64), document, documents, HAS_POS, False)
    if EARLIER:
        before = tl.load(arriving + r, mask=r < R, other=0.0)[None, :]
        angle += tl.where((at > l)[:, None], before, 0.0) if HAS_POS else before
    return cos_sin(angle)


@triton.jit
def mamba3_angle_edges_kernel(
    dt, theta, pos, edges, T, R, H: tl.constexpr, HAS_POS: tl.constexpr, L: tl.constexpr, P: tl.constexpr
):  # fmt: skip
    """The sum of dt theta over the tokens of the document of each chunk's last token, [B, C, H, R] in float64."""
    # of many tokens there are more chunks than the second axis of a grid can have; heads of a chunk share what they read
    h, n, b = tl.program_id(0) % H, tl.program_id(0) // H, tl.program_id(1).to(tl.int64)
    chunks = tl.num_programs(0) // H
    l = tl.arange(0, L)
    t = n * L + l
    dt_l = tl.load(dt + (b * T + t) * H + h, mask=t < T, other=0.0).to(tl.float64)
    seen = t < T
    if HAS_POS:
        seen = seen & (L - 1 - l <= tl.load(pos + b * T + tl.minimum(n * L + L - 1, T - 1)))
    for r0 in range(0, R, P):
        r = r0 + tl.arange(0, P)
        turning = tl.load(theta + (b * T + t[:, None]) * R + r[None, :], mask=seen[:, None] & (r < R)[None, :], other=0.0)
        found = tl.sum(tl.where(seen[:, None], dt_l[:, None] * turning.to(tl.float64), 0.0), 0)
        tl.store(edges + ((b * chunks + n) * H + h) * R + r, found, mask=r < R)


@triton.jit
def mamba3_rotate_kernel(
    B, C, dt, theta, B_bias, C_bias, pos, arriving, k, next_q, first, own, cos_last, sin_last, T, B_batch, B_row, B_head, C_batch,
    C_row, C_head, N: tl.constexpr, R: tl.constexpr, H: tl.constexpr, S: tl.constexpr, J: tl.constexpr, HAS_POS: tl.constexpr,
    EARLIER: tl.constexpr, L: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Turned k of each token and turned q of its next one, [B, T, J, H, N]; q of the first, [B, H, J, N]; cosine and sine of the
    last token's angle, [B, H, R]; and with one input the products of each token's q and k, [B, T, H]."""
    h, n, b = tl.program_id(0) % H, tl.program_id(0) // H, tl.program_id(1).to(tl.int64)
    chunks = tl.num_programs(0) // H
    l = tl.arange(0, L)
    t = n * L + l
    inside = t < T
    at, document, documents = documents_of(pos + b * T, t, l, T, HAS_POS)
    dt_l = tl.load(dt + (b * T + t) * H + h, mask=inside, other=0.0).to(tl.float64)
    last_chunk = n == chunks - 1
    found = tl.zeros([L], tl.float32)
    for r0 in tl.static_range(0, (N + 1) // 2, P):
        r, x = r0 + tl.arange(0, P), 2 * r0 + tl.arange(0, 2 * P)
        for j in tl.static_range(J):
            of_row = ((b * T * J + j) * H + h) * N
            k_a, k_b = load_pairs(B + b * B_batch + h // S * B_head + j * N, t, B_row, x, inside, N, P)
            q_a, q_b = load_pairs(C + b * C_batch + h // S * C_head + j * N, t, C_row, x, inside, N, P)
            of_k_a, of_k_b = load_vector(B_bias + (h * J + j) * N, x, N, P)
            of_q_a, of_q_b = load_vector(C_bias + (h * J + j) * N, x, N, P)
            k_a, k_b, q_a, q_b = k_a + of_k_a, k_b + of_k_b, q_a + of_q_a, q_b + of_q_b
            if J == 1:
                found += tl.sum(q_a * k_a + q_b * k_b, 1)
            if r0 < R:
                if j == 0:  # the angles are those of all inputs
                    turning = inside[:, None] & (r < R)[None, :]
                    theta_lp = tl.load(theta + (b * T + t[:, None]) * R + r[None, :], mask=turning, other=0.0)
                    of_chunk = arriving + ((b * chunks + n) * H + h) * R
                    cos, sin = angles_of(dt_l, theta_lp, of_chunk, r, at, l, document, documents, R, HAS_POS, EARLIER)
                    ends = (t == T - 1)[:, None] & (r < R)[None, :]
                    of_head = (b * H + h + l * 0)[:, None] * R + r[None, :]
                    tl.store(cos_last + of_head, cos, mask=ends)
                    tl.store(sin_last + of_head, sin, mask=ends)
                k_a, k_b = k_a * cos - k_b * sin, k_a * sin + k_b * cos
                q_a, q_b = q_a * cos - q_b * sin, q_a * sin + q_b * cos
            store_pairs(k + of_row, t, J * H * N, x, inside, N, P, k_a, k_b)
            store_pairs(next_q + of_row, t - 1, J * H * N, x, inside & (t > 0), N, P, q_a, q_b)
            store_pairs(first + ((b * H + h) * J + j) * N, t, 0, x, t == 0, N, P, q_a, q_b)
            nothing = tl.zeros([2 * P], next_q.dtype.element_ty)
            tl.store(next_q + of_row + (b * 0 + T - 1) * (J * H * N) + x, nothing, mask=last_chunk & (x < N))
    if J == 1:
        tl.store(own + (b * T + t) * H + h, found, mask=inside)


@triton.jit
def mamba3_rotate_backward_kernel(
    B, C, dt, theta, B_bias, C_bias, pos, arriving, dnext, dfirst, dk, down, dcos, dsin, dB_own, dC_own, dB, dC, biases, edges, ddt,
    dtheta, T, B_batch, B_row, B_head, C_batch, C_row, C_head, dnext_batch, dnext_row, dnext_head, dk_batch, dk_row, dk_head,
    N: tl.constexpr, R: tl.constexpr, H: tl.constexpr, S: tl.constexpr, J: tl.constexpr, HAS_POS: tl.constexpr,
    EARLIER: tl.constexpr, L: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Derivatives to B and C, [B, T, G, J, N], and of each chunk to both biases, [B, C, H, J, N, 2]. Of an angle's derivative as
    far as this chunk's tokens have it: to dt of a block of pairs, [blocks, B, T, H], to theta of a group, [G, B, T, R], and what
    the chunk before gets of it, [B, C, H, R]. dnext and dk: [B, T J, H, N]. dB_own and dC_own, float32: with several inputs, what
    dB and dC have of the products of q and k, which `product_kernels` compute."""
    blocks: tl.constexpr = ((N + 1) // 2 + P - 1) // P
    block, n, chunks = tl.program_id(0) % blocks, tl.program_id(0) // blocks, tl.num_programs(0) // blocks
    b, g, batch = (tl.program_id(1) // (H // S)).to(tl.int64), tl.program_id(1) % (H // S), tl.num_programs(1) // (H // S)
    l = tl.arange(0, L)
    t = n * L + l
    inside = t < T
    r0 = block * P
    r, x = r0 + tl.arange(0, P), 2 * r0 + tl.arange(0, 2 * P)
    at, document, documents = documents_of(pos + b * T, t, l, T, HAS_POS)
    turning = inside[:, None] & (r < R)[None, :]
    theta_lp = tl.load(theta + (b * T + t[:, None]) * R + r[None, :], mask=turning, other=0.0)
    of_group, groups = (b * T * (H // S) + g) * (J * N), H // S
    given, sums = (), ()
    for j in tl.static_range(J):
        given += load_pairs(B + b * B_batch + g * B_head + j * N, t, B_row, x, inside, N, P)
        given += load_pairs(C + b * C_batch + g * C_head + j * N, t, C_row, x, inside, N, P)
        if J == 1:
            sums += (tl.zeros([L, P], tl.float32), tl.zeros([L, P], tl.float32))
            sums += (tl.zeros([L, P], tl.float32), tl.zeros([L, P], tl.float32))
        else:
            sums += load_pairs(dB_own + of_group + j * N, t, groups * J * N, x, inside, N, P)
            sums += load_pairs(dC_own + of_group + j * N, t, groups * J * N, x, inside, N, P)
    dtheta_lp = tl.zeros([L, P], tl.float32)
    of_four = 4 * r0 + tl.arange(0, 4 * P)
    # an input's derivatives are loaded while those of the input before it are computed with
    dk += b * dk_batch + g * S * dk_head
    dnext += b * dnext_batch + g * S * dnext_head
    dk_tile = load_tile(dk, t * J, dk_row, x, inside, N)
    dq_tile = load_tile(dnext, (t - 1) * J, dnext_row, x, inside & (t > 0), N)
    for one in range(S):
        h = g * S + one
        dt_l = tl.load(dt + (b * T + t) * H + h, mask=inside, other=0.0)
        cos, sin = tl.full([L, P], 1.0, tl.float32), tl.zeros([L, P], tl.float32)
        dangle, new = tl.zeros([L, P], tl.float32), ()
        for j in tl.static_range(J):
            dk_a, dk_b = pairs_of(dk_tile, P)
            dq_a, dq_b = pairs_of(dq_tile, P)
            if j + 1 < J:
                dk_tile = load_tile(dk + one * dk_head + (j + 1) * dk_row, t * J, dk_row, x, inside, N)
                at_next = dnext + one * dnext_head + (j + 1) * dnext_row
                dq_tile = load_tile(at_next, (t - 1) * J, dnext_row, x, inside & (t > 0), N)
            else:
                following = inside & (one + 1 < S)
                dk_tile = load_tile(dk + (one + 1) * dk_head, t * J, dk_row, x, following, N)
                dq_tile = load_tile(dnext + (one + 1) * dnext_head, (t - 1) * J, dnext_row, x, following & (t > 0), N)
            of_k_a, of_k_b = load_vector(B_bias + (h * J + j) * N, x, N, P)
            of_q_a, of_q_b = load_vector(C_bias + (h * J + j) * N, x, N, P)
            k_a, k_b = given[4 * j] + of_k_a, given[4 * j + 1] + of_k_b
            q_a, q_b = given[4 * j + 2] + of_q_a, given[4 * j + 3] + of_q_b
            if n == 0:
                of_first_a, of_first_b = load_vector(dfirst + ((b * H + h) * J + j) * N, x, N, P)
                begins = (l == 0)[:, None]
                dq_a, dq_b = dq_a + tl.where(begins, of_first_a, 0.0), dq_b + tl.where(begins, of_first_b, 0.0)
            if r0 < R:
                of_chunk = ((b * chunks + n) * H + h) * R
                if j == 0:
                    cos, sin = angles_of(
                        dt_l.to(tl.float64), theta_lp, arriving + of_chunk, r, at, l, document, documents, R, HAS_POS, EARLIER
                    )
                dk_a, dk_b = dk_a * cos + dk_b * sin, dk_b * cos - dk_a * sin
                dq_a, dq_b = dq_a * cos + dq_b * sin, dq_b * cos - dq_a * sin
                dangle += q_a * dq_b - q_b * dq_a + k_a * dk_b - k_b * dk_a
                if j == J - 1:
                    if n == chunks - 1:
                        of_head = (b * H + h) * R + r
                        to_cos = tl.load(dcos + of_head, mask=r < R, other=0.0)[None, :]
                        to_sin = tl.load(dsin + of_head, mask=r < R, other=0.0)[None, :]
                        dangle += tl.where((t == T - 1)[:, None], cos * to_sin - sin * to_cos, 0.0)
                    dangle = sums_in_chunk(tl.where(turning, dangle, 0.0), document, documents, HAS_POS, True)
                    tl.store(edges + of_chunk + (l * 0)[:, None] + r[None, :], dangle, mask=(l == 0)[:, None] & (r < R)[None, :])
                    to_dt = tl.sum(dangle * theta_lp, 1)
                    tl.store(ddt + ((block * batch + b) * T + t) * H + h, to_dt, mask=inside)
                    dtheta_lp += dangle * dt_l[:, None]
            if J == 1:  # a token's own product of q and k is not turned
                down_l = tl.load(down + (b * T + t) * H + h, mask=inside, other=0.0)[:, None]
                dq_a, dq_b, dk_a, dk_b = dq_a + down_l * k_a, dq_b + down_l * k_b, dk_a + down_l * q_a, dk_b + down_l * q_b
            # rows behind the last token are zeros but for products of biases, whose `down` is zero
            four = tl.sum(tl.join(tl.join(dk_a, dq_a), tl.join(dk_b, dq_b)), 0)
            of_bias = (((b * chunks + n) * H + h) * J + j) * (2 * N)
            tl.store(biases + of_bias + of_four, tl.reshape(tl.permute(four, (0, 2, 1)), [4 * P]), mask=of_four < 2 * N)
            new += (sums[4 * j] + dk_a, sums[4 * j + 1] + dk_b, sums[4 * j + 2] + dq_a, sums[4 * j + 3] + dq_b)
        sums = new
    for j in tl.static_range(J):
        store_pairs(dB + of_group + j * N, t, groups * J * N, x, inside, N, P, sums[4 * j], sums[4 * j + 1])
        store_pairs(dC + of_group + j * N, t, groups * J * N, x, inside, N, P, sums[4 * j + 2], sums[4 * j + 3])
    if r0 < R:
        tl.store(dtheta + ((g * batch + b) * T + t[:, None]) * R + r[None, :], dtheta_lp, mask=turning)


@triton.jit
def mamba3_output_kernel(
    read, x, decay, skip, first, y, rows, T, x_row, H: tl.constexpr, D: tl.constexpr, HAS_FIRST: tl.constexpr, BR: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """y [B, T, H, D] = decay times what the token before has read, of the first token `first` [B, H, D], and skip times x."""
    row, d = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BD)[None, :]
    inside, t = (row < rows)[:, None] & (d < D), row // H % T
    of_row = row[:, None] * D + d
    before = tl.load(read + of_row - H * D, mask=inside & (t > 0)[:, None], other=0.0).to(tl.float32)
    if HAS_FIRST:
        of_head = (row // (T * H) * H + row % H)[:, None] * D + d
        before += tl.load(first + of_head, mask=inside & (t == 0)[:, None], other=0.0)
    x_rd = tl.load(x + (row // H)[:, None] * x_row + (row % H)[:, None] * D + d, mask=inside, other=0.0).to(tl.float32)
    decay_r = tl.load(decay + row, mask=row < rows, other=0.0)[:, None]
    skip_r = tl.load(skip + row, mask=row < rows, other=0.0)[:, None]
    tl.store(y + of_row, (decay_r * before + skip_r * x_rd).to(y.dtype.element_ty), mask=inside)


@triton.jit
def mamba3_output_backward_kernel(
    read, x, decay, skip, first, dy, dread, dx, ddecay, dskip, dfirst, rows, T, x_row, dy_row, H: tl.constexpr, D: tl.constexpr,
    HAS_FIRST: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Derivatives to all of it, in the shapes that it has."""
    row, d = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BD)[None, :]
    inside, t = (row < rows)[:, None] & (d < D), row // H % T
    of_row, of_token = row[:, None] * D + d, (row % H)[:, None] * D + d
    later, begins = inside & (t > 0)[:, None], inside & (t == 0)[:, None]
    before = tl.load(read + of_row - H * D, mask=later, other=0.0).to(tl.float32)
    of_head = (row // (T * H) * H + row % H)[:, None] * D + d
    if HAS_FIRST:
        before += tl.load(first + of_head, mask=begins, other=0.0)
    x_rd = tl.load(x + (row // H)[:, None] * x_row + of_token, mask=inside, other=0.0).to(tl.float32)
    dy_rd = tl.load(dy + (row // H)[:, None] * dy_row + of_token, mask=inside, other=0.0).to(tl.float32)
    decay_r = tl.load(decay + row, mask=row < rows, other=0.0)[:, None]
    skip_r = tl.load(skip + row, mask=row < rows, other=0.0)[:, None]
    tl.store(dread + of_row - H * D, (decay_r * dy_rd).to(dread.dtype.element_ty), mask=later)
    tl.store(dread + of_row, tl.zeros_like(dy_rd).to(dread.dtype.element_ty), mask=inside & (t == T - 1)[:, None])
    if HAS_FIRST:
        tl.store(dfirst + of_head, decay_r * dy_rd, mask=begins)
    tl.store(dx + of_row, (skip_r * dy_rd).to(dx.dtype.element_ty), mask=inside)
    tl.store(ddecay + row, tl.sum(dy_rd * before, 1), mask=row < rows)
    tl.store(dskip + row, tl.sum(dy_rd * x_rd, 1), mask=row < rows)


@triton.jit
def mamba3_step_kernel(
    x, B, C, dt, g, lam, theta, B_bias, C_bias, D, pos, h, k, last_x, y, x_batch, x_head, B_batch, B_head, C_batch, C_head, R,
    N: tl.constexpr, H: tl.constexpr, S: tl.constexpr, WIDTH: tl.constexpr, HAS_POS: tl.constexpr, P: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """One token a sequence: y [B, H, WIDTH], and the State h and last_x in place. A program has some columns of a head's h; k,
    which all of them read, is for others to write."""
    parts = tl.cdiv(WIDTH, BD)
    bh = tl.program_id(0) // parts
    n, of_head = (bh // H).to(tl.int64), bh % H
    r, j = tl.arange(0, P), tl.program_id(0) % parts * BD + tl.arange(0, BD)
    column, first, second = j < WIDTH, 2 * r < N, 2 * r + 1 < N
    h += bh.to(tl.int64) * (N * WIDTH) + (2 * r)[:, None] * WIDTH + j[None, :]
    # every load comes before the first store, behind which the compiler could not move it
    h_a = tl.load(h, mask=first[:, None] & column[None, :], other=0.0)
    h_b = tl.load(h + WIDTH, mask=second[:, None] & column[None, :], other=0.0)
    of_k, of_bias, of_group = k + bh.to(tl.int64) * N + 2 * r, of_head * N + 2 * r, of_head // S
    before_a, before_b = tl.load(of_k, mask=first, other=0.0), tl.load(of_k + 1, mask=second, other=0.0)
    B += n * B_batch + of_group * B_head + 2 * r
    C += n * C_batch + of_group * C_head + 2 * r
    k_a = tl.load(B, mask=first, other=0.0).to(tl.float32) + tl.load(B_bias + of_bias, mask=first, other=0.0)
    k_b = tl.load(B + 1, mask=second, other=0.0).to(tl.float32) + tl.load(B_bias + of_bias + 1, mask=second, other=0.0)
    q_a = tl.load(C, mask=first, other=0.0).to(tl.float32) + tl.load(C_bias + of_bias, mask=first, other=0.0)
    q_b = tl.load(C + 1, mask=second, other=0.0).to(tl.float32) + tl.load(C_bias + of_bias + 1, mask=second, other=0.0)
    x_j = tl.load(x + n * x_batch + of_head * x_head + j, mask=column, other=0.0).to(tl.float32)
    of_last = last_x + bh.to(tl.int64) * WIDTH + j
    last_j = tl.load(of_last, mask=column, other=0.0)
    step, share = tl.load(dt + bh), tl.load(lam + bh)
    cos, sin = cos_sin(step.to(tl.float64) * tl.load(theta + n * R + r, mask=r < R, other=0.0).to(tl.float64))
    decay, skip = tl.exp2(tl.load(g + bh) * LOG2_E), tl.load(D + of_head)
    earlier = (1.0 - share) * step * last_j
    h_a, h_b = h_a + before_a[:, None] * earlier[None, :], h_b + before_b[:, None] * earlier[None, :]
    if HAS_POS:
        goes_on = tl.load(pos + n) != 0
        h_a, h_b = tl.where(goes_on, h_a, 0.0), tl.where(goes_on, h_b, 0.0)
    # the state turns by the negative angle
    cos, sin = decay * cos[:, None], decay * sin[:, None]
    h_a, h_b = h_a * cos + h_b * sin, h_b * cos - h_a * sin
    own = share * step * x_j
    h_a, h_b = h_a + k_a[:, None] * own[None, :], h_b + k_b[:, None] * own[None, :]
    y_j = tl.sum(q_a[:, None] * h_a + q_b[:, None] * h_b, 0) + skip * x_j
    tl.store(y + bh.to(tl.int64) * WIDTH + j, y_j.to(y.dtype.element_ty), mask=column)
    tl.store(h, h_a, mask=first[:, None] & column[None, :])
    tl.store(h + WIDTH, h_b, mask=second[:, None] & column[None, :])
    tl.store(of_last, x_j, mask=column)
