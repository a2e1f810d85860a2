"""The gradient of `triton_chunk_forward`, in Triton: chunk by chunk from the end, see `chunk_kernel_utils`, and token by token
where that went so.

The one thing to know: the walk is made again from the slots before the chunk, and then backwards, again without a sum over lanes.
With r = p q what reads, Z the slots over p, and P, W, A of all tokens, cotangents barred, and R that of the last Z:

    rbar = Z dy = s dy + W tril(dy h^T)^T,   pbar = q rbar + later ones,   wbar = r tril(dy h^T) + R h^T + A_later h_later.h
    fbar = pbar p / |u| - wbar w / f,   X = |u|^-3 pbar p f,   dmu = fbar - mu X
    dw = wbar / (p f) - a fbar - w |h - s a|^2 X,   da = w^2 a X - w fbar (and -gamma dw, in encoding),   A = p da
    pbar of p before = pbar f / |u| - wbar w / p + da a / p,   d|h|^2 = -w^2 X / 2
    dh = tril(r^T W)^T dy + W R + A s + (E + E^T) h + 2 d|h|^2 h with E = tril(A^T W, -1),   ds = R + r dy + A h

A slot's length does not matter behind the chunk, nor do p's there. Only R and A wait for the chunk behind: one kernel goes from
chunk to chunk with them, another does before it and a third behind it, for all chunks at once, what else there is to do.

Shape suffixes: see `triton_forward`.
"""

import triton
import triton.language as tl

from baton.kernels.common.triton_prefetch import prefetch
from baton.kernels.lattice.chunk_kernel_utils import (
    exact,
    leave,
    line_of,
    mixed,
    numbers_at,
    product,
    sectors_of,
    segments_of,
    tile,
    walk,
)
from baton.kernels.lattice.register_tiles import places, read, write
from baton.kernels.lattice.triton_backward import border_back
from baton.kernels.lattice.triton_forward import ENC

ROWS = tl.constexpr(7)
"""Of each chunk and program in memory, [ROWS, C, BM]: k, then A; h.s, then r; p; w; h's product with the slot before it over p,
then what dmu is summed of; wbar, then dgamma's; pbar, then 2 d|h|^2's."""


@triton.jit
def rows_of(rows, first, C: tl.constexpr, BM: tl.constexpr, N: tl.constexpr):
    """Of N tokens from the first on: what `walk_back` reads of each in rows."""
    found = ()
    for t in tl.static_range(N):
        at = rows + (first + t) * BM
        found += (tl.load(at), tl.load(at + 4 * C * BM), tl.load(at + 3 * C * BM))
        # p before the token
        if t > 0:
            found += (tl.load(at + (2 * C - 1) * BM),)
        else:
            found += (tl.where(first > 0, tl.load(at + (2 * C - tl.minimum(first, 1)) * BM), 1.0),)
        found += (tl.load(at + 6 * C * BM),)
    return found


