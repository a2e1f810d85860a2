"""Tests of the bounds checker for interpreted kernels, which is active in every test of this folder."""

import os

import pytest
import torch

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="on a GPU kernels are not interpreted")

if os.environ.get("TRITON_INTERPRET") == "1":
    import triton
    import triton.language as tl
    from triton.runtime.errors import InterpreterError

    @triton.jit
    def copy_kernel(x, y, first, last, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        tl.store(y + at, tl.load(x + first + at, mask=first + at < last, other=0.0), mask=at < last)


def test_what_masks_leave_out_is_not_touched():
    x, y = torch.randn(10), torch.empty(10)
    copy_kernel[(1,)](x, y, 0, 10, SIZE=16)
    assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("first", "last", "what"), [(0, 11, "1 of 11 addresses of a load"), (-2, 10, "2 of 12 addresses of a load")]
)
def test_a_read_beyond_an_argument_is_found(first, last, what):
    with pytest.raises(InterpreterError, match=f"copy_kernel: {what} are in no argument's memory"):
        copy_kernel[(1,)](torch.randn(10), torch.empty(16), first, last, SIZE=16)


def test_a_write_beyond_an_argument_is_found():
    with pytest.raises(InterpreterError, match="copy_kernel: 3 of 10 addresses of a store are in no argument's memory"):
        copy_kernel[(1,)](torch.randn(10), torch.empty(7), 0, 10, SIZE=16)
