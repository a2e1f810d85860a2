"""Shape functions of meta tensors in C++: what they make has the shape, dtype and strides of a CPU's, and is as in Python."""

import pytest
import torch

from baton.kernels.compile.meta_kernels import native_meta_kernels


def in_python(name):
    """Whether an operator's shape function is one of Python's."""
    (line,) = [line for line in torch._C._dispatch_dump(f"aten::{name}").splitlines() if line.startswith("Meta: ")]
    return "RegisterMeta" not in line


def test_functions_in_python_are_back_behind_it():
    names = ("add.Tensor", "exp", "cumsum")
    before = [in_python(name) for name in names]
    assert before[0]
    for _ in range(2):
        with native_meta_kernels():
            assert not any(map(in_python, names))
            with native_meta_kernels():
                pass
            assert not any(map(in_python, names))
        assert [in_python(name) for name in names] == before
    with pytest.raises(ZeroDivisionError), native_meta_kernels():
        raise ZeroDivisionError
    assert [in_python(name) for name in names] == before


MADE = {
    "sum of two dtypes": lambda x, y: x + y.bfloat16(),
    "a number added": lambda x, y: x.half() + 2.5,
    "broadcast": lambda x, y: x[:, :1] * y[None],
    "transposed": lambda x, y: torch.exp(x.transpose(0, 2)),
    "two layouts": lambda x, y: x.transpose(0, 1) * x.permute(1, 0, 2).contiguous(),
    "compared": lambda x, y: torch.where(x > 0, x, y),
    "reduced": lambda x, y: x.sum((0, 2), keepdim=True, dtype=torch.float64),
    "matrices": lambda x, y: x @ y.T,
    "in place": lambda x, y: x.clone().mul_(y).addcmul_(x, x),
    "gathered": lambda x, y: x.gather(1, torch.zeros(3, 2, 5, dtype=torch.int64, device=x.device)),
    "accumulated": lambda x, y: x.cumsum(1).logsumexp(-1),
    "joined": lambda x, y: torch.cat([x, x.transpose(0, 2).contiguous().transpose(0, 2)], 1),
    "chosen": lambda x, y: x.topk(2, dim=-1).indices,
    "only in Python": lambda x, y: torch.nn.functional.rms_norm(x, (5,), eps=1e-5),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_results_have_the_shapes_dtypes_and_strides_of_a_cpu(make):
    def of(device):
        made = make(torch.ones(3, 4, 5, device=device), torch.ones(4, 5, device=device))
        return made.shape, made.dtype, made.stride()

    expected = of("cpu")
    with native_meta_kernels():
        assert of("meta") == expected


def test_tensors_of_two_devices_are_refused():
    with native_meta_kernels(), pytest.raises(RuntimeError, match="device"):
        torch.ones(2) + torch.ones(2, device="meta")
