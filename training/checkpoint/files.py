"""A rank's tensors on disk: a safetensors file of boxes, each named "KEY@OFFSET"; and reading boxes of whole tensors back.

Tensors are first copied to host memory (`Staging`), which later saves reuse: training goes on while a thread writes, and
memory does not grow from save to save. safetensors is a JSON header and plain bytes, so reading a file runs no code.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.data_pipeline.errors import is_transient, unreadable
from baton.data_pipeline.file_io import retry_transient
from baton.training.checkpoint.digest import box_digest
from baton.training.checkpoint.shard_boxes import ShardBox
from baton.training.errors import CheckpointError

ShardBoxes = dict[str, list[ShardBox]]

BLOCK = 1 << 23
"""Bytes written at a time."""

SYNC = 1 << 28
"""Bytes after which the disk is waited for, which shows that a write goes on: one sync at the end can be silent for minutes."""

MOMENTS = ("exp_avg.", "exp_avg_sq.")
"""How the keys of AdamW's moments begin."""

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""As safetensors calls them."""


def file_name(rank: int) -> str:
    """File of a rank's tensors."""
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True)
class StagedBox:
    """A box in host memory."""

    key: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    data: Tensor

    @property
    def name(self) -> str:
        return box_key(self.key, self.offset)


def box_key(key: str, offset: Sequence[int]) -> str:
    """Name of a box in its file."""
    return f"{key}@{','.join(map(str, offset))}"


