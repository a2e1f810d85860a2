"""The training stream: lanes of documents, tokenized and cut into batches, with the cursors that resume it at any step.

The one thing to know: a document x1..xn gives inputs [doc, x1..xn] with labels [x1..xn, doc] and pos 0..n, so every label is valid
and none crosses documents; documents of a lane are joined and cut every `context` inputs. A lane holds the short documents of one
unit and a piece of a long one, so its memory does not grow with a document's length. What is the same for every kind of lane
(steps, ranks, the thread) is in steps.py.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from baton.data_pipeline.batches import Batch, OpenDocument, check_tokenizer
from baton.data_pipeline.config import ShardsConfig
from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.evaluation import EvaluationSet, documents, evaluation_batches
from baton.data_pipeline.files import fingerprint
from baton.data_pipeline.lanes import Cursor, LaneOrder, Units
from baton.data_pipeline.pieces import id_pieces
from baton.data_pipeline.shards import ShardSummary
from baton.data_pipeline.steps import StepData, StepPlan, Steps, Stretch
from baton.data_pipeline.tokenizer import Ids, Tokenizer

__all__ = [
    "Batch",
    "BatchStream",
    "Cursor",
    "Dataset",
    "EvaluationSet",
    "StepData",
    "StepPlan",
    "Stretch",
    "documents",
    "evaluation_batches",
    "stream_fingerprint",
]

STREAM_VERSION = 1  # part of the fingerprint: raise it when the order or the cutting changes


class _Lane:
    """One lane being read: its unit's payloads from the cursor on, and the document under way."""

    def __init__(self, read: Callable[[int, int], "_OpenUnit"], lane: int, cursor: Cursor, doc: int) -> None:
        self._read = read
        self._lane = lane
        self._doc = doc
        self.cursor = cursor
        self._unit: _OpenUnit | None = None
        self._document: OpenDocument | None = None

    def fill(self, batch: Batch, row: int) -> None:
        """Write the lane's next inputs into a row of a batch, and move the cursor past them."""
        start, context = 0, batch.tokens.shape[1]
        while start < context:
            unit, document = self.cursor.unit, self.cursor.document
            opened = self._document = self._document or self._open()
            start = opened.fill(batch, row, start)
            if not opened.over:
                self.cursor = Cursor(unit, document, opened.offset)
                continue
            self._document = None
            assert self._unit is not None, "a document under way is one of a unit"
            if document + 1 == self._unit.count:
                self._unit = None
                self.cursor = Cursor(unit + 1)
            else:
                self.cursor = Cursor(unit, document + 1)

    def _open(self) -> OpenDocument:
        """The document at the cursor, from there on."""
        unit, document, offset = self.cursor.unit, self.cursor.document, self.cursor.offset
        if self._unit is None:
            self._unit = self._read(self._lane, unit)
            if document >= self._unit.count:
                raise DataError(
                    f"the cursor of lane {self._lane} points at document {document} of a unit of {self._unit.count}; "
                    "it belongs to another dataset, or other unit settings"
                )
        try:
            return OpenDocument(self._unit.ids(document, max(0, offset - 1)), offset, self._doc)
        except IndexError:
            raise DataError(
                f"the cursor of lane {self._lane} points at token {offset} of {self._unit.named(document)}, which is shorter; "
                "it belongs to another dataset or tokenizer"
            ) from None


class _OpenUnit:
    """A unit's documents in reading order; each is given out, and its payload forgotten, once."""

    def __init__(
        self, dataset: Dataset, tokenizer: Tokenizer, shard: ShardSummary, first: int, order: npt.NDArray[np.int64]
    ) -> None:
        self._dataset, self._tokenizer, self._shard, self._first, self._order = dataset, tokenizer, shard, first, order
        self.count = len(order)
        self._payloads = dataset.read_short(shard, first, self.count)

    def ids(self, document: int, first: int) -> Iterator[Ids]:
        """A document's ids from its token number `first` on, in pieces."""
        sample = int(self._order[document])
        payload, self._payloads[sample] = self._payloads[sample], None
        return id_pieces(self._dataset, self._tokenizer, self._shard, self._first + sample, payload, first)

    def named(self, document: int) -> str:
        """A document as errors name it."""
        return self._dataset.named(self._shard, self._first + int(self._order[document]))


class BatchStream(Steps[Cursor]):
    """The endless steps of one data rank; iterate over it.

    tokenizer: makes the ids of a text dataset, and must be the one that made those of a token dataset. plan: this rank's rows, step
    by step; all but `lanes` may change on resuming. split: which documents. seed: of the order.
    cursors: where lanes begin, as saved after step plan.start_step - 1; those of other ranks' lanes are ignored; none: the
    beginning. unit_documents, unit_bytes: see ShardsConfig.

    Attributes: `fingerprint`, hex sha256 of everything that decides the lanes' contents; a resumed run must find it unchanged.
    `cursors`, of this rank's lanes after the last step yielded.
    Raises DataError: another tokenizer's ids, missing cursors, damaged data; a failure of the background thread is raised by
    `next`.
    """

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: Tokenizer,
        plan: StepPlan,
        *,
        split: str = "train",
        seed: int,
        cursors: Mapping[int, Cursor] | None = None,
        unit_documents: int = ShardsConfig.model_fields["unit_documents"].default,
        unit_bytes: int = ShardsConfig.model_fields["unit_bytes"].default,
    ) -> None:
        if unit_documents < 1 or unit_bytes < 1:
            raise DataError("unit_documents and unit_bytes must both be at least 1")
        begin = plan.first_cursors(cursors, Cursor())
        check_tokenizer(dataset, tokenizer)
        shards = dataset.require(split)
        self.fingerprint = stream_fingerprint(
            dataset, tokenizer, split=split, seed=seed, lanes=plan.lanes, unit_documents=unit_documents, unit_bytes=unit_bytes
        )
        order = LaneOrder(
            Units([dataset.index(shard).text_bytes for shard in shards], unit_documents, unit_bytes), seed, plan.lanes
        )

        def read(lane: int, k: int) -> _OpenUnit:
            unit, samples = order.unit(lane, k)
            return _OpenUnit(dataset, tokenizer, shards[unit.shard], unit.first, samples)

        sources = {lane: _Lane(read, lane, cursor, tokenizer.doc) for lane, cursor in begin.items()}

        def fill_rows(batches: Sequence[Batch]) -> dict[int, Cursor]:
            for batch in batches:
                for row, lane in enumerate(batch.lanes):
                    sources[lane].fill(batch, row)
            return {lane: source.cursor for lane, source in sources.items()}

        super().__init__(plan, begin, fill_rows)


def stream_fingerprint(
    dataset: Dataset, tokenizer: Tokenizer, *, split: str = "train", seed: int, lanes: int, unit_documents: int, unit_bytes: int
) -> str:
    """Hex sha256 of everything that decides the lanes' contents; arguments as of BatchStream. A resumed run must find it equal."""
    return fingerprint([STREAM_VERSION, dataset.fingerprint, tokenizer.fingerprint, split, seed, lanes, unit_documents, unit_bytes])
