"""manifest.json: everything of a checkpoint that is not a tensor, where each tensor's parts are, and the checksums of both.

It is written last and carries a checksum of itself, so a folder with a manifest that verifies is a whole checkpoint.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from baton.kernels import tiles
from baton.training.errors import CheckpointError

FORMAT = 2
NAME = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """step: optimizer steps done. tokens: tokens consumed by them. adam_steps: updates AdamW made.

    cursors: per lane, where its stream goes on. fingerprints: of what must be the same on resuming (model, stream, …).
    layout: the mesh that wrote it, and versions: of what computed, for the reader's eyes: any others may load it.
    data: what the sources say of themselves (data_pipeline.source). validation: loss measured after this very step, nats per token;
    None: it was not. time: when it was saved, seconds since 1970.
    files: name -> {bytes, sha256}. tensors: key -> {dtype, shape, checksum (checkpoint.digest), parts: [[file, offset, extent],
    ...]}.
    """

    step: int
    tokens: int
    adam_steps: int
    cursors: dict[str, Any]
    fingerprints: dict[str, str]
    layout: dict[str, int]
    versions: dict[str, str]
    data: dict[str, Any] = field(default_factory=dict)
    validation: float | None = None
    time: float = 0.0
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Write and sync folder/manifest.json."""
        body = asdict(self)
        with open(folder / NAME, "w", encoding="utf-8") as f:
            json.dump({"sha256": _digest(body), "manifest": body}, f, sort_keys=True)
            f.flush()
            os.fsync(f.fileno())

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read folder/manifest.json. Raises CheckpointError when it is missing, damaged or of another format."""
        try:
            document = json.loads((folder / NAME).read_text(encoding="utf-8"))
            body = document["manifest"]
            if document["sha256"] != _digest(body):
                raise CheckpointError(f"{folder / NAME}: its checksum does not match")
        except FileNotFoundError:
            raise CheckpointError(f"{folder / NAME}: missing") from None
        except (ValueError, KeyError, TypeError):
            raise CheckpointError(f"{folder / NAME}: not readable") from None
        if body.get("format") != FORMAT:
            raise CheckpointError(f"{folder / NAME}: format {body.get('format')}, this version reads {FORMAT}")
        return cls(**body)


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def checksum(path: Path) -> dict[str, Any]:
    """{bytes, sha256} of a file."""
    with open(path, "rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def check_file(folder: Path, name: str, expected: dict[str, Any]) -> str | None:
    """What is wrong with a file of a checkpoint, or None."""
    path = folder / name
    if not path.exists():
        return f"{name} is missing"
    if path.stat().st_size != expected["bytes"]:
        return f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}"
    if checksum(path)["sha256"] != expected["sha256"]:
        return f"{name} does not match its checksum"
    return None


def versions() -> dict[str, str]:
    """Of what computes here: packages, and the table of the kernels' tiles."""
    packages = ("baton-lm", "torch", "deepspeed", "megatron-core")
    return {**{name: version(name) for name in packages}, "kernel tiles": tiles.digest()}
