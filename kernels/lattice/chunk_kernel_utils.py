"""Device functions for encoding and similarity with projection, chunk by chunk: the sequential steps of a chunk and their inputs.

Sizes as in `triton_forward`; a chunk has C tokens (CHECKPOINT_INTERVAL). [BLOCK_M, C] holds a slot's tokens side by side.

Slots do not depend on each other here, and a slot only moves in the plane of itself and a token's value h. After the chunk's token
t a slot is therefore p_t (s + sum over j <= t of w_j h_j), where s is the slot before the chunk, and p_t and w_t follow from one
number per slot and token, a_t = p_(t-1) (h_t.s + sum over j < t of w_j h_t.h_j):

    w = gamma (k - a in encoding),   f = mu - w a,   1 / |u|^2 = mu^2 + w^2 (|h|^2 - a^2),   p_t = p_(t-1) f / |u|,
    w_t = w / (p_(t-1) f)

Matrix products give all h.s and h.h, and outputs and slots from p and w. The sequential steps have one slot per lane and no sum
over lanes. Only slots depend on the previous chunk. Everything else is computed for all chunks at once, by kernels before and after
the one that goes from chunk to chunk. Values pass between products and steps through memory: Triton would otherwise give the steps
the layout of the products.

Where a slot turns by nearly a right angle, f is the difference of two nearly equal numbers and w_t loses digits; where h is nearly
parallel to a slot, |h|^2 - a^2 does. Such chunks are not `safe` and run token by token.

A document that starts in the chunk begins a segment: s is S0 there, p is 1 before it, and tokens of different segments do not
interact.
"""

import triton
import triton.language as tl

from baton.kernels.common.triton_prefetch import is_interpreted
from baton.kernels.lattice.triton_forward import ENC

# The cosine of a slot's rotation by a token is at least this, so that f loses at most two digits.
MIN_COSINE = tl.constexpr(0.02)
# w^2 |h|^2 / |u|^2 is at most this: |u|^2 is a difference of terms that are at most so many times larger.
MAX_RATIO = tl.constexpr(64.0)
# p is at least this: as p shrinks, w grows.
MIN_P = tl.constexpr(1e-15)


@triton.jit
def dot_fp32(x, y):
    """x y in float32; where y is bfloat16, x is split into two bfloat16 terms."""
    if y.dtype == tl.bfloat16:
        high = x.to(tl.bfloat16)
        found = tl.dot((x - high.to(tl.float32)).to(tl.bfloat16), y, tl.dot(high, y))
    else:
        found = tl.dot(x, y.to(tl.float32), input_precision="tf32x3")
    return found


@triton.jit
def dot(x, y, LOW_PRECISION: tl.constexpr):
    """x y. LOW_PRECISION: in tf32, for factors or results that have bfloat16's digits."""
    return tl.dot(x.to(tl.float32), y.to(tl.float32), input_precision="tf32" if LOW_PRECISION else "tf32x3")


@triton.jit
def load_tile(x, mask, ALL: tl.constexpr):
    """The tile at x; 0 where masked. ALL: everything exists."""
    return tl.load(x) if ALL else tl.load(x, mask=mask, other=0.0)