class Staging:
    """Host memory into which a save is copied; pinned if there is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, boxes: ShardBoxes) -> tuple[list[StagedBox], Tensor]:
        """Copies of the boxes as of now, and the memory that holds them one after the other, uint8 [bytes]."""
        tensor_boxes = [(key, box) for key, tensor_boxes in boxes.items() for box in tensor_boxes]
        tensor_boxes.sort(key=lambda item: -item[1].data.element_size())  # each begins at a multiple of its elements' size
        size = sum(box.data.nbytes for _, box in tensor_boxes)
        if len(self._memory) < size:
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        parts, at = [], 0
        for key, box in tensor_boxes:
            space = self._memory[at : at + box.data.nbytes].view(box.data.dtype).view(box.data.shape)
            space.copy_(box.data, non_blocking=True)
            parts.append(StagedBox(key, box.whole, box.offset, space))
            at += box.data.nbytes
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return parts, self._memory[:size]


def write_file(
    path: Path, parts: Sequence[StagedBox], memory: Tensor, on_block: Callable[[], None] = lambda: None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write and sync what `Staging.copy` returned. Raises OSError.

    Returns {bytes, sha256} of the content that was meant to be written, and `describe` of the parts. Both checksums are
    computed by threads while the disk writes. on_block: called after each block.
    """
    header, at = {}, 0
    for part in parts:
        end = at + part.data.nbytes
        header[part.name] = {"dtype": DTYPES[part.data.dtype], "shape": list(part.data.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    content = memoryview(memory.numpy().data)
    start, size = len(text).to_bytes(8, "little") + text, 8 + len(text) + len(content)
    with ThreadPoolExecutor(2, thread_name_prefix="checksum") as pool:
        digest, described = pool.submit(_sha256, start, content, on_block=on_block), pool.submit(describe, parts)
        with open(path, "wb", buffering=0) as f:
            unsynced = 0
            for block in _blocks(start, content):
                unsynced += len(block)
                while block:
                    block = block[f.write(block) :]
                if unsynced >= SYNC:
                    os.fdatasync(f.fileno())
                    unsynced = 0
                on_block()
            os.fsync(f.fileno())
        return {"bytes": size, "sha256": digest.result()}, described.result()


def _sha256(*contents: bytes | memoryview, on_block: Callable[[], None] = lambda: None) -> str:
    digest = hashlib.sha256()
    for block in _blocks(*contents):
        digest.update(block)
        on_block()
    return digest.hexdigest()


def _blocks(*contents: bytes | memoryview) -> Iterator[memoryview]:
    for content in contents:
        whole = memoryview(content)
        for start in range(0, len(whole), BLOCK):
            yield whole[start : start + BLOCK]


def describe(parts: Sequence[StagedBox]) -> dict[str, Any]:
    """The manifest's entries of a rank's boxes: {key: {dtype, shape, digest: of these boxes, parts: [[offset, extent], ...]}}."""
    found: dict[str, Any] = {}
    for part in parts:
        entry = {"dtype": DTYPES[part.data.dtype], "shape": list(part.whole), "digest": 0, "parts": []}
        entry = found.setdefault(part.key, entry)
        entry["digest"] += box_digest(part.data, part.offset)
        entry["parts"].append([list(part.offset), list(part.data.shape)])
    return found


class CheckpointFiles:
    """The tensors in a checkpoint's folder.

    tensors: as in the manifest, {key: {dtype, shape, checksum, parts: [[file, offset, extent], ...]}}.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, Any]) -> None:
        self._folder, self.tensors = folder, tensors
        self._open: dict[str, Any] = {}

    def fill(self, key: str, box: ShardBox) -> None:
        """Copy a box of a whole tensor into the box's memory.

        Raises:
            CheckpointError: there is no such tensor, shape or dtype differ (only moments are converted: a run may change
                training.optimizer.moments_dtype), or the stored boxes do not cover it.
            StorageError, OSError: a file cannot be read.
        """
        stored = self.tensors.get(key)
        if stored is None:
            raise CheckpointError(f"the checkpoint has no tensor {key}: it is of another model")
        if tuple(stored["shape"]) != box.whole:
            raise CheckpointError(f"the checkpoint's {key} has shape {tuple(stored['shape'])}, the model's {box.whole}")
        if stored["dtype"] != DTYPES[box.data.dtype] and not (key.startswith(MOMENTS) and box.data.is_floating_point()):
            raise CheckpointError(f"the checkpoint's {key} has type {stored['dtype']}, the model's {DTYPES[box.data.dtype]}")
        covered = 0
        for file, offset, extent in stored["parts"]:
            begin = [max(a, b) for a, b in zip(offset, box.offset, strict=True)]
            end = [min(a + n, b + m) for a, n, b, m in zip(offset, extent, box.offset, box.data.shape, strict=True)]
            if any(a >= b for a, b in zip(begin, end)):
                continue
            there = tuple(slice(a - o, b - o) for a, b, o in zip(begin, end, offset))
            here = tuple(slice(a - o, b - o) for a, b, o in zip(begin, end, box.offset))
            with self._reading(file, key):
                box.data[here].copy_(self._file(file).get_slice(box_key(key, offset))[there])
            covered += math.prod(b - a for a, b in zip(begin, end))
        if covered != box.data.numel():
            raise CheckpointError(f"the checkpoint holds {covered} of {box.data.numel()} elements of {key} at {box.offset}")

    def whole(self, key: str) -> Tensor:
        """A whole tensor, on the CPU. Raises what `fill` raises."""
        stored = self.tensors[key]
        shape = tuple(stored["shape"])
        dtype = next(dtype for dtype, name in DTYPES.items() if name == stored["dtype"])
        box = ShardBox(shape, (0,) * len(shape), torch.empty(shape, dtype=dtype))
        self.fill(key, box)
        return box.data

    def digests(self, key: str) -> list[int]:
        """Digests of a tensor's boxes as they are on disk. Raises what `fill` raises."""
        found = []
        for file, offset, _ in self.tensors[key]["parts"]:
            with self._reading(file, key):
                found.append(box_digest(self._file(file).get_tensor(box_key(key, offset)), tuple(offset)))
        return found

    def _file(self, name: str) -> Any:
        if name not in self._open:
            path = self._folder / name
            retry_transient(lambda: path.open("rb").close())  # safe_open calls every failure a missing file
            self._open[name] = safe_open(path, framework="pt")
        return self._open[name]

    @contextmanager
    def _reading(self, file: str, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if is_transient(error):
                raise unreadable(self._folder / file, error) from error
            raise
        except SafetensorError as error:
            raise CheckpointError(f"{self._folder / file}: {key} cannot be read ({error})") from error
