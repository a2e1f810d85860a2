"""Distributes batches: one rank reads for all ranks that work on the same sequences, and each takes its span of them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist

from baton.data_pipeline.packing import Batch, NumpyBatch
from baton.data_pipeline.steps import PhaseSpec, StepData, StepPlan, StepStream
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


class StepReader:
    """Endless steps, as this rank gets them; an iterator.

    Args:
        stream: on a reading rank; None on the others.
        start_step: number of the first step.
    """

    def __init__(self, stream: StepStream[Any] | None, mesh: Mesh, training: TrainingConfig, start_step: int = 0) -> None:
        self._stream, self._mesh, self._training, self._step = stream, mesh, training, start_step
        self._read: _Read | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StepBatches:
        """Waits for the data. Raises the stream's errors."""
        read, self._read = self._read, None
        wait_s = 0.0
        if read is None and self._stream is not None:
            began = time.perf_counter()
            data = next(self._stream)
            wait_s = time.perf_counter() - began
            read = _Read.of(data, self._mesh)
        at = self._training.at(self._step)
        self._step += 1
        shape = at.micro_batch_size, at.sequence_length
        micro_batches = at.sequences_per_step // (self._mesh.layout.data * at.micro_batch_size)
        packed = [None] * micro_batches if read is None else read.packed
        batches = [_share(rows, self._mesh, shape, at.segments) for rows in packed]
        schedule = StepSchedule(at.segments, at.gradient_segments)
        if read is None:
            return StepBatches(batches, schedule, {})
        return StepBatches(batches, schedule, dict(read.data.cursors), read.data.micro_batches, wait_s, read.checksum)

    def prepare(self) -> None:
        """Read the next step if its rows are made, so that `next` has little left to do: for a time when the host would wait for
        a GPU. An error of the stream is raised by `next`."""
        if self._read is not None or self._stream is None or not self._stream.is_ready():
            return
        try:
            data = next(self._stream)
        except Exception:  # a stream that has failed raises the same error each time
            return
        self._read = _Read.of(data, self._mesh)


@dataclass(frozen=True)
class _PackedRows:
    """A batch on its way to the ranks that share its rows. flat: tokens, labels, positions and lanes, int64 [3 rows T + rows], on
    the reading rank's device."""

    flat: torch.Tensor
    lanes: tuple[int, ...]


@dataclass(frozen=True)
class _Read:
    data: StepData
    packed: list[_PackedRows]
    checksum: int

    @classmethod
    def of(cls, data: StepData, mesh: Mesh) -> Self:
        return cls(data, [_pack(batch, mesh.device) for batch in data.micro_batches], batch_checksum(data.micro_batches))


def _pack(batch: NumpyBatch, device: torch.device) -> _PackedRows:
    lanes = batch.lanes or (-1,) * len(batch.tokens)
    arrays = (batch.tokens, batch.labels, batch.pos, np.array(lanes))
    # from page-locked memory the copy does not stop the host; NumPy writes it without PyTorch's threads (see `rows_digest`)
    whole = torch.empty(sum(x.size for x in arrays), dtype=torch.int64, pin_memory=device.type == "cuda")
    np.concatenate([x.ravel() for x in arrays], out=whole.numpy())
    return _PackedRows(whole.to(device, non_blocking=True), lanes)


def batch_checksum(batches: Sequence[NumpyBatch]) -> int:
    """Checksum of the batches' rows (tokens, labels and positions, each row under its lane), int64.

    Summed over ranks with wrap-around it is the checksum of the whole step, however rows were divided among ranks and
    micro-batches.
    """
    found = 0
    for batch in batches:
        found += rows_digest(np.stack([batch.tokens, batch.labels, batch.pos], axis=1, dtype=np.int64), batch.lanes)
    return (found + (1 << 63)) % (1 << 64) - (1 << 63)


def is_reader(mesh: Mesh) -> bool:
    """Whether this rank reads for the ranks that work on the same sequences."""
    return mesh.tensor_rank == 0 and mesh.context_rank == 0 and mesh.pipeline_rank == 0


def distribute(batch: NumpyBatch | None, mesh: Mesh, shape: tuple[int, int], segments: int = 1) -> Batch[torch.Tensor]:
    """Broadcast a batch from its reading rank; returns this rank's span of each segment, on its device.

    batch: None on ranks that do not read. shape: (rows, tokens) of the whole batch.
    """
    return _share(None if batch is None else _pack(batch, mesh.device), mesh, shape, segments)


def _share(packed: _PackedRows | None, mesh: Mesh, shape: tuple[int, int], segments: int) -> Batch[torch.Tensor]:
    rows, sequence_length = shape
    if packed is not None:
        flat = packed.flat
    else:
        flat = torch.empty(3 * rows * sequence_length + rows, dtype=torch.int64, device=mesh.device)
    if dist.get_world_size(mesh.lane_group) > 1:
        dist.broadcast(flat, src=dist.get_global_rank(mesh.lane_group, 0), group=mesh.lane_group)
    spans = flat[: 3 * rows * sequence_length].view(3, rows, segments, mesh.layout.context, -1)[:, :, :, mesh.context_rank]
    tokens, labels, pos = spans.reshape(3, rows, -1)
    # reading lanes back from a GPU waits for it; who has read the batch knows them
    lanes = tuple(flat[3 * rows * sequence_length :].tolist()) if packed is None else packed.lanes
    return Batch(tokens, labels, pos.to(torch.int32), lanes)