@triton.jit
def store_tile(x, value, mask, ALL: tl.constexpr):
    """Store a tile, in x's dtype; see `load_tile`."""
    if ALL:
        tl.store(x, value.to(x.dtype.element_ty))
    else:
        tl.store(x, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def cache_line(at, line, SIZE: tl.constexpr):
    """Pointers to the cache lines of SIZE float32 numbers."""
    return at + tl.minimum(line * 32, SIZE - 1)


@triton.jit
def load_gates(gamma, mu, pos, t, T, gamma_row, mu_row, FORGET: tl.constexpr, HAS_POS: tl.constexpr, C: tl.constexpr):
    """gamma, mu, and 1 where a document starts, 0 elsewhere, [C] float32. Past the end: steps that change nothing."""
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
def store_gram(gram, h_t, gates, segment, HAS_POS: tl.constexpr, LOW_PRECISION: tl.constexpr, C: tl.constexpr):
    """Store what the sequential steps read as scalars: the Gram matrix h.h of tokens in the same segment, [C, C], and [3, C]:
    gamma; mu, negated where a document starts (another number per token would take registers that loads ahead need); and segment,
    the number of documents that have started, [C]. h_t: [C, BLOCK_D].
    """
    c = tl.arange(0, C)
    gram_row = dot(h_t, tl.trans(h_t), LOW_PRECISION)
    if HAS_POS:
        gram_row = tl.where(segment[:, None] == segment[None, :], gram_row, 0.0)
    tl.store(gram + c[:, None] * C + c[None, :], gram_row)
    tl.store(gram + C * C + c, gates[0])
    tl.store(gram + (C + 1) * C + c, tl.where(gates[2] > 0.0, -gates[1], gates[1]))
    tl.store(gram + (C + 2) * C + c, segment)


@triton.jit
def load_segments(gram, HAS_POS: tl.constexpr, C: tl.constexpr):
    """How many documents have started in the chunk up to each of its tokens, [C], and in all."""
    c = tl.arange(0, C)
    # 0 without positions
    return tl.load(gram + (C + 2) * C + c), (tl.load(gram + (C + 3) * C - 1) if HAS_POS else 0.0)


@triton.jit
def load_scalars(at, N: tl.constexpr):
    """N adjacent numbers as a tuple. Four at a time where possible: a load of one number takes as long as one of four, and Triton
    loads scalars one by one.
    """
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


@triton.constexpr_function
def _loads(stride, count):
    """Instructions that load `count` numbers, each `stride` bytes behind the one before, in each lane."""
    return "\n".join(f"ld.global.f32 ${n}, [${count} + {n * stride}];" for n in range(count))


@triton.constexpr_function
def _load_constraints(count):
    return "=&f," * count + "l,~{memory}"


@triton.constexpr_function
def _float32(count):
    return (tl.float32,) * count


@triton.jit
def load_vectors(at, STRIDE: tl.constexpr, N: tl.constexpr):
    """N vectors as a tuple: what the pointers `at` point at, and STRIDE, 2 STRIDE, ... numbers further, of float32.

    Compiling a `tl.load` of a tensor takes time in proportion to the square of the kernel's size (Triton's coalescing pass goes
    through everything that depends on it), and the sequential steps load hundreds.
    """
    if N == 1 or is_interpreted():
        found = ()
        for n in tl.static_range(N):
            found += (tl.load(at + n * STRIDE),)
    else:
        found = tl.inline_asm_elementwise(
            _loads(4 * STRIDE, N), _load_constraints(N), [tl.cast(at, tl.int64, bitcast=True)], dtype=_float32(N), is_pure=False,
            pack=1,
        )  # fmt: skip
    return found


@triton.constexpr_function
def _fmas(offset):
    return f"""{{
    .reg .f32 y<4>;
    ld.global.v4.f32 {{y0, y1, y2, y3}}, [$4 + {offset}];
    fma.rn.f32 $0, y0, $5, $6;
    fma.rn.f32 $1, y1, $5, $7;
    fma.rn.f32 $2, y2, $5, $8;
    fma.rn.f32 $3, y3, $5, $9;
    }}"""


@triton.jit
def add_multiples(sums, scalars, x, OFFSET: tl.constexpr, N: tl.constexpr):
    """The N sums, each with a multiple of x added: by N numbers that lie side by side, OFFSET behind the pointer `scalars`. They
    are loaded as in `load_scalars`; fewer operations than by itself, as fewer are compiled faster.
    """
    found = ()
    if N % 4 == 0 and not is_interpreted():
        at = tl.cast(scalars, tl.int64, bitcast=True)
        for n in tl.static_range(0, N, 4):
            found += tl.inline_asm_elementwise(
                _fmas(4 * (OFFSET + n)), "=&f,=&f,=&f,=&f,l,f,f,f,f,f,~{memory}",
                [at, x, sums[n], sums[n + 1], sums[n + 2], sums[n + 3]],
                dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1,
            )  # fmt: skip
    else:
        for n in tl.static_range(N):
            found += (sums[n] + tl.load(scalars + OFFSET + n) * x,)
    return found


@triton.jit
def load_sectors(gram, first, C: tl.constexpr, N: tl.constexpr):
    """One number of each cache sector that `store_gram` stored for the N tokens from `first` on. This loads all of it into L1. The
    caller stores the result somewhere after the next barrier: an unused load would be eliminated.
    """
    EACH: tl.constexpr = (N + 7) // 8
    sector = tl.arange(0, triton.next_power_of_2((C + 3) * EACH))
    return tl.load(gram + tl.minimum(sector // EACH, C + 2) * C + first + sector % EACH * 8)


@triton.jit
def c_and_weight(k_t, gamma_t, a, VARIANT: tl.constexpr):
    """c and the weight of h, [BLOCK_M]."""
    c = k_t - a if VARIANT == ENC else k_t
    return c, gamma_t * c


@triton.jit
def chunk_steps(
    gram, rows, to, VARIANT: tl.constexpr, HAS_POS: tl.constexpr, CHECK: tl.constexpr, BACK: tl.constexpr, C: tl.constexpr,
    BLOCK_M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Store p and w of each token at `to` and, if BACK, h's product with the slot before it divided by that p, [2 or 3, C,
    BLOCK_M].

    Returns [BLOCK_M]: 1 where a slot's steps are not safe, if CHECK. gram: see `store_gram`; rows: [2, C, BLOCK_M], k and h.s. N
    tokens are in registers at a time; with all of them, compilation takes minutes.
    """
    rows += tl.arange(0, BLOCK_M)
    to += tl.arange(0, BLOCK_M)
    p = tl.full([BLOCK_M], 1.0, tl.float32)
    bad = tl.zeros([BLOCK_M], tl.float32)
    for group in range(C // N):
        first = group * N
        products = load_vectors(rows + (C + first) * BLOCK_M, BLOCK_M, N)
        for e in range(group):
            earlier, of_earlier = load_vectors(to + (C + e * N) * BLOCK_M, BLOCK_M, N), gram + e * N * C + first
            for j in tl.static_range(N):
                products = add_multiples(products, of_earlier, earlier[j], j * C, N)
        k_group = load_vectors(rows + first * BLOCK_M, BLOCK_M, N)
        ps, ws = (), ()
        of_group = gram + first
        gammas, mus = load_scalars(of_group + C * C, N), load_scalars(of_group + (C + 1) * C, N)
        for t in tl.static_range(N):
            gamma_t, mu_t, gram_row = gammas[t], tl.abs(mus[t]), load_scalars(of_group + (first + t) * C, N)
            square, k_t = gram_row[t], k_group[t]
            if HAS_POS:
                p = tl.where(mus[t] < 0.0, 1.0, p)
            a = p * products[t]
            _c, weight = c_and_weight(k_t, gamma_t, a, VARIANT)
            f = mu_t - weight * a
            of_square = weight * weight
            inv_norm = tl.rsqrt(mu_t * mu_t + of_square * tl.maximum(square - a * a, 0.0))
            cosine = f * inv_norm
            w = weight / (p * f)
            p *= cosine
            ps += (p,)
            ws += (w,)
            if CHECK:
                # NaN is not safe either
                good = (tl.abs(cosine) >= MIN_COSINE) & (of_square * square * inv_norm * inv_norm <= MAX_RATIO)
                bad = tl.where(good & (tl.abs(p) >= MIN_P), bad, 1.0)
            later = ()
            for s in tl.static_range(N):
                later += (tl.fma(gram_row[s], w, products[s]) if s > t else products[s],)
            products = later
        # stored last, so that no load above waits for it
        to_group = to + first * BLOCK_M
        for t in tl.static_range(N):
            tl.store(to_group + t * BLOCK_M, ps[t])
            tl.store(to_group + (C + t) * BLOCK_M, ws[t])
            if BACK:
                tl.store(to_group + (2 * C + t) * BLOCK_M, products[t])
        tl.debug_barrier()
    return bad
