"""Batches to the ranks that need them: one rank reads for all that work on the same sequences, and each takes its span of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from baton.data_pipeline.batches import Batch
from baton.data_pipeline.steps import Steps
from baton.parallel.mesh import Mesh
from baton.training.config import TrainingConfig
from baton.training.executor import TokenBatch


@dataclass(frozen=True)
class StepBatches:
    """One optimizer step's micro-batches on this rank; cursors of its lanes after the step ({} on ranks that do not read)."""

    batches: list[TokenBatch]
    cursors: dict[int, Any]


def steps(stream: Steps[Any] | None, mesh: Mesh, training: TrainingConfig) -> Iterator[StepBatches]:
    """Endless steps. stream: on a reading rank, None elsewhere."""
    shape = (training.micro_batch, training.context)
    micro_batches = training.sequences_per_step // (mesh.layout.data * training.micro_batch)
    source = iter(stream) if stream is not None else None
    while True:
        data = next(source) if source is not None else None
        arrays = data.micro_batches if data is not None else [None] * micro_batches
        yield StepBatches([share(a, mesh, shape) for a in arrays], dict(data.cursors) if data is not None else {})


def reads(mesh: Mesh) -> bool:
    """Whether this rank reads for the ranks that work on the same sequences."""
    return mesh.tensor_rank == 0 and mesh.sequence_rank == 0 and mesh.pipeline_rank == 0


def share(batch: Batch | None, mesh: Mesh, shape: tuple[int, int]) -> TokenBatch:
    """This rank's span of a batch that a reading rank has, on the device. batch: None on the others; shape: of the whole batch."""
    if batch is not None:
        packed = torch.from_numpy(np.stack([batch.tokens, batch.labels, batch.pos.astype(np.int64)])).to(mesh.device)
    else:
        packed = torch.empty((3, *shape), dtype=torch.int64, device=mesh.device)
    if dist.get_world_size(mesh.lane_group) > 1:
        dist.broadcast(packed, src=dist.get_global_rank(mesh.lane_group, 0), group=mesh.lane_group)
    packed = packed.chunk(mesh.layout.sequence, dim=2)[mesh.sequence_rank].contiguous()
    return TokenBatch(packed[0], packed[1], packed[2].to(torch.int32))
