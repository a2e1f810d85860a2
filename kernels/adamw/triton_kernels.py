"""AdamW's update in Triton: a block of one gradient's elements per program, found in tables of all gradients.

Shape suffixes: E elements of a block.
"""

import triton
import triton.language as tl


# ALIGNED says it of all addresses together: two forms, and not one more for each of them
@triton.jit(do_not_specialize_on_alignment=["parameters", "exp_avg", "exp_avg_sq"])
def adamw_kernel(
    parameters, exp_avg, exp_avg_sq, grads, copies, starts, lengths, owners, firsts,
    scale, shrink, b1, b1_rest, b2, b2_rest, root, eps, rate,
    COPIED: tl.constexpr, ALIGNED: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """grads: addresses; copies: likewise, of what receives the new parameters in the dtype COPIED (None: nothing), 0: of this one
    nothing; starts and lengths: of each gradient, in elements; owners: the gradient of each program; firsts: the first program of
    each gradient. ALIGNED: all addresses, starts and lengths are multiples of 16 bytes."""
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    start, length, address = tl.load(starts + owner), tl.load(lengths + owner), tl.load(grads + owner)
    grad = address.to(tl.pointer_type(tl.float32))
    parameters, exp_avg, exp_avg_sq = parameters + start, exp_avg + start, exp_avg_sq + start
    if ALIGNED:
        length, grad, parameters = tl.multiple_of(length, 4), tl.multiple_of(grad, 16), tl.multiple_of(parameters, 16)
        exp_avg, exp_avg_sq = tl.multiple_of(exp_avg, 16), tl.multiple_of(exp_avg_sq, 16)
    e = (program - tl.load(firsts + owner)).to(tl.int64) * BE + tl.arange(0, BE)
    inside = e < length
    g_E = tl.load(grad + e, mask=inside, other=0.0) * scale
    m_E = tl.load(exp_avg + e, mask=inside, other=0.0).to(tl.float32) * b1 + g_E * b1_rest
    v_E = tl.load(exp_avg_sq + e, mask=inside, other=0.0).to(tl.float32) * b2 + g_E * g_E * b2_rest
    p_E = tl.load(parameters + e, mask=inside, other=0.0) * shrink
    tl.store(exp_avg + e, m_E.to(exp_avg.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq + e, v_E.to(exp_avg_sq.dtype.element_ty), mask=inside)
    p_E = p_E - rate * (m_E / (tl.sqrt_rn(v_E) * root + eps))
    tl.store(parameters + e, p_E, mask=inside)
    if COPIED is not None:
        copied_to = tl.load(copies + owner)
        copy = copied_to.to(tl.pointer_type(COPIED))
        if ALIGNED:
            copy = tl.multiple_of(copy, 16)
        tl.store(copy + e, p_E.to(COPIED), mask=inside & (copied_to != 0))
