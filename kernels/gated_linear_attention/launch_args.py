"""Arguments of the launches in `triton_launch` and `shared_launch`: the launch configuration, a call's shapes, and tensors in the
layout that the kernels read.

A "side" is the tensors with dimension x, which has the decays, or with dimension y; see `triton_kernels`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple, Self

import torch
from torch import Tensor

from baton.kernels.common import launch_utils
from baton.kernels.common.launch_utils import LazyModule
from baton.kernels.compile.aot import on_gpu
from baton.kernels.errors import REDUCED_DTYPES
from baton.kernels.gated_linear_attention.reference import Gate

KERNELS = LazyModule("baton.kernels.gated_linear_attention.triton_kernels")
_common = LazyModule("baton.kernels.gated_linear_attention.triton_common")

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
        registers_gated: the most registers of a thread in the same kernels.
        warps_scores: warps in the kernel that computes scores with a decay per channel.
        stages: pipeline stages of loops; the kernel that computes scores with a decay per channel has one.
        x_shared, warps_shared, stages_shared, registers_shared: channels of dimension x per program, warps, pipeline stages and the
            most registers of a thread in the kernel that computes derivatives along x of tensors that all heads share.
        warps_scores_shared, registers_scores_shared: the same in the kernel that adds such heads' scores.
        heads: heads per program in both, at most; fewer if there would be fewer programs than `target_programs`.
        target_programs: programs in the loops over chunks that fill a GPU; with fewer, the sequence is split into pieces.
    """

    chunk: int = 64
    x: int = 64
    x_gated: int = 64
    x_read: int = 64
    x_prepared: int = 64
    x_scores: int = 64
    x_products: int = 64
    y: int = 128
    y_gated: int = 64
    warps: int = 4
    warps_gated: int = 8
    registers_gated: int = 255
    warps_read: int = 8
    warps_scores: int = 4
    stages: int = 3
    x_shared: int = 64
    warps_shared: int = 4
    stages_shared: int = 3
    registers_shared: int = 255
    warps_scores_shared: int = 8
    registers_scores_shared: int = 128
    heads: int = 64
    target_programs: int = 384

    @cached_property
    def for_float32(self) -> Self:
        """The largest block sizes for float32, whose matmuls use no tensor cores and whose larger blocks do not fit in
        registers."""
        tiles = ("chunk", "x", "x_gated", "x_read", "x_prepared", "x_scores", "x_products", "x_shared", "y", "y_gated")
        least = {name: min(32, getattr(self, name)) for name in tiles}
        least |= {"stages": 1, "stages_shared": 1, "registers_gated": 255, "registers_shared": 255, "registers_scores_shared": 255}
        kernels = ("gated", "read", "scores", "shared", "scores_shared")
        return replace(self, **least, **{f"warps_{kernel}": self.warps for kernel in kernels})


class QKV(NamedTuple):
    """q, k and v with a contiguous last dimension and one head of q and k per head of the state; all are one if the head stride is
    0."""

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

        def per_head(x: Tensor) -> Tensor:
            if x.shape[2] == 1:
                return launch_utils.contiguous_last_dim(x).expand(-1, -1, heads, -1)
            # of what came expanded every head has a derivative of its own
            return launch_utils.contiguous_last_dim(x) if x.stride(2) else x.contiguous()

        return cls(per_head(q), per_head(k), launch_utils.contiguous_last_dim(v))


class Side(NamedTuple):
    """The tensor that reads the state, [B, T, Q, size], and the tensor that is written to it, [B, T, H, size]; None: unknown or
    unused."""

    r: Tensor | None
    w: Tensor | None


NOTHING = Side(None, None)


