"""Arguments of the launches in `triton_launch`: the launch configuration, and tensors in the layout that the kernels read.

A "side" is what lies along x, the dimension with decays, or along y; see `triton_kernels`.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self

from torch import Tensor

from baton.kernels.common import launch_utils
from baton.kernels.compile.aot import on_gpu
from baton.kernels.errors import REDUCED_DTYPES


@dataclass(frozen=True)
class LaunchConfig:
    """How the kernels are cut; powers of two, at least 16.

    Attributes:
        chunk: tokens that are multiplied with each other; between chunks there is a state.
        x: of the side with the decays, a program's part.
        x_gated: the same where derivatives along that side are computed; x_read: where only what is read with has one.
        x_prepared, x_scores: the same where gates are summed, and where scores have a decay per channel.
        x_products: a step over what lies along a side where scores have no decay per channel.
        y: of the other side, a program's part.
        y_gated: the same where derivatives along the side with the decays are computed.
        warps: of a program.
        warps_gated: of one that computes derivatives along the side with the decays; warps_read: only of what is read with.
        warps_scores: of one that computes scores with a decay per channel.
        stages: of what loops load, ahead of what they compute; scores with a decay per channel have one.
        heads: of a program that computes derivatives of what all heads share; what divides their number is taken.
        target_programs: that a GPU should have where chunks are walked through; with fewer the sequence is cut.
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
        """None larger than these: products of float32 use no tensor cores, and larger ones have no room in registers."""
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
        """Whether matrix products are computed in bfloat16."""
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
    """The tensor that reads the state, [B, T, Q, size], and the one that is written to it, [B, T, H, size]; None: unknown or not
    needed."""

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
