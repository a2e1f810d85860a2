"""What encoding and similarity with projection are in a chunk of tokens, in Triton: what is read of it, and its walk.

The one thing to know: slots do not see each other there, and a slot only ever moves in the plane of itself and a token's value h.
So behind the chunk's token t a slot is p_t (s + sum over j <= t of w_j h_j), s being what it was before the chunk, and p_t and w_t
follow from one number per slot and token, a_t = p_(t-1) (h_t.s + sum over j < t of w_j h_t.h_j):

    w = gamma (k - a in encoding),   f = mu - w a,   1 / |u|^2 = mu^2 + w^2 (|h|^2 - a^2),   p_t = p_(t-1) f / |u|,
    w_t = w / (p_(t-1) f)

Products of small matrices give all h.s and h.h, and outputs and slots from p and w: the walk itself has a slot in a lane and sums
nothing over lanes. Only slots wait for the chunk before: what does not need them, and all that is read of them, is done for all
chunks at once by kernels of its own, before and behind the one that goes from chunk to chunk. What goes from products to the walk
and back goes through memory: Triton would otherwise lay out the walk as the products are.
Where a slot turns by nearly a right angle f is the difference of two like numbers, and w_t is what was lost; and where h lies along
a slot |h|^2 - a^2 is. Such chunks are not `safe` and go token by token.

A document that begins in the chunk begins a segment: its slots' s is what is loaded, p is 1 before it, and tokens of two segments
do not see each other.

Shape suffixes as in `triton_forward`; a chunk has C tokens (BORDER), and what is [BM, C] has a slot's tokens side by side.
"""

import triton
import triton.language as tl

from baton.kernels.common.triton_prefetch import is_interpreted
from baton.kernels.lattice.triton_forward import ENC

# A slot's turn by a token has at least this cosine, so that f keeps all but two of its digits.
LEAST_COSINE = tl.constexpr(0.02)
# w^2 |h|^2 / |u|^2 is at most this: so many times larger than |u|^2 is what it is the difference of.
LARGEST_RATIO = tl.constexpr(64.0)
# p is not much below 1, since w is as much above.
SMALLEST_P = tl.constexpr(1e-15)


@triton.jit
def exact(x, y):
    """x y in float32; where y is bfloat16, of the first 16 bits of x."""
    if y.dtype == tl.bfloat16:
        high = x.to(tl.bfloat16)
        found = tl.dot((x - high.to(tl.float32)).to(tl.bfloat16), y, tl.dot(high, y))
    else:
        found = tl.dot(x, y.to(tl.float32), input_precision="tf32x3")
    return found


@triton.jit
def product(x, y, ROUND: tl.constexpr):
    """x y; ROUND: of factors that have bfloat16's digits, or for what is rounded to those."""
    return tl.dot(x.to(tl.float32), y.to(tl.float32), input_precision="tf32" if ROUND else "tf32x3")


@triton.jit
def tile(x, mask, ALL: tl.constexpr):
    """What lies at x; 0 where the mask says that nothing does. ALL: it says so nowhere."""
    return tl.load(x) if ALL else tl.load(x, mask=mask, other=0.0)


