"""What hangs on the loop: the record, replicas, validation, checkpoints. Every rank runs every callback, in this order."""

import time
from importlib.metadata import version
from typing import Any

import psutil
import torch
import torch.distributed as dist

from baton.data_pipeline.batches import Batch
from baton.data_pipeline.source import ShardSource, TaskSource
from baton.data_pipeline.stream import EvaluationSet, evaluation_batches
from baton.data_pipeline.task_stream import task_set
from baton.parallel.mesh import Mesh
from baton.training import feed, replicas
from baton.training.build import Built
from baton.training.checkpoint.manifest import Manifest
from baton.training.checkpoint.rectangles import optimizer_rectangles
from baton.training.checkpoint.store import CheckpointStore
from baton.training.clock import StepClock
from baton.training.config import TrainingConfig
from baton.training.evaluation import evaluate, score
from baton.training.executor import StepResult
from baton.training.generation import generate
from baton.training.lane_states import LaneStates
from baton.training.monitor import Monitor
from baton.training.passes import TokenBatch
from baton.training.run import Progress, RunSettings
from baton.training.schedule import learning_rate


class Recorder:
    """Every step into the record."""

    def __init__(self, monitor: Monitor | None, clock: StepClock, training: TrainingConfig, mesh: Mesh) -> None:
        self._monitor, self._clock, self._training, self._device = monitor, clock, training, mesh.device

    def after_step(self, progress: Progress, result: StepResult) -> None:
        if self._monitor is None:
            return
        self._monitor.train(
            {
                "step": progress.step,
                "tokens": progress.tokens,
                "loss": result.loss,
                "lr": learning_rate(progress.step - 1, self._training),
                "grad_norm": result.grad_norm,
                "step_tokens": self._training.global_batch_tokens,
                "seconds": self._clock.seconds(),
                "memory_bytes": _memory(self._device),
            }
        )


class ReplicaCheck:
    """Replicas compared every so many steps, and before anything is saved: what a run resumes from has been found in order."""

    def __init__(self, built: Built, training: TrainingConfig) -> None:
        self._built, self._training = built, training

    def before_first_step(self, progress: Progress) -> None:
        if self._training.replica_check_every:
            replicas.require_equal(self._built, progress.step)

    def after_step(self, progress: Progress, result: StepResult) -> None:
        every = self._training.replica_check_every
        if every and (progress.step % every == 0 or _save_is_due(progress, self._training)):
            replicas.require_equal(self._built, progress.step)


class Evaluator:
    """Validation on text every so many steps and after the last, with a sample of what the model writes."""

    def __init__(self, built: Built, source: ShardSource, monitor: Monitor | None, settings: RunSettings) -> None:
        self._built, self._dataset, self._tokenizer, self._monitor = built, source.dataset, source.tokenizer, monitor
        self._training = settings.training
        self._set: tuple[EvaluationSet, list[TokenBatch]] | None = None

    def after_step(self, progress: Progress, result: StepResult) -> None:
        if not _evaluation_is_due(progress, self._training):
            return
        chosen, batches = self._set = self._set or self._read()
        model, mesh = self._built.model, self._built.mesh
        found = evaluate(model, batches, chosen.text_bytes, chosen.tokens, mesh)
        sample = None
        wanted = self._training.evaluation.sample_tokens
        if wanted and mesh.data_rank == 0:
            doc = self._tokenizer.doc
            ids = generate(model, [doc], tokens=wanted, vocab_size=self._tokenizer.vocab_size, stop=doc, seed=progress.step)
            sample = self._tokenizer.decode(ids, errors="replace")
        if self._monitor is not None:
            self._monitor.evaluation(progress.step, progress.tokens, found.loss, found.bits_per_byte, sample)

    def _read(self) -> tuple[EvaluationSet, list[TokenBatch]]:
        mesh, training = self._built.mesh, self._training
        chosen = evaluation_batches(
            self._dataset,
            self._tokenizer,
            context=training.context,
            micro_batch=training.micro_batch,
            max_tokens=training.evaluation.tokens,
            data_rank=mesh.data_rank,
            data_size=mesh.layout.data,
        )
        return chosen, _shared(chosen.batches, mesh)


