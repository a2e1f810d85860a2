"""Lanes being read: from cursors to rows, unit by unit and document by document.

The one thing to know: a `LaneReader` is what a thread of the training process or a worker process has of some lanes; `Corpus` says
what they read and is small enough to be sent to a worker, which opens the files for itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from baton.data_pipeline.batches import Batch, OpenDocument, OpenRun, check_tokenizer
from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.files import fingerprint
from baton.data_pipeline.lane_order import Cursor, LaneOrder, Unit, Units
from baton.data_pipeline.mixture import Mixture
from baton.data_pipeline.shards import ShardSummary
from baton.data_pipeline.steps import Place
from baton.data_pipeline.token_chunks import id_pieces, id_run
from baton.data_pipeline.tokenizer import Tokenizer

STREAM_VERSION = 2  # part of the fingerprint: raise it when the order or the cutting changes

RUN_BYTES = 1 << 18
"""Of short lists of ids that a lane joins at a time: it has so much twice for as long as that takes."""

Growth = tuple[tuple[int, int], ...]
"""Of a source that has grown: (first epoch, shards) of each size it has had, the first from epoch 0 on; (): all that are there."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """What decides the contents of all lanes, but for the documents themselves.

    names: of the sources, () for one alone. split: which documents. seed: of the order. lanes: G. schedule: see Mixture. growth:
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
        """Hex sha256 of everything that decides the lanes' contents from the beginning. Weights may change, and shards be added."""
        contents = [d.prefix_fingerprint(self.split, growth[0][1] if growth else None) for d, growth in self._grown(datasets)]
        sizes = [self.seed, self.lanes, self.unit_documents, self.unit_bytes]
        return fingerprint([STREAM_VERSION, list(self.names), contents, tokenizer.fingerprint, self.split, *sizes])

    def orders(self, datasets: Sequence[Dataset]) -> tuple[list[LaneOrder], Mixture]:
        """The order of units in each source, and which source comes next. Raises DataError."""
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


class Documents:
    """Which documents lanes read, and reading them. Raises DataError: another tokenizer's ids, damaged data, no such split."""

    def __init__(self, corpus: Corpus, datasets: Sequence[Dataset], tokenizer: Tokenizer) -> None:
        for dataset in datasets:
            check_tokenizer(dataset, tokenizer)
        self._datasets, self.tokenizer, self.sources = datasets, tokenizer, len(datasets)
        self._shards = [dataset.require(corpus.split) for dataset in datasets]
        self._orders, self._mixture = corpus.orders(datasets)

    def choose(self, lane: int, cursor: Cursor, step: int) -> Cursor:
        """The cursor with its unit's source; of one source alone nothing is chosen."""
        if cursor.source is not None or self.sources == 1:
            return cursor
        return replace(cursor, source=self._mixture.source(lane, cursor.unit, step))

    def unit(self, lane: int, cursor: Cursor) -> tuple[int, Unit, npt.NDArray[np.int64]]:
        """The source of the cursor's unit, and what it is there."""
        source = cursor.source or 0
        return source, *self._orders[source].unit(lane, cursor.units_of(source))

    def open(self, lane: int, cursor: Cursor) -> "_OpenUnit":
        """The cursor's unit, read."""
        source, unit, samples = self.unit(lane, cursor)
        return _OpenUnit(self._datasets[source], self.tokenizer, self._shards[source][unit.shard], unit.first, samples)

    def touched(self, lane: int, before: Cursor, after: Cursor, step: int) -> list[Place]:
        """The documents that a lane gave tokens of between two cursors, both of step `step`, in order."""
        found, cursor = [], replace(before, taken=before.taken or (0,) * len(after.taken))
        while (cursor.unit, cursor.document) < (after.unit, after.document + (after.offset > 0)):
            cursor = self.choose(lane, cursor, step)
            source, unit, samples = self.unit(lane, cursor)
            key = source, cursor.units_of(source), cursor.document
            if key not in cursor.skipped:
                shard = self._shards[source][unit.shard]
                found.append(Place(*key, self._datasets[source].named(shard, unit.first + int(samples[cursor.document]))))
            last = cursor.document + 1 == unit.count
            cursor = cursor.next_unit() if last else replace(cursor, document=cursor.document + 1, offset=0)
        return found