@triton.jit
def leave(x, value, mask, ALL: tl.constexpr):
    """The other way round, in the type of what x points to."""
    if ALL:
        tl.store(x, value.to(x.dtype.element_ty))
    else:
        tl.store(x, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def line_of(at, line, SIZE: tl.constexpr):
    """Where of SIZE numbers in float32 a line of the cache begins, or the last number."""
    return at + tl.minimum(line * 32, SIZE - 1)


@triton.jit
def gates_of(gamma, mu, pos, t, T, gamma_row, mu_row, FORGET: tl.constexpr, HAS_POS: tl.constexpr, C: tl.constexpr):
    """gamma, mu and 1 where a document starts, 0 elsewhere, [C] float32. Behind the end: steps that change nothing."""
    exists, at = t < T, tl.minimum(t, T - 1).to(tl.int64)
    gamma_t = tl.where(exists, tl.load(gamma + at * gamma_row).to(tl.float32), 0.0)
    mu_t = tl.full([C], 1.0, tl.float32)
    if FORGET:
        mu_t = tl.where(exists, tl.load(mu + at * mu_row).to(tl.float32), 1.0)
    starts = tl.zeros([C], tl.float32)
    if HAS_POS:
        starts = tl.where(exists & (tl.load(pos + at) == 0), 1.0, 0.0)
    return gamma_t, mu_t, starts


@triton.jit
def lay_out(numbers, h_t, gates, segment, HAS_POS: tl.constexpr, LOW: tl.constexpr, C: tl.constexpr):
    """Leave what the walk reads as single numbers: h.h of each two tokens that see each other [C, C], and [3, C] gamma, mu, below 0
    where a document starts, since a number more for each token would take registers that loads ahead need, and how many documents
    have started, segment [C]. h_t: [C, BD]."""
    c = tl.arange(0, C)
    alike = product(h_t, tl.trans(h_t), LOW)
    if HAS_POS:
        alike = tl.where(segment[:, None] == segment[None, :], alike, 0.0)
    tl.store(numbers + c[:, None] * C + c[None, :], alike)
    tl.store(numbers + C * C + c, gates[0])
    tl.store(numbers + (C + 1) * C + c, tl.where(gates[2] > 0.0, -gates[1], gates[1]))
    tl.store(numbers + (C + 2) * C + c, segment)


@triton.jit
def segments_of(numbers, HAS_POS: tl.constexpr, C: tl.constexpr):
    """How many documents have started in the chunk behind each of its tokens, [C], and in all."""
    c = tl.arange(0, C)
    # 0 everywhere without positions
    return tl.load(numbers + (C + 2) * C + c), (tl.load(numbers + (C + 3) * C - 1) if HAS_POS else 0.0)


@triton.jit
def numbers_at(at, N: tl.constexpr):
    """N numbers that lie side by side, as a tuple. Four at a time where they are as many and lie on 16 bytes: each load takes its
    turn, of one number as of four, and Triton loads single ones alone."""
    found = ()
    if N % 4 == 0 and not is_interpreted():
        for n in tl.static_range(0, N, 4):
            found += tl.inline_asm_elementwise(
                "ld.global.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,l,~{memory}", [tl.cast(at + n, tl.int64, bitcast=True)],
                dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1,
            )  # fmt: skip
    else:
        for n in tl.static_range(N):
            found += (tl.load(at + n),)
    return found


@triton.jit
def sectors_of(numbers, first, C: tl.constexpr, N: tl.constexpr):
    """A number of each sector of the cache that has what `lay_out` left of N tokens from `first` on, for all tokens. Whoever reads
    one has all of it in L1, and stores it somewhere behind the next barrier: to leave it unused would be to leave out the load."""
    EACH: tl.constexpr = (N + 7) // 8
    sector = tl.arange(0, triton.next_power_of_2((C + 3) * EACH))
    return tl.load(numbers + tl.minimum(sector // EACH, C + 2) * C + first + sector % EACH * 8)


@triton.jit
def mixed(k_t, gamma_t, a, VARIANT: tl.constexpr):
    """c and the weight of h, [BM]."""
    c = k_t - a if VARIANT == ENC else k_t
    return c, gamma_t * c


@triton.jit
def walk(
    numbers, rows, to, VARIANT: tl.constexpr, HAS_POS: tl.constexpr, CHECK: tl.constexpr, BACK: tl.constexpr, C: tl.constexpr,
    BM: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Leaves p and w of each token at `to`, and if BACK h's product with the slot before it over that p, [2 or 3, C, BM]. [BM]: 1
    where a slot's way is not safe, if CHECK. numbers: see `lay_out`; rows: [2, C, BM], k and h.s. N tokens are in registers at a
    time: with all of them Triton takes minutes."""
    rows += tl.arange(0, BM)
    to += tl.arange(0, BM)
    p = tl.full([BM], 1.0, tl.float32)
    bad = tl.zeros([BM], tl.float32)
    for group in range(C // N):
        first = group * N
        products = ()
        for t in tl.static_range(N):
            products += (tl.load(rows + (C + first + t) * BM),)
        for e in range(group):
            for j in tl.static_range(N):
                w, alike = tl.load(to + (C + e * N + j) * BM), numbers_at(numbers + (e * N + j) * C + first, N)
                sums = ()
                for t in tl.static_range(N):
                    sums += (products[t] + alike[t] * w,)
                products = sums
        ps, ws = (), ()
        of_group = numbers + first
        gammas, mus = numbers_at(of_group + C * C, N), numbers_at(of_group + (C + 1) * C, N)
        for t in tl.static_range(N):
            gamma_t, mu_t, alike = gammas[t], tl.abs(mus[t]), numbers_at(of_group + (first + t) * C, N)
            square, k_t = alike[t], tl.load(rows + (first + t) * BM)
            if HAS_POS:
                p = tl.where(mus[t] < 0.0, 1.0, p)
            a = p * products[t]
            _c, weight = mixed(k_t, gamma_t, a, VARIANT)
            f = mu_t - weight * a
            of_square = weight * weight
            over = tl.rsqrt(mu_t * mu_t + of_square * tl.maximum(square - a * a, 0.0))
            cosine = f * over
            w = weight / (p * f)
            p *= cosine
            ps += (p,)
            ws += (w,)
            if CHECK:
                # so that what is not a number is not safe
                good = (tl.abs(cosine) >= LEAST_COSINE) & (of_square * square * over * over <= LARGEST_RATIO)
                bad = tl.where(good & (tl.abs(p) >= SMALLEST_P), bad, 1.0)
            later = ()
            for s in tl.static_range(N):
                later += (products[s] + alike[s] * w if s > t else products[s],)
            products = later
        # only now, so that nothing that is loaded above waits for it
        for t in tl.static_range(N):
            tl.store(to + (first + t) * BM, ps[t])
            tl.store(to + (C + first + t) * BM, ws[t])
            if BACK:
                tl.store(to + (2 * C + first + t) * BM, products[t])
        tl.debug_barrier()
    return bad
