"""Saves checkpoints, asynchronously where settings say so."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from baton.data_pipeline.errors import StorageError
from baton.data_pipeline.file_io import PAUSES_S
from baton.training.bptt.lane_states import LaneStates
from baton.training.build import TrainState
from baton.training.callbacks.callback import Callback
from baton.training.checkpoint.files import ShardBoxes
from baton.training.checkpoint.interval import CheckpointSchedule
from baton.training.checkpoint.manifest import Manifest, versions
from baton.training.checkpoint.shard_boxes import optimizer_boxes
from baton.training.checkpoint.store import CheckpointStore, Saved, newest
from baton.training.errors import RunError
from baton.training.monitoring.metrics import MetricsLogger
from baton.training.run import RunProgress, RunSettings
from baton.training.step.executor import StepResult


class CheckpointCallback(Callback):
    """Saves whenever the schedule says so, and after the last step of a start. Values that are not finite are not saved: older
    checkpoints, which the run can go on from, would make room for them."""

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
        """describe: what a manifest says of the run as it is: its fields `fingerprints`, `data` and `recent`."""
        self._train_state, self._lanes, self._store, self._metrics = train_state, lanes, store, metrics
        self._mesh = train_state.mesh
        self._schedule, self._training, self._describe = schedule, settings.training, describe
        self._stall = 0.0
        self._nonfinite: str | None = None

    def on_train_start(self, progress: RunProgress) -> None:
        """With guard.policy=rollback a new run saves its initial values: a rollback needs a checkpoint."""
        if self._training.guard.policy == "rollback" and progress.step == 0:
            self.save(progress)
            self.finish()
            self.save_again(progress)
            self.require_saved(progress)

    def after_step(self, progress: RunProgress, result: StepResult) -> None:
        self._published(self._store.poll())
        if self._schedule.due(progress.step, stop_requested=progress.stop_requested):
            self.save(progress)
        if progress.step == self._training.steps or progress.stop_requested:
            self.finish()
            self.save_again(progress)

    def save_again(self, progress: RunProgress) -> None:
        """Retry a failed last save a few times, when no later step would be followed by another. Collective.

        `CheckpointStore.problem` says whether all tries failed.
        """
        for pause in PAUSES_S:
            if self._store.problem is None or self._nonfinite is not None:
                return
            if self._mesh.is_main:
                print(f"trying again to save in {pause:g} s", flush=True)
            time.sleep(pause)
            self.save(progress)
            self.finish()

    def require_saved(self, progress: RunProgress) -> None:
        """Raise, on all ranks, StorageError if the last save has failed, RunError if there was nothing sound to save."""
        if self._nonfinite is not None:
            raise RunError(
                f"{self._store.folder}: step {progress.step} is not saved: {self._nonfinite} after its update, and "
                f"{self._kept()}; lower training.optimizer.lr or set training.optimizer.clip_norm, then start again"
            )
        if self._store.problem is not None:
            raise StorageError(
                f"{self._store.folder}: step {progress.step} could not be saved ({self._store.problem}), and {self._kept()}; make "
                f"room, then start again: the run goes on from there"
            )

    def _kept(self) -> str:
        last = newest(self._store.folder)
        return "no checkpoint is there" if last is None else f"the newest checkpoint is {last.name}"

    def finish(self) -> None:
        """Wait for the checkpoint that is being written."""
        self._published(self._store.finish())

    def save(self, progress: RunProgress) -> None:
        """Begin a save. Collective."""
        self.finish()  # one at a time: what is still being written is waited for
        start = time.perf_counter()
        if self._metrics is not None:
            self._metrics.flush()
        mesh = self._train_state.mesh
        boxes = optimizer_boxes(self._train_state.model, self._train_state.engine, mesh, for_save=True)
        if self._lanes is not None:
            boxes |= self._lanes.boxes(for_save=True)
        own = {str(lane): c.to_json() for lane, c in progress.cursors.items()}
        of_ranks: list[Any] = [None] * mesh.world_size
        dist.all_gather_object(of_ranks, (own, _nonfinite(boxes)))
        self._nonfinite = next((found for _, found in of_ranks if found is not None), None)
        if self._nonfinite is not None:
            if mesh.is_main:
                print(f"step {progress.step} is not saved: {self._nonfinite} after its update; {self._kept()}", flush=True)
            return
        manifest = Manifest(
            step=progress.step,
            tokens=progress.tokens,
            adam_steps=self._train_state.engine.updates,
            cursors={lane: c for part, _ in of_ranks for lane, c in part.items()},
            layout=mesh.layout.sizes(),
            versions=versions(),
            validation=progress.validation_loss,
            time=time.time(),
            **self._describe(),
        )
        saved = self._store.save(boxes, manifest)
        self._stall = time.perf_counter() - start
        chosen = self._schedule.record_save(progress.step, self._stall)
        if chosen is not None and mesh.is_main:
            print(f"the next checkpoint is due after step {chosen}: this one stopped training for {self._stall:.2f} s", flush=True)
        self._published(saved)

    def _published(self, saved: Saved | None) -> None:
        if saved is not None and self._metrics is not None:
            self._metrics.log_checkpoint(saved.name, saved.seconds, saved.bytes, self._stall)


def _nonfinite(boxes: ShardBoxes) -> str | None:
    """The first tensor with a value that is not finite, for a message; None: there is none."""
    data = [(key, box.data) for key, parts in boxes.items() for box in parts if box.data.is_floating_point() and box.data.numel()]
    if not data:
        return None
    # the largest size is not finite if any is not, and takes no memory
    largest = torch.stack([torch.linalg.vector_norm(x, torch.inf).double() for _, x in data])
    return next((f"{key} is not finite" for (key, _), one in zip(data, largest.isfinite().tolist(), strict=True) if not one), None)