class Gradients(NamedTuple):
    """Memory for gradients, of the shapes and dtypes of q, k and v, whose last dimension is contiguous; None: new memory."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None


class PreparedGates(NamedTuple):
    """What the kernels take of the gates and of what lies along x, see `triton_kernels.gla_prepare_kernel`. None: not needed."""

    sums: Tensor | None = None
    read: Tensor | None = None
    written: Tensor | None = None
    whole: Tensor | None = None


class Kept(NamedTuple):
    """What a forward pass keeps for the backward pass beside its arguments; None: it is computed again.

    scores: of each chunk's tokens, [B, Q, N, C, C]. states: before each chunk, [B, H, N, X, Y]. prepared: of gates and of what they
    were multiplied with; all None if it is made again.
    """

    scores: Tensor | None = None
    states: Tensor | None = None
    prepared: PreparedGates = PreparedGates()

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All of them, as autograd saves them."""
        return self.scores, self.states, *self.prepared

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None]) -> "Kept":
        """From `tensors`."""
        scores, states, *prepared = tensors
        return cls(scores, states, PreparedGates(*prepared))


class Launch:
    """Shapes of one call: scale sum_i rx_i^T S_i ry_i, see `triton_kernels`. low: whether matmuls are computed in bfloat16.
    near: log2 of the tokens over half of which all decays together are at least 2^-96, or more than a chunk has."""

    def __init__(
        self, gate: Gate, scale: float, pos: Tensor | None, g: Tensor | None, given: QKV, config: LaunchConfig, *, low: bool,
        near: int = NEAR,
    ) -> None:  # fmt: skip
        self.swapped = gate == "value"
        # a query or key that all heads share has a head stride of 0, see `QKV.of`
        self.shared = gate in ("none", "scalar") and given.v.shape[2] > 1 and given.q.stride(2) == given.k.stride(2) == 0
        self.batch, self.length, self.heads, d_value = given.v.shape
        self.query_heads, d_key = given.q.shape[2], given.k.shape[3]
        self.given, self.device, self.g, self.pos = (
            given,
            given.v.device,
            None if g is None else launch_utils.contiguous_last_dim(g),
            pos,
        )
        self.config = config if low else config.for_float32
        self.sizes = (d_value, d_key) if self.swapped else (d_key, d_value)
        self.scale, self.near = scale, near
        self.chunks = -(-self.length // self.config.chunk)
        self.kernels = KERNELS
        self.kept = torch.bfloat16 if low else torch.float32
        self.gate, self.per_channel = gate_kind(gate), gate in ("key", "value")
        self.common = {
            "H": self.heads, "G": self.query_heads // self.heads, "GATE": self.gate, "HAS_POS": pos is not None,
            "C": self.config.chunk, "num_stages": self.config.stages,
        }  # fmt: skip
        self.low = {"DOT_DTYPE": launch_utils.triton_bfloat16() if low else None}

    @property
    def levels(self) -> dict[str, int]:
        """Constants of kernels that join blocks of tokens, see `triton_common`."""
        levels = self.config.chunk.bit_length() - 1
        return {"NEAR": min(self.near, levels), "LEVELS": levels}

    @property
    def queries(self) -> Side:
        """Along x and y, as far as q says."""
        return Side(None, self.given.q) if self.swapped else Side(self.given.q, None)

    @property
    def writes(self) -> tuple[Tensor, Tensor]:
        """Along x and along y."""
        return (self.given.v, self.given.k) if self.swapped else (self.given.k, self.given.v)

    def state(self, x: Tensor) -> Tensor:
        """[B, H, X, Y] from [B, H, d_key, d_value], or back."""
        return x.transpose(2, 3) if self.swapped else x

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def gradient(self, given: Tensor | None, heads: int, size: int, dtype: torch.dtype | None) -> Tensor | None:
        """Memory for a derivative, [B, T, heads, size]: what is given, or new of this dtype. None without a dtype."""
        if dtype is None:
            return None
        return self.new(self.batch, self.length, heads, size, dtype=dtype) if given is None else given

    def or_v(self, x: Tensor | None) -> Tensor:
        """A pointer in place of an absent tensor, which is not read."""
        return self.given.v if x is None else x

    def block(self, size: int, wanted: int) -> int:
        return max(16, min(wanted, launch_utils.next_power_of_2(size)))


@cache
def gate_kind(gate: Gate) -> int:
    """Of the gate, as the kernels call it."""
    kinds = {"none": _common.NONE, "scalar": _common.SCALAR, "key": _common.CHANNEL, "value": _common.CHANNEL}
    value: int = kinds[gate].value
    return value
