"""The short causal convolution in Triton, forwards and backwards.

The one thing to know: a program owns a block of channels over a span of tokens and walks along it with the last inputs in
registers, so every input is loaded once. Backwards it goes the same way and recomputes what went into the activation; what a token
gives the inputs before it is added up in registers too, and the last tokens of a span's gradients need the first ones behind it,
which both spans compute. Gradients of weight and bias leave as one partial sum per span: there are no atomics.

Shape suffixes: B batch, T time, W width, D channels, S spans. A program's block is [BD].
"""

import triton
import triton.language as tl

from baton.kernels.rows import load_rows, loads_begun, released, sigmoid


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


@triton.jit
def conv_kernel(
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
        loads_begun()
        outputs = ()
        for s in tl.static_range(STEPS):
            fresh = at[s] == 0 if HAS_POS else False
            window, x_t = forgotten(window, fresh, HAS_POS, W), released(xs[s], x)
            total = convolved(shift, taps, window, x_t, W)
            outputs += (total * sigmoid(total) if SILU else total,)
            window = moved_on(window, x_t, W)
        for s in tl.static_range(STEPS):
            row = y + (b * 0 + t0 + s) * D
            tl.store(row, outputs[s].to(y.dtype.element_ty), mask=d_in & (True if EVEN else t0 + s < end))
        xs, at = next_xs, next_at


@triton.jit
def conv_backward_kernel(
    x, weight, bias, tail, pos, dy, dtail_out, dx, dtail, dweight, dbias, T, span, x_batch, dy_batch,
    D: tl.constexpr, x_row: tl.constexpr, dy_row: tl.constexpr, W: tl.constexpr, HAS_TAIL: tl.constexpr, HAS_POS: tl.constexpr,
    SILU: tl.constexpr, FULL: tl.constexpr, BD: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """dx [B, T, D], dtail [B, W - 1, D], and of each span dweight [B, S, W, D] and dbias [B, S, D]. dtail_out is the cotangent of
    the last W - 1 inputs of tail and piece."""
    d, b = tl.program_id(0) * BD + tl.arange(0, BD), tl.program_id(1).to(tl.int64)
    d_in = d < D
    x += b * x_batch + d
    dy += b * dy_batch + d
    dx += b * T * D + d
    tail += b * (W - 1) * D + d
    dtail += b * (W - 1) * D + d
    dtail_out += b * (W - 1) * D + d
    pos += b * T
    begin, end = tl.program_id(2) * span, tl.minimum((tl.program_id(2) + 1) * span, T)
    # tokens behind the span whose outputs its last inputs reach
    behind = tl.minimum(end + W - 1, T)
    taps, shift = load_taps(weight, d, d_in, W), tl.load(bias + d, mask=d_in, other=0.0).to(tl.float32)
    window = first_window(x, tail, pos, b * 0 + begin, x_row, d_in, W, D, HAS_TAIL, HAS_POS)
    # gradients of the W - 1 inputs before the token at hand, not complete yet; of each tap, and of the bias
    dshift = tl.zeros([BD], tl.float32)
    waiting, dtaps = (), (dshift,)
    for _ in tl.static_range(W - 1):
        waiting += (dshift,)
        dtaps += (dshift,)
    xs = load_rows(x, b * 0 + begin, x_row, d_in, behind, STEPS, FULL, False)
    dys = load_rows(dy, b * 0 + begin, dy_row, d_in, behind, STEPS, FULL, False)
    at = positions(pos, b * 0 + begin, behind, STEPS, False, HAS_POS)
    for t0 in range(begin, end + W - 1, STEPS):
        t1 = b * 0 + t0 + STEPS
        next_xs = load_rows(x, t1, x_row, d_in, behind, STEPS, FULL, False)
        next_dys = load_rows(dy, t1, dy_row, d_in, behind, STEPS, FULL, False)
        next_at = positions(pos, t1, behind, STEPS, False, HAS_POS)
        loads_begun()
        done = ()
        for s in tl.static_range(STEPS):
            t = t0 + s
            window, x_t = forgotten(window, at[s] == 0 if HAS_POS else False, HAS_POS, W), released(xs[s], x)
            g = released(dys[s], dy)
            if SILU:
                total = convolved(shift, taps, window, x_t, W)
                open_t = sigmoid(total)
                g *= open_t * (1.0 + total * (1.0 - open_t))
            own = tl.where(t < end, g, 0.0)
            dshift += own
            grown, added = (), ()
            for i in tl.static_range(W - 1):
                grown += (dtaps[i] + own * window[i],)
                to_past = taps[i] * g
                added += (waiting[i] + (tl.where(at[s] >= W - 1 - i, to_past, 0.0) if HAS_POS else to_past),)
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
            total = done[s] + tl.load(
                dtail_out + (b * 0 + t - (T - (W - 1))) * D, mask=d_in & (t >= T - (W - 1)) & (t < T), other=0.0
            ).to(tl.float32)
            tl.store(dx + (b * 0 + t) * D, total.to(dx.dtype.element_ty), mask=d_in & (t >= begin) & (t < end))
            if HAS_TAIL:
                row = dtail + (b * 0 + t + W - 1) * D
                tl.store(row, total.to(dtail.dtype.element_ty), mask=d_in & (t < 0) & (begin == 0))
        xs, dys, at = next_xs, next_dys, next_at
    at_span = b * tl.num_programs(2) + tl.program_id(2)
    for i in tl.static_range(W):
        tl.store(dweight + (at_span * W + i) * D + d, dtaps[i], mask=d_in)
    tl.store(dbias + at_span * D + d, dshift, mask=d_in)
