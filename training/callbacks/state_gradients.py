"""Norms of the gradients that States pass back over the boundaries of segments and ranks."""

from baton.training.build import TrainState
from baton.training.callbacks.callback import Callback
from baton.training.config import TrainingConfig
from baton.training.monitoring.metrics import MetricsLogger
from baton.training.monitoring.state_gradients import StateGradientMonitor
from baton.training.run import RunProgress
from baton.training.step.executor import StepResult


class StateGradientCallback(Callback):
    """Logs norms of State gradients at the boundaries of segments and ranks, every `monitoring.state_grad_norm_every` steps, of
    steps that made an update."""

    time_category = "other"

    def __init__(self, train_state: TrainState, metrics: MetricsLogger | None, training: TrainingConfig) -> None:
        model, mesh = train_state.model, train_state.mesh
        self._metrics, self._training, self._mesh = metrics, training, mesh
        # what is recorded between ranks observes every step, since what it does is fixed
        self._always = training.cuda_graphs is True and mesh.layout.context > 1
        self._gradient_monitor: StateGradientMonitor | None = None
        if model.link is not None and training.monitoring.state_grad_norm_every:
            self._gradient_monitor = StateGradientMonitor(model, model.link, mesh, keep=self._always)

    def on_train_start(self, progress: RunProgress) -> None:
        self._observe_next(progress)

    def on_rollback(self, progress: RunProgress) -> None:
        self._observe_next(progress)

    def _observe_next(self, progress: RunProgress) -> None:
        """Observe the next step if its norms are due."""
        if self._gradient_monitor is not None:
            due = self._is_due(progress.step + 1)
            (self._gradient_monitor.start if due or self._always else self._gradient_monitor.stop)()

    def after_step(self, progress: RunProgress, result: StepResult) -> None:
        if self._gradient_monitor is None:
            return
        if result.updated and self._is_due(progress.step):
            segment = self._training.at(progress.step - 1).segment
            found = self._gradient_monitor.read(segment // self._mesh.layout.context, cut=self._training.carries_lane_states)
            if self._metrics is not None and found is not None:
                self._metrics.log_state_gradients(progress.step, progress.tokens, found.to_json())
        self._observe_next(progress)

    def _is_due(self, step: int) -> bool:
        return step % self._training.monitoring.state_grad_norm_every == 0
