"""Products of queries and keys of Mamba-3's heads with several inputs, in Triton: forward and backward.

Shape suffixes: B batch, T time, C chunks of L tokens, G groups, H heads (S of a group), J inputs and outputs of a head, U pairs of
them (J (J - 1) / 2), N d_state, R pairs of states that turn, P pairs of a block.

A token's q and k turn alike, so that the angle does not matter to their products. Those of a token's k with its next token's q need
the angle of that token alone, and are those of q_i and k_j with i < j; where a document starts they are 0.
"""

import triton
import triton.language as tl

from baton.kernels.mamba3.triton_kernels import cos_sin, load_pairs, load_vector, store_pairs


@triton.jit
def goes_on_at(pos, t, T, HAS_POS: tl.constexpr):
    """Whether tokens t have one before them, in their document and in this piece."""
    found = (t > 0) & (t < T)
    if HAS_POS:
        found = found & (tl.load(pos + t, mask=found, other=0) != 0)
    return found


@triton.jit
def load_inputs(
    base, bias, t, row, x, inside, FIRST: tl.constexpr, END: tl.constexpr, N: tl.constexpr, P: tl.constexpr
):  # fmt: skip
    """Of tokens t: of inputs FIRST to END - 1 the first and the second of each pair, with their biases."""
    found = ()
    for j in tl.static_range(FIRST, END):
        a, b = load_pairs(base + j * N, t, row, x, inside, N, P)
        of_a, of_b = load_vector(bias + j * N, x, N, P)
        found += (a + of_a, b + of_b)
    return found


@triton.jit
def step_cos_sin(dt, theta, t, r, goes_on, H: tl.constexpr, R: tl.constexpr):
    """Cosine and sine, [L, P], of the angles of tokens t alone; and these tokens' dt and theta. dt: of a head."""
    t = t.to(tl.int64)
    dt_l = tl.load(dt + t * H, mask=goes_on, other=0.0)
    theta_lp = tl.load(theta + t[:, None] * R + r[None, :], mask=goes_on[:, None] & (r < R)[None, :], other=0.0)
    cos, sin = cos_sin(dt_l.to(tl.float64)[:, None] * theta_lp.to(tl.float64))
    return cos, sin, dt_l, theta_lp


