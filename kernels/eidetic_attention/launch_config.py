"""The launch configuration of the joint attention kernels: block sizes, warps and pipeline stages by the size of heads."""

from dataclasses import dataclass, replace

from baton.kernels.common import launch_utils
from baton.kernels.compile import launch_configs

KERNEL = "eidetic_attention"


@dataclass(frozen=True)
class LaunchConfig:
    """Block sizes of the kernels; powers of two, at least 16.

    Attributes:
        queries, keys: tokens and rows of a step of the kernels that compute y and dq.
        queries_backward, keys_backward: the same of the kernels that compute dk and dv.
        memory: rows of a memory in a step.
        warps, warps_backward: of a program.
        stages, stages_backward: pipeline stages of loops, of the kernels that compute y and dq and of the others.
        rows_first: 1: the kernels that compute dk and dv have weights by rows and queries, and multiply them out of registers; 0:
            by queries and rows, and out of shared memory.
        keys_dq: rows of a step of the kernel that computes dq, which holds twice as many of tokens; 0: as `keys`.
        float32: tokens and rows of a step of all kernels in float32.
        registers: at most, of a thread of the forward kernel: with 128, an SM holds two programs of 8 warps.
    """

    queries: int = 128
    keys: int = 64
    queries_backward: int = 64
    keys_backward: int = 64
    memory: int = 64
    warps: int = 8
    warps_backward: int = 8
    stages: int = 2
    stages_backward: int = 2
    rows_first: int = 0
    keys_dq: int = 0
    float32: int = 32
    registers: int = 255

    def for_float32(self) -> "LaunchConfig":
        """Smaller blocks: float32 products use no tensor cores, and larger blocks do not fit in registers."""
        sizes = dict.fromkeys(("queries", "keys", "queries_backward", "keys_backward", "memory"), self.float32)
        return replace(self, **sizes, warps=8, warps_backward=8, stages=1, stages_backward=1, keys_dq=0, registers=255)


def shape_of(dim: int, *, whole: bool = False) -> launch_configs.Shape:
    """The table's key. whole: attention to the whole document alone, whose loops are long."""
    shape: launch_configs.Shape = {"dim": launch_utils.next_power_of_2(dim)}
    return {**shape, "whole": 1} if whole else shape


def default_launch_config(dim: int, *, whole: bool) -> LaunchConfig:
    """What is launched where the table has no row. whole: as for `shape_of`; such kernels were timed on an H200, those of more than
    128 numbers a head were compiled only."""
    if dim > 128:
        return LaunchConfig(keys_dq=32, queries_backward=32, memory=32, stages_backward=1, float32=16)
    if not whole:
        return LaunchConfig()
    if dim > 64:
        return LaunchConfig(queries_backward=128, stages=3, stages_backward=1)
    return LaunchConfig(warps=4, warps_backward=4, stages=3, stages_backward=3)
