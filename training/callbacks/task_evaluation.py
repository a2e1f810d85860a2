"""Loss and accuracy on a synthetic task, case by case."""

import numpy as np
from torch import Tensor

from baton.data_pipeline.packing import IGNORE_INDEX, Batch, NumpyBatch
from baton.data_pipeline.run_source import TaskSource
from baton.data_pipeline.synthetic_stream import synthetic_evaluation_set
from baton.training.build import TrainState
from baton.training.callbacks.callback import Callback
from baton.training.callbacks.evaluation_batches import begin_evaluation, distribute_batches, evaluation_is_due
from baton.training.evaluation.evaluate import evaluate_task
from baton.training.monitoring.metrics import MetricsLogger
from baton.training.run import RunProgress, RunSettings
from baton.training.step.executor import StepResult


class TaskEvaluationCallback(Callback):
    """Evaluates every case of a synthetic task, at multiples of evaluation.every and after the last step."""

    time_category = "evaluation"

    def __init__(self, train_state: TrainState, source: TaskSource, metrics: MetricsLogger | None, settings: RunSettings) -> None:
        self._train_state, self._cases, self._metrics = train_state, source.config.evaluated(), metrics
        self._training = settings.training
        self._sets: dict[str, tuple[int, int, list[Batch[Tensor]]]] = {}

    def after_step(self, progress: RunProgress, result: StepResult) -> None:
        if not evaluation_is_due(progress, self._training):
            return
        begin_evaluation(progress, first=not self._sets)
        self._sets = self._sets or self._make()
        model, mesh = self._train_state.model, self._train_state.mesh
        found = {name: evaluate_task(model, batches, labels, mesh, segments=n) for name, (labels, n, batches) in self._sets.items()}
        progress.validation_loss = sum(of_case.loss for of_case in found.values()) / len(found)
        if self._metrics is not None:
            self._metrics.log_task_evaluation(
                progress.step, progress.tokens, {name: (s.loss, s.accuracy) for name, s in found.items()}
            )

    def _make(self) -> dict[str, tuple[int, int, list[Batch[Tensor]]]]:
        """Of each case: number of labels, number of segments, batches."""
        mesh, training = self._train_state.mesh, self._training
        made = {}
        for name, (case, examples) in self._cases.items():
            chosen = synthetic_evaluation_set(
                case,
                tokens=training.evaluation_tokens,
                examples=examples,
                sequence_length=training.sequence_length,
                micro_batch_size=training.micro_batch_size,
                data_rank=mesh.data_rank,
                data_size=mesh.layout.data,
            )
            segments = 1 if training.bptt is None else -(-case.length // training.segment)
            whole = [b if segments == 1 else _padded(b, segments * training.segment) for b in chosen.batches]
            made[name] = chosen.labels, segments, distribute_batches(whole, mesh, segments)
        return made


def _padded(batch: NumpyBatch, tokens: int) -> NumpyBatch:
    """Rows padded to `tokens` tokens without labels."""
    more = ((0, 0), (0, tokens - batch.tokens.shape[1]))
    pos = np.broadcast_to(np.arange(tokens, dtype=np.int32), (len(batch.pos), tokens))
    return Batch(np.pad(batch.tokens, more), np.pad(batch.labels, more, constant_values=IGNORE_INDEX), pos, batch.lanes)
