"""Where a rank's optimizer state lies in the whole model.

ZeRO-1 cuts the concatenation of a group's parameters into equal flat ranges, one per data rank, wherever the cuts fall. What a
rank owns of one parameter is therefore a flat range of its row-major tensor-parallel share, and such a range is a few
rectangles: a part of a first row, whole rows, a part of a last row. Written at their offsets in the whole tensor they need no
communication, and any layout can read what any other wrote.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from baton.parallel.layout import named_layouts
from baton.parallel.mesh import Mesh

KINDS = ("master", "exp_avg", "exp_avg_sq")
"""What is stored per parameter: the fp32 master copy and AdamW's two moments."""


@dataclass(frozen=True)
class Rectangle:
    """A box of one whole tensor and the memory that holds it (a view, shaped like the box)."""

    whole: tuple[int, ...]
    offset: tuple[int, ...]
    data: Tensor


def flat_range_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes (offset, extent), in row-major order, that together are elements [start, stop) of a row-major tensor of `shape`.

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


def optimizer_rectangles(module: nn.Module, engine: Any, mesh: Mesh, *, for_save: bool) -> dict[str, list[Rectangle]]:
    """Key ("master.<name>", "exp_avg.<name>", …) to the rectangles of it that this rank's ZeRO partition holds.

    for_save: leave out what another tensor rank writes too (replicated parameters are written by tensor rank 0).
    """
    flats = _flat_tensors(engine)
    found: dict[str, list[Rectangle]] = {}
    for name, parameter, layout in named_layouts(module):
        fragment = parameter._hp_mapping  # type: ignore[attr-defined]
        if fragment is None or (for_save and layout.split is None and mesh.tensor_rank != 0):
            continue
        here, there = fragment.lp_fragment_address, fragment.hp_fragment_address
        columns = math.prod(parameter.shape[1:])
        for block in layout.global_blocks(name, mesh.tensor_rank, mesh.layout.tensor):
            block_start = block.local_row * columns
            start = max(here.start, block_start)
            stop = min(here.start + here.numel, block_start + math.prod(block.extent))
            for offset, extent in flat_range_boxes(block.extent, start - block_start, stop - block_start):
                position = block_start + sum(o * math.prod(block.extent[d + 1 :]) for d, o in enumerate(offset))
                at = there.start + position - here.start
                for kind, flat in zip(KINDS, flats[fragment.param_group_index]):
                    box = Rectangle(
                        block.whole,
                        tuple(a + b for a, b in zip(block.offset, offset)),
                        flat[at : at + math.prod(extent)].view(extent),
                    )
                    found.setdefault(f"{kind}.{block.name}", []).append(box)
    return found


def parameter_rectangles(module: nn.Module, mesh: Mesh) -> dict[str, list[Rectangle]]:
    """The same keys' master copies with the module's own parameters as memory: for loading weights without an engine."""
    found: dict[str, list[Rectangle]] = {}
    for name, parameter, layout in named_layouts(module):
        for block in layout.global_blocks(name, mesh.tensor_rank, mesh.layout.tensor):
            rows = parameter.detach()[block.local_row : block.local_row + block.extent[0]]
            found[f"master.{block.name}"] = [Rectangle(block.whole, block.offset, rows)]
    return found


def _flat_tensors(engine: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(master, exp_avg, exp_avg_sq), flat, of each optimizer group's partition on this rank."""
    zero = engine.optimizer
    # the moments by the group's flat tensor: DeepSpeed's own links to optimizer fragments cover group 0 only
    state = zero.optimizer.state
    return [(flat.detach(), state[flat]["exp_avg"], state[flat]["exp_avg_sq"]) for flat in zero.single_partition_of_fp32_groups]


def create_adam_state(engine: Any) -> None:
    """Make AdamW's moments now, not in the first step, so that there is something to load into or to save at step 0."""
    adam = engine.optimizer.optimizer
    for group in adam.param_groups:
        for flat in group["params"]:
            if flat not in adam.state or not adam.state[flat]:
                adam.state[flat] = {
                    "step": torch.zeros((), dtype=torch.float32, device=flat.device if group.get("fused") else "cpu"),
                    "exp_avg": torch.zeros_like(flat),
                    "exp_avg_sq": torch.zeros_like(flat),
                }


def adam_steps(engine: Any) -> int:
    """How many updates AdamW has made (its bias correction depends on it)."""
    adam = engine.optimizer.optimizer
    return int(next(iter(adam.state.values()))["step"].item())


def set_adam_steps(engine: Any, steps: int) -> None:
    """Set AdamW's count of updates in every group."""
    for state in engine.optimizer.optimizer.state.values():
        state["step"].fill_(float(steps))
