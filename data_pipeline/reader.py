"""Lanes read from cursors into rows, unit by unit and document by document.

A `LaneReader` reads some lanes, in a thread of the training process or in a worker process. `CorpusSpec` says which documents the
lanes hold; it is small enough to be sent to a worker, which opens the files itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.files import fingerprint
from baton.data_pipeline.lane_order import Cursor, LaneOrder, Mixture, Unit, Units
from baton.data_pipeline.packing import DocCursor, NumpyBatch, PackedDocs, check_tokenizer, packed_docs, token_chunks
from baton.data_pipeline.shards import ShardSummary
from baton.data_pipeline.steps import DocumentRef
from baton.data_pipeline.tokenizer import Tokenizer

STREAM_VERSION = 2  # part of the fingerprint: raise it when the order of documents or their packing changes

RUN_BYTES = 1 << 18
"""Bytes of short documents that a lane concatenates at a time. They are in memory twice while it does."""

Growth = tuple[tuple[int, int], ...]
"""Sizes of a source to which shards were added: (first epoch, number of shards), from epoch 0 on; (): all shards that exist."""


@dataclass(frozen=True, kw_only=True)
class CorpusSpec:
    """Everything that decides the contents of all lanes, except the documents themselves.

    names: of the sources, () for a single one. split: of the datasets. seed: of the order. lanes: G. schedule: see Mixture. growth:
    of each source.
    """

    names: tuple[str, ...] = ()
    split: str
    seed: int
    lanes: int
    unit_documents: int
    unit_bytes: int
    schedule: tuple[tuple[int, Mapping[str, float]], ...] = ()
    growth: tuple[Growth, ...] = ()

    def __post_init__(self) -> None:
        if self.unit_documents < 1 or self.unit_bytes < 1:
            raise DataError("unit_documents and unit_bytes must both be at least 1")

    def fingerprint(self, datasets: Sequence[Dataset], tokenizer: Tokenizer) -> str:
        """Hex sha256 of everything that decides the lanes' contents from the beginning. Later weights and added shards are not part
        of it."""
        contents = [d.prefix_fingerprint(self.split, growth[0][1] if growth else None) for d, growth in self._grown(datasets)]
        sizes = [self.seed, self.lanes, self.unit_documents, self.unit_bytes]
        return fingerprint([STREAM_VERSION, list(self.names), contents, tokenizer.fingerprint, self.split, *sizes])

    def orders(self, datasets: Sequence[Dataset]) -> tuple[list[LaneOrder], Mixture]:
        """The order of units in each source, and the mixture that chooses the source of the next unit. Raises DataError."""
        orders, means = [], {}
        for number, (dataset, growth) in enumerate(self._grown(datasets)):
            shards = dataset.require(self.split)[: growth[-1][1] if growth else None]
            starts = [dataset.unit_starts(shard, self.unit_documents, self.unit_bytes) for shard in shards]
            units = Units(starts, [shard.documents for shard in shards])
            counts = tuple((epoch, units.before(shard)) for epoch, shard in growth)
            name = self.names[number] if self.names else ""
            orders.append(LaneOrder(units, f"{self.seed}\n{name}" if self.names else self.seed, self.lanes, counts))
            means[name] = sum(shard.text_bytes for shard in shards) / max(1, len(units))
        return orders, Mixture(self.seed, self.schedule or ((0, {"": 1.0}),), means)

    def _grown(self, datasets: Sequence[Dataset]) -> Iterator[tuple[Dataset, Growth]]:
        yield from zip(datasets, self.growth or [()] * len(datasets), strict=True)


class DocReader:
    """Finds and reads the documents of lanes.

    Raises:
        DataError: ids of another tokenizer, damaged data, no such split.
    """

    def __init__(self, corpus: CorpusSpec, datasets: Sequence[Dataset], tokenizer: Tokenizer) -> None:
        for dataset in datasets:
            check_tokenizer(dataset, tokenizer)
        self._datasets, self.tokenizer, self.sources = datasets, tokenizer, len(datasets)
        self._shards = [dataset.require(corpus.split) for dataset in datasets]
        self._orders, self._mixture = corpus.orders(datasets)

    def choose(self, lane: int, cursor: Cursor, step: int) -> Cursor:
        """The cursor with the source of its unit. With a single source nothing is chosen."""
        if cursor.source is not None or self.sources == 1:
            return cursor
        return replace(cursor, source=self._mixture.source(lane, cursor.unit, step))

    def unit(self, lane: int, cursor: Cursor) -> tuple[int, Unit, npt.NDArray[np.int64]]:
        """The source of the cursor's unit, the unit, and the order int64[count] in which its samples are read."""
        source = cursor.source or 0
        return source, *self._orders[source].unit(lane, cursor.units_of(source))

    def open(self, lane: int, cursor: Cursor) -> "_UnitReader":
        """The cursor's unit, read."""
        source, unit, samples = self.unit(lane, cursor)
        return _UnitReader(self._datasets[source], self.tokenizer, self._shards[source][unit.shard], unit.first, samples)

    def documents_between(self, lane: int, before: Cursor, after: Cursor, step: int) -> list[DocumentRef]:
        """Documents of which a lane gave tokens between two cursors of step `step`, in order."""
        found, cursor = [], replace(before, taken=before.taken or (0,) * len(after.taken))
        while (cursor.unit, cursor.document) < (after.unit, after.document + (after.offset > 0)):
            cursor = self.choose(lane, cursor, step)
            source, unit, samples = self.unit(lane, cursor)
            key = source, cursor.units_of(source), cursor.document
            if key not in cursor.skipped:
                shard = self._shards[source][unit.shard]
                found.append(DocumentRef(*key, self._datasets[source].named(shard, unit.first + int(samples[cursor.document]))))
            last = cursor.document + 1 == unit.count
            cursor = cursor.next_unit() if last else replace(cursor, document=cursor.document + 1, offset=0)
        return found


