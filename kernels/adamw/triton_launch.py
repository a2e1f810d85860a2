"""AdamW's update on a GPU: launches the kernel of `triton_kernels` once for a partition, with tables of where gradients lie."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from baton.kernels.common.launch_utils import LazyModule

_kernels = LazyModule("baton.kernels.adamw.triton_kernels")
_types = LazyModule("triton.language")  # dtypes of copies

_BLOCK = 4096  # elements of a program
_TABLES = 256  # kept: two of each group of parameters, and those of gradients that lie elsewhere in the next step


def prepare_triton(
    parameters: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grads: Sequence[Tensor],
    starts: Sequence[int],
    copies: Sequence[Tensor | None],
) -> Callable[[tuple[float, ...]], None]:
    """As `op.prepare_adamw`, which checks the arguments; the function takes `AdamWStep.scalars`."""
    lengths, addresses = tuple(x.numel() for x in grads), tuple(x.data_ptr() for x in grads)
    programs = sum(-(-n // _BLOCK) for n in lengths)
    if not programs:
        return lambda scalars: None
    device = parameters.device
    flat = (parameters.data_ptr(), exp_avg.data_ptr(), exp_avg_sq.data_ptr())
    copied_to = tuple(0 if x is None else x.data_ptr() for x in copies)
    copied = next((str(x.dtype).removeprefix("torch.") for x in copies if x is not None), None)
    whole = 16 // exp_avg.element_size()  # numbers in 16 bytes, of the narrowest type of what is read
    aligned = all(x % 16 == 0 for x in (*flat, *addresses, *copied_to)) and all(n % whole == 0 for n in (*starts, *lengths))
    tables = _addresses(addresses, device), _addresses(copied_to, device), *_places(tuple(starts), lengths, device)
    kept = [*grads, *copies]  # the kernel has no more than their addresses

    @torch.no_grad()
    def update(scalars: tuple[float, ...]) -> None:
        _kernels.adamw_kernel[(programs,)](
            parameters, exp_avg, exp_avg_sq, *tables, *scalars,
            COPIED=None if copied is None else getattr(_types, copied), ALIGNED=aligned, BE=_BLOCK, num_warps=8,
        )  # fmt: skip
        kept.clear()

    return update


@lru_cache(_TABLES)
def _addresses(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """The table of addresses; the same one where gradients lie where they were, as with CUDA graphs."""
    return torch.tensor(addresses, dtype=torch.int64, device=device)


@lru_cache(_TABLES)
def _places(starts: tuple[int, ...], lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tables of starts, lengths, each program's gradient, and each gradient's first program."""
    counts = torch.tensor([-(-n // _BLOCK) for n in lengths])
    owners = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(counts)
    firsts = (counts.cumsum(0) - counts).to(torch.int32)
    return tuple(x.to(device) for x in (torch.tensor(starts), torch.tensor(lengths), owners, firsts))  # type: ignore[return-value]
