"""The gradient of an embedding lookup on a GPU: sorts the ids and launches the kernels of `triton_kernels`.

No shape depends on the values of the ids, so the host never synchronises and a CUDA graph can capture it.
"""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

import torch
from torch import Tensor

from baton.kernels.common import launch_utils
from baton.kernels.common.launch_utils import LazyModule
from baton.kernels.compile.aot import on_gpu

_kernels = LazyModule("baton.kernels.embedding.triton_kernels")

_CHUNK = 32  # sorted tokens, of a program
_STEPS = 8  # tokens whose rows are loaded at once
_COLUMNS = 512  # of a program
_BORDER_COLUMNS = 256
_PARTS = 16  # chunks whose parts of a run are loaded at once


def use_triton(into: Tensor) -> bool:
    """Whether these kernels apply: on a GPU, computing in float32."""
    return on_gpu(into) and into.dtype == torch.float32


def add_rows_triton(into: Tensor, ids: Tensor, rows: Tensor, *, chunk: int = _CHUNK) -> None:
    """As `op.add_rows`, which checks the arguments. chunk: sorted tokens of a program, a multiple of the steps, or fewer."""
    # half the bytes take half the passes
    ids, order = ids.clamp(-1, len(into)).to(torch.int32).sort(stable=True)
    width, chunks = into.shape[1], -(-len(ids) // chunk)
    parts = torch.empty(2, chunks, width, dtype=torch.float32, device=into.device)
    common, kernels = (len(ids), len(into)), _kernels
    runs, borders = launch_sizes(width, _COLUMNS), launch_sizes(width, _BORDER_COLUMNS)
    kernels.embedding_sum_runs_kernel[(chunks, -(-width // runs["BD"]))](
        ids, order, rows.contiguous(), into, parts, *common, C=chunk, STEPS=min(chunk, _STEPS), **runs
    )
    kernels.embedding_sum_borders_kernel[(chunks, -(-width // borders["BD"]))](
        ids, into, parts, *common, C=chunk, BP=_PARTS, **borders
    )


@cache
def launch_sizes(width: int, columns: int) -> Mapping[str, int]:
    """A launch's, for rows of so many numbers, of which a program has so many columns."""
    block = min(columns, launch_utils.next_power_of_2(width))
    return MappingProxyType({"D": width, "BD": block, "num_warps": min(4, max(1, block // 64))})
