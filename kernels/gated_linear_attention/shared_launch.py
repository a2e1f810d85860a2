"""Launches the kernels of `shared_kernels`: the derivatives along x where all heads share what is read and what is written with."""

import torch
from torch import Tensor

from baton.kernels.common import launch_utils
from baton.kernels.common.launch_utils import LazyModule
from baton.kernels.gated_linear_attention.launch_args import Launch, Side

_kernels = LazyModule("baton.kernels.gated_linear_attention.shared_kernels")


def launch_shared_dqk(
    launch: Launch,
    x: Side,
    y: Side,
    sums: Tensor | None,
    states: Tensor,
    cotangents: Tensor,
    *,
    read: torch.dtype,
    write: torch.dtype,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """As `launch_chunk_dqk` where all heads share what is read and written with: parts of the sums over heads, [B, T, parts, X],
    and the derivatives to the log-decays of heads."""
    (X, Y), heads, batch, length, chunks = launch.sizes, launch.heads, launch.batch, launch.length, launch.chunks
    config = launch.config
    BX, BY = launch.block(X, config.x_shared), launch.block(Y, config.y)
    blocks = -(-X // BX)
    # heads are split further if chunks and blocks give too few programs
    share = -(-heads // max(-(-heads // config.heads), min(heads, -(-config.target_programs // (blocks * chunks * batch)))))
    parts = -(-heads // share)
    scores = launch.new(batch, parts, chunks, config.chunk, config.chunk, dtype=launch.kept)
    r, w = (launch.new(batch, length, parts, X, dtype=dtype) for dtype in (read, write))
    # a slot for each block of x, and one for pairs of a chunk's tokens
    flows = None if sums is None else launch.new(blocks + 1, batch, length, heads)
    options = {**launch.common, **launch.low, "num_stages": config.stages_shared, "X": X, "Y": Y, "BX": BX, "BY": BY}
    del options["G"]
    given = (launch.or_v(x.r), launch.or_v(y.r), launch.or_v(x.w), launch.or_v(y.w), launch.or_v(sums), launch.or_v(launch.pos))
    strides = [n for one in (x.r, y.r, x.w, y.w) for n in launch_utils.strides(one)]
    _kernels.gla_shared_scores_kernel[(chunks, parts, batch)](
        *given, scores, launch.or_v(None if flows is None else flows[blocks]), length, share, launch.scale, *strides,
        num_warps=config.warps_scores_shared, maxnreg=config.registers_scores_shared, **options,
    )  # fmt: skip
    _kernels.gla_shared_dqk_kernel[(blocks, chunks, batch * parts)](
        *given, scores, states, cotangents, r, w, launch.or_v(flows), length, chunks, share, launch.scale, *strides,
        num_warps=config.warps_shared, maxnreg=config.registers_shared, **options,
    )  # fmt: skip
    if flows is None:
        return r, w, None
    g = launch.new(batch, length, heads)
    _kernels.gla_shared_dg_kernel[(chunks, -(-heads // 32), batch)](
        flows, g, length, blocks + 1, H=heads, C=config.chunk, BH=32, num_warps=4
    )
    return r, w, g
