"""Which documents a lane reads, in which order: pure functions of (seed, lane, shard indexes), and the cursor that marks a place in
them.

The one thing to know: the training order is G endless *lanes*, fixed for a run. Lane j's k-th unit of a source is slot j + k*G of
the endless sequence perm(seed, epoch 0), perm(seed, epoch 1), ... of all its units, and inside a unit documents come in the order
perm(seed, epoch, unit). Nothing here knows of ranks or steps beyond the arithmetic of `next_lanes`, so changing their number
changes nothing but who reads. Which of several sources a unit comes from is mixture.py's.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.data_pipeline.errors import DataError

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Cursor:
    """A place in a lane: the next token to consume. Independent of the context length.

    unit: how many units the lane has left behind, of all sources. document: position in the unit's order. offset: how many of the
    document's inputs (its mark, then its tokens) are consumed, so also `pos` of the next input.
    taken: of several sources, units of each that are left behind; () with one. source: whose unit is open, since what the weights
    were when it was opened need not be what they are now; None: the next unit is not chosen.
    skipped: documents to leave out, each (source, how many units of it came before, position in the unit's order); what of one is
    consumed already stays so.
    """

    unit: int = 0
    document: int = 0
    offset: int = 0
    taken: tuple[int, ...] = ()
    source: int | None = None
    skipped: tuple[tuple[int, int, int], ...] = ()

    def units_of(self, source: int) -> int:
        """Units of a source that are left behind."""
        return self.taken[source] if self.taken else self.unit

    def at(self, document: int, offset: int) -> "Cursor":
        """Another place in the same unit. Called once for every row of a step: `replace` takes three times as long."""
        return Cursor(self.unit, document, offset, self.taken, self.source, self.skipped)

    def next_unit(self) -> "Cursor":
        """The beginning of the next unit, which nobody has chosen."""
        taken = tuple(n + (number == self.source) for number, n in enumerate(self.taken))
        return replace(self, unit=self.unit + 1, document=0, offset=0, taken=taken, source=None)

    def to_json(self) -> dict[str, Any]:
        """A JSON object of a few integers."""
        return {**asdict(self), "taken": list(self.taken), "skipped": [list(place) for place in self.skipped]}

    @classmethod
    def from_json(cls, value: Any) -> "Cursor":
        """What `to_json` made. Raises DataError for anything else."""
        try:
            if set(value) != {field.name for field in fields(cls)}:
                raise ValueError
            skipped = tuple(tuple(place) for place in value["skipped"])
            cursor = cls(**{**value, "taken": tuple(value["taken"]), "skipped": skipped})
            numbers = [cursor.unit, cursor.document, cursor.offset, *cursor.taken, *(n for place in skipped for n in place)]
            numbers += [] if cursor.source is None else [cursor.source]
            if any(type(n) is not int or n < 0 for n in numbers) or any(len(place) != 3 for place in skipped):
                raise ValueError
        except (TypeError, ValueError):
            raise DataError(f"not a lane cursor: {value!r}; it comes from a damaged checkpoint, use another one") from None
        return cursor


@dataclass(frozen=True)
class Unit:
    """A run of neighbouring samples of one shard: samples `first` to `first + count - 1` of shard number `shard` (of the split)."""

    shard: int
    first: int
    count: int


class Units:
    """All units of a split, numbered in shard order. Stored as three int64 arrays, because there may be millions."""

    def __init__(self, starts_of_shards: Sequence[Int64], documents: Sequence[int]) -> None:
        """starts_of_shards: per shard, first sample of each of its units, int64[units]. documents: per shard, how many it has."""
        self._shard = np.repeat(np.arange(len(documents)), [len(starts) for starts in starts_of_shards])
        self._first = np.concatenate([np.zeros(0, np.int64), *starts_of_shards])
        counts = [np.diff(starts, append=count) for starts, count in zip(starts_of_shards, documents, strict=True)]
        self._count = np.concatenate([np.zeros(0, np.int64), *counts])
        self._before = [0, *accumulate(map(len, starts_of_shards))]

    def __len__(self) -> int:
        return len(self._first)

    def before(self, shard: int) -> int:
        """How many units the first `shard` shards have."""
        return self._before[shard]

    def __getitem__(self, number: int) -> Unit:
        return Unit(int(self._shard[number]), int(self._first[number]), int(self._count[number]))


def unit_starts(sizes: Int64, unit_documents: int, unit_bytes: int) -> Int64:
    """First sample of each unit: as many neighbours as fit in `unit_documents` and `unit_bytes`, at least one. int64[units].

    sizes: int64[n], UTF-8 bytes of the documents' text (so text and token shards have the same units).
    """
    regular = np.arange(0, len(sizes), unit_documents)
    if len(sizes) == 0 or np.add.reduceat(sizes, regular).max() <= unit_bytes:
        return regular
    total = np.concatenate([[0], np.cumsum(sizes)])
    each = np.arange(len(sizes))
    fitting = np.searchsorted(total, total[:-1] + unit_bytes, side="right") - 1
    end = np.maximum(each + 1, np.minimum(each + unit_documents, fitting)).tolist()  # of a unit that begins with each sample
    starts = [0]
    while (following := end[starts[-1]]) < len(sizes):
        starts.append(following)
    return np.array(starts, dtype=np.int64)


def permutation(n: int, *key: int | str) -> Int64:
    """int64[n], a permutation of range(n) that depends on `key` alone: the order of n raw 64-bit words of Philox keyed by blake2b
    of `key`.

    Philox's raw words are fixed by its definition, unlike the methods of numpy's Generator, which may change between versions.
    """
    digest = hashlib.blake2b("\n".join(map(str, key)).encode(), digest_size=16).digest()
    words = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(n)
    return np.argsort(words, kind="stable")


class LaneOrder:
    """The endless order of units in every lane.

    seed: of the run, and of the source where there are several. lanes: G. growth: (first epoch, units) of each size that the
    source has had, where it has grown; its first epoch is 0. Units that came later are numbered after those before.
    """

    def __init__(self, units: Units, seed: int | str, lanes: int, growth: Sequence[tuple[int, int]] = ()) -> None:
        if not len(units):
            raise DataError("the dataset has no unit to read; prepare it again from more documents")
        self.units = units
        self.seed = seed
        self.lanes = lanes
        self._epochs: dict[int, Int64] = {}
        self._sizes = [(0, 0, len(units))]  # first slot, first epoch, units in an epoch
        for number, (epoch, count) in enumerate(growth):
            slot, before, size = self._sizes[-1]
            self._sizes[number:] = [(slot + (epoch - before) * size, epoch, count)]

    def unit(self, lane: int, k: int) -> tuple[Unit, Int64]:
        """Lane `lane`'s k-th unit, and the order int64[count] in which its samples are read."""
        epoch, place, count = self._slot(lane, k)
        if epoch not in self._epochs:
            if len(self._epochs) > 2:  # lanes move on together; old epochs are not needed again
                del self._epochs[min(self._epochs)]
            self._epochs[epoch] = permutation(count, "units", self.seed, epoch)
        number = int(self._epochs[epoch][place])
        unit = self.units[number]
        return unit, permutation(unit.count, "documents", self.seed, epoch, number)

    def epoch(self, lane: int, k: int) -> int:
        """In which epoch lane `lane`'s k-th unit is."""
        return self._slot(lane, k)[0]

    def _slot(self, lane: int, k: int) -> tuple[int, int, int]:
        """Epoch, place in it, and its number of units."""
        slot = lane + k * self.lanes
        first, epoch, count = next(size for size in reversed(self._sizes) if size[0] <= slot)
        epochs, place = divmod(slot - first, count)
        return epoch + epochs, place, count


def next_lanes(rows: int, lanes: int, count: int) -> list[int]:
    """The lanes that a step of `count` rows advances when the steps before it had `rows` in all: the next ones of `lanes`,
    cyclically."""
    return [(rows + i) % lanes for i in range(count)]


def check_layout(*, lanes: int, lanes_per_step: int, micro_batch_size: int, data_size: int) -> None:
    """Raises DataError, naming sizes that would do, unless every data rank gets whole micro-batches of its own lanes in every
    step."""
    if lanes < 1 or lanes_per_step < 1 or micro_batch_size < 1 or data_size < 1:
        raise DataError("lanes, lanes_per_step, micro_batch_size and data_size must all be at least 1")
    if lanes_per_step > lanes:
        raise DataError(
            f"lanes_per_step {lanes_per_step} exceeds lanes {lanes}; a step takes one row from a lane: raise lanes or lower it"
        )
    common = int(np.gcd(lanes, lanes_per_step))
    if common % data_size:
        legal = _divisors(common)
        raise DataError(
            f"{data_size} data ranks do not divide both lanes {lanes} and lanes_per_step {lanes_per_step}; "
            f"use {legal} data ranks, or lane counts that are multiples of {data_size}"
        )
    rows = lanes_per_step // data_size
    if rows % micro_batch_size:
        raise DataError(
            f"micro_batch_size {micro_batch_size} does not divide the {rows} rows a data rank has per step "
            f"(lanes_per_step {lanes_per_step} / {data_size} data ranks); use {_divisors(rows)}"
        )


def _divisors(n: int) -> str:
    found = [str(i) for i in range(1, n + 1) if n % i == 0]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} or {found[-1]}"
