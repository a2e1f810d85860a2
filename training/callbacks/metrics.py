"""Writes a row of metrics.jsonl after every optimizer step."""

import psutil
import torch

from baton.parallel.mesh import Mesh
from baton.training.callbacks.callback import Callback
from baton.training.checkpoint.digest import combine_digests
from baton.training.config import TrainingConfig
from baton.training.lr_schedule import learning_rate
from baton.training.monitoring.metrics import MetricsLogger
from baton.training.monitoring.step_timer import StepTimer
from baton.training.run import RunProgress
from baton.training.step.executor import StepResult


class MetricsCallback(Callback):
    """Logs every step that made an update."""

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
                "data_wait_s": progress.data_wait_s,
                "memory_bytes": _memory(self._device),
            },
            self._timer.spans(),
        )


def _memory(device: torch.device) -> int:
    """Peak allocated bytes on a GPU, resident bytes of this process on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss
