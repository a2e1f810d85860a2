"""The process mesh: which rank shares what with whom.

megatron-core's parallel_state owns every process group; this module starts it and gives the groups their names here. Ranks are
numbered tensor first, then sequence, data and pipeline.
"""

import contextlib
import datetime
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from baton.parallel import compat
from baton.parallel.config import LayoutConfig
from baton.parallel.context_parallel import ContextLink, context_link
from baton.parallel.errors import LayoutError
from baton.parallel.pipeline import PipelineLink, pipeline_link


@dataclass(frozen=True)
class Mesh:
    """This process's place in the mesh. Sizes and ranks count processes; groups are torch.distributed's."""

    layout: LayoutConfig
    device: torch.device
    rank: int
    tensor_rank: int
    context_rank: int
    data_rank: int
    pipeline_rank: int
    tensor_group: dist.ProcessGroup
    data_group: dist.ProcessGroup
    """Ranks that see different tokens (data x context): ZeRO partitions over it, gradients are summed over it."""
    lane_group: dist.ProcessGroup
    """Ranks that work on the same sequences (tensor x context x pipeline): what the first of them reads, all need."""
    stage_group: dist.ProcessGroup | None
    """Ranks that hold the same layers (tensor x context x data); None where that is all of them."""
    embedding_group: dist.ProcessGroup | None
    """The first and the last stage's ranks that share an embedding; None on others, and where there is one stage."""
    model_group: dist.ProcessGroup
    """Ranks that hold one copy of the model together (tensor x pipeline)."""
    link: ContextLink | None
    """The neighbours in the sequence group; None where it is one rank."""
    pipeline: PipelineLink | None
    """The stages before and after this one; None where there is one."""

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def is_main(self) -> bool:
        """Whether this rank writes what a run writes once."""
        return self.rank == 0


def initialize(
    layout: LayoutConfig,
    *,
    device: torch.device,
    rank: int,
    store: torch.distributed.Store,
    patience_s: float | None = None,
) -> Mesh:
    """Join the world and build the mesh's groups.

    layout: sizes; their product is the number of processes that call this. Its timeout_s also bounds every collective, unless
    patience_s does, for ranks that a watching process monitors, which identifies a hanging rank better than a timeout does.
    device: "cpu" (gloo), "cuda:i" (NCCL) or "meta" (torch's fake: this process stands for one of the world, and nothing is sent).
    store: where the processes meet.
    Raises LayoutError for a layout that cannot be.
    """
    layout.check()
    compat.install(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout_s = patience_s or layout.timeout_s
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(
        {"cuda": "nccl", "meta": "fake"}.get(device.type, "gloo"),
        store=store,
        rank=rank,
        world_size=layout.world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    from baton.parallel.megatron import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        distributed_timeout_minutes=math.ceil(timeout_s / 60),
        create_gloo_process_groups=False,
    )
    stage_size = layout.world_size // layout.pipeline
    piped = layout.pipeline > 1
    stages = [range(n * stage_size, (n + 1) * stage_size) for n in range(layout.pipeline)]
    sharing = layout.tensor * layout.context
    lanes = [[rank for stage in stages for rank in stage[n * sharing : (n + 1) * sharing]] for n in range(layout.data)]
    has_embedding = piped and (parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage())
    return Mesh(
        layout=layout,
        device=device,
        rank=rank,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        context_rank=parallel_state.get_context_parallel_rank(),
        data_rank=parallel_state.get_data_parallel_rank(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        data_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        # megatron-core has none that leaves out the data ranks alone, or the stages alone
        lane_group=_own_group(lanes, timeout) if piped else parallel_state.get_tensor_and_context_parallel_group(),
        stage_group=_own_group(stages, timeout) if piped else None,
        embedding_group=parallel_state.get_embedding_group() if has_embedding else None,
        model_group=parallel_state.get_model_parallel_group(),
        link=context_link(layout, rank, device, timeout_s),
        pipeline=pipeline_link(layout, rank, parallel_state.get_pipeline_model_parallel_group(), device, timeout_s),
    )


def _own_group(groups: Sequence[Sequence[int]], timeout: datetime.timedelta) -> dist.ProcessGroup:
    """The group that this rank is in; every rank makes all of them, in the same order."""
    made = [dist.new_group(list(ranks), timeout=timeout) for ranks in groups]
    return next(group for group, ranks in zip(made, groups, strict=True) if dist.get_rank() in ranks)


def await_all(mesh: Mesh, store: dist.Store) -> None:
    """Wait until all ranks are here and no GPU has work, after which each process may end without `shutdown`.

    Until then another rank's GPU may read this one's memory. Destroying NCCL's communicators takes seconds and can hang; the
    end of a process frees all they have. store: as given to `initialize`. The wait ends early where the store, a thread of
    rank 0, has ended: rank 0 has then met all ranks.
    """
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)
    with contextlib.suppress(dist.DistError):
        if store.add("ranks at their end", 1) == mesh.world_size:
            store.set("all ranks at their end", "")
        store.wait(["all ranks at their end"])


def shutdown() -> None:
    """Leave the world; the process may join another. Ends megatron-core's groups, those that DeepSpeed caches, and torch's."""
    from baton.parallel.megatron import parallel_state

    parallel_state.destroy_model_parallel()
    if "deepspeed" in sys.modules:
        import deepspeed.comm.comm
        from deepspeed.utils import groups

        if deepspeed.comm.comm.cdb is not None:
            deepspeed.comm.comm.destroy_process_group()
            deepspeed.comm.comm.cdb = None
            groups.mpu = None
    if dist.is_initialized():
        dist.destroy_process_group()
    compat.restore_cuda_functions()


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
