"""What Triton kernels share that walk over tokens: rows of channels, loaded ahead of time and held until they are used.

The one thing to know: a load is worth nothing ahead of time if the compiler does something with what was loaded: it waits. So rows
are held as they are in memory, in registers of 32 bits.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def reciprocal(x):
    """1 / x of positive x, 3e-7 off: a division takes four times the instructions."""
    root = tl.rsqrt(x)
    return root * root


@triton.jit
def sigmoid(x):
    return reciprocal(1.0 + tl.exp2(-x * LOG2_E))


@triton.jit
def load_row(row, inside, present, FULL: tl.constexpr, EVEN: tl.constexpr):
    """What row points at, and 0 where nothing is. Masks cost instructions: FULL says that `inside`, EVEN that `present` is true."""
    if FULL and EVEN:
        return tl.load(row)
    elif FULL:
        return tl.load(row, mask=present, other=0.0)
    else:
        return tl.load(row, mask=inside & present, other=0.0)


@triton.jit
def held(x):
    """What was loaded, in registers of 32 bits: narrower ones the compiler packs in pairs, and waits for the load to do it."""
    if x.dtype == tl.float32:
        return x
    else:
        return x.to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def released(x, like):
    """What is held, in fp32. like: a pointer to where it was loaded from."""
    if like.dtype.element_ty == tl.float32:
        return x
    elif like.dtype.element_ty == tl.bfloat16:
        return (x << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def load_rows(base, t0, row, inside, end, STEPS: tl.constexpr, FULL: tl.constexpr, EVEN: tl.constexpr):
    """The rows of STEPS tokens from t0 on, held; base points at token 0's."""
    base += t0 * row
    found = ()
    for s in tl.static_range(STEPS):
        found += (held(load_row(base + s * row, inside, t0 + s < end, FULL, EVEN)),)
    return found


@triton.jit
def loads_begun():
    """Loads written before it begin before what is written behind it: a memory may be written anew behind a barrier. Without it the
    assembler moves a load down to where it is used, to save registers, and the load is not ahead of anything. With one warp it
    costs nothing."""
    tl.debug_barrier()
