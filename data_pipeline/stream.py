"""The training stream: lanes of documents, tokenized and cut into batches, with the cursors that resume it at any step.

The one thing to know: a document x1..xn gives inputs [doc, x1..xn] with labels [x1..xn, doc] and pos 0..n, so every label is valid
and none crosses documents; documents of a lane are joined and cut every `context` inputs. A lane holds the short documents of one
unit and a piece of a long one, so its memory does not grow with a document's length. What is the same for every kind of lane
(steps, ranks, the thread) is in steps.py, what reads documents in reader.py, and in processes of its own in workers.py.
"""

from collections.abc import Mapping

from baton.data_pipeline.batches import Batch
from baton.data_pipeline.config import ShardsConfig
from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.evaluation import EvaluationSet, documents, evaluation_batches
from baton.data_pipeline.lane_order import Cursor
from baton.data_pipeline.reader import Corpus, Documents, Growth, LaneReader
from baton.data_pipeline.steps import Place, StepData, StepPlan, Steps, Stretch
from baton.data_pipeline.tokenizer import Tokenizer
from baton.data_pipeline.workers import Start, Workers

__all__ = [
    "Batch",
    "BatchStream",
    "Cursor",
    "Dataset",
    "EvaluationSet",
    "Place",
    "StepData",
    "StepPlan",
    "Stretch",
    "documents",
    "evaluation_batches",
]


class BatchStream(Steps[Cursor]):
    """The endless steps of one data rank; iterate over it.

    sources: what is read: a dataset, or several by name. tokenizer: makes the ids of a text dataset, and must be the one that made
    those of a token dataset. plan: this rank's rows, step by step; all but `lanes` may change on resuming. split: which documents.
    seed: of the order. cursors: where lanes begin, as saved after step plan.start_step - 1; those of other ranks' lanes are
    ignored; none: the beginning. unit_documents, unit_bytes: see ShardsConfig. mixture: of several sources, (first step, {name:
    weight}), see Mixture. growth: of each source that has grown, by name ("" for one alone). workers: processes that read; 0: a
    thread of this one. start: see Workers.

    Attributes: `fingerprint`, hex sha256 of everything that decides the lanes' contents; a resumed run must find it unchanged.
    `cursors`, of this rank's lanes after the last step yielded.
    Raises DataError: another tokenizer's ids, missing cursors, damaged data; a failure of the background thread is raised by
    `next`.
    """

    def __init__(
        self,
        sources: Dataset | Mapping[str, Dataset],
        tokenizer: Tokenizer,
        plan: StepPlan,
        *,
        split: str = "train",
        seed: int,
        cursors: Mapping[int, Cursor] | None = None,
        unit_documents: int = ShardsConfig.model_fields["unit_documents"].default,
        unit_bytes: int = ShardsConfig.model_fields["unit_bytes"].default,
        mixture: tuple[tuple[int, Mapping[str, float]], ...] = (),
        growth: Mapping[str, Growth] | None = None,
        workers: int = 0,
        start: Start | None = None,
    ) -> None:
        begin = plan.first_cursors(cursors, Cursor())
        named = {"": sources} if isinstance(sources, Dataset) else dict(sources)
        datasets = list(named.values())
        corpus = Corpus(
            names=tuple(named) if len(named) > 1 else (),
            split=split,
            seed=seed,
            lanes=plan.lanes,
            unit_documents=unit_documents,
            unit_bytes=unit_bytes,
            schedule=mixture,
            growth=tuple((growth or {}).get(name, ()) for name in named),
        )
        self.fingerprint = corpus.fingerprint(datasets, tokenizer)
        # beside workers too: what cannot be read is refused here and now, and documents have names
        self._documents = Documents(corpus, datasets, tokenizer)
        if workers:
            fill = Workers(workers, corpus, datasets, tokenizer, plan, begin, start)
            super().__init__(plan, begin, fill, fill.close, fill.room)
        else:
            super().__init__(plan, begin, LaneReader(self._documents, begin))

    def touched(self, lane: int, before: Cursor | None, after: Cursor, step: int) -> list[Place]:
        """The documents that a lane of this rank gave tokens of in a step between two cursors (before: None, the beginning), in
        order."""
        return self._documents.touched(lane, before or Cursor(), after, step)