class LaneReader:
    """Reads some lanes; a `FillRows` for their rows that leaves rows of other lanes alone. cursors: where each lane begins.

    Raises:
        DataError: the cursors are of a run with other sources.
    """

    def __init__(self, read: DocReader, cursors: Mapping[int, Cursor]) -> None:
        many = (0,) * read.sources if read.sources > 1 else ()
        begin = {lane: replace(cursor, taken=cursor.taken or many) for lane, cursor in cursors.items()}
        if any(len(cursor.taken) != len(many) for cursor in begin.values()):
            raise DataError("the cursors are of a run with other sources; use the run's own data.sources")
        self._lanes = {lane: _Lane(read, lane, cursor) for lane, cursor in begin.items()}
        self._cursors = begin

    def __call__(self, step: int, batches: Sequence[NumpyBatch]) -> dict[int, Cursor]:
        for batch in batches:
            for row, lane in enumerate(batch.lanes):
                if lane in self._lanes:
                    self._cursors[lane] = self._lanes[lane].fill(step, batch, row)
        return dict(self._cursors)


class _Lane:
    """One lane: its open unit's payloads from the cursor on, and the documents that are being copied."""

    def __init__(self, read: DocReader, lane: int, cursor: Cursor) -> None:
        self._read = read
        self._lane = lane
        self._cursor = cursor  # where the documents being copied were opened
        self._skipped = frozenset(cursor.skipped)
        self._unit: _UnitReader | None = None
        self._opened: DocCursor | PackedDocs | None = None

    def fill(self, step: int, batch: NumpyBatch, row: int) -> Cursor:
        """Write the lane's next inputs into a row of a batch. Returns the cursor after them."""
        start, sequence_length = 0, batch.tokens.shape[1]
        while start < sequence_length:
            opened = self._opened = self._opened or self._open(step)
            if opened is not None:
                start = opened.fill(batch, row, start)
                if not opened.over:
                    continue
            self._opened = None
            assert self._unit is not None, "documents being copied belong to an open unit"
            following = self._cursor.document + (1 if opened is None else opened.count)
            if following == self._unit.count:
                self._unit = None
                self._cursor = self._cursor.next_unit()
            else:
                self._cursor = self._cursor.at(following, 0)
        if self._opened is None:
            return self._cursor
        return self._cursor.at(self._cursor.document + self._opened.document, self._opened.offset)

    def _open(self, step: int) -> DocCursor | PackedDocs | None:
        """The document at the cursor, from its offset on, together with documents that follow it; None when it is skipped."""
        cursor = self._cursor = self._read.choose(self._lane, self._cursor, step)
        source = cursor.source or 0
        if self._unit is None:
            self._unit = self._read.open(self._lane, cursor)
            if cursor.document >= self._unit.count:
                raise DataError(
                    f"the cursor of lane {self._lane} points at document {cursor.document} of a unit of {self._unit.count}; "
                    "it belongs to another dataset, or other unit settings"
                )
        until = self._unit.count
        if self._skipped:
            here = {document for of, unit, document in self._skipped if (of, unit) == (source, cursor.units_of(source))}
            until = min([document for document in here if document >= cursor.document], default=until)
            if until == cursor.document:
                return None
        try:
            return self._unit.open(cursor.document, until, cursor.offset)
        except IndexError:
            raise DataError(
                f"the cursor of lane {self._lane} points at token {cursor.offset} of {self._unit.named(cursor.document)}, which is "
                "shorter; it belongs to another dataset or tokenizer"
            ) from None


class _UnitReader:
    """A unit's documents in reading order. Each is returned once, and its payload is then released."""

    def __init__(
        self, dataset: Dataset, tokenizer: Tokenizer, shard: ShardSummary, first: int, order: npt.NDArray[np.int64]
    ) -> None:
        self._dataset, self._tokenizer, self._shard = dataset, tokenizer, shard
        self.count = len(order)
        self._samples: list[int] = (first + order).tolist()
        payloads = dataset.read_short(shard, first, self.count)
        self._payloads = [payloads[sample] for sample in order.tolist()]

    def open(self, document: int, until: int, offset: int) -> DocCursor | PackedDocs:
        """A document of which `offset` inputs are consumed. Token ids in memory are returned together with the following documents
        of that kind before document `until`, up to RUN_BYTES.

        Raises:
            IndexError: the document is shorter than `offset`.
        """
        sample, payload = self._samples[document], self._payloads[document]
        eod_id = self._tokenizer.eod_id
        if payload is None or self._dataset.content != "tokens":
            self._payloads[document] = None
            first = max(0, offset - 1)
            return DocCursor(token_chunks(self._dataset, self._tokenizer, self._shard, sample, payload, first), offset, eod_id)
        run, size = [(sample, payload)], len(payload)
        for number in range(document + 1, until):
            following = self._payloads[number]
            if following is None or (size := size + len(following)) > RUN_BYTES:
                break
            run.append((self._samples[number], following))
        opened = packed_docs(self._dataset, self._shard, run, offset, eod_id)
        self._payloads[document : document + opened.count] = [None] * opened.count
        return opened

    def named(self, document: int) -> str:
        """The document's name in error messages."""
        return self._dataset.named(self._shard, self._samples[document])
