"""Distributes batches: one rank reads for all ranks that work on the same sequences, and each takes its span of them."""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from baton.data_pipeline.packing import Batch, NumpyBatch
from baton.data_pipeline.steps import PhaseSpec, StepPlan, StepStream
from baton.parallel.mesh import Mesh
from baton.parallel.pipeline import StepSchedule
from baton.training.checkpoint.digest import rows_digest
from baton.training.config import TrainingConfig


@dataclass(frozen=True)
class StepBatches:
    """One optimizer step's micro-batches on this rank.

    Attributes:
        batches: this rank's spans, on its device.
        schedule: how the sequences are split in time.
        cursors: of the rank's lanes after the step; {} on ranks that do not read.
        reader_batches: the whole rows as they were read; None on ranks that do not read.
        wait_s: seconds for which this rank waited for the data pipeline.
        checksum: `batch_checksum` of reader_batches; 0 on other ranks.
    """

    batches: list[Batch[torch.Tensor]]
    schedule: StepSchedule
    cursors: dict[int, Any]
    reader_batches: list[NumpyBatch] | None = None
    wait_s: float = 0.0
    checksum: int = 0


def step_plan(training: TrainingConfig, mesh: Mesh, start_step: int, prefetch: int) -> StepPlan:
    """The rows of this data rank in every step from start_step on."""
    phases = [(first, at.sequence_length, at.sequences_per_step, at.micro_batch_size) for first, at in training.phases]
    return StepPlan(
        lanes=training.lane_count,
        phases=tuple(PhaseSpec(*phase) for phase in phases),
        data_rank=mesh.data_rank,
        data_size=mesh.layout.data,
        start_step=start_step,
        prefetch=prefetch,
    )


def step_batches(
    stream: StepStream[Any] | None, mesh: Mesh, training: TrainingConfig, start_step: int = 0
) -> Iterator[StepBatches]:
    """Endless steps from start_step on. stream: on a reading rank; None on the others."""
    source = iter(stream) if stream is not None else None
    for step in itertools.count(start_step):
        at = training.at(step)
        shape, micro_batches = (
            (at.micro_batch_size, at.sequence_length),
            at.sequences_per_step // (mesh.layout.data * at.micro_batch_size),
        )
        began = time.perf_counter()
        data = next(source) if source is not None else None
        wait_s = time.perf_counter() - began
        arrays = data.micro_batches if data is not None else [None] * micro_batches
        batches = [distribute(a, mesh, shape, at.segments) for a in arrays]
        schedule = StepSchedule(at.segments, at.gradient_segments)
        cursors, reader_batches = ({}, None) if data is None else (dict(data.cursors), data.micro_batches)
        yield StepBatches(batches, schedule, cursors, reader_batches, wait_s, batch_checksum(reader_batches or []))


def batch_checksum(batches: Sequence[NumpyBatch]) -> int:
    """Checksum of the batches' rows (tokens, labels and positions, each row under its lane), int64.

    Summed over ranks with wrap-around it is the checksum of the whole step, however rows were divided among ranks and
    micro-batches.
    """
    found = 0
    for batch in batches:
        rows = torch.from_numpy(np.stack([batch.tokens, batch.labels, batch.pos], axis=1).astype(np.int64))
        found += rows_digest(rows, batch.lanes)
    return (found + (1 << 63)) % (1 << 64) - (1 << 63)


def is_reader(mesh: Mesh) -> bool:
    """Whether this rank reads for the ranks that work on the same sequences."""
    return mesh.tensor_rank == 0 and mesh.context_rank == 0 and mesh.pipeline_rank == 0


def distribute(batch: NumpyBatch | None, mesh: Mesh, shape: tuple[int, int], segments: int = 1) -> Batch[torch.Tensor]:
    """Broadcast a batch from its reading rank; returns this rank's span of each segment, on its device.

    batch: None on ranks that do not read. shape: (rows, tokens) of the whole batch.
    """
    rows, sequence_length = shape
    lanes: tuple[int, ...] | None = None
    if batch is not None:
        lanes = batch.lanes or (-1,) * rows
        packed = np.concatenate([x.ravel().astype(np.int64) for x in (batch.tokens, batch.labels, batch.pos, np.array(lanes))])
        whole = torch.from_numpy(packed)
        # from page-locked memory the copy does not stop the host
        flat = whole.pin_memory().to(mesh.device, non_blocking=True) if mesh.device.type == "cuda" else whole
    else:
        flat = torch.empty(3 * rows * sequence_length + rows, dtype=torch.int64, device=mesh.device)
    if dist.get_world_size(mesh.lane_group) > 1:
        dist.broadcast(flat, src=dist.get_global_rank(mesh.lane_group, 0), group=mesh.lane_group)
    spans = flat[: 3 * rows * sequence_length].view(3, rows, segments, mesh.layout.context, -1)[:, :, :, mesh.context_rank]
    tokens, labels, pos = spans.reshape(3, rows, -1)
    if lanes is None:  # reading them back from a GPU waits for it; who has read the batch knows them
        lanes = tuple(flat[3 * rows * sequence_length :].tolist())
    return Batch(tokens, labels, pos.to(torch.int32), lanes)
