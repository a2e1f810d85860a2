"""Slots and vectors as the kernels of `triton_forward` and `triton_backward` hold them, in parts, and the sums over them.

The one thing to know: instructions are what these kernels are short of, and most that are not products move sums between lanes. So
slots are rows of PARTS tensors, each with a part of d side by side: products are added within a lane before lanes add theirs, and
few lanes are left to be summed over. What is stored or summed over warps is that of several tokens at once, since both go through
memory that warps share.

"Parts" are tuples of PARTS tensors: of slots [BM, BP], of vectors [BP], with BP = BD / PARTS.
"""

import triton
import triton.language as tl


@triton.jit
def places(p, D: tl.constexpr, M: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, PARTS: tl.constexpr):
    """Of a program's slots: m [BM] and, of the first part, d [BD / PARTS]; of each part, which slots' and which d are there; and
    which m are."""
    m, d = p * BM + tl.arange(0, BM), tl.arange(0, BD // PARTS)
    inside, d_in = (), ()
    for i in tl.static_range(PARTS):
        d_in += (i * (BD // PARTS) + d < D,)
        inside += (d_in[i][None, :] & (m < M)[:, None],)
    return m, d, inside, d_in, m < M


@triton.jit
def read(pointer, at, apart, inside, PARTS: tl.constexpr, WHOLE: tl.constexpr):
    """Parts of float32 at pointer + at, apart from one another; 0 where they are not inside."""
    # masks cost instructions, and what is behind them registers to be zeroed
    parts = ()
    for i in tl.static_range(PARTS):
        if WHOLE:
            parts += (tl.load(pointer + i * apart + at),)
        else:
            parts += (tl.load(pointer + i * apart + at, mask=inside[i], other=0.0),)
    return parts


@triton.jit
def write(pointer, at, apart, parts, inside, PARTS: tl.constexpr, WHOLE: tl.constexpr):
    """The other way round, in the type of what the pointer points to."""
    for i in tl.static_range(PARTS):
        if WHOLE:
            tl.store(pointer + i * apart + at, parts[i].to(pointer.dtype.element_ty))
        else:
            tl.store(pointer + i * apart + at, parts[i].to(pointer.dtype.element_ty), mask=inside[i])


@triton.jit
def spread(vector, PARTS: tl.constexpr):
    """A vector's parts beside slots', [1, BD / PARTS]."""
    parts = ()
    for i in tl.static_range(PARTS):
        parts += (vector[i][None, :],)
    return parts


@triton.jit
def scaled(slots, factor, PARTS: tl.constexpr):
    """factor: [BM]."""
    parts = ()
    for i in tl.static_range(PARTS):
        parts += (slots[i] * factor[:, None],)
    return parts


@triton.jit
def over_d(x, y, PARTS: tl.constexpr):
    """Sums over d of the products of parts of slots and of slots or a vector, [BM]."""
    total = x[0] * y[0]
    for i in tl.static_range(1, PARTS):
        total += x[i] * y[i]
    return tl.sum(total, len(total.shape) - 1)


@triton.jit
def in_warp(x, WARPS: tl.constexpr):
    """Sums over the slots [BM, BP] of each warp, [WARPS, BP], if rows go to lanes first, of which each has 4 of d, and then to
    warps: so Triton lays out what is loaded and stored. However they lie, the rows of the result add up to the same sum."""
    LANES: tl.constexpr = min(32, max(1, 128 // x.shape[1]))
    ROWS: tl.constexpr = min(LANES, x.shape[0] // WARPS)
    x = tl.reshape(x, [x.shape[0] // (ROWS * WARPS), WARPS, ROWS, x.shape[1]])
    return tl.sum(tl.sum(x, 0), 1)


@triton.jit
def halves(x, N: tl.constexpr):
    """N / 2 tensors with a last dimension of 2, of which the n-th has x[n] and x[n + N / 2]."""
    joined = ()
    for n in tl.static_range(N // 2):
        joined += (tl.join(x[n], x[n + N // 2]),)
    return joined


@triton.jit
def stacked(x, N: tl.constexpr):
    """N tensors of one shape as one with a last dimension of N, within each lane; N: a power of two up to 32."""
    y = x
    if N >= 32:
        y = halves(y, 32)
    if N >= 16:
        y = halves(y, 16)
    if N >= 8:
        y = halves(y, 8)
    if N >= 4:
        y = halves(y, 4)
    if N >= 2:
        y = halves(y, 2)
    return tl.reshape(y[0], x[0].shape + [N])  # noqa: RUF005 - Triton has no stars


@triton.jit
def over_slots(parts, PARTS: tl.constexpr, WARPS: tl.constexpr):
    """Sums over slots, parts of a vector. Warps wait for each other once, however many parts there are."""
    found = ()
    for i in tl.static_range(PARTS):
        found += (tl.sum(parts[i], 0) if WARPS == 1 else in_warp(parts[i], WARPS),)
    if WARPS > 1:
        if PARTS == 1:
            found = (tl.sum(found[0], 0),)
        if PARTS == 2:
            found = tl.split(tl.sum(stacked(found, PARTS), 0))
        if PARTS == 4:
            even, odd = tl.split(tl.reshape(tl.sum(stacked(found, PARTS), 0), [parts[0].shape[1], 2, 2]))
            even, odd = tl.split(even), tl.split(odd)
            found = (even[0], odd[0], even[1], odd[1])
    return found


@triton.jit
def two_sums(x, y, N: tl.constexpr):
    """Over slots, of N tensors [BM] each: two of [N]."""
    both = ()
    for n in tl.static_range(N):
        both += (x[n], y[n])
    return tl.split(tl.reshape(tl.sum(stacked(both, 2 * N), 0), [N, 2]))