class TaskEvaluator:
    """Accuracy on a synthetic task every so many steps and after the last, case by case."""

    def __init__(self, built: Built, source: TaskSource, monitor: Monitor | None, settings: RunSettings) -> None:
        self._built, self._cases, self._monitor = built, source.config.evaluated(), monitor
        self._training = settings.training
        self._sets: dict[str, tuple[int, list[TokenBatch]]] = {}

    def after_step(self, progress: Progress, result: StepResult) -> None:
        if not _evaluation_is_due(progress, self._training):
            return
        self._sets = self._sets or self._make()
        model, mesh = self._built.model, self._built.mesh
        found = {name: score(model, batches, labels, mesh) for name, (labels, batches) in self._sets.items()}
        if self._monitor is not None:
            self._monitor.accuracy(progress.step, progress.tokens, {name: (s.loss, s.accuracy) for name, s in found.items()})

    def _make(self) -> dict[str, tuple[int, list[TokenBatch]]]:
        mesh, training = self._built.mesh, self._training
        sets = {
            name: task_set(
                case,
                tokens=training.evaluation.tokens,
                context=training.context,
                micro_batch=training.micro_batch,
                data_rank=mesh.data_rank,
                data_size=mesh.layout.data,
            )
            for name, case in self._cases.items()
        }
        return {name: (chosen.labels, _shared(chosen.batches, mesh)) for name, chosen in sets.items()}


class Saver:
    """A checkpoint every so many steps and after the last."""

    def __init__(
        self,
        built: Built,
        lanes: LaneStates | None,
        store: CheckpointStore,
        monitor: Monitor | None,
        fingerprints: dict[str, str],
        training: TrainingConfig,
    ) -> None:
        self._built, self._lanes, self._store, self._monitor = built, lanes, store, monitor
        self._fingerprints, self._training = fingerprints, training

    def after_step(self, progress: Progress, result: StepResult) -> None:
        if not _save_is_due(progress, self._training):
            return
        start = time.perf_counter()
        if self._monitor is not None:
            self._monitor.flush()
        mesh = self._built.mesh
        cursors: list[Any] = [None] * mesh.world_size
        dist.all_gather_object(cursors, {str(lane): c.to_json() for lane, c in progress.cursors.items()})
        manifest = Manifest(
            step=progress.step,
            tokens=progress.tokens,
            adam_steps=self._built.engine.updates,
            cursors={lane: c for part in cursors for lane, c in part.items()},
            fingerprints=self._fingerprints,
            layout=mesh.layout.sizes(),
            versions={name: version(name) for name in ("baton-lm", "torch", "deepspeed", "megatron-core")},
        )
        rectangles = optimizer_rectangles(self._built.model, self._built.engine, mesh, for_save=True)
        if self._lanes is not None:
            rectangles |= self._lanes.rectangles(for_save=True)
        size = self._store.save(rectangles, manifest)
        if size is not None and self._monitor is not None:
            self._monitor.saved(f"step-{progress.step:08d}", time.perf_counter() - start, size)


def _save_is_due(progress: Progress, training: TrainingConfig) -> bool:
    return progress.step % training.checkpoint.every == 0 or progress.step == training.steps


def _evaluation_is_due(progress: Progress, training: TrainingConfig) -> bool:
    every, last = training.evaluation.every, progress.step == training.steps
    return bool(every) and (progress.step % every == 0 or last)


def _shared(batches: list[Batch], mesh: Mesh) -> list[TokenBatch]:
    """Batches of tensor rank 0 on every rank of its tensor group, on the device."""
    return [feed.share(b if feed.reads(mesh) else None, mesh, (b.tokens.shape[0], b.tokens.shape[1])) for b in batches]


def _memory(device: torch.device) -> int:
    """Peak bytes on a GPU, resident bytes of this process on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss
