"""The short causal convolution in Triton, forwards and backwards.

The one thing to know: a program owns a block of channels over a span of tokens and walks along it with the last inputs in
registers, so every input is loaded once, STEPS tokens ahead. Backwards, where registers leave room for fewer programs and so for
fewer loads on their way, they are also asked for some 16 tokens ahead; forwards that costs more than it brings. Backwards it goes
the same way and recomputes what went into the activation; what a token gives the inputs before it is added up in registers too, and
the last tokens of a span's gradients need the first ones behind it, which both spans compute. Gradients of weight and bias leave as
one partial sum per span: there are no atomics.

Shape suffixes: B batch, T time, W width, D channels, S spans. A program's block is [BD].
"""

import triton
import triton.language as tl

from baton.kernels.common.triton_prefetch import issue_loads, load_rows, prefetch, row_lines, sigmoid, unpack_bits


@triton.jit
def first_window(x, tail, pos, t0, x_row, d_in, W: tl.constexpr, D: tl.constexpr, HAS_TAIL: tl.constexpr, HAS_POS: tl.constexpr):
    """The W - 1 inputs before token t0 in fp32, oldest first; 0 where there is none or it is another document's."""
    window = ()
    for i in tl.static_range(W - 1):
        t = t0 - (W - 1) + i
        own = d_in
        if HAS_POS:
            own = d_in & (tl.load(pos + t0) >= W - 1 - i)
        value = tl.load(x + t * x_row, mask=own & (t >= 0), other=0.0).to(tl.float32)
        if HAS_TAIL:
            value += tl.load(tail + (W - 1 + t) * D, mask=own & (t < 0), other=0.0).to(tl.float32)
        window += (value,)
    return window


