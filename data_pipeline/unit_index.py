"""Where the units of all shards begin, in one small file beside them, so that a start need not read every index.

The one thing to know: the file holds nothing that the indexes do not: it is made with the default settings of a run, used by runs
that have them, and compared with every index that is read.
"""

import io
import zipfile
import zlib
from collections.abc import Iterable
from typing import Self

import numpy as np

from baton.data_pipeline.errors import DataError
from baton.data_pipeline.lane_order import Int64, unit_starts
from baton.data_pipeline.shards import ShardSummary

UNITS = "units.npz"
_REMEDY = "restore it from a copy, or prepare the dataset again"
_DTYPES = {"units": "<i8", "names": "S", "indexes": "S64", "counts": "<i8", "starts": "<i8"}


class UnitTable:
    """Where units begin in some shards.

    Attributes: `unit_documents` and `unit_bytes`, the settings that it holds for (see ShardsConfig).
    """

    def __init__(self, unit_documents: int, unit_bytes: int, shards: dict[str, tuple[str, Int64]], where: str) -> None:
        """shards: {name: (hex sha256 of its index, first sample of each unit int64[units])}; where: as errors name the table."""
        self.unit_documents, self.unit_bytes = unit_documents, unit_bytes
        self._shards, self._where = shards, where

    @classmethod
    def of(cls, unit_documents: int, unit_bytes: int, shards: Iterable[tuple[str, str, Int64]], where: str = UNITS) -> Self:
        """shards: (name, hex sha256 of its index, first sample of each unit int64[units])."""
        return cls(unit_documents, unit_bytes, {name: (index, starts) for name, index, starts in shards}, where)

    def to_bytes(self) -> bytes:
        """An uncompressed .npz without pickles; equal tables are equal bytes."""
        indexes, starts = zip(*self._shards.values()) if self._shards else ((), ())
        columns = {
            "units": np.array([self.unit_documents, self.unit_bytes], np.int64),
            "names": np.array([name.encode() for name in self._shards], "S"),
            "indexes": np.array([index.encode() for index in indexes], "S64"),
            "counts": np.array([len(each) for each in starts], np.int64),
            "starts": np.concatenate([np.zeros(0, np.int64), *starts]),
        }
        buffer = io.BytesIO()
        np.savez(buffer, **columns)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> Self:
        """What `to_bytes` made. Raises DataError when it is damaged."""
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                columns = {name: arrays[name] for name in _DTYPES}
        except (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
            raise DataError(f"{where} is damaged ({error}); {_REMEDY}") from error
        units, names, indexes, counts, starts = columns.values()
        kinds = all(columns[name].ndim == 1 and np.dtype(dtype).kind == columns[name].dtype.kind for name, dtype in _DTYPES.items())
        if not kinds or len(units) != 2 or not len(names) == len(indexes) == len(counts) or counts.sum() != len(starts):
            raise DataError(f"{where} has columns of unexpected types or lengths; {_REMEDY}")
        parts = np.split(starts, np.cumsum(counts)[:-1]) if len(counts) else []
        return cls.of(int(units[0]), int(units[1]), zip(map(bytes.decode, names), map(bytes.decode, indexes), parts), where)

    def starts(self, shard: ShardSummary) -> Int64 | None:
        """First sample of each unit of a shard, int64[units]; None: the table does not know it (a shard that came later). Raises
        DataError: it is another shard's of that name, or nonsense."""
        if shard.name not in self._shards:
            return None
        index, starts = self._shards[shard.name]
        if index != shard.index_sha256:
            raise DataError(f"{self._where} is of another {shard.name} (its index has another checksum); {_REMEDY}")
        counts = np.diff(starts, append=shard.documents)
        if starts[:1].tolist() != [0] * min(1, shard.documents) or (counts < 1).any() or (counts > self.unit_documents).any():
            raise DataError(f"{self._where} names impossible units of {shard.name}; {_REMEDY}")
        return starts

    def check(self, shard: ShardSummary, text_bytes: Int64) -> None:
        """Compare with a shard's index. text_bytes: int64[n], its column. Raises DataError where they disagree."""
        known = self.starts(shard)
        if known is not None and not np.array_equal(known, unit_starts(text_bytes, self.unit_documents, self.unit_bytes)):
            raise DataError(f"{self._where} disagrees with the index of {shard.name} about its units; {_REMEDY}")
