"""The order of documents in every lane, and the cursor of a place in a lane.

The training order is G endless *lanes*, fixed for a run. A lane is a stream of documents that fills one row of a step. A unit is a
run of neighbouring documents of a shard. Lane j's k-th unit of a source is slot j + k*G of the endless sequence perm(seed, epoch
0), perm(seed, epoch 1), ... of all the source's units; inside a unit documents come in the order perm(seed, epoch, unit). `Mixture`
chooses which of several sources a lane's next unit comes from: a hash of (seed, lane, unit number) against the weights of the step
in which the unit is opened.

All of it is a pure function of (seed, lane, shard indexes). Ranks and steps appear only in `next_lanes`, so that their number
changes which process reads a lane and nothing else. New weights hold from a step on, in every lane from its next unit on.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.data_pipeline.config import check_weights
from baton.data_pipeline.errors import DataError, NewerFormatError

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Cursor:
    """A place in a lane: the next token to consume. It does not depend on the length of rows.

    unit: number of units that the lane has completed, of all sources. document: position in the unit's order. offset: number of the
    document's inputs (its EOD token, then its tokens) that are consumed, which is also `pos` of the next input. taken: with several
    sources, completed units of each; () with one. source: of the open unit, because the weights may have changed since it was
    chosen; None: the next unit is not chosen. skipped: documents to leave out, each (source, units of it that came before, position
    in the unit's order). Tokens of them that are consumed already are not taken back.
    """

    unit: int = 0
    document: int = 0
    offset: int = 0
    taken: tuple[int, ...] = ()
    source: int | None = None
    skipped: tuple[tuple[int, int, int], ...] = ()

    def units_of(self, source: int) -> int:
        """Completed units of a source."""
        return self.taken[source] if self.taken else self.unit

    def at(self, document: int, offset: int) -> "Cursor":
        """Another place in the same unit. Called once for every row of a step; `replace` takes three times as long."""
        return Cursor(self.unit, document, offset, self.taken, self.source, self.skipped)

    def next_unit(self) -> "Cursor":
        """The beginning of the next unit, whose source is not chosen yet."""
        taken = tuple(n + (number == self.source) for number, n in enumerate(self.taken))
        return replace(self, unit=self.unit + 1, document=0, offset=0, taken=taken, source=None)

    def to_json(self) -> dict[str, Any]:
        """A JSON object of a few integers."""
        return {**asdict(self), "taken": list(self.taken), "skipped": [list(place) for place in self.skipped]}

    @classmethod
    def from_json(cls, value: Any) -> "Cursor":
        """The cursor that `to_json` wrote. Raises NewerFormatError for one with more keys, and DataError for anything else."""
        names = {field.name for field in fields(cls)}
        if isinstance(value, dict) and value.keys() > names:
            raise NewerFormatError(f"a lane cursor has {min(value.keys() - names)}, which this version does not know")
        try:
            if set(value) != names:
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
    """Neighbouring samples of one shard: samples `first` to `first + count - 1` of shard number `shard` of the split."""

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
        """Number of units in the first `shard` shards."""
        return self._before[shard]

    def __getitem__(self, number: int) -> Unit:
        return Unit(int(self._shard[number]), int(self._first[number]), int(self._count[number]))


def permutation(n: int, *key: int | str) -> Int64:
    """int64[n], a permutation of range(n) that depends on `key` alone: the order of n raw 64-bit words of Philox, keyed by blake2b
    of `key`.

    Philox's raw words are fixed by its definition. The methods of numpy's Generator may change between versions.
    """
    digest = hashlib.blake2b("\n".join(map(str, key)).encode(), digest_size=16).digest()
    words = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(n)
    return np.argsort(words, kind="stable")


class LaneOrder:
    """The endless order of a source's units in every lane.

    seed: of the run, and of the source where there are several. lanes: G. growth: (first epoch, units) of each size of a source to
    which shards were added, from epoch 0 on. Added units are numbered after the earlier ones.
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
            if len(self._epochs) > 2:  # lanes advance together, so old epochs are not needed again
                del self._epochs[min(self._epochs)]
            self._epochs[epoch] = permutation(count, "units", self.seed, epoch)
        number = int(self._epochs[epoch][place])
        unit = self.units[number]
        return unit, permutation(unit.count, "documents", self.seed, epoch, number)

    def epoch(self, lane: int, k: int) -> int:
        """The epoch of lane `lane`'s k-th unit."""
        return self._slot(lane, k)[0]

    def _slot(self, lane: int, k: int) -> tuple[int, int, int]:
        """Epoch, place in the epoch, and number of units of the epoch."""
        slot = lane + k * self.lanes
        first, epoch, count = next(size for size in reversed(self._sizes) if size[0] <= slot)
        epochs, place = divmod(slot - first, count)
        return epoch + epochs, place, count


def next_lanes(rows: int, lanes: int, count: int) -> list[int]:
    """The lanes that a step of `count` rows advances after `rows` rows of earlier steps: the next ones of `lanes`, cyclically."""
    return [(rows + i) % lanes for i in range(count)]


def check_layout(*, lanes: int, lanes_per_step: int, micro_batch_size: int, data_size: int) -> None:
    """Raises DataError, with possible sizes, unless every data rank gets whole micro-batches of its own lanes in every step."""
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


class Mixture:
    """Chooses the source of a lane's next unit.

    Args:
        schedule: (first step, {source: weight}) in the order of the steps, from step 0 on. Weights are shares of the text's bytes.
        unit_bytes: {source: mean UTF-8 bytes of a unit}; sources with larger units get fewer of them. Its order numbers the
            sources.

    Raises:
        DataError: see `check_weights`.
    """

    def __init__(self, seed: int, schedule: Sequence[tuple[int, Mapping[str, float]]], unit_bytes: Mapping[str, float]) -> None:
        self._seed, self.count = seed, len(unit_bytes)
        if self.count > 1:
            check_weights(schedule, list(unit_bytes))
        self._firsts = [first for first, _ in schedule]
        self._bounds = []
        for _, weights in schedule:
            rates = [weights[name] / size for name, size in unit_bytes.items()]
            total = sum(rates)
            self._bounds.append(list(accumulate(rate / total for rate in rates)))

    def source(self, lane: int, k: int, step: int) -> int:
        """The source of lane `lane`'s unit number k, opened in step `step`."""
        if self.count == 1:
            return 0
        bounds = self._bounds[bisect_right(self._firsts, step) - 1]
        digest = hashlib.blake2b(f"source\n{self._seed}\n{lane}\n{k}".encode(), digest_size=8).digest()
        drawn = int.from_bytes(digest, "little") / 2.0**64
        last = max(n for n, bound in enumerate(bounds) if n == 0 or bound > bounds[n - 1])  # rounding must not choose beyond it
        return min(bisect_right(bounds, drawn), last)
