"""Validation loss, bits per byte, and a sample of generated text."""

import math

from torch import Tensor

from baton.data_pipeline.evaluation import EvaluationSet, evaluation_batches
from baton.data_pipeline.packing import Batch
from baton.data_pipeline.run_source import ShardSource
from baton.training.build import TrainState
from baton.training.callbacks.callback import Callback
from baton.training.callbacks.evaluation_batches import begin_evaluation, distribute_batches, evaluation_is_due
from baton.training.evaluation.evaluate import evaluate
from baton.training.evaluation.generation import generate
from baton.training.monitoring.metrics import MetricsLogger
from baton.training.run import RunProgress, RunSettings
from baton.training.step.executor import StepResult


class TextEvaluationCallback(Callback):
    """Evaluates the validation split and generates a sample, at multiples of evaluation.every and after the last step."""

    time_category = "evaluation"

    def __init__(self, train_state: TrainState, source: ShardSource, metrics: MetricsLogger | None, settings: RunSettings) -> None:
        self._train_state, self._source, self._tokenizer, self._metrics = train_state, source, source.tokenizer, metrics
        self._training = settings.training
        self._set: tuple[EvaluationSet, list[Batch[Tensor]]] | None = None

    def after_step(self, progress: RunProgress, result: StepResult) -> None:
        if not evaluation_is_due(progress, self._training):
            return
        begin_evaluation(progress, first=self._set is None)
        chosen, batches = self._set = self._set or self._read()
        model, mesh = self._train_state.model, self._train_state.mesh
        found = evaluate(model, batches, chosen.text_bytes, chosen.tokens, mesh, segments=self._training.segments)
        sample = None
        wanted = self._training.evaluation.sample_tokens
        # a model that is not finite any more says nothing; what is done about it, training.guard decides in the next step
        if wanted and math.isfinite(found.loss) and mesh.data_rank == 0:
            doc = self._tokenizer.eod_id
            (ids,) = generate(model, [[doc]], tokens=wanted, vocab_size=self._tokenizer.vocab_size, stop=doc, seeds=[progress.step])
            sample = self._tokenizer.decode(ids, errors="replace")
        progress.validation_loss = found.loss
        if self._metrics is not None:
            self._metrics.log_evaluation(progress.step, progress.tokens, found.loss, found.bits_per_byte, sample)

    def _read(self) -> tuple[EvaluationSet, list[Batch[Tensor]]]:
        """The evaluation set; each of several sources contributes by its weight."""
        mesh, training, parts = self._train_state.mesh, self._training, []
        for name, weight in self._source.weights.items():
            chosen = evaluation_batches(
                self._source.datasets[name],
                self._tokenizer,
                sequence_length=training.sequence_length,
                micro_batch_size=training.micro_batch_size,
                max_tokens=max(1, round(training.evaluation_tokens * weight)),
                data_rank=mesh.data_rank,
                data_size=mesh.layout.data,
            )
            parts.append(chosen)
        together = EvaluationSet.joined(parts)
        return together, distribute_batches(together.batches, mesh, training.segments)