class LaneReader:
    """Some lanes being read; a `Fill` of their rows, that leaves those of other lanes alone. cursors: where each begins. Raises
    DataError: cursors of other sources."""

    def __init__(self, read: Documents, cursors: Mapping[int, Cursor]) -> None:
        many = (0,) * read.sources if read.sources > 1 else ()
        begin = {lane: replace(cursor, taken=cursor.taken or many) for lane, cursor in cursors.items()}
        if any(len(cursor.taken) != len(many) for cursor in begin.values()):
            raise DataError("the cursors are of a run with other sources; use the run's own data.sources")
        self._lanes = {lane: _Lane(read, lane, cursor) for lane, cursor in begin.items()}
        self._cursors = begin

    def __call__(self, step: int, batches: Sequence[Batch]) -> dict[int, Cursor]:
        for batch in batches:
            for row, lane in enumerate(batch.lanes):
                if lane in self._lanes:
                    self._cursors[lane] = self._lanes[lane].fill(step, batch, row)
        return dict(self._cursors)


class _Lane:
    """One lane being read: its unit's payloads from the cursor on, and the documents under way."""

    def __init__(self, read: Documents, lane: int, cursor: Cursor) -> None:
        self._read = read
        self._lane = lane
        self._cursor = cursor  # of documents under way, where they were opened
        self._skipped = frozenset(cursor.skipped)
        self._unit: _OpenUnit | None = None
        self._opened: OpenDocument | OpenRun | None = None

    def fill(self, step: int, batch: Batch, row: int) -> Cursor:
        """Write the lane's next inputs into a row of a batch; the cursor after them."""
        start, sequence_length = 0, batch.tokens.shape[1]
        while start < sequence_length:
            opened = self._opened = self._opened or self._open(step)
            if opened is not None:
                start = opened.fill(batch, row, start)
                if not opened.over:
                    continue
            self._opened = None
            assert self._unit is not None, "documents under way are of a unit"
            following = self._cursor.document + (1 if opened is None else opened.count)
            if following == self._unit.count:
                self._unit = None
                self._cursor = self._cursor.next_unit()
            else:
                self._cursor = self._cursor.at(following, 0)
        if self._opened is None:
            return self._cursor
        return self._cursor.at(self._cursor.document + self._opened.document, self._opened.offset)

    def _open(self, step: int) -> OpenDocument | OpenRun | None:
        """The document at the cursor, from there on, with others that follow it; None when it is to be skipped."""
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


class _OpenUnit:
    """A unit's documents in reading order; each is given out, and its payload forgotten, once."""

    def __init__(
        self, dataset: Dataset, tokenizer: Tokenizer, shard: ShardSummary, first: int, order: npt.NDArray[np.int64]
    ) -> None:
        self._dataset, self._tokenizer, self._shard = dataset, tokenizer, shard
        self.count = len(order)
        self._samples: list[int] = (first + order).tolist()
        payloads = dataset.read_short(shard, first, self.count)
        self._payloads = [payloads[sample] for sample in order.tolist()]

    def open(self, document: int, until: int, offset: int) -> OpenDocument | OpenRun:
        """A document of which `offset` inputs are consumed; if it is token ids in memory, with those that follow it before document
        `until`, as far as they are such too, within RUN_BYTES. Raises IndexError: it is shorter."""
        sample, payload = self._samples[document], self._payloads[document]
        doc = self._tokenizer.doc
        if payload is None or self._dataset.content != "tokens":
            self._payloads[document] = None
            first = max(0, offset - 1)
            return OpenDocument(id_pieces(self._dataset, self._tokenizer, self._shard, sample, payload, first), offset, doc)
        run, size = [(sample, payload)], len(payload)
        for number in range(document + 1, until):
            following = self._payloads[number]
            if following is None or (size := size + len(following)) > RUN_BYTES:
                break
            run.append((self._samples[number], following))
        opened = id_run(self._dataset, self._shard, run, offset, doc)
        self._payloads[document : document + opened.count] = [None] * opened.count
        return opened

    def named(self, document: int) -> str:
        """A document as errors name it."""
        return self._dataset.named(self._shard, self._samples[document])