@triton.jit
def load_taps(weight, d, d_in, W: tl.constexpr):
    """Weights in fp32, oldest tap first."""
    taps = ()
    for i in tl.static_range(W):
        taps += (tl.load(weight + d * W + i, mask=d_in, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def convolved(bias, taps, window, x_t, W: tl.constexpr):
    total = bias
    for i in tl.static_range(W - 1):
        total += taps[i] * window[i]
    return total + taps[W - 1] * x_t


@triton.jit
def forgotten(window, fresh, HAS_POS: tl.constexpr, W: tl.constexpr):
    """The window of a token, empty where a document starts with it."""
    if not HAS_POS:
        return window
    else:
        kept = ()
        for i in tl.static_range(W - 1):
            kept += (tl.where(fresh, 0.0, window[i]),)
        return kept


@triton.jit
def moved_on(window, x_t, W: tl.constexpr):
    later = ()
    for i in tl.static_range(1, W - 1):
        later += (window[i],)
    if W > 1:
        later += (x_t,)
    return later


@triton.jit
def positions(pos, t0, end, STEPS: tl.constexpr, EVEN: tl.constexpr, HAS_POS: tl.constexpr):
    """pos of STEPS tokens from t0 on; no document starts with a token that does not exist."""
    found = ()
    for s in tl.static_range(STEPS if HAS_POS else 0):
        found += (tl.load(pos + t0 + s) if EVEN else tl.load(pos + t0 + s, mask=t0 + s < end, other=1),)
    return found


@triton.constexpr_function
def asked_ahead(steps):
    """How many tokens ahead rows are asked for: so that 16 are on their way, and before they are loaded, which is a block ahead."""
    return max(2, 16 // steps) * steps


@triton.jit
def near_first(lines, line_row, begin, last, STEPS: tl.constexpr):
    """Asks for rows that are loaded before those that the loop asks for, but not the first block's, which are loaded at once."""
    for t in tl.static_range(STEPS, asked_ahead(STEPS), STEPS):
        prefetch(lines + tl.minimum(begin + t, last).to(tl.int64) * line_row)


@triton.jit
def short_conv_forward_kernel(
    x, weight, bias, tail, pos, y, T, span, x_batch,
    D: tl.constexpr, x_row: tl.constexpr, W: tl.constexpr, HAS_TAIL: tl.constexpr, HAS_POS: tl.constexpr, SILU: tl.constexpr,
    EVEN: tl.constexpr, FULL: tl.constexpr, BD: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """y [B, T, D]."""
    d, b = tl.program_id(0) * BD + tl.arange(0, BD), tl.program_id(1).to(tl.int64)
    d_in = d < D
    x += b * x_batch + d
    y += b * T * D + d
    tail += b * (W - 1) * D + d
    pos += b * T
    begin, end = tl.program_id(2) * span, tl.minimum((tl.program_id(2) + 1) * span, T)
    taps, shift = load_taps(weight, d, d_in, W), tl.load(bias + d, mask=d_in, other=0.0).to(tl.float32)
    window = first_window(x, tail, pos, b * 0 + begin, x_row, d_in, W, D, HAS_TAIL, HAS_POS)
    xs = load_rows(x, b * 0 + begin, x_row, d_in, end, STEPS, FULL, EVEN)
    at = positions(pos, b * 0 + begin, end, STEPS, EVEN, HAS_POS)
    for t0 in range(begin, end, STEPS):
        t1 = b * 0 + (tl.minimum(t0 + STEPS, end - STEPS) if EVEN else t0 + STEPS)
        next_xs = load_rows(x, t1, x_row, d_in, end, STEPS, FULL, EVEN)
        next_at = positions(pos, t1, end, STEPS, EVEN, HAS_POS)
        issue_loads()
        outputs = ()
        for s in tl.static_range(STEPS):
            fresh = at[s] == 0 if HAS_POS else False
            window, x_t = forgotten(window, fresh, HAS_POS, W), unpack_bits(xs[s], x)
            total = convolved(shift, taps, window, x_t, W)
            outputs += (total * sigmoid(total) if SILU else total,)
            window = moved_on(window, x_t, W)
        for s in tl.static_range(STEPS):
            row = y + (b * 0 + t0 + s) * D
            tl.store(row, outputs[s].to(y.dtype.element_ty), mask=d_in & (True if EVEN else t0 + s < end))
        xs, at = next_xs, next_at


@triton.jit
def block_backward(
    xs, dys, at, t0, carried, taps, shift, x, dy, dtail_out, dx, dtail, begin, end, d_in, T,
    D: tl.constexpr, W: tl.constexpr, HAS_TAIL: tl.constexpr, HAS_POS: tl.constexpr, SILU: tl.constexpr, TAKEN: tl.constexpr,
    STEPS: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Gradients of STEPS tokens from t0 on; those of inputs that no later token reaches are stored. EDGE: some of the tokens may be
    behind the span, which is nobody's but the next span's, or behind the last one.

    carried, given and returned: the W - 1 inputs before the token at hand; their gradients, not complete yet; gradients of each tap
    and of the bias.
    """
    window, waiting, dtaps, dshift = carried
    done = ()
    for s in tl.static_range(STEPS):
        window, x_t = forgotten(window, at[s] == 0 if HAS_POS else False, HAS_POS, W), unpack_bits(xs[s], x)
        g = unpack_bits(dys[s], dy)
        if SILU:
            total = convolved(shift, taps, window, x_t, W)
            open_t = sigmoid(total)
            g *= open_t * (1.0 + total * (1.0 - open_t))
        own = g
        if EDGE:
            g = tl.where(t0 + s < T, g, 0.0)
            own = tl.where(t0 + s < end, g, 0.0)
        dshift += own
        grown, added = (), ()
        for i in tl.static_range(W - 1):
            grown += (dtaps[i] + own * window[i],)
            to_past = tl.where(at[s] >= W - 1 - i, g, 0.0) if HAS_POS else g
            added += (waiting[i] + taps[i] * to_past,)
        grown += (dtaps[W - 1] + own * x_t,)
        dtaps = grown
        added += (taps[W - 1] * g,)
        done += (added[0],)
        waiting = ()
        for i in tl.static_range(1, W):
            waiting += (added[i],)
        window = moved_on(window, x_t, W)
    for s in tl.static_range(STEPS):
        # the input that no later token reaches; before 0 they are the tail's
        t = t0 + s - (W - 1)
        total = done[s]
        inside = d_in & (t >= begin)
        if EDGE and TAKEN:
            last = T - (W - 1)
            total += tl.load(dtail_out + (t - last) * D, mask=d_in & (t >= last) & (t < T), other=0.0).to(tl.float32)
        if EDGE:
            inside &= t < end
        tl.store(dx + t * D, total.to(dx.dtype.element_ty), mask=inside)
        if HAS_TAIL:
            tl.store(dtail + (t + W - 1) * D, total.to(dtail.dtype.element_ty), mask=d_in & (t < 0) & (begin == 0))
    return window, waiting, dtaps, dshift


@triton.jit
def short_conv_backward_kernel(
    x, weight, bias, tail, pos, dy, dtail_out, dx, dtail, sums, T, span, x_batch, dy_batch,
    D: tl.constexpr, x_row: tl.constexpr, dy_row: tl.constexpr, W: tl.constexpr, HAS_TAIL: tl.constexpr, HAS_POS: tl.constexpr,
    SILU: tl.constexpr, TAKEN: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, BD: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """dx [B, T, D], dtail [B, W - 1, D], and of each span the gradients of taps and bias, [B, S, W + 1, D]. dtail_out is the
    cotangent of the last W - 1 inputs of tail and piece, where they were TAKEN. EVEN: spans are whole blocks of tokens. STEPS is at
    least W - 1."""
    d, b = tl.program_id(0) * BD + tl.arange(0, BD), tl.program_id(1).to(tl.int64)
    d_in = d < D
    begin, end = tl.program_id(2) * span, tl.minimum((tl.program_id(2) + 1) * span, T)
    tensors = (x + b * x_batch, dy + b * dy_batch)
    lines, line_row = row_lines(tensors, (x_row, dy_row), tl.program_id(0) * BD, T - begin, D, BD, STEPS)
    last = tl.maximum(tl.minimum(end, T - STEPS), begin)
    near_first(lines, line_row, begin, last, STEPS)
    x += b * x_batch + d
    dy += b * dy_batch + d
    dx += b * T * D + d
    tail += b * (W - 1) * D + d
    dtail += b * (W - 1) * D + d
    dtail_out += b * (W - 1) * D + d
    pos += b * T
    taps, shift = load_taps(weight, d, d_in, W), tl.load(bias + d, mask=d_in, other=0.0).to(tl.float32)
    nothing = tl.zeros([BD], tl.float32)
    waiting, dtaps = (), (nothing,)
    for _ in tl.static_range(W - 1):
        waiting += (nothing,)
        dtaps += (nothing,)
    window = first_window(x, tail, pos, b * 0 + begin, x_row, d_in, W, D, HAS_TAIL, HAS_POS)
    xs = load_rows(x, b * 0 + begin, x_row, d_in, T, STEPS, FULL, EVEN)
    dys = load_rows(dy, b * 0 + begin, dy_row, d_in, T, STEPS, FULL, EVEN)
    at = positions(pos, b * 0 + begin, T, STEPS, EVEN, HAS_POS)
    dshift = nothing
    for t0 in range(begin, end, STEPS):
        # behind the last token there may be no memory: the last ones again, of which nothing is used
        t1 = b * 0 + (tl.minimum(t0 + STEPS, T - STEPS) if EVEN else t0 + STEPS)
        prefetch(lines + (b * 0 + tl.minimum(t0 + asked_ahead(STEPS), last)) * line_row)
        next_xs = load_rows(x, t1, x_row, d_in, T, STEPS, FULL, EVEN)
        next_dys = load_rows(dy, t1, dy_row, d_in, T, STEPS, FULL, EVEN)
        next_at = positions(pos, t1, T, STEPS, EVEN, HAS_POS)
        issue_loads()
        window, waiting, dtaps, dshift = block_backward(
            xs, dys, at, b * 0 + t0, (window, waiting, dtaps, dshift), taps, shift, x, dy, dtail_out, dx, dtail, begin, end, d_in,
            T, D, W, HAS_TAIL, HAS_POS, SILU, TAKEN, STEPS, not EVEN,
        )  # fmt: skip
        xs, dys, at = next_xs, next_dys, next_at
    # the tokens behind the span that its last inputs reach
    behind = b * 0 + begin + tl.cdiv(end - begin, STEPS) * STEPS
    window, waiting, dtaps, dshift = block_backward(
        xs, dys, at, behind, (window, waiting, dtaps, dshift), taps, shift, x, dy, dtail_out, dx, dtail, begin, end, d_in, T,
        D, W, HAS_TAIL, HAS_POS, SILU, TAKEN, STEPS, True,
    )  # fmt: skip
    sums += (b * tl.num_programs(2) + tl.program_id(2)) * (W + 1) * D + d
    for i in tl.static_range(W):
        tl.store(sums + i * D, dtaps[i], mask=d_in)
    tl.store(sums + W * D, dshift, mask=d_in)
