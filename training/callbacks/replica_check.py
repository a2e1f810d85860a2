"""Compares the bits of replicated parameters over ranks: at the start, at intervals, and before every checkpoint."""

from baton.training.build import TrainState
from baton.training.callbacks.callback import Callback
from baton.training.checkpoint.interval import CheckpointSchedule
from baton.training.config import TrainingConfig
from baton.training.monitoring import replica_check
from baton.training.run import RunProgress
from baton.training.step.executor import StepResult


class ReplicaCheckCallback(Callback):
    """Compares replicas at the start, every `replica_check_every` steps, and before every checkpoint, so that none stores a
    difference."""

    time_category = "check"

    def __init__(self, train_state: TrainState, training: TrainingConfig, schedule: CheckpointSchedule) -> None:
        self._train_state, self._training, self._schedule = train_state, training, schedule

    def on_train_start(self, progress: RunProgress) -> None:
        if self._training.replica_check_every:
            replica_check.check_replicas(self._train_state, progress.step)

    def after_step(self, progress: RunProgress, result: StepResult) -> None:
        every = self._training.replica_check_every
        if every and (progress.step % every == 0 or self._schedule.due(progress.step, stop_requested=progress.stop_requested)):
            replica_check.check_replicas(self._train_state, progress.step)
