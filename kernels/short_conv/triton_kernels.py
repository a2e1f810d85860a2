"""Triton kernels of the short causal convolution, forward and backward.

Sizes: W width (number of taps), DIM channels, BLOCK_D of a program, BLOCK_T tokens loaded together.

A program owns a block of channels over a span of tokens. It loops over the span with the last W - 1 inputs in registers, so every
input is loaded once, BLOCK_T tokens ahead. The backward kernel, whose registers leave room for fewer programs and so for fewer
loads in flight, also prefetches about 16 tokens ahead; in the forward kernel that costs more than it saves.

The backward kernel goes in the same direction and recomputes the activation's input. The gradients of the last W - 1 inputs are
accumulated in registers. Those of a span's last inputs need the first tokens of the next span, which both spans compute. Gradients
of weight and bias are stored as one partial sum per span: there are no atomics.
"""

import triton
import triton.language as tl

from baton.kernels.common.triton_prefetch import issue_loads, load_rows, prefetch, row_lines, sigmoid, unpack_bits


@triton.jit
def load_window(x, tail, pos, t0, x_row, d_in, W: tl.constexpr, DIM: tl.constexpr, HAS_TAIL: tl.constexpr, HAS_POS: tl.constexpr):
    """The W - 1 inputs before token t0 in fp32, oldest first; 0 where there is none or where it belongs to another document."""
    window = ()
    for i in tl.static_range(W - 1):
        t = t0 - (W - 1) + i
        dy_own = d_in
        if HAS_POS:
            dy_own = d_in & (tl.load(pos + t0) >= W - 1 - i)
        value = tl.load(x + t * x_row, mask=dy_own & (t >= 0), other=0.0).to(tl.float32)
        if HAS_TAIL:
            value += tl.load(tail + (W - 1 + t) * DIM, mask=dy_own & (t < 0), other=0.0).to(tl.float32)
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
def convolve(bias, taps, window, x_t, W: tl.constexpr):
    total = bias
    for i in tl.static_range(W - 1):
        total += taps[i] * window[i]
    return total + taps[W - 1] * x_t


@triton.jit
def reset_window(window, starts_document, HAS_POS: tl.constexpr, W: tl.constexpr):
    """The window of a token; zeros where a document starts with it."""
    if not HAS_POS:
        return window
    else:
        kept = ()
        for i in tl.static_range(W - 1):
            kept += (tl.where(starts_document, 0.0, window[i]),)
        return kept


@triton.jit
def shift_window(window, x_t, W: tl.constexpr):
    later = ()
    for i in tl.static_range(1, W - 1):
        later += (window[i],)
    if W > 1:
        later += (x_t,)
    return later


@triton.jit
def load_positions(pos, t0, end, BLOCK_T: tl.constexpr, EVEN_T: tl.constexpr, HAS_POS: tl.constexpr):
    """pos of BLOCK_T tokens from t0 on; 1 past the end, so that no document starts there."""
    found = ()
    for s in tl.static_range(BLOCK_T if HAS_POS else 0):
        found += (tl.load(pos + t0 + s) if EVEN_T else tl.load(pos + t0 + s, mask=t0 + s < end, other=1),)
    return found


