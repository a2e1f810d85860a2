"""An in-place exponential on the CPU whose result does not depend on where an element lies in memory.

torch.exp2, sigmoid and silu compute the last few elements of each thread's range with another routine than the rest, so the same
number gives different bits when a sequence is split elsewhere. torch.exp does not, but is 2.5 times slower here. Buffers are
therefore rounded up to whole vectors, and each thread gets whole vectors.
"""

import torch
from torch import Tensor

LOG2_E = 1.4426950408889634  # exp(x) = exp2(x * LOG2_E)

# a vectorised loop of torch eats two registers at a time: 2 * 64 bytes with AVX-512, so 32 float32
_WHOLE_VECTORS = 64
# elements that one thread takes at least, at::internal::GRAIN_SIZE
_GRAIN = 32768


def padded_buffer(numel: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialised flat memory of at least `numel` elements, padded so that `exp2_` may process any prefix of up to `numel`
    elements."""
    return torch.empty(_round_up(numel), dtype=dtype, device=like.device)


def exp2_(buffer: Tensor, numel: int) -> None:
    """2**x in place on the first `numel` elements of a buffer made by `padded_buffer` (and on the padding behind them).

    Equal inputs give equal bits wherever they lie, for every length and number of threads.
    """
    flat = buffer[: _round_up(numel)]
    threads = torch.get_num_threads()
    if flat.device.type != "cpu" or threads == 1 or len(flat) <= _GRAIN:
        flat.exp2_()
        return
    # torch deals a call of k * _GRAIN elements, k <= threads, to k threads of exactly _GRAIN each; what remains goes to one
    start = 0
    while start < len(flat):
        grains = min(threads, (len(flat) - start) // _GRAIN)
        length = grains * _GRAIN if grains else len(flat) - start
        flat[start : start + length].exp2_()
        start += length


def _round_up(numel: int) -> int:
    return -(-numel // _WHOLE_VECTORS) * _WHOLE_VECTORS
