"""Exceptions of this package, and argument checks that raise KernelError.

Kernels never broadcast their arguments. An argument without exactly the expected shape, dtype and device is refused by name before
anything is computed; a transposed matrix would otherwise train for a week.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

REDUCED_DTYPES = (torch.bfloat16, torch.float16)
FLOAT_DTYPES = (*REDUCED_DTYPES, torch.float32, torch.float64)
_SINGLE_DTYPES = frozenset((*REDUCED_DTYPES, torch.float32))


class KernelError(ValueError):
    """An argument of a kernel is unusable. The message names the kernel, the argument, what it is and what was expected."""


class LaunchConfigError(Exception):
    """The table of launch configurations cannot be read, used or written."""

    exit_status = 2


class CompileError(Exception):
    """Kernels cannot be compiled ahead of time."""

    exit_status = 2


def expect_tensor(
    kernel: str, name: str, tensor: object, axes: tuple[str, ...], sizes: tuple[int, ...], device: torch.device
) -> None:
    """Refuse `tensor` unless it is a tensor of exactly `sizes` on `device`.

    Args:
        kernel, name: who complains about which argument.
        axes: the names of the dimensions, for the message.
        sizes: the expected size of each; -1 accepts any size of at least 1.

    Raises:
        KernelError: naming the argument, its shape and the expected one.
    """
    if not isinstance(tensor, Tensor):
        raise KernelError(f"{kernel}: {name} is a {type(tensor).__name__}, expected a tensor of shape {_expected(axes, sizes)}")
    shape = tensor.shape
    # in every layer and for every argument, so what is nearly always so comes first
    if shape != sizes and (
        len(shape) != len(sizes) or any(have < 1 if want < 0 else have != want for have, want in zip(shape, sizes, strict=True))
    ):
        message = f"{kernel}: {name} has shape {tuple(shape)}, expected {_expected(axes, sizes)}"
        raise KernelError(message + ("; every dimension must be at least 1" if 0 in shape else ""))
    if tensor.device != device:
        raise KernelError(f"{kernel}: {name} is on {tensor.device}, expected {device} like the other arguments")


def expect_state_keys(kernel: str, name: str, state: object, leaves: Collection[str]) -> None:
    """Refuse `state` unless it is a mapping with exactly these keys. What it holds is checked by `expect_tensor`.

    Raises:
        KernelError: naming the argument, its type or its keys, and the expected ones.
    """
    if not isinstance(state, Mapping):
        raise KernelError(
            f"{kernel}: {name} is a {type(state).__name__}, expected a dict of tensors with the keys {sorted(leaves)}"
        )
    if set(state) != set(leaves):
        raise KernelError(f"{kernel}: {name} has the keys {sorted(map(str, state))}, expected {sorted(leaves)}")


def _expected(axes: tuple[str, ...], sizes: tuple[int, ...]) -> str:
    comma = "," if len(axes) == 1 else ""
    return f"({', '.join(axes)}{comma}) = ({', '.join('any' if size < 0 else str(size) for size in sizes)}{comma})"


def expect_dtype(kernel: str, name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Refuse `tensor` unless its dtype is one of `dtypes`. Raises KernelError naming both."""
    if tensor.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise KernelError(f"{kernel}: {name} has dtype {str(tensor.dtype).removeprefix('torch.')}, expected {names}")


def expect_positions(kernel: str, pos: object, batch: int, length: int, device: torch.device) -> None:
    """Refuse `pos` unless it is int32 or int64 [batch, T] on `device` and, where looking is free (CPU), nowhere negative."""
    expect_tensor(kernel, "pos", pos, ("batch", "T"), (batch, length), device)
    assert isinstance(pos, Tensor)
    expect_dtype(kernel, "pos", pos, (torch.int32, torch.int64))
    # on a GPU this would wait for the device in every layer
    if device.type == "cpu" and int(pos.min()) < 0:
        raise KernelError(f"{kernel}: pos holds {int(pos.min())}, expected positions in a document, 0 at its first token")


def expect_one_precision(kernel: str, **tensors: Tensor) -> torch.dtype:
    """The dtype to compute in: float64 where all are float64, float32 where all are float32, bfloat16 or float16.

    Raises:
        KernelError: an argument is not floating point, or float64 is mixed with anything else (results would be float32's
            while looking like float64's).
    """
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if dtypes <= _SINGLE_DTYPES:
        return torch.float32
    for name, tensor in tensors.items():
        expect_dtype(kernel, name, tensor, FLOAT_DTYPES)
    doubles = [name for name, tensor in tensors.items() if tensor.dtype == torch.float64]
    if doubles and len(doubles) != len(tensors):
        other = next(name for name in tensors if name not in doubles)
        have = str(tensors[other].dtype).removeprefix("torch.")
        raise KernelError(f"{kernel}: {other} has dtype {have} but {doubles[0]} is float64, expected all or none to be float64")
    return torch.float64 if doubles else torch.float32