@triton.jit
def mimo_products_kernel(
    B, C, dt, theta, B_bias, C_bias, pos, own, later, T, B_batch, B_row, B_head, C_batch, C_row, C_head, N: tl.constexpr,
    R: tl.constexpr, H: tl.constexpr, S: tl.constexpr, J: tl.constexpr, HAS_POS: tl.constexpr, L: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """own [B, T, H, J, J]: of each token's q with its k; later [B, T, H, U]: of its next token's q_i with its k_j, i < j."""
    h, n, b = tl.program_id(0) % H, tl.program_id(0) // H, tl.program_id(1).to(tl.int64)
    t = n * L + tl.arange(0, L)
    inside, following = t < T, goes_on_at(pos + b * T, t + 1, T, HAS_POS)
    B += b * B_batch + h // S * B_head
    C += b * C_batch + h // S * C_head
    B_bias += h * (J * N)
    C_bias += h * (J * N)
    found, ahead = (), ()
    for _ in tl.static_range(J * J):
        found += (tl.zeros([L], tl.float32),)
    for _ in tl.static_range(J * (J - 1) // 2):
        ahead += (tl.zeros([L], tl.float32),)
    for r0 in tl.static_range(0, (N + 1) // 2, P):
        r, x = r0 + tl.arange(0, P), 2 * r0 + tl.arange(0, 2 * P)
        keys = load_inputs(B, B_bias, t, B_row, x, inside, 0, J, N, P)
        grown, grown_ahead = (), ()
        if r0 < R:
            cos, sin, _, _ = step_cos_sin(dt + b * T * H + h, theta + b * T * R, t + 1, r, following, H, R)
        for i in tl.static_range(J):
            q_a, q_b = load_inputs(C, C_bias, t, C_row, x, inside, i, i + 1, N, P)
            for j in tl.static_range(J):
                grown += (found[i * J + j] + tl.sum(q_a * keys[2 * j] + q_b * keys[2 * j + 1], 1),)
            if i + 1 < J:
                q_a, q_b = load_inputs(C, C_bias, t + 1, C_row, x, following, i, i + 1, N, P)
                if r0 < R:
                    q_a, q_b = q_a * cos - q_b * sin, q_a * sin + q_b * cos
                for j in tl.static_range(i + 1, J):
                    of_pair = tl.sum(q_a * keys[2 * j] + q_b * keys[2 * j + 1], 1)
                    grown_ahead += (ahead[i * (2 * J - i - 1) // 2 + j - i - 1] + of_pair,)
        found, ahead = grown, grown_ahead
    of_token = (b * T + t) * H + h
    for one in tl.static_range(J * J):
        tl.store(own + of_token * (J * J) + one, found[one], mask=inside)
    for one in tl.static_range(J * (J - 1) // 2):
        tl.store(later + of_token * (J * (J - 1) // 2) + one, tl.where(following, ahead[one], 0.0), mask=inside)


@triton.jit
def mimo_products_backward_kernel(
    B, C, dt, theta, B_bias, C_bias, pos, down, dlater, dB, dC, biases, ddt, dtheta, T, B_batch, B_row, B_head, C_batch, C_row,
    C_head, N: tl.constexpr, R: tl.constexpr, H: tl.constexpr, S: tl.constexpr, J: tl.constexpr, HAS_POS: tl.constexpr,
    L: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Derivatives to B and C, float32 [B, T, G, J, N]; of each chunk to both biases, [B, C, H, J, N, 2]; to dt of a block of pairs,
    [blocks, B, T, H], and to theta of a group, [G, B, T, R]."""
    blocks: tl.constexpr = ((N + 1) // 2 + P - 1) // P
    block, n, chunks = tl.program_id(0) % blocks, tl.program_id(0) // blocks, tl.num_programs(0) // blocks
    groups: tl.constexpr = H // S
    b, g, batch = (tl.program_id(1) // groups).to(tl.int64), tl.program_id(1) % groups, tl.num_programs(1) // groups
    t = n * L + tl.arange(0, L)
    inside = t < T
    goes_on, following = goes_on_at(pos + b * T, t, T, HAS_POS), goes_on_at(pos + b * T, t + 1, T, HAS_POS)
    r, x = block * P + tl.arange(0, P), 2 * block * P + tl.arange(0, 2 * P)
    B += b * B_batch + g * B_head
    C += b * C_batch + g * C_head
    of_four, sums = 4 * block * P + tl.arange(0, 4 * P), ()
    for _ in tl.static_range(4 * J):
        sums += (tl.zeros([L, P], tl.float32),)
    dtheta_lp = tl.zeros([L, P], tl.float32)
    for one in range(S):
        h = g * S + one
        of_token, of_bias = (b * T + t) * H + h, h * (J * N)
        keys = load_inputs(B, B_bias + of_bias, t, B_row, x, inside, 0, J, N, P)
        of_head, of_batch = dt + b * T * H + h, theta + b * T * R
        cos, sin, dt_l, theta_lp = step_cos_sin(of_head, of_batch, t, r, goes_on, H, R)
        cos_next, sin_next, _, _ = step_cos_sin(of_head, of_batch, t + 1, r, following, H, R)
        dkeys, new, dangle = (), (), tl.zeros([L, P], tl.float32)
        for _ in tl.static_range(2 * J):
            dkeys += (tl.zeros([L, P], tl.float32),)
        dqueries = ()
        for i in tl.static_range(J):
            q_a, q_b = load_inputs(C, C_bias + of_bias, t, C_row, x, inside, i, i + 1, N, P)
            dq_a, dq_b, grown = tl.zeros([L, P], tl.float32), tl.zeros([L, P], tl.float32), ()
            for j in tl.static_range(J):
                weight = tl.load(down + of_token * (J * J) + i * J + j, mask=inside, other=0.0)[:, None]
                dq_a, dq_b = dq_a + weight * keys[2 * j], dq_b + weight * keys[2 * j + 1]
                grown += (dkeys[2 * j] + weight * q_a, dkeys[2 * j + 1] + weight * q_b)
            dkeys, grown = grown, ()
            if i + 1 < J:
                # what the token before has of this one's q; and what this token has of the next one's
                of_before, of_after = tl.zeros([L, P], tl.float32), tl.zeros([L, P], tl.float32)
                next_a, next_b = load_inputs(C, C_bias + of_bias, t + 1, C_row, x, following, i, i + 1, N, P)
                next_a, next_b = next_a * cos_next - next_b * sin_next, next_a * sin_next + next_b * cos_next
                for j in tl.static_range(J):
                    if j <= i:
                        grown += (dkeys[2 * j], dkeys[2 * j + 1])
                    else:
                        of_pair = dlater + of_token * (J * (J - 1) // 2) + i * (2 * J - i - 1) // 2 + j - i - 1
                        weight = tl.load(of_pair, mask=following, other=0.0)[:, None]
                        grown += (dkeys[2 * j] + weight * next_a, dkeys[2 * j + 1] + weight * next_b)
                        weight = tl.load(of_pair - H * (J * (J - 1) // 2), mask=goes_on, other=0.0)[:, None]
                        k_a, k_b = load_inputs(B, B_bias + of_bias, t - 1, B_row, x, goes_on, j, j + 1, N, P)
                        of_before, of_after = of_before + weight * k_a, of_after + weight * k_b
                of_before, of_after = of_before * cos + of_after * sin, of_after * cos - of_before * sin
                dangle += q_a * of_after - q_b * of_before
                dq_a, dq_b, dkeys = dq_a + of_before, dq_b + of_after, grown
            dqueries += (dq_a, dq_b)
        for j in tl.static_range(J):
            dk_a, dk_b, dq_a, dq_b = dkeys[2 * j], dkeys[2 * j + 1], dqueries[2 * j], dqueries[2 * j + 1]
            four = tl.reshape(tl.permute(tl.sum(tl.join(tl.join(dk_a, dq_a), tl.join(dk_b, dq_b)), 0), (0, 2, 1)), [4 * P])
            to = biases + (((b * chunks + n) * H + h) * J + j) * (2 * N)
            tl.store(to + of_four, four, mask=of_four < 2 * N)
            new += (sums[4 * j] + dk_a, sums[4 * j + 1] + dk_b, sums[4 * j + 2] + dq_a, sums[4 * j + 3] + dq_b)
        sums = new
        if block * P < R:
            tl.store(ddt + ((block * batch + b) * T + t) * H + h, tl.sum(dangle * theta_lp, 1), mask=inside)
            dtheta_lp += dangle * dt_l[:, None]
    of_group = (b * T * groups + g) * (J * N)
    for j in tl.static_range(J):
        store_pairs(dB + of_group + j * N, t, groups * J * N, x, inside, N, P, sums[4 * j], sums[4 * j + 1])
        store_pairs(dC + of_group + j * N, t, groups * J * N, x, inside, N, P, sums[4 * j + 2], sums[4 * j + 3])
    if block * P < R:
        turning = inside[:, None] & (r < R)[None, :]
        tl.store(dtheta + ((g * batch + b) * T + t[:, None]) * R + r[None, :], dtheta_lp, mask=turning)
