"""Triton functions for kernels that loop over tokens: loads that are issued ahead of their use, and L2 prefetches.

A load is only asynchronous until the compiler converts the loaded value, because the conversion waits for it. Rows are therefore
kept as raw 32-bit registers (`pack_bits`, `unpack_bits`). There are too few registers to cover the latency of device memory, so
rows are prefetched into L2 earlier still (`prefetch`), which takes no registers.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LINE = tl.constexpr(128)  # bytes


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
def pack_bits(x):
    """What was loaded, in registers of 32 bits: narrower ones the compiler packs in pairs, and waits for the load to do it."""
    if x.dtype == tl.float32:
        return x
    else:
        return x.to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def unpack_bits(x, like):
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
        found += (pack_bits(load_row(base + s * row, inside, t0 + s < end, FULL, EVEN)),)
    return found


@triton.jit
def issue_loads():
    """Loads written before it begin before what is written behind it: a memory may be written anew behind a barrier. Without it the
    assembler moves a load down to where it is used, to save registers, and the load is not ahead of anything. With one warp it
    costs nothing."""
    tl.debug_barrier()


@triton.constexpr_function
def is_interpreted():
    return triton.knobs.runtime.interpret


@triton.jit
def prefetch(at):
    """Asks for the lines of memory that the pointers `at` (or addresses, int64) point into, to be in the GPU's cache when they are
    loaded: nothing waits for it, and it takes no registers. A pointer must point at what is there."""
    if not is_interpreted():
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [tl.cast(at, tl.int64, bitcast=True)], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip


@triton.constexpr_function
def elements_per_line(pointer):
    """Elements, of what a pointer of this type points at."""
    return LINE.value * 8 // pointer.element_ty.primitive_bitwidth


@triton.constexpr_function
def num_lines(count, pointer):
    """Lines that `count` elements fill from a line's begin on; a power of two."""
    return triton.next_power_of_2(-(-count // elements_per_line(pointer)))


@triton.jit
def line_pointers(first, count, MOST: tl.constexpr):
    """Lines of `count` elements, MOST at most, that lie side by side from the pointer `first` on: a pointer in each lane."""
    line = tl.arange(0, num_lines(MOST, first.dtype))
    return first + tl.minimum(line * elements_per_line(first.dtype), count - 1)


@triton.jit
def row_lines(tensors, rows, channel, tokens, D: tl.constexpr, BD: tl.constexpr, TOKENS: tl.constexpr):
    """Lines of the rows that the first TOKENS tokens, of `tokens`, have in a few tensors, BD channels, of D, from `channel` on: an
    address in each lane, and how many bytes further the next token's is. tensors: pointers to token 0's rows; rows: elements from
    one to the next. As many lines of a row as the first tensor's fills, if it begins where a line does."""
    LINES: tl.constexpr = num_lines(BD, tensors[0].dtype)
    EACH: tl.constexpr = LINES * triton.next_power_of_2(TOKENS)
    lane = tl.arange(0, triton.next_power_of_2(len(tensors)) * EACH)
    line, token = lane % LINES, tl.minimum(lane % EACH // LINES, tl.minimum(tokens, TOKENS) - 1)
    at, row = tl.zeros(lane.shape, tl.int64), tl.zeros(lane.shape, tl.int32)
    # lanes behind the last tensor's have the last one's again
    for i in tl.static_range(len(tensors)):
        d = tl.minimum(channel + line * elements_per_line(tensors[i].dtype), tl.minimum(channel + BD, D) - 1)
        own = tensors[i] + (token.to(tl.int64) * rows[i] + d)
        at = tl.where(lane >= i * EACH, tl.cast(own, tl.int64, bitcast=True), at)
        row = tl.where(lane >= i * EACH, rows[i] * (LINE // elements_per_line(tensors[i].dtype)), row)
    return at, row
