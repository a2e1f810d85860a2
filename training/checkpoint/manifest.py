"""manifest.json: everything in a checkpoint that is not a tensor, and where each tensor's boxes are, with checksums.

It is written last and contains a checksum of itself, so a folder whose manifest verifies is a complete checkpoint.

In every format the file is {"sha256": checksum, "manifest": body}, and the body has `format` and `versions`; the rule for other
keys is in data_pipeline.written_by. A format that this version does not read is no damage: nothing falls back to an earlier
checkpoint.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic reads that of typing from Python 3.12 on

from baton.data_pipeline.errors import NewerFormatError, is_transient, unreadable
from baton.data_pipeline.file_io import PAUSES_S, read_text, retry_transient
from baton.data_pipeline.written_by import PACKAGE, known_fields, other_format, own_version, writer
from baton.kernels.compile import launch_configs
from baton.training.errors import CheckpointError, OtherFormatError

FORMAT = 2
NAME = "manifest.json"


class FileEntry(TypedDict):
    """What a manifest says of a file."""

    bytes: int
    sha256: str


class TensorEntry(TypedDict):
    """What a manifest says of a tensor. parts: (file, offset, extent) of each box."""

    dtype: str
    shape: list[int]
    checksum: str
    parts: list[tuple[str, list[int], list[int]]]


@dataclass(frozen=True)
class Manifest:
    """Content of manifest.json.

    Attributes:
        step, tokens: optimizer steps done and tokens consumed.
        adam_steps: updates that AdamW made.
        cursors: per lane, where its stream continues.
        fingerprints: of what must be the same on resuming (model, stream, ...).
        layout, versions: of the ranks and packages that wrote it; for information, any others may load it.
        data: state of the data sources (data_pipeline.run_source).
        recent: losses and norms of the last steps, by which spikes are judged (monitoring.anomaly_detection).
        validation: loss measured after this step, nats per token; None: not measured.
        time: of the save, seconds since 1970.
        files: name to {bytes, sha256}.
        tensors: key to {dtype, shape, checksum (checkpoint.digest), parts: [[file, offset, extent], ...]}.
    """

    step: int
    tokens: int
    adam_steps: int
    cursors: dict[str, Any]
    fingerprints: dict[str, str]
    layout: dict[str, int]
    versions: dict[str, str]
    data: dict[str, Any] = field(default_factory=dict)
    recent: dict[str, list[float]] = field(default_factory=dict)
    validation: float | None = None
    time: float = 0.0
    files: dict[str, FileEntry] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Write and sync folder/manifest.json."""
        body = {one.name: getattr(self, one.name) for one in fields(self)}
        if not self.recent:  # versions that do not know it read checkpoints without it
            del body["recent"]
        with open(folder / NAME, "w", encoding="utf-8") as f:
            f.write(json.dumps({"sha256": _digest(body), "manifest": body}, sort_keys=True))  # json.dump has no C form
            f.flush()
            os.fsync(f.fileno())

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read folder/manifest.json.

        Raises:
            OtherFormatError: it is of a format that this version does not read.
            CheckpointError: it is missing or damaged, at two reads.
            StorageError, OSError: it cannot be read, which says nothing about its content.
        """
        try:
            return cls._read(folder)
        except OtherFormatError:
            raise
        except CheckpointError:
            if not folder.is_dir():
                raise
            time.sleep(PAUSES_S[0])  # a file server may show a file short, or not yet, that it is still replicating
            return cls._read(folder)

    @classmethod
    def _read(cls, folder: Path) -> "Manifest":
        try:
            document = json.loads(read_text(folder / NAME))
            body = document["manifest"]
            if document["sha256"] != _digest(body):
                raise CheckpointError(f"{folder / NAME}: its checksum does not match")
        except FileNotFoundError:
            raise CheckpointError(f"{folder / NAME}: missing") from None
        except (ValueError, KeyError, TypeError):
            raise CheckpointError(f"{folder / NAME}: not readable") from None
        if not isinstance(body, dict):
            raise CheckpointError(f"{folder / NAME}: not readable")
        if body.get("format") != FORMAT:
            by = body.get("versions")
            raise OtherFormatError(
                other_format(folder / NAME, body.get("format"), FORMAT, by.get(PACKAGE) if isinstance(by, dict) else None)
            )
        try:
            _schema().validate_python(body)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise CheckpointError(f"{folder / NAME}: not what a checkpoint has ({where}: {first['msg']})") from None
        return cls(**known_fields(cls, body))

    @property
    def writer(self) -> str:
        """The version of Baton that wrote it, as a sentence names it."""
        return writer(self.versions.get(PACKAGE))

    def cursors_of(self, cursor: Callable[[Any], Any]) -> dict[int, Any]:
        """The cursors of all lanes. cursor: makes one from JSON. Raises OtherFormatError for one with keys that this version does
        not know, which may be another place than what is known of it, and DataError for one that is none."""
        try:
            return {int(lane): cursor(value) for lane, value in self.cursors.items()}
        except NewerFormatError as error:
            raise OtherFormatError(
                f"the checkpoint of step {self.step}, which {self.writer} wrote: {error}; this is Baton {own_version()}, use the "
                f"version that wrote it"
            ) from None


@cache
def _schema() -> TypeAdapter[Manifest]:
    """The types of a manifest's values; keys that it has besides are a later version's."""
    return TypeAdapter(Manifest)


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def checksum(path: Path) -> dict[str, Any]:
    """{bytes, sha256} of a file. Raises OSError."""
    with open(path, "rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
        return {"bytes": f.tell(), "sha256": digest}


def check_file(folder: Path, name: str, expected: FileEntry) -> str | None:
    """What is wrong with a checkpoint's file, or None. Decided by bytes that were read, and confirmed by a second read a
    little later.

    Raises:
        StorageError, OSError: the file cannot be read, which says nothing about its content.
    """
    if _look_at(folder / name, expected) is None:
        return None
    time.sleep(PAUSES_S[0])  # as for the manifest
    return _look_at(folder / name, expected)


def _look_at(path: Path, expected: FileEntry) -> str | None:
    try:
        found = retry_transient(lambda: checksum(path))
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        if is_transient(error):
            raise unreadable(path, error) from error
        raise
    if found["bytes"] != expected["bytes"]:
        return f"{path.name} has {found['bytes']} bytes instead of {expected['bytes']}"
    if found["sha256"] != expected["sha256"]:
        return f"{path.name} does not match its checksum"
    return None


def versions() -> dict[str, str]:
    """Versions of the packages that compute, and the digest of the kernels' launch configurations."""
    return {**_installed(), "kernel launch configurations": launch_configs.digest()}


@cache
def _installed() -> dict[str, str]:
    """Of packages, whose metadata takes milliseconds to read."""
    return {name: version(name) for name in (PACKAGE, "torch", "deepspeed", "megatron-core")}