@triton.constexpr_function
def prefetch_distance(steps):
    """How many tokens ahead rows are prefetched: about 16, and more than the one block that loads are ahead."""
    return max(2, 16 // steps) * steps


@triton.jit
def prefetch_first_rows(lines, line_row, begin, last, BLOCK_T: tl.constexpr):
    """Prefetch the rows that are loaded before the loop's own prefetches arrive, except the first block's, which are loaded at
    once.
    """
    for t in tl.static_range(BLOCK_T, prefetch_distance(BLOCK_T), BLOCK_T):
        prefetch(lines + tl.minimum(begin + t, last).to(tl.int64) * line_row)


@triton.jit
def sum_over_head(x, UNIT: tl.constexpr):
    """Of [BLOCK_D] channels, for each the sum over the UNIT channels of its head."""
    if x.shape[0] == UNIT:
        return tl.sum(x, 0)
    else:
        by_head = tl.reshape(x, [x.shape[0] // UNIT, UNIT])
        return tl.reshape(tl.broadcast_to(tl.sum(by_head, 1)[:, None], by_head.shape), x.shape)


@triton.jit
def in_one_document(pos, begin, end, before: tl.constexpr):
    """Whether a span's tokens, and so many before it, are in one document: then nothing has to be selected by positions, which
    takes as many instructions as the taps' products."""
    return tl.load(pos + end - 1) >= end - begin - 1 + before


@triton.jit
def span_forward(
    x, y, pos, window, taps, bias_d, d_in, zero, begin, end, eps,
    DIM: tl.constexpr, x_row: tl.constexpr, W: tl.constexpr, HAS_POS: tl.constexpr, SILU: tl.constexpr, UNIT: tl.constexpr,
    EVEN_T: tl.constexpr, EVEN_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Stores the outputs of a span. window: the inputs before its first token; zero: in 64 bits."""
    xs = load_rows(x, zero + begin, x_row, d_in, end, BLOCK_T, EVEN_D, EVEN_T)
    pos_s = load_positions(pos, zero + begin, end, BLOCK_T, EVEN_T, HAS_POS)
    for t0 in range(begin, end, BLOCK_T):
        t1 = zero + (tl.minimum(t0 + BLOCK_T, end - BLOCK_T) if EVEN_T else t0 + BLOCK_T)
        next_xs = load_rows(x, t1, x_row, d_in, end, BLOCK_T, EVEN_D, EVEN_T)
        next_pos = load_positions(pos, t1, end, BLOCK_T, EVEN_T, HAS_POS)
        issue_loads()
        outputs = ()
        for s in tl.static_range(BLOCK_T):
            starts_document = pos_s[s] == 0 if HAS_POS else False
            window, x_t = reset_window(window, starts_document, HAS_POS, W), unpack_bits(xs[s], x)
            total = convolve(bias_d, taps, window, x_t, W)
            if SILU:
                total *= sigmoid(total)
            if UNIT > 0:
                total *= tl.rsqrt(sum_over_head(total * total, UNIT) + eps)
            outputs += (total,)
            window = shift_window(window, x_t, W)
        for s in tl.static_range(BLOCK_T):
            row = y + (zero + t0 + s) * DIM
            tl.store(row, outputs[s].to(y.dtype.element_ty), mask=d_in & (True if EVEN_T else t0 + s < end))
        xs, pos_s = next_xs, next_pos


@triton.jit
def short_conv_forward_kernel(
    x, weight, bias, tail, pos, y, T, span, x_batch, eps,
    DIM: tl.constexpr, x_row: tl.constexpr, W: tl.constexpr, HAS_TAIL: tl.constexpr, HAS_POS: tl.constexpr, SILU: tl.constexpr,
    UNIT: tl.constexpr, EVEN_T: tl.constexpr, EVEN_D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """y [batch, T, DIM]. UNIT: channels of a head, whose length becomes 1 but for eps; 0: there are no heads."""
    d, b = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D), tl.program_id(1).to(tl.int64)
    d_in = d < DIM
    x += b * x_batch + d
    y += b * T * DIM + d
    tail += b * (W - 1) * DIM + d
    pos += b * T
    begin, end = tl.program_id(2) * span, tl.minimum((tl.program_id(2) + 1) * span, T)
    taps, bias_d = load_taps(weight, d, d_in, W), tl.load(bias + d, mask=d_in, other=0.0).to(tl.float32)
    window = load_window(x, tail, pos, b * 0 + begin, x_row, d_in, W, DIM, HAS_TAIL, HAS_POS)
    # of another document the window has zeros
    if not HAS_POS or in_one_document(pos, begin, end, 0):
        span_forward(
            x, y, pos, window, taps, bias_d, d_in, b * 0, begin, end, eps, DIM, x_row, W, False, SILU, UNIT, EVEN_T, EVEN_D, BLOCK_T
        )
    else:
        span_forward(
            x, y, pos, window, taps, bias_d, d_in, b * 0, begin, end, eps, DIM, x_row, W, True, SILU, UNIT, EVEN_T, EVEN_D, BLOCK_T
        )


@triton.jit
def short_conv_step_kernel(
    x, weight, bias, tail, pos, y, x_batch, eps,
    DIM: tl.constexpr, W: tl.constexpr, HAS_POS: tl.constexpr, SILU: tl.constexpr, UNIT: tl.constexpr, EVEN_D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One token of every sequence: y [batch, DIM], and the tail [batch, W - 1, DIM] moved on by it in place."""
    d, b = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D), tl.program_id(1).to(tl.int64)
    d_in = d < DIM if not EVEN_D else tl.full([BLOCK_D], True, tl.int1)
    tail += b * (W - 1) * DIM + d
    taps, bias_d = load_taps(weight, d, d_in, W), tl.load(bias + d, mask=d_in, other=0.0).to(tl.float32)
    kept = ()
    for i in tl.static_range(W - 1):
        kept += (tl.load(tail + i * DIM, mask=d_in, other=0.0),)
    kept += (tl.load(x + b * x_batch + d, mask=d_in, other=0.0),)
    position = tl.load(pos + b) if HAS_POS else W
    window = ()
    for i in tl.static_range(W - 1):
        window += (tl.where(position >= W - 1 - i, kept[i].to(tl.float32), 0.0),)
    total = convolve(bias_d, taps, window, kept[W - 1].to(tl.float32), W)
    if SILU:
        total *= sigmoid(total)
    if UNIT > 0:
        total *= tl.rsqrt(sum_over_head(total * total, UNIT) + eps)
    tl.store(y + b * DIM + d, total.to(y.dtype.element_ty), mask=d_in)
    for i in tl.static_range(W - 1):
        tl.store(tail + i * DIM, kept[i + 1], mask=d_in)


@triton.jit
def block_backward(
    xs, dys, pos_s, t0, carry, taps, bias_d, x, dy, dtail_out, dx, dtail, begin, end, d_in, T, eps,
    DIM: tl.constexpr, dx_row: tl.constexpr, W: tl.constexpr, HAS_TAIL: tl.constexpr, HAS_POS: tl.constexpr, SILU: tl.constexpr,
    UNIT: tl.constexpr, HAS_DTAIL_OUT: tl.constexpr, BLOCK_T: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Gradients of BLOCK_T tokens from t0 on. Gradients of inputs that no later token reaches are stored. EDGE: some tokens may lie
    past the span, and belong to the next one, or past the end.

    carry, passed in and returned: the W - 1 inputs before the current token, their incomplete gradients, and the gradients of each
    tap and of the bias.
    """
    window, dx_pending, dtaps, dbias_d = carry
    done = ()
    for s in tl.static_range(BLOCK_T):
        window, x_t = reset_window(window, pos_s[s] == 0 if HAS_POS else False, HAS_POS, W), unpack_bits(xs[s], x)
        g = unpack_bits(dys[s], dy)
        if SILU or UNIT > 0:
            total = convolve(bias_d, taps, window, x_t, W)
            sigmoid_t = sigmoid(total) if SILU else 1.0
            activated = total * sigmoid_t
            if UNIT > 0:
                scale = tl.rsqrt(sum_over_head(activated * activated, UNIT) + eps)
                along = sum_over_head(activated * g, UNIT) * (scale * scale)
                g = scale * (g - along * activated)
            if SILU:
                g *= sigmoid_t + activated * (1.0 - sigmoid_t)
        dy_own = g
        if EDGE:
            g = tl.where(t0 + s < T, g, 0.0)
            dy_own = tl.where(t0 + s < end, g, 0.0)
        dbias_d += dy_own
        new_dtaps, dx_window = (), ()
        for i in tl.static_range(W - 1):
            new_dtaps += (dtaps[i] + dy_own * window[i],)
            to_past = tl.where(pos_s[s] >= W - 1 - i, g, 0.0) if HAS_POS else g
            dx_window += (dx_pending[i] + taps[i] * to_past,)
        new_dtaps += (dtaps[W - 1] + dy_own * x_t,)
        dtaps = new_dtaps
        dx_window += (taps[W - 1] * g,)
        done += (dx_window[0],)
        dx_pending = ()
        for i in tl.static_range(1, W):
            dx_pending += (dx_window[i],)
        window = shift_window(window, x_t, W)
    for s in tl.static_range(BLOCK_T):
        # the input that no later token reaches; before 0 it is in the tail
        t = t0 + s - (W - 1)
        total = done[s]
        inside = d_in & (t >= begin)
        if EDGE and HAS_DTAIL_OUT:
            last = T - (W - 1)
            total += tl.load(dtail_out + (t - last) * DIM, mask=d_in & (t >= last) & (t < T), other=0.0).to(tl.float32)
        if EDGE:
            inside &= t < end
        tl.store(dx + t * dx_row, total.to(dx.dtype.element_ty), mask=inside)
        if HAS_TAIL:
            tl.store(dtail + (t + W - 1) * DIM, total.to(dtail.dtype.element_ty), mask=d_in & (t < 0) & (begin == 0))
    return window, dx_pending, dtaps, dbias_d


@triton.jit
def span_backward(
    x, dy, pos, carry, taps, bias_d, dtail_out, dx, dtail, lines, line_row, d_in, zero, begin, end, last, T, eps,
    DIM: tl.constexpr, x_row: tl.constexpr, dy_row: tl.constexpr, dx_row: tl.constexpr, W: tl.constexpr, HAS_TAIL: tl.constexpr,
    HAS_POS: tl.constexpr, SILU: tl.constexpr, UNIT: tl.constexpr, HAS_DTAIL_OUT: tl.constexpr, EVEN_T: tl.constexpr,
    EVEN_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Gradients of a span's tokens; carry as in `block_backward`. zero: in 64 bits; last: the token up to which rows may be
    prefetched. Returns the rows of the tokens behind the span, and the carry."""
    xs = load_rows(x, zero + begin, x_row, d_in, T, BLOCK_T, EVEN_D, EVEN_T)
    dys = load_rows(dy, zero + begin, dy_row, d_in, T, BLOCK_T, EVEN_D, EVEN_T)
    pos_s = load_positions(pos, zero + begin, T, BLOCK_T, EVEN_T, HAS_POS)
    for t0 in range(begin, end, BLOCK_T):
        # memory may end after the last token: load the last ones again, which are not used
        t1 = zero + (tl.minimum(t0 + BLOCK_T, T - BLOCK_T) if EVEN_T else t0 + BLOCK_T)
        prefetch(lines + (zero + tl.minimum(t0 + prefetch_distance(BLOCK_T), last)) * line_row)
        next_xs = load_rows(x, t1, x_row, d_in, T, BLOCK_T, EVEN_D, EVEN_T)
        next_dys = load_rows(dy, t1, dy_row, d_in, T, BLOCK_T, EVEN_D, EVEN_T)
        next_pos = load_positions(pos, t1, T, BLOCK_T, EVEN_T, HAS_POS)
        issue_loads()
        carry = block_backward(
            xs, dys, pos_s, zero + t0, carry, taps, bias_d, x, dy, dtail_out, dx, dtail, begin, end,
            d_in, T, eps, DIM, dx_row, W, HAS_TAIL, HAS_POS, SILU, UNIT, HAS_DTAIL_OUT, BLOCK_T, not EVEN_T,
        )  # fmt: skip
        xs, dys, pos_s = next_xs, next_dys, next_pos
    return xs, dys, carry


@triton.jit
def short_conv_backward_kernel(
    x, weight, bias, tail, pos, dy, dtail_out, dx, dtail, sums, T, span, x_batch, dy_batch, dx_batch, eps,
    DIM: tl.constexpr, x_row: tl.constexpr, dy_row: tl.constexpr, dx_row: tl.constexpr, W: tl.constexpr, HAS_TAIL: tl.constexpr,
    HAS_POS: tl.constexpr, SILU: tl.constexpr, UNIT: tl.constexpr, HAS_DTAIL_OUT: tl.constexpr, EVEN_T: tl.constexpr,
    EVEN_D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """dx [batch, T, DIM], dtail [batch, W - 1, DIM], and for each span the gradients of taps and bias, [batch, spans, W + 1, DIM].

    dtail_out: the cotangent of the last W - 1 inputs of tail and segment, if HAS_DTAIL_OUT. EVEN_T: spans are whole blocks of
    tokens. BLOCK_T is at least W - 1.
    """
    d, b = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D), tl.program_id(1).to(tl.int64)
    d_in = d < DIM
    begin, end = tl.program_id(2) * span, tl.minimum((tl.program_id(2) + 1) * span, T)
    tensors = (x + b * x_batch, dy + b * dy_batch)
    lines, line_row = row_lines(tensors, (x_row, dy_row), tl.program_id(0) * BLOCK_D, T - begin, DIM, BLOCK_D, BLOCK_T)
    last = tl.maximum(tl.minimum(end, T - BLOCK_T), begin)
    prefetch_first_rows(lines, line_row, begin, last, BLOCK_T)
    x += b * x_batch + d
    dy += b * dy_batch + d
    dx += b * dx_batch + d
    tail += b * (W - 1) * DIM + d
    dtail += b * (W - 1) * DIM + d
    dtail_out += b * (W - 1) * DIM + d
    pos += b * T
    taps, bias_d = load_taps(weight, d, d_in, W), tl.load(bias + d, mask=d_in, other=0.0).to(tl.float32)
    nothing = tl.zeros([BLOCK_D], tl.float32)
    dx_pending, dtaps = (), (nothing,)
    for _ in tl.static_range(W - 1):
        dx_pending += (nothing,)
        dtaps += (nothing,)
    window = load_window(x, tail, pos, b * 0 + begin, x_row, d_in, W, DIM, HAS_TAIL, HAS_POS)
    carry = (window, dx_pending, dtaps, nothing)
    # gradients of inputs before the span are no one's but the tail's
    if not HAS_POS or in_one_document(pos, begin, end, W - 1 if HAS_TAIL else 0):
        xs, dys, carry = span_backward(
            x, dy, pos, carry, taps, bias_d, dtail_out, dx, dtail, lines, line_row, d_in, b * 0, begin, end, last, T, eps, DIM,
            x_row, dy_row, dx_row, W, HAS_TAIL, False, SILU, UNIT, HAS_DTAIL_OUT, EVEN_T, EVEN_D, BLOCK_T,
        )  # fmt: skip
    else:
        xs, dys, carry = span_backward(
            x, dy, pos, carry, taps, bias_d, dtail_out, dx, dtail, lines, line_row, d_in, b * 0, begin, end, last, T, eps, DIM,
            x_row, dy_row, dx_row, W, HAS_TAIL, True, SILU, UNIT, HAS_DTAIL_OUT, EVEN_T, EVEN_D, BLOCK_T,
        )  # fmt: skip
    # the tokens after the span, which its last inputs reach
    behind = b * 0 + begin + tl.cdiv(end - begin, BLOCK_T) * BLOCK_T
    pos_s = load_positions(pos, tl.minimum(behind, T - BLOCK_T) if EVEN_T else behind, T, BLOCK_T, EVEN_T, HAS_POS)
    _, _, dtaps, dbias_d = block_backward(
        xs, dys, pos_s, behind, carry, taps, bias_d, x, dy, dtail_out, dx, dtail, begin, end, d_in,
        T, eps, DIM, dx_row, W, HAS_TAIL, HAS_POS, SILU, UNIT, HAS_DTAIL_OUT, BLOCK_T, True,
    )  # fmt: skip
    sums += (b * tl.num_programs(2) + tl.program_id(2)) * (W + 1) * DIM + d
    for i in tl.static_range(W):
        tl.store(sums + i * DIM, dtaps[i], mask=d_in)
    tl.store(sums + W * DIM, dbias_d, mask=d_in)
