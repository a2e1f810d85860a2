"""Where a rank's optimizer state lies in the whole tensors.

ZeRO splits the concatenation of a group's parameters into equal flat ranges, one per data rank, at arbitrary positions. So
a rank owns a flat range of a parameter's row-major tensor-parallel shard. Such a range is a few boxes: part of a first row,
whole rows, part of a last row. Written under their offsets in the whole tensor, they need no communication, and any layout
can read another's checkpoint.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

from baton.parallel.mesh import Mesh
from baton.parallel.param_layout import named_layouts
from baton.parallel.zero import Engine

KINDS = ("master", "exp_avg", "exp_avg_sq")
"""What is stored per parameter: the fp32 master copy and AdamW's two moments."""


@dataclass(frozen=True)
class ShardBox:
    """A box of a whole tensor and its memory.

    whole: shape of the whole tensor. offset: of the box in it. data: a view, shaped like the box.
    """

    whole: tuple[int, ...]
    offset: tuple[int, ...]
    data: Tensor


def flat_range_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes (offset, extent), in row-major order, that make up elements [start, stop) of a row-major tensor of `shape`.

    At most 2k - 1 boxes for k dimensions.
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last:
        for offset, extent in flat_range_boxes(shape[1:], start - first * row, stop - first * row):
            yield (first, *offset), (1, *extent)
        return
    if start % row:
        for offset, extent in flat_range_boxes(shape[1:], start - first * row, row):
            yield (first, *offset), (1, *extent)
        first += 1
    whole_rows = stop // row - first
    if whole_rows > 0:
        yield (first, *(0,) * (len(shape) - 1)), (whole_rows, *shape[1:])
    if stop % row:
        for offset, extent in flat_range_boxes(shape[1:], 0, stop % row):
            yield (stop // row, *offset), (1, *extent)


def optimizer_boxes(module: nn.Module, engine: Engine, mesh: Mesh, *, for_save: bool) -> dict[str, list[ShardBox]]:
    """Boxes of this rank's optimizer state by key: "master.<name>", "exp_avg.<name>", "exp_avg_sq.<name>".

    for_save: leave out what another rank writes. Replicated parameters are written by tensor rank 0; at ZeRO stage 0, where
    every data rank has all of them, by data rank 0.
    """
    names = {parameter: (name, layout) for name, parameter, layout in named_layouts(module)}
    found: dict[str, list[ShardBox]] = {}
    if for_save and engine.stage == 0 and dist.get_rank(mesh.data_group) != 0:
        return found
    for fragment in engine.fragments():
        name, layout = names[fragment.parameter]
        if for_save and layout.split is None and mesh.tensor_rank != 0:
            continue
        columns = math.prod(fragment.parameter.shape[1:])
        for block in layout.shard_boxes(name, mesh.tensor_rank, mesh.layout.tensor):
            block_start = block.local_row * columns
            start = max(fragment.start, block_start)
            stop = min(fragment.start + fragment.master.numel(), block_start + math.prod(block.extent))
            for offset, extent in flat_range_boxes(block.extent, start - block_start, stop - block_start):
                position = block_start + sum(o * math.prod(block.extent[d + 1 :]) for d, o in enumerate(offset))
                at = position - fragment.start
                for kind in KINDS:
                    box = ShardBox(
                        block.whole,
                        tuple(a + b for a, b in zip(block.offset, offset)),
                        getattr(fragment, kind)[at : at + math.prod(extent)].view(extent),
                    )
                    found.setdefault(f"{kind}.{block.name}", []).append(box)
    return found


def parameter_boxes(module: nn.Module, mesh: Mesh | None) -> dict[str, list[ShardBox]]:
    """Boxes "master.<name>" whose memory is the module's parameters: for loading weights without an engine. mesh: None: the module
    is the whole model."""
    found: dict[str, list[ShardBox]] = {}
    rank, ranks = (0, 1) if mesh is None else (mesh.tensor_rank, mesh.layout.tensor)
    for name, parameter, layout in named_layouts(module):
        for block in layout.shard_boxes(name, rank, ranks):
            rows = parameter.detach()[block.local_row : block.local_row + block.extent[0]]
            found[f"master.{block.name}"] = [ShardBox(block.whole, block.offset, rows)]
    return found
