"""The process mesh: which rank shares what with whom.

megatron-core's parallel_state owns every process group; this module starts it and gives the groups their names here. Ranks are
numbered tensor first, then sequence, data and pipeline.
"""

import datetime
from dataclasses import dataclass

import torch
import torch.distributed as dist

from baton.parallel import compat
from baton.parallel.config import LayoutConfig
from baton.parallel.errors import LayoutError
from baton.parallel.sequence import SequenceLink


@dataclass(frozen=True)
class Mesh:
    """This process's place in the mesh. Sizes and ranks count processes; groups are torch.distributed's."""

    layout: LayoutConfig
    device: torch.device
    rank: int
    tensor_rank: int
    sequence_rank: int
    data_rank: int
    tensor_group: dist.ProcessGroup
    data_group: dist.ProcessGroup
    """Ranks that see different tokens (data x sequence): ZeRO partitions over it, gradients are summed over it."""
    lane_group: dist.ProcessGroup
    """Ranks that work on the same sequences (tensor x sequence): what one of them reads, all need."""
    model_group: dist.ProcessGroup
    """Ranks that hold one copy of the model together (tensor x pipeline)."""
    link: SequenceLink | None
    """The neighbours in the sequence group; None where it is one rank."""

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def is_main(self) -> bool:
        """Whether this rank writes what a run writes once."""
        return self.rank == 0


def initialize(
    layout: LayoutConfig, *, device: torch.device, rank: int, store: torch.distributed.Store, timeout_s: float = 600.0
) -> Mesh:
    """Join the world and build the mesh's groups.

    layout: sizes; their product is the number of processes that call this.
    device: "cpu" (gloo) or "cuda:i" (NCCL).
    store: where the processes meet. timeout_s: seconds that a collective may wait before the process gives up.
    Raises LayoutError for a layout that is not built.
    """
    layout.check()
    world_size = layout.world_size
    compat.install(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.sequence,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
        create_gloo_process_groups=False,
    )
    return Mesh(
        layout=layout,
        device=device,
        rank=rank,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        sequence_rank=parallel_state.get_context_parallel_rank(),
        data_rank=parallel_state.get_data_parallel_rank(),
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        data_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        lane_group=parallel_state.get_tensor_and_context_parallel_group(),
        model_group=parallel_state.get_model_parallel_group(),
        link=_sequence_link(layout, rank, device),
    )


def _sequence_link(layout: LayoutConfig, rank: int, device: torch.device) -> SequenceLink | None:
    """This rank's neighbours, with a communicator per direction for every sequence group: all ranks make all of them, in order."""
    if layout.sequence == 1:
        return None
    found = None
    for first in range(layout.world_size):
        if first // layout.tensor % layout.sequence:
            continue
        ranks = [first + n * layout.tensor for n in range(layout.sequence)]
        to_right, to_left = (dist.new_group(ranks) for _ in range(2))
        if rank in ranks:
            found = SequenceLink(ranks.index(rank), layout.sequence, ranks, to_right, to_left, device)
    return found


def shutdown() -> None:
    """Leave the world; the process may join another."""
    compat.destroy_process_groups()


def local_device(local_rank: int, local_world_size: int, wanted: str) -> torch.device:
    """The device of this machine's local_rank-th process.

    wanted: "cpu", "cuda" or "auto" (cuda where there is one). Raises LayoutError when there are fewer GPUs than ranks.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    available = torch.cuda.device_count()
    if available < local_world_size:
        raise LayoutError(
            f"the layout asks for {local_world_size} ranks on this machine, which has {available} GPU(s); "
            f"use at most {available} ranks, or set device=cpu"
        )
    return torch.device("cuda", local_rank)
