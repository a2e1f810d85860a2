"""Loss by position, norms of States and the reach of gradients on long rows, with every evaluation."""

from collections.abc import Callable

import torch

from baton.data_pipeline.packing import IGNORE_INDEX, Batch
from baton.data_pipeline.run_source import ShardSource, TaskSource
from baton.training.build import TrainState
from baton.training.callbacks.callback import Callback
from baton.training.callbacks.evaluation_batches import begin_evaluation, evaluation_is_due
from baton.training.config_checks import check_long_evaluation
from baton.training.evaluation.long_context import LongRows, evaluate_long, long_row_batches
from baton.training.monitoring.metrics import MetricsLogger
from baton.training.monitoring.state_gradients import StateGradients, gradient_reach
from baton.training.run import RunProgress, RunSettings
from baton.training.step.executor import StepResult


class LongContextCallback(Callback):
    """Evaluates long rows together with every evaluation, if evaluation.long_tokens or gradient_reach_segment_length ask for
    it. release_graphs: frees the steps' recorded passes, which the next step records again; beside their memory there may be no
    room for the plain passes that gradient reach takes."""

    time_category = "evaluation"

    def __init__(
        self,
        train_state: TrainState,
        source: ShardSource | TaskSource,
        metrics: MetricsLogger | None,
        settings: RunSettings,
        release_graphs: Callable[[], None],
    ) -> None:
        self._train_state, self._metrics, self._training = train_state, metrics, settings.training
        self._release_graphs = release_graphs
        self._rows: LongRows | None = None
        self._first = True
        evaluation, documents = settings.training.evaluation, isinstance(source, ShardSource)
        check_long_evaluation(settings.model, settings.training, train_state.mesh.layout.context, documents=documents)
        if evaluation.long_rows_tokens and isinstance(source, ShardSource):
            self._rows = LongRows(source.heaviest, source.tokenizer, rows=evaluation.long_rows, tokens=evaluation.long_rows_tokens)

    def after_step(self, progress: RunProgress, result: StepResult) -> None:
        if self._rows is None or not evaluation_is_due(progress, self._training):
            return
        model, mesh, evaluation = self._train_state.model, self._train_state.mesh, self._training.evaluation
        begin_evaluation(progress, first=self._first)
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
            self._release_graphs()
            found = self._gradient_reach(self._rows)
            if self._metrics is not None:
                seen = None if found is None else {**found.to_json(), "reach": found.reach()}
                self._metrics.log_gradient_reach(progress.step, progress.tokens, seen)

    def _gradient_reach(self, rows: LongRows) -> StateGradients | None:
        """Gradient reach on those of this data rank's first rows that are one document, since no gradient passes a document's
        start.

        None: no rank has such a row.
        """
        mesh, evaluation = self._train_state.mesh, self._training.evaluation
        segment, segments = evaluation.gradient_reach_segment_length, evaluation.gradient_reach_segments
        groups = long_row_batches(rows, mesh, micro_batch_size=self._training.micro_batch_size, segment=segment, segments=segments)
        batch = None
        if spans := list(next(groups, ())):
            tokens, labels, pos = (torch.cat([getattr(x, name) for x in spans], dim=1) for name in ("tokens", "labels", "pos"))
            # the last sequence rank, whose labels count, has the rows' last tokens
            batch = Batch(tokens, torch.where(pos[:, -1:] + 1 < segment * segments, IGNORE_INDEX, labels), pos)
        return gradient_reach(self._train_state.model, batch, segments, segment // mesh.layout.context, mesh)
