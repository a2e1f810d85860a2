"""How each parameter is laid out over the ranks: declared once, where the parameter is made.

DeepSpeed's tensor-parallel tags, the optimizer's groups, the gradient reductions, the boxes that a checkpoint writes and the tests
that gather a model all follow from it.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

_THREADS = 8
"""Threads that make initial values. Each has a whole tensor in memory, on all ranks of a node at once."""

Init = Callable[[Tensor, torch.Generator], None]
"""Fills a whole (unsplit) fp32 tensor in place from a generator."""


@dataclass(frozen=True)
class ParameterLayout:
    """How one parameter is laid out over the ranks.

    shape: of the whole parameter, all tensor ranks together. split: the dimension that is split over the tensor group
    (column-parallel: 0, row-parallel: 1, vocabulary: 0); None: replicated. fused_splits: names and sizes of a fused projection's
    parts along dimension 0; () when it is not fused. Each part is split separately, so a rank holds the same slice of each.
    partial_over: groups ("tensor") over whose ranks the gradient is a partial sum, which `finalize_model_grads` adds up. decay:
    whether weight decay applies. tied_replica: this rank only reads the values: another stage owns the parameter, updates it and
    broadcasts it (a tied embedding on the last stage, or a block that layers of several stages share). The gradient computed here
    is added to the owner's. tied_owner: this rank, of the first stage, owns a parameter that has replicas. tied_over: where these
    are: on the last stage ("embedding"), or on all stages ("pipeline"). init: initial values of the whole parameter. They follow
    from the seed and the name, whatever the layout.
    """

    shape: tuple[int, ...]
    init: Init
    split: int | None = None
    fused_splits: tuple[tuple[str, int], ...] = ()
    partial_over: frozenset[str] = field(default_factory=frozenset)
    decay: bool = True
    tied_replica: bool = False
    tied_owner: bool = False
    tied_over: Literal["embedding", "pipeline"] = "embedding"

    def __post_init__(self) -> None:
        if self.fused_splits and (self.split != 0 or sum(n for _, n in self.fused_splits) != self.shape[0]):
            raise ValueError(f"fused_splits {self.fused_splits} must be split along dimension 0 and add up to {self.shape[0]}")

    @property
    def named_splits(self) -> tuple[tuple[str, int], ...]:
        """The fused projection's parts as (suffix, rows); one part with an empty suffix where the parameter is not fused."""
        return self.fused_splits or (("", self.shape[0]),)

    def local_shape(self, tensor_size: int) -> tuple[int, ...]:
        """Shape of one tensor rank's shard."""
        if self.split is None:
            return self.shape
        return tuple(n // tensor_size if d == self.split else n for d, n in enumerate(self.shape))

    def split_name(self, name: str, part: str) -> str:
        """Fully qualified name of a part: `in_proj.weight` and `x` give `in_proj.x.weight`."""
        if not part:
            return name
        head, _, leaf = name.rpartition(".")
        return f"{head}.{part}.{leaf}"

    def shard_boxes(self, name: str, tensor_rank: int, tensor_size: int) -> "list[ShardBox]":
        """Where this tensor rank's rows lie in the whole: one box per part, in the order of the local rows."""
        blocks = []
        row = 0
        for part, rows in self.named_splits:
            whole = (rows, *self.shape[1:])
            extent = list(whole)
            offset = [0] * len(whole)
            if self.split is not None:
                extent[self.split] = whole[self.split] // tensor_size
                offset[self.split] = tensor_rank * extent[self.split]
            blocks.append(ShardBox(self.split_name(name, part), whole, tuple(offset), tuple(extent), row))
            row += extent[0]
        return blocks


@dataclass(frozen=True)
class ShardBox:
    """A rank's box of one named tensor: shape of the whole, offset and extent in it, and first row in the local tensor."""

    name: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    local_row: int


def declare(parameter: nn.Parameter, layout: ParameterLayout) -> nn.Parameter:
    """Attach a layout to a parameter and set the tags that DeepSpeed's gradient norm reads."""
    parameter.baton_layout = layout  # type: ignore[attr-defined]
    # DeepSpeed counts an untagged parameter's gradient once (on tensor rank 0) and a tagged one on every rank.
    parameter.tensor_model_parallel = layout.split is not None  # type: ignore[attr-defined]
    parameter.model_parallel = layout.split is not None  # type: ignore[attr-defined]
    return parameter


def layout_of(parameter: nn.Parameter, name: str = "parameter") -> ParameterLayout:
    """The layout that `declare` attached. Raises TypeError for a parameter without one."""
    layout = getattr(parameter, "baton_layout", None)
    if not isinstance(layout, ParameterLayout):
        raise TypeError(f"{name} has no layout: make it with parallel.tensor or declare() one")
    return layout


def named_layouts(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, ParameterLayout]]:
    """(name, parameter, layout) of every parameter, once each, in the module's order."""
    for name, parameter in module.named_parameters():
        yield name, parameter, layout_of(parameter, name)


def parameter_count(module: nn.Module) -> int:
    """Number of parameters of a model or stage, all tensor ranks together, without tied replicas. Works on the meta device."""
    return sum(torch.Size(layout.shape).numel() for _, _, layout in named_layouts(module) if not layout.tied_replica)


def initialize_parameters(module: nn.Module, seed: int, tensor_rank: int, tensor_size: int) -> None:
    """Fill every parameter: the whole tensor is drawn from (seed, name), then this rank's shard is copied from it.

    The values do not depend on the layout, the device or the order of the parameters.
    """

    @torch.no_grad()  # a thread has its own mode
    def fill(named: tuple[str, nn.Parameter, ParameterLayout]) -> None:
        name, parameter, layout = named
        for block in layout.shard_boxes(name, tensor_rank, tensor_size):
            whole = torch.empty(block.whole, dtype=torch.float32)
            layout.init(whole, torch.Generator().manual_seed(_stable_seed(seed, block.name)))
            share = whole[tuple(slice(o, o + e) for o, e in zip(block.offset, block.extent))]
            parameter[block.local_row : block.local_row + block.extent[0]].copy_(share)

    # a generator draws on one core: 10 s for 1.3B parameters
    with ThreadPoolExecutor(min(_THREADS, len(os.sched_getaffinity(0)))) as pool:
        for _ in pool.map(fill, named_layouts(module)):
            pass


def _stable_seed(seed: int, name: str) -> int:
    import hashlib

    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little") >> 1


@torch.no_grad()
def gather_parameters(
    module: nn.Module, group: "torch.distributed.ProcessGroup", of: Callable[[nn.Parameter], Tensor] | None = None
) -> dict[str, Tensor]:
    """Whole tensors of this stage by part name, on the CPU of every rank of the tensor group: for tests, monitors and exports.

    of: what to gather for a parameter, shaped like it (default: the parameter itself).
    """
    import torch.distributed as dist

    size = dist.get_world_size(group)
    whole: dict[str, Tensor] = {}
    for name, parameter, layout in named_layouts(module):
        local = (parameter if of is None else of(parameter)).detach().contiguous()
        shares = [torch.empty_like(local) for _ in range(size)]
        dist.all_gather(shares, local, group=group)
        for rank, share in enumerate(shares):
            for block in layout.shard_boxes(name, rank, size):
                into = whole.setdefault(block.name, torch.empty(block.whole, dtype=local.dtype))
                index = tuple(slice(o, o + e) for o, e in zip(block.offset, block.extent))
                into[index].copy_(share[block.local_row : block.local_row + block.extent[0]])
    return whole
