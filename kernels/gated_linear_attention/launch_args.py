"""Arguments of the launches in `triton_launch`: the launch configuration, and tensors in the layout that the kernels read.

A "side" is the tensors with dimension x, which has the decays, or with dimension y; see `triton_kernels`.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self

from torch import Tensor

from baton.kernels.common import launch_utils
from baton.kernels.compile.aot import on_gpu
from baton.kernels.errors import REDUCED_DTYPES

NEAR = 3
"""log2 of the tokens of a block that is joined at one of its own, for decays without a bound; see `triton_common`."""


@dataclass(frozen=True)
class LaunchConfig:
    """Block sizes of the kernels; powers of two, at least 16.

    Attributes:
        chunk: tokens per chunk; within a chunk, scores between tokens are computed, and between chunks a state is passed.
        x: channels of dimension x per program.
        x_gated: the same in kernels that compute derivatives along x; x_read: if only the reading tensor has a derivative.
        x_prepared, x_scores: the same in the kernels that sum gates, and that compute scores with a decay per channel.
        x_products: channels per iteration in the kernel that computes scores without a decay per channel.
        y: channels of dimension y per program.
        y_gated: the same in kernels that compute derivatives along x.
        warps: warps of a program.
        warps_gated: warps in kernels that compute derivatives along x; warps_read: if only the reading tensor has a derivative.
        warps_scores: warps in the kernel that computes scores with a decay per channel.
        stages: pipeline stages of loops; the kernel that computes scores with a decay per channel has one.
        heads: heads per program in kernels that compute derivatives of tensors that all heads share; reduced to a divisor.
        target_programs: programs in the loops over chunks that fill a GPU; with fewer, the sequence is split into pieces.
    """

    chunk: int = 64
    x: int = 64
    x_gated: int = 64
    x_read: int = 64
    x_prepared: int = 64
    x_scores: int = 32
    x_products: int = 64
    y: int = 128
    y_gated: int = 64
    warps: int = 4
    warps_gated: int = 8
    warps_read: int = 8
    warps_scores: int = 4
    stages: int = 3
    heads: int = 8
    target_programs: int = 384

    @cached_property
    def for_float32(self) -> Self:
        """The largest block sizes for float32, whose matmuls use no tensor cores and whose larger blocks do not fit in
        registers."""
        largest = dict.fromkeys(("chunk", "x", "x_gated", "x_read", "x_prepared", "x_scores", "x_products", "y", "y_gated"), 32)
        least = {name: min(size, getattr(self, name)) for name, size in largest.items()}
        return replace(self, **least, warps_gated=self.warps, warps_read=self.warps, warps_scores=self.warps, stages=1)


class QKV(NamedTuple):
    """q, k and v with a contiguous last dimension and one head of q and k per head of the state."""

    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def low(self) -> bool:
        """Whether matmuls are computed in bfloat16."""
        return on_gpu(self.v) and all(x.dtype in REDUCED_DTYPES for x in self)

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> "QKV":
        heads = v.shape[2]
        q, k = (
            x.expand(-1, -1, heads, -1) if x.shape[2] == 1 else x
            for x in (launch_utils.contiguous_last_dim(q), launch_utils.contiguous_last_dim(k))
        )
        return cls(q, k, launch_utils.contiguous_last_dim(v))


class Side(NamedTuple):
    """The tensor that reads the state, [B, T, Q, size], and the tensor that is written to it, [B, T, H, size]; None: unknown or
    unused."""

    r: Tensor | None
    w: Tensor | None


class PreActivations(NamedTuple):
    """What lies along y and is silu of what was projected: that, and memory of the same shapes for its gradients."""

    given: Side
    gradients: Side


class PreparedGates(NamedTuple):
    """What the kernels take of the gates and of what lies along x, see `triton_kernels.gla_prepare_kernel`. None: not needed."""

    sums: Tensor | None
    read: Tensor | None
    written: Tensor | None
    whole: Tensor | None
