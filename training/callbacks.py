"""What hangs on the loop: the record, replicas, validation, norms, checkpoints. Every rank runs every callback, in this order."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

from baton.data_pipeline.batches import IGNORE_INDEX, Batch
from baton.data_pipeline.file_io import PAUSES_S
from baton.data_pipeline.run_source import ShardSource, TaskSource
from baton.data_pipeline.stream import EvaluationSet, evaluation_batches
from baton.data_pipeline.synthetic_stream import task_set
from baton.parallel.mesh import Mesh
from baton.training.bptt.lane_states import LaneStates
from baton.training.build import TrainState
from baton.training.checkpoint.digest import combine_digests
from baton.training.checkpoint.interval import CheckpointSchedule
from baton.training.checkpoint.manifest import Manifest, versions
from baton.training.checkpoint.shard_boxes import optimizer_boxes
from baton.training.checkpoint.store import CheckpointStore, Saved
from baton.training.config import TrainingConfig
from baton.training.config_checks import check_long_evaluation
from baton.training.evaluation.evaluate import evaluate, evaluate_task
from baton.training.evaluation.generation import generate
from baton.training.evaluation.long_context import LongRows, evaluate_long, long_row_batches
from baton.training.lr_schedule import learning_rate
from baton.training.monitoring import heartbeat, replica_check
from baton.training.monitoring.metrics import MetricsLogger
from baton.training.monitoring.state_gradients import StateGradientMonitor, StateGradients, gradient_reach
from baton.training.monitoring.step_timer import StepTimer
from baton.training.run import RunProgress, RunSettings
from baton.training.step import batch_distribution
from baton.training.step.executor import StepResult
from baton.training.step.microbatch_runner import TokenBatch


class MetricsCallback:
    """Every step into the record."""

    time_category = "other"

    def __init__(self, metrics: MetricsLogger | None, timer: StepTimer, training: TrainingConfig, mesh: Mesh) -> None:
        self._metrics, self._timer, self._training, self._device = metrics, timer, training, mesh.device

    def after_step(self, progress: RunProgress, result: StepResult) -> None:
        if self._metrics is None or not result.updated:
            return
        self._metrics.log_step(
            {
                "step": progress.step,
                "tokens": progress.tokens,
                "loss": result.loss,
                "lr": learning_rate(progress.step - 1, self._training),
                "grad_norm": result.grad_norm,
                **({} if result.update_norm is None else {"update_norm": result.update_norm}),
                "step_tokens": self._training.at(progress.step - 1).global_batch_tokens,
                "consumed": combine_digests([result.checksum]),
                "seconds": self._timer.seconds(),
                "data_wait_s": progress.data_wait_s,
                "memory_bytes": _memory(self._device),
            }
        )


class ReplicaCheckCallback:
    """Replicas compared every so many steps, and before anything is saved: what a run resumes from has been found in order."""

    time_category = "check"

    def __init__(self, train_state: TrainState, training: TrainingConfig, schedule: CheckpointSchedule) -> None:
        self._train_state, self._training, self._schedule = train_state, training, schedule

    def before_first_step(self, progress: RunProgress) -> None:
        if self._training.replica_check_every:
            replica_check.check_replicas(self._train_state, progress.step)

    def after_step(self, progress: RunProgress, result: StepResult) -> None:
        every = self._training.replica_check_every
        if every and (progress.step % every == 0 or self._schedule.due(progress.step, stop_requested=progress.stop_requested)):
            replica_check.check_replicas(self._train_state, progress.step)


class TextEvaluationCallback:
    """Validation on text every so many steps and after the last, with a sample of what the model writes."""

    time_category = "evaluation"

    def __init__(self, train_state: TrainState, source: ShardSource, metrics: MetricsLogger | None, settings: RunSettings) -> None:
        self._train_state, self._source, self._tokenizer, self._metrics = train_state, source, source.tokenizer, metrics
        self._training = settings.training
        self._set: tuple[EvaluationSet, list[TokenBatch]] | None = None

    def after_step(self, progress: RunProgress, result: StepResult) -> None:
        if not _evaluation_is_due(progress, self._training):
            return
        _evaluation_begins(progress, first=self._set is None)
        chosen, batches = self._set = self._set or self._read()
        model, mesh = self._train_state.model, self._train_state.mesh
        found = evaluate(model, batches, chosen.text_bytes, chosen.tokens, mesh, segments=self._training.segments)
        sample = None
        wanted = self._training.evaluation.sample_tokens
        if wanted and mesh.data_rank == 0:
            doc = self._tokenizer.doc
            ids = generate(model, [doc], tokens=wanted, vocab_size=self._tokenizer.vocab_size, stop=doc, seed=progress.step)
            sample = self._tokenizer.decode(ids, errors="replace")
        progress.validation_loss = found.loss
        if self._metrics is not None:
            self._metrics.log_evaluation(progress.step, progress.tokens, found.loss, found.bits_per_byte, sample)

    def _read(self) -> tuple[EvaluationSet, list[TokenBatch]]:
        """Of several sources, of each its share."""
        mesh, training, parts = self._train_state.mesh, self._training, []
        for name, weight in self._source.weights.items():
            chosen = evaluation_batches(
                self._source.datasets[name],
                self._tokenizer,
                sequence_length=training.sequence_length,
                micro_batch_size=training.micro_batch_size,
                max_tokens=max(1, round(training.evaluation.tokens * weight)),
                data_rank=mesh.data_rank,
                data_size=mesh.layout.data,
            )
            parts.append(chosen)
        together = EvaluationSet.joined(parts)
        return together, _shared(together.batches, mesh, training.segments)


class TaskEvaluationCallback:
    """Accuracy on a synthetic task every so many steps and after the last, case by case."""

    time_category = "evaluation"

    def __init__(self, train_state: TrainState, source: TaskSource, metrics: MetricsLogger | None, settings: RunSettings) -> None:
        self._train_state, self._cases, self._metrics = train_state, source.config.evaluated(), metrics
        self._training = settings.training
        self._sets: dict[str, tuple[int, int, list[TokenBatch]]] = {}

    def after_step(self, progress: RunProgress, result: StepResult) -> None:
        if not _evaluation_is_due(progress, self._training):
            return
        _evaluation_begins(progress, first=not self._sets)
        self._sets = self._sets or self._make()
        model, mesh = self._train_state.model, self._train_state.mesh
        found = {name: evaluate_task(model, batches, labels, mesh, segments=n) for name, (labels, n, batches) in self._sets.items()}
        progress.validation_loss = sum(of_case.loss for of_case in found.values()) / len(found)
        if self._metrics is not None:
            self._metrics.log_task_evaluation(
                progress.step, progress.tokens, {name: (s.loss, s.accuracy) for name, s in found.items()}
            )

    def _make(self) -> dict[str, tuple[int, int, list[TokenBatch]]]:
        """Of each case: labels, segments, batches."""
        mesh, training = self._train_state.mesh, self._training
        made = {}
        for name, case in self._cases.items():
            chosen = task_set(
                case,
                tokens=training.evaluation.tokens,
                sequence_length=training.sequence_length,
                micro_batch_size=training.micro_batch_size,
                data_rank=mesh.data_rank,
                data_size=mesh.layout.data,
            )
            segments = 1 if training.bptt is None else -(-case.length // training.segment)
            whole = [b if segments == 1 else _padded(b, segments * training.segment) for b in chosen.batches]
            made[name] = chosen.labels, segments, _shared(whole, mesh, segments)
        return made


class LongContextCallback:
    """Loss by position, norms of States and the reach of credit on long rows, with every evaluation."""

    time_category = "evaluation"

    def __init__(
        self, train_state: TrainState, source: ShardSource | TaskSource, metrics: MetricsLogger | None, settings: RunSettings
    ) -> None:
        self._train_state, self._metrics, self._training = train_state, metrics, settings.training
        self._rows: LongRows | None = None
        self._first = True
        evaluation, documents = settings.training.evaluation, isinstance(source, ShardSource)
        check_long_evaluation(settings.model, settings.training, train_state.mesh.layout.context, documents=documents)
        if evaluation.long_rows_tokens and isinstance(source, ShardSource):
            self._rows = LongRows(source.heaviest, source.tokenizer, rows=evaluation.long_rows, tokens=evaluation.long_rows_tokens)

    def after_step(self, progress: RunProgress, result: StepResult) -> None:
        if self._rows is None or not _evaluation_is_due(progress, self._training):
            return
        model, mesh, evaluation = self._train_state.model, self._train_state.mesh, self._training.evaluation
        _evaluation_begins(progress, first=self._first)
        self._first = False
        if evaluation.long_tokens:
            segment = self._training.segment
            segments = -(-min(evaluation.long_tokens, self._rows.tokens) // segment)
            groups = long_row_batches(
                self._rows, mesh, micro_batch_size=self._training.micro_batch_size, segment=segment, segments=segments
            )
            looked = evaluate_long(model, groups, mesh, segment=segment, segments=segments)
            if self._metrics is not None:
                self._metrics.log_long_context(progress.step, progress.tokens, looked.to_json())
        if evaluation.gradient_reach_segment_length:
            found = self._gradient_reach(self._rows)
            if self._metrics is not None:
                seen = None if found is None else {**found.to_json(), "reach": found.reach()}
                self._metrics.log_gradient_reach(progress.step, progress.tokens, seen)

    def _gradient_reach(self, rows: LongRows) -> StateGradients | None:
        """On those of this data rank's first rows that are one document: no credit goes back beyond a document's start. None: no
        rank has any."""
        mesh, evaluation = self._train_state.mesh, self._training.evaluation
        segment, segments = evaluation.gradient_reach_segment_length, evaluation.gradient_reach_segments
        groups = long_row_batches(rows, mesh, micro_batch_size=self._training.micro_batch_size, segment=segment, segments=segments)
        batch = None
        if spans := list(next(groups, ())):
            tokens, labels, pos = (torch.cat([getattr(x, name) for x in spans], dim=1) for name in ("tokens", "labels", "pos"))
            # the last sequence rank, whose labels count, has the rows' last tokens
            batch = TokenBatch(tokens, torch.where(pos[:, -1:] + 1 < segment * segments, IGNORE_INDEX, labels), pos)
        return gradient_reach(self._train_state.model, batch, segments, segment // mesh.layout.context, mesh)


class StateGradientCallback:
    """Norms of the cotangents at the borders of segments and ranks, every so many steps."""

    time_category = "other"

    def __init__(self, train_state: TrainState, metrics: MetricsLogger | None, training: TrainingConfig) -> None:
        model, mesh = train_state.model, train_state.mesh
        self._metrics, self._training, self._mesh = metrics, training, mesh
        self._gradient_monitor = None if model.link is None else StateGradientMonitor(model, model.link, mesh)

    def before_first_step(self, progress: RunProgress) -> None:
        if self._gradient_monitor is not None:
            (self._gradient_monitor.start if self._is_due(progress.step + 1) else self._gradient_monitor.stop)()

    def after_step(self, progress: RunProgress, result: StepResult) -> None:
        if self._gradient_monitor is None:
            return
        if self._is_due(progress.step):
            self._gradient_monitor.stop()
            segment = self._training.at(progress.step - 1).segment
            found = self._gradient_monitor.read(segment // self._mesh.layout.context, cut=self._training.carries_lane_states)
            if self._metrics is not None and found is not None:
                self._metrics.log_state_gradients(progress.step, progress.tokens, found.to_json())
        self.before_first_step(progress)

    def _is_due(self, step: int) -> bool:
        every = self._training.monitoring.state_grad_norm_every
        return bool(every) and step % every == 0


class CheckpointCallback:
    """A checkpoint whenever one is due, written while training goes on."""

    time_category = "save"

    def __init__(
        self,
        train_state: TrainState,
        lanes: LaneStates | None,
        store: CheckpointStore,
        metrics: MetricsLogger | None,
        schedule: CheckpointSchedule,
        settings: RunSettings,
        describe: Callable[[], dict[str, Any]],
    ) -> None:
        """describe: what a manifest says of the run as it is: its fields `fingerprints` and `data`."""
        self._train_state, self._lanes, self._store, self._metrics = train_state, lanes, store, metrics
        self._mesh = train_state.mesh
        self._schedule, self._training, self._describe = schedule, settings.training, describe
        self._stall = 0.0

    def after_step(self, progress: RunProgress, result: StepResult) -> None:
        self._published(self._store.poll())
        if self._schedule.due(progress.step, stop_requested=progress.stop_requested):
            self.save(progress)
        if progress.step == self._training.steps or progress.stop_requested:
            self.finish()
            self.save_again(progress)

    def save_again(self, progress: RunProgress) -> None:
        """Where the last save failed, and nothing is trained any more that would be followed by another one: try it again a few
        times. Every rank calls it; `CheckpointStore.problem` says whether it failed to the end."""
        for pause in PAUSES_S:
            if self._store.problem is None:
                return
            if self._mesh.is_main:
                print(f"trying again to save in {pause:g} s", flush=True)
            time.sleep(pause)
            self.save(progress)
            self.finish()

    def finish(self) -> None:
        """Wait for what is being written."""
        self._published(self._store.finish())

    def save(self, progress: RunProgress) -> None:
        """Every rank calls it."""
        self.finish()  # one at a time: what is still being written is waited for
        start = time.perf_counter()
        if self._metrics is not None:
            self._metrics.flush()
        mesh = self._train_state.mesh
        cursors: list[Any] = [None] * mesh.world_size
        dist.all_gather_object(cursors, {str(lane): c.to_json() for lane, c in progress.cursors.items()})
        manifest = Manifest(
            step=progress.step,
            tokens=progress.tokens,
            adam_steps=self._train_state.engine.updates,
            cursors={lane: c for part in cursors for lane, c in part.items()},
            layout=mesh.layout.sizes(),
            versions=versions(),
            validation=progress.validation_loss,
            time=time.time(),
            **self._describe(),
        )
        boxes = optimizer_boxes(self._train_state.model, self._train_state.engine, mesh, for_save=True)
        if self._lanes is not None:
            boxes |= self._lanes.boxes(for_save=True)
        saved = self._store.save(boxes, manifest)
        self._stall = time.perf_counter() - start
        chosen = self._schedule.record_save(progress.step, self._stall)
        if chosen is not None and mesh.is_main:
            print(f"the next checkpoint is due after step {chosen}: this one stopped training for {self._stall:.2f} s", flush=True)
        self._published(saved)

    def _published(self, saved: Saved | None) -> None:
        if saved is not None and self._metrics is not None:
            self._metrics.log_checkpoint(saved.name, saved.seconds, saved.bytes, self._stall)


def _evaluation_is_due(progress: RunProgress, training: TrainingConfig) -> bool:
    every, last = training.evaluation.every, progress.step == training.steps
    return bool(every) and (progress.step % every == 0 or last)


def _shared(batches: list[Batch], mesh: Mesh, segments: int) -> list[TokenBatch]:
    """Batches of a reading rank on every rank that works on the same rows, on the device: its spans of the segments."""
    return [
        batch_distribution.distribute(
            b if batch_distribution.is_reader(mesh) else None, mesh, (b.tokens.shape[0], b.tokens.shape[1]), segments
        )
        for b in batches
    ]


def _padded(batch: Batch, tokens: int) -> Batch:
    """Rows of `tokens` tokens; the last ones are not asked."""
    more = ((0, 0), (0, tokens - batch.tokens.shape[1]))
    pos = np.broadcast_to(np.arange(tokens, dtype=np.int32), (len(batch.pos), tokens))
    return Batch(np.pad(batch.tokens, more), np.pad(batch.labels, more, constant_values=IGNORE_INDEX), pos, batch.lanes)


def _memory(device: torch.device) -> int:
    """Peak bytes on a GPU, resident bytes of this process on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss


def _evaluation_begins(progress: RunProgress, *, first: bool) -> None:
    """A sign of life. The first evaluation reads its documents and compiles kernels."""
    heartbeat.own_heartbeat().beat(progress.step, "evaluation", slow=first)