@triton.jit
def ask_for_rows(rows, next_rows, first, C: tl.constexpr, BM: tl.constexpr, N: tl.constexpr):
    """Has near what `rows_of` reads of the N tokens that are next, behind those from `first` on: of all of a chunk at once, for all
    programs, half would have left the cache again. next_rows: of the chunk before."""
    EACH: tl.constexpr = (N * BM + 31) // 32
    line = tl.arange(0, 8 * EACH)
    number = tl.minimum(line // EACH, 4)
    row = number + (number > 0).to(tl.int32) + (number > 3).to(tl.int32)
    at = row * (C * BM) + tl.minimum(line % EACH * 32, N * BM - 1)
    if first > 0:
        prefetch(rows + (first - N) * BM + at)
    else:
        prefetch(next_rows + (C - N) * BM + at)


@triton.jit
def walk_back(
    numbers, next_numbers, rows, next_rows, own, dk, t0, T, m_in, dk_row, VARIANT: tl.constexpr, FORGET: tl.constexpr,
    HAS_POS: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Stores dk, and leaves of each token A in the row of k, and what sums over slots make dgamma, 2 d|h|^2 and dmu of in those of
    wbar, pbar and h.s; N tokens at a time. rows: see `ROWS`, wbar and pbar without what the walk itself adds; next_numbers,
    next_rows: of the chunk before. own: memory for more than C + 3 numbers, which nobody reads."""
    lane, begin = tl.arange(0, BM), rows
    rows += lane
    carry = tl.zeros([BM], tl.float32)
    for step in range(C // N):
        first = C - N - step * N
        ask_for_rows(begin, next_rows, first, C, BM, N)
        numbers_of_next, first_of_next = numbers, first - N
        if first == 0:
            numbers_of_next, first_of_next = next_numbers, C - N
        sectors = sectors_of(numbers_of_next, first_of_next, C, N)
        wbars = ()
        for s in tl.static_range(N):
            wbars += (tl.load(rows + (5 * C + first + s) * BM),)
        for g in range(step):
            for j in tl.static_range(N):
                later = C - N - g * N + j
                A, alike = tl.load(rows + later * BM), numbers_at(numbers + later * C + first, N)
                sums = ()
                for s in tl.static_range(N):
                    sums += (wbars[s] + alike[s] * A,)
                wbars = sums
        found = rows_of(rows, first, C, BM, N)
        gammas, mus = numbers_at(numbers + C * C + first, N), numbers_at(numbers + (C + 1) * C + first, N)
        dks, cotangents, dgamma_group, square_group, dmu_group = (), (), (), (), ()
        for s in tl.static_range(N - 1, -1, -1):
            k_t, reached, w, before, pbar = found[5 * s : 5 * s + 5]
            gamma_t, mu_t, alike = gammas[s], tl.abs(mus[s]), numbers_at(numbers + (first + s) * C + first, N)
            square, wbar = alike[s], wbars[s]
            pbar += carry
            if HAS_POS:
                before = tl.where(mus[s] < 0.0, 1.0, before)
            a = before * reached
            c, weight = mixed(k_t, gamma_t, a, VARIANT)
            f = mu_t - weight * a
            across = tl.maximum(square - a * a, 0.0)
            over = tl.rsqrt(mu_t * mu_t + weight * weight * across)
            quotient = 1.0 / (before * f)
            back, of_length = wbar * w * quotient, pbar * before
            fbar = of_length * over - back * before
            X = over * over * over * (of_length * f)
            wX = weight * X
            dw = wbar * quotient - a * fbar - across * wX
            da = weight * (a * wX - fbar)
            dk_t = gamma_t * dw
            if VARIANT == ENC:
                da -= dk_t
            A = before * da
            carry = pbar * (f * over) - back * f + da * reached
            if HAS_POS:
                carry = tl.where(mus[s] < 0.0, 0.0, carry)
            earlier = ()
            for e in tl.static_range(N):
                earlier += (wbars[e] + alike[e] * A if e < s else wbars[e],)
            wbars = earlier
            # the last token's first
            dks, cotangents = (dk_t,) + dks, (A,) + cotangents
            dgamma_group, square_group = (dw * c,) + dgamma_group, (-weight * wX,) + square_group
            if FORGET:
                dmu_group = (fbar - mu_t * X,) + dmu_group
        for s in tl.static_range(N):
            t = t0 + first + s
            tl.store(dk + tl.cast(t, tl.int64) * dk_row + lane, dks[s].to(dk.dtype.element_ty), mask=m_in & (t < T))
            at = rows + (first + s) * BM
            tl.store(at, cotangents[s])
            tl.store(at + 5 * C * BM, dgamma_group[s])
            tl.store(at + 6 * C * BM, square_group[s])
            if FORGET:
                tl.store(at + 4 * C * BM, dmu_group[s])
        tl.debug_barrier()
        tl.store(own + tl.arange(0, sectors.shape[0]), sectors)


@triton.jit
def lattice_backward_pre_kernel(
    q, k, v, numbers, loaded, borders, unsafe, rows, dy, dq, T, q_batch, q_row, q_head, k_batch, k_row, k_head,
    v_batch, v_row, v_head, dy_batch, dy_row, dy_head,
    D: tl.constexpr, M: tl.constexpr, H: tl.constexpr, VARIANT: tl.constexpr, HAS_POS: tl.constexpr, EVEN: tl.constexpr,
    BORDER: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Of chunk n of sequence and head bh and part p of the slots, if it did not go token by token: the walk, dq, and all of wbar
    and pbar that does not wait for the chunk behind; rows [B H, P, chunks, ROWS, BORDER, BM]."""
    n, bh, p = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = (bh // H).to(tl.int64), bh % H
    chunks, P = tl.num_programs(0), tl.num_programs(2)
    LINES: tl.constexpr = (BORDER * (BORDER + 3) + 31) // 32
    WHOLE: tl.constexpr = D == BD and M % BM == 0
    ALL: tl.constexpr = WHOLE and EVEN
    LOW: tl.constexpr = v.dtype.element_ty == tl.bfloat16 and dy.dtype.element_ty == tl.bfloat16
    d, c, lane = tl.arange(0, BD), tl.arange(0, BORDER), tl.arange(0, BM)
    m, t = p * BM + lane, n * BORDER + c
    here, exists = t.to(tl.int64), t < T
    of_m, of_d = (m < M)[:, None] & exists[None, :], exists[:, None] & (d < D)[None, :]
    of_slots, slots_in = m[:, None] * D + d[None, :], (m < M)[:, None] & (d < D)[None, :]
    at = bh.to(tl.int64) * chunks + n
    numbers += at * (BORDER * (BORDER + 3))
    rows += ((bh.to(tl.int64) * P + p) * chunks + n) * (ROWS * BORDER * BM)
    at_rows = rows + c[None, :] * BM + lane[:, None]
    prefetch(line_of(numbers, tl.arange(0, triton.next_power_of_2(LINES)), BORDER * (BORDER + 3)))
    if tl.load(unsafe + (p * tl.num_programs(1) + bh) * chunks + n) == 0:
        h_t = tile(v + b * v_batch + h * v_head + here[:, None] * v_row + d[None, :], of_d, ALL)
        k_t = tile(k + b * k_batch + h * k_head + here[None, :] * k_row + m[:, None], of_m, ALL)
        dy_t = tile(dy + b * dy_batch + h * dy_head + here[:, None] * dy_row + d[None, :], of_d, ALL)
        h_T, dy_T = tl.trans(h_t), tl.trans(dy_t)
        S = tile(borders + at * (D * M) + of_slots, slots_in, WHOLE)
        products, rbar = exact(S, h_T), exact(S, dy_T)
        segment, resets = segments_of(numbers, HAS_POS, BORDER)
        seen = c[:, None] >= c[None, :]
        if HAS_POS:
            seen &= segment[:, None] == segment[None, :]
            if resets > 0.0:
                begun, L = (segment > 0.0)[None, :], tile(loaded + h * (D * M) + of_slots, slots_in, WHOLE)
                products, rbar = tl.where(begun, exact(L, h_T), products), tl.where(begun, exact(L, dy_T), rbar)
        tl.store(at_rows, k_t.to(tl.float32))
        tl.store(at_rows + BORDER * BM, products)
        sectors = sectors_of(numbers, 0, BORDER, BORDER)
        tl.debug_barrier()
        # where wbar will be
        tl.store(rows + 5 * BORDER * BM + tl.arange(0, sectors.shape[0]), sectors)
        # two of it, see `chunk_backward_kernel`
        if resets > 0.0:
            walk(numbers, rows, rows + 2 * BORDER * BM, VARIANT, HAS_POS, False, True, BORDER, BM, GROUP)
        else:
            walk(numbers, rows, rows + 2 * BORDER * BM, VARIANT, False, False, True, BORDER, BM, GROUP)
        p_t, w_t = tl.load(at_rows + 2 * BORDER * BM), tl.load(at_rows + 3 * BORDER * BM)
        q_t = tile(q + b * q_batch + h * q_head + here[None, :] * q_row + m[:, None], of_m, ALL).to(tl.float32)
        across = tl.where(seen, product(dy_t, h_T, LOW), 0.0)
        rbar += exact(w_t, tl.trans(across))
        leave(dq + ((b * T + here) * H + h)[None, :] * M + m[:, None], p_t * rbar, of_m, ALL)
        read_t = q_t * p_t
        tl.store(at_rows + BORDER * BM, read_t)
        tl.store(at_rows + 5 * BORDER * BM, exact(read_t, across))
        tl.store(at_rows + 6 * BORDER * BM, q_t * rbar)


@triton.jit
def lattice_chunk_backward_kernel(
    q, k, v, gamma, mu, pos, numbers, loaded, borders, last, unsafe, rows, scales, dy, arriving, states, dlasts, dq, dk, dv, dgamma,
    dmu, dfirst, dloaded, T,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, gamma_batch, gamma_row, gamma_head,
    mu_batch, mu_row, mu_head, dy_batch, dy_row, dy_head,
    D: tl.constexpr, M: tl.constexpr, H: tl.constexpr, VARIANT: tl.constexpr, FORGET: tl.constexpr, HAS_POS: tl.constexpr,
    EVEN: tl.constexpr, STEPS: tl.constexpr, BORDER: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, PARTS: tl.constexpr,
    WARPS: tl.constexpr, OWN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """dk, what of `rows` waits for the chunk behind, and R of each chunk, dlasts [B H, chunks, M, D]; all gradients of chunks that
    went token by token, and of slots as `triton_backward.lattice_backward_kernel`. last: the slots behind the last chunk. states:
    memory of the programs' own, [programs, OWN]. GROUP: tokens whose rows are read together."""
    p, bh = tl.program_id(0), tl.program_id(1)
    b, h = (bh // H).to(tl.int64), bh % H
    batch = tl.num_programs(1) // H
    m, part, inside, d_in, m_in = places(p, D, M, BD, BM, PARTS)
    WHOLE: tl.constexpr = D == BD and M % BM == 0
    ALL: tl.constexpr = WHOLE and EVEN
    BP: tl.constexpr = BD // PARTS
    d, c, lane = tl.arange(0, BD), tl.arange(0, BORDER), tl.arange(0, BM)
    d_there = d < D
    slots_in = m_in[:, None] & d_there[None, :]
    of_slots, of_parts = m[:, None] * D + d[None, :], m[:, None] * D + part[None, :]
    of_own, of_own_parts = lane[:, None] * BD + d[None, :], lane[:, None] * BD + part[None, :]
    q += b * q_batch + h * q_head
    k += b * k_batch + h * k_head
    v += b * v_batch + h * v_head
    dy += b * dy_batch + h * dy_head
    gamma += b * gamma_batch + h * gamma_head
    mu += b * mu_batch + h * mu_head
    pos += b * T
    of_token = b * T * H + h
    of_part = (p * batch + b) * T * H + h
    head = bh.to(tl.int64) * (D * M)
    chunks = tl.cdiv(T, BORDER)
    N: tl.constexpr = BORDER * (BORDER + 3)
    ROW: tl.constexpr = BORDER * BM // 32
    line = tl.arange(0, triton.next_power_of_2(2 * ROW + (N + 31) // 32))
    numbers += bh.to(tl.int64) * chunks * N
    borders += head * chunks
    dlasts += head * chunks
    scales += bh.to(tl.int64) * chunks * M
    unsafe += (p * tl.num_programs(1) + bh) * chunks
    rows += (bh.to(tl.int64) * tl.num_programs(0) + p) * chunks * (ROWS * BORDER * BM)
    initial = loaded + h * (D * M)
    dloaded += head
    own_slots = states + (bh.to(tl.int64) * tl.num_programs(0) + p) * OWN
    own_tokens = own_slots + BM * BD
    dS = tile(arriving + head + of_slots, slots_in, WHOLE)
    behind = last + head
    # where each element of each tile lies would otherwise be found once, and take the registers
    for step in tl.range(0, chunks, disable_licm=True):
        n = chunks - 1 - step
        begins = borders + tl.cast(n, tl.int64) * (D * M)
        of_chunk = rows + tl.cast(n, tl.int64) * (ROWS * BORDER * BM)
        # what the next chunk reads, and behind this one's walk r; what its walk reads `walk_back` asks for
        before = tl.cast(tl.maximum(n - 1, 0), tl.int64)
        next_rows, next_numbers = rows + before * (ROWS * BORDER * BM), numbers + before * N
        at_line = tl.where(line < ROW, next_rows + 5 * BORDER * BM, of_chunk) + tl.minimum(line, 2 * ROW - 1) * 32
        prefetch(tl.where(line < 2 * ROW, at_line, line_of(next_numbers, tl.maximum(line - 2 * ROW, 0), N)))
        if tl.load(unsafe + n) == 0:
            at_rows = of_chunk + c[None, :] * BM + lane[:, None]
            t = n * BORDER + c
            here, exists = t.to(tl.int64), t < T
            of_d = exists[:, None] & d_there[None, :]
            h_t = tile(v + here[:, None] * v_row + d[None, :], of_d, ALL)
            dy_t = tile(dy + here[:, None] * dy_row + d[None, :], of_d, ALL)
            U = tile(behind + of_slots, slots_in, WHOLE)
            scale = tl.load(scales + tl.cast(n, tl.int64) * M + m, mask=m_in, other=0.0)
            wbar = tl.load(at_rows + 5 * BORDER * BM)
            R = (dS - U * tl.sum(U * dS, 1)[:, None]) * scale[:, None]
            of_behind = exact(R, tl.trans(h_t))
            leave(dlasts + tl.cast(n, tl.int64) * (D * M) + of_slots, R, slots_in, WHOLE)
            segment, resets = segments_of(numbers + tl.cast(n, tl.int64) * N, HAS_POS, BORDER)
            if resets > 0.0:
                of_behind = tl.where((segment == resets)[None, :], of_behind, 0.0)
            tl.store(at_rows + 5 * BORDER * BM, wbar + of_behind)
            tl.debug_barrier()
            # two of it: where no document starts, as in most chunks, its loads do not wait for what makes one start
            to_dk, of_numbers = dk + of_token * M + p * BM, numbers + tl.cast(n, tl.int64) * N
            if resets > 0.0:
                walk_back(
                    of_numbers, next_numbers, of_chunk, next_rows, own_tokens, to_dk, n * BORDER, T, m_in, H * M, VARIANT,
                    FORGET, HAS_POS, BORDER, BM, GROUP,
                )  # fmt: skip
            else:
                walk_back(
                    of_numbers, next_numbers, of_chunk, next_rows, own_tokens, to_dk, n * BORDER, T, m_in, H * M, VARIANT,
                    FORGET, False, BORDER, BM, GROUP,
                )  # fmt: skip
            A, read_t = tl.load(at_rows), tl.load(at_rows + BORDER * BM)
            if resets > 0.0:
                begun = (segment > 0.0)[None, :]
                dS = exact(tl.where(begun, 0.0, read_t), dy_t) + exact(tl.where(begun, 0.0, A), h_t)
                # rare, so the sum waits in memory
                dL = R + exact(tl.where(begun, read_t, 0.0), dy_t) + exact(tl.where(begun, A, 0.0), h_t)
                dL += tl.load(dloaded + of_slots, mask=slots_in, other=0.0)
                tl.store(dloaded + of_slots, dL, mask=slots_in)
            else:
                dS = R + exact(read_t, dy_t) + exact(A, h_t)
        else:
            tl.store(own_slots + of_own, dS)
            tl.debug_barrier()
            parts = read(own_slots, of_own_parts, BP, inside, PARTS, True)
            parts = border_back(
                parts, n * BORDER, begins, own_tokens, q + m, k + m, v, gamma, mu, pos, dy, initial, dloaded, dq, dk, dv, dgamma,
                dmu, of_parts, inside, m, part, m_in, d_in, of_token, of_part, T, (q_row, k_row, v_row, gamma_row, mu_row), v_row,
                dy_row, D, M, H, VARIANT, FORGET, True, HAS_POS, EVEN, STEPS, BORDER, BD, BM, PARTS, WARPS, WHOLE,
            )  # fmt: skip
            tl.debug_barrier()
            write(own_slots, of_own_parts, BP, parts, inside, PARTS, True)
            tl.debug_barrier()
            dS = tl.load(own_slots + of_own)
        behind = begins
    leave(dfirst + head + of_slots, dS, slots_in, WHOLE)


@triton.jit
def lattice_backward_post_kernel(
    v, numbers, loaded, borders, unsafe, rows, dlasts, dy, dv, dgamma, dmu, T, v_batch, v_row, v_head, dy_batch, dy_row, dy_head,
    D: tl.constexpr, M: tl.constexpr, H: tl.constexpr, FORGET: tl.constexpr, HAS_POS: tl.constexpr, EVEN: tl.constexpr,
    BORDER: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """dv, dgamma and dmu, as `triton_backward.lattice_backward_kernel`, of chunk n of sequence and head bh and part p of the slots,
    unless it went token by token."""
    n, bh, p = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = (bh // H).to(tl.int64), bh % H
    batch, chunks, P = tl.num_programs(1) // H, tl.num_programs(0), tl.num_programs(2)
    WHOLE: tl.constexpr = D == BD and M % BM == 0
    ALL: tl.constexpr = WHOLE and EVEN
    LOW: tl.constexpr = v.dtype.element_ty == tl.bfloat16
    d, c, lane = tl.arange(0, BD), tl.arange(0, BORDER), tl.arange(0, BM)
    m, t = p * BM + lane, n * BORDER + c
    here, exists = t.to(tl.int64), t < T
    of_d = exists[:, None] & (d < D)[None, :]
    of_slots, slots_in = m[:, None] * D + d[None, :], (m < M)[:, None] & (d < D)[None, :]
    at = bh.to(tl.int64) * chunks + n
    rows += ((bh.to(tl.int64) * P + p) * chunks + n) * (ROWS * BORDER * BM)
    at_rows, at_sums = rows + c[None, :] * BM + lane[:, None], rows + c[:, None] * BM + lane[None, :]
    if tl.load(unsafe + (p * tl.num_programs(1) + bh) * chunks + n) == 0:
        to_sums = ((p * batch + b) * T + here) * H + h
        leave(dgamma + to_sums, tl.sum(tl.load(at_sums + 5 * BORDER * BM), 1), exists, EVEN)
        of_length = tl.sum(tl.load(at_sums + 6 * BORDER * BM), 1)
        if FORGET:
            leave(dmu + to_sums, tl.sum(tl.load(at_sums + 4 * BORDER * BM), 1), exists, EVEN)
        A, read_t, w_t = tl.load(at_rows), tl.load(at_rows + BORDER * BM), tl.load(at_rows + 3 * BORDER * BM)
        h_t = tile(v + b * v_batch + h * v_head + here[:, None] * v_row + d[None, :], of_d, ALL)
        dy_t = tile(dy + b * dy_batch + h * dy_head + here[:, None] * dy_row + d[None, :], of_d, ALL)
        segment, resets = segments_of(numbers + at * (BORDER * (BORDER + 3)), HAS_POS, BORDER)
        seen, w_last = c[:, None] >= c[None, :], w_t
        if HAS_POS:
            seen &= segment[:, None] == segment[None, :]
            w_last = tl.where((segment == resets)[None, :], w_t, 0.0)
        among = tl.where(seen, product(tl.trans(read_t), w_t, LOW), 0.0)
        pairs = tl.where(seen & (c[:, None] > c[None, :]), product(tl.trans(A), w_t, LOW), 0.0)
        pairs += tl.trans(pairs)
        pairs += tl.where(c[:, None] == c[None, :], of_length[:, None], 0.0)
        dh = product(tl.trans(among), dy_t, LOW) + product(pairs, h_t, LOW)
        dh += product(tl.trans(w_last), tile(dlasts + at * (D * M) + of_slots, slots_in, WHOLE), LOW)
        S = tile(borders + at * (D * M) + of_slots, slots_in, WHOLE)
        if HAS_POS:
            begun = (segment > 0.0)[None, :]
            dh += product(tl.trans(tl.where(begun, 0.0, A)), S, LOW)
            if resets > 0.0:
                L = tile(loaded + h * (D * M) + of_slots, slots_in, WHOLE)
                dh += product(tl.trans(tl.where(begun, A, 0.0)), L, LOW)
        else:
            dh += product(tl.trans(A), S, LOW)
        leave(dv + (((p * batch + b) * T + here) * H + h)[:, None] * D + d[None, :], dh, of_d, ALL)
