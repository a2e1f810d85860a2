"""Slots and vectors in registers, in parts, and sums over them, for the kernels of `triton_forward` and `triton_backward`.

"Parts" are tuples of PARTS tensors that split d: of slots [BLOCK_M, PART_D], of vectors [PART_D], with PART_D = BLOCK_D / PARTS.

These kernels are bound by instructions, and most instructions other than products move sums between lanes. With d split into parts,
products are added within a lane before they are summed over lanes, and fewer lanes are left to sum over. Values that are stored or
summed over warps are stacked for several tokens at once, because both go through memory that warps share.
"""

import triton
import triton.language as tl


@triton.jit
def slot_indices(p, D: tl.constexpr, M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, PARTS: tl.constexpr):
    """Indices of a program's slots: m [BLOCK_M] and, for the first part, d [PART_D]; for each part, masks of the slots and of d
    that exist; and the mask of m.
    """
    m, d = p * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D // PARTS)
    inside, d_in = (), ()
    for i in tl.static_range(PARTS):
        d_in += (i * (BLOCK_D // PARTS) + d < D,)
        inside += (d_in[i][None, :] & (m < M)[:, None],)
    return m, d, inside, d_in, m < M


@triton.jit
def load_parts(pointer, at, apart, inside, PARTS: tl.constexpr, EVEN_D: tl.constexpr):
    """Parts at pointer + at, `apart` elements from each other; 0 where not inside. EVEN_D: everything exists."""
    # masks cost instructions, and registers to be zeroed
    parts = ()
    for i in tl.static_range(PARTS):
        if EVEN_D:
            parts += (tl.load(pointer + i * apart + at),)
        else:
            parts += (tl.load(pointer + i * apart + at, mask=inside[i], other=0.0),)
    return parts


@triton.jit
def store_parts(pointer, at, apart, parts, inside, PARTS: tl.constexpr, EVEN_D: tl.constexpr):
    """Store parts, in the pointer's dtype; see `load_parts`."""
    for i in tl.static_range(PARTS):
        if EVEN_D:
            tl.store(pointer + i * apart + at, parts[i].to(pointer.dtype.element_ty))
        else:
            tl.store(pointer + i * apart + at, parts[i].to(pointer.dtype.element_ty), mask=inside[i])


@triton.jit
def broadcast_parts(vector, PARTS: tl.constexpr):
    """A vector's parts, broadcastable against slots, [1, PART_D]."""
    parts = ()
    for i in tl.static_range(PARTS):
        parts += (vector[i][None, :],)
    return parts


@triton.jit
def scale_parts(slots, factor, PARTS: tl.constexpr):
    """Slots times factor [BLOCK_M]."""
    parts = ()
    for i in tl.static_range(PARTS):
        parts += (slots[i] * factor[:, None],)
    return parts


@triton.jit
def sum_over_d(x, y, PARTS: tl.constexpr):
    """The sum over d of x y, [BLOCK_M]. x: parts of slots; y: parts of slots or of a vector."""
    total = x[0] * y[0]
    for i in tl.static_range(1, PARTS):
        total += x[i] * y[i]
    return tl.sum(total, len(total.shape) - 1)


@triton.jit
def sum_within_warps(x, WARPS: tl.constexpr):
    """Sums over the slots [BLOCK_M, PART_D] of each warp, [WARPS, PART_D], if Triton distributes rows over lanes first, of which
    each holds 4 of d, and then over warps, as it lays out loads and stores. In any layout the rows of the result add up to the same
    sum.
    """
    LANES: tl.constexpr = min(32, max(1, 128 // x.shape[1]))
    ROWS: tl.constexpr = min(LANES, x.shape[0] // WARPS)
    x = tl.reshape(x, [x.shape[0] // (ROWS * WARPS), WARPS, ROWS, x.shape[1]])
    return tl.sum(tl.sum(x, 0), 1)


@triton.jit
def join_halves(x, N: tl.constexpr):
    """N / 2 tensors with a last dimension of 2; the n-th holds x[n] and x[n + N / 2]."""
    joined = ()
    for n in tl.static_range(N // 2):
        joined += (tl.join(x[n], x[n + N // 2]),)
    return joined


@triton.jit
def stack(x, N: tl.constexpr):
    """N tensors of one shape as one with a last dimension of N, within each lane; N: a power of two up to 32."""
    y = x
    if N >= 32:
        y = join_halves(y, 32)
    if N >= 16:
        y = join_halves(y, 16)
    if N >= 8:
        y = join_halves(y, 8)
    if N >= 4:
        y = join_halves(y, 4)
    if N >= 2:
        y = join_halves(y, 2)
    return tl.reshape(y[0], x[0].shape + [N])  # noqa: RUF005 - Triton has no iterable unpacking


@triton.jit
def sum_over_slots(parts, PARTS: tl.constexpr, WARPS: tl.constexpr):
    """Sums over slots, parts of a vector. Warps synchronize once, whatever the number of parts."""
    found = ()
    for i in tl.static_range(PARTS):
        found += (tl.sum(parts[i], 0) if WARPS == 1 else sum_within_warps(parts[i], WARPS),)
    if WARPS > 1:
        if PARTS == 1:
            found = (tl.sum(found[0], 0),)
        if PARTS == 2:
            found = tl.split(tl.sum(stack(found, PARTS), 0))
        if PARTS == 4:
            even, odd = tl.split(tl.reshape(tl.sum(stack(found, PARTS), 0), [parts[0].shape[1], 2, 2]))
            even, odd = tl.split(even), tl.split(odd)
            found = (even[0], odd[0], even[1], odd[1])
    return found


@triton.jit
def sum_two_over_slots(x, y, N: tl.constexpr):
    """Sums over slots of two lists of N tensors [BLOCK_M]: two tensors [N]."""
    both = ()
    for n in tl.static_range(N):
        both += (x[n], y[n])
    return tl.split(tl.reshape(tl.sum(stack(both, 2 * N), 0), [N, 2]))
