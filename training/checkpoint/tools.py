"""Commands on a run's checkpoints: list, verify, compare, prune, export weights. One process, no process groups."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from baton.data_pipeline.errors import StorageError, error_reason, is_transient, unreadable
from baton.data_pipeline.file_io import retry_transient
from baton.data_pipeline.written_by import PACKAGE, own_version
from baton.training.checkpoint.digest import combine_digests
from baton.training.checkpoint.files import CheckpointFiles
from baton.training.checkpoint.manifest import Manifest, check_file
from baton.training.checkpoint.retention import Retention
from baton.training.checkpoint.shard_boxes import ShardBox
from baton.training.checkpoint.store import PREFIX, prune, published
from baton.training.checkpoint.weights_format import FORMAT, check_format
from baton.training.errors import CheckpointError, OtherFormatError

MASTER = "master."


def checkpoints_of(place: Path) -> list[Path]:
    """Checkpoints of a run directory, oldest first, or the one checkpoint that `place` is. Raises CheckpointError: there is
    none."""
    if (place / "manifest.json").exists():
        return [place]
    found = published(place / "checkpoints") or published(place)
    if not found:
        raise CheckpointError(f"{place}: no checkpoint there; give a run directory, or a checkpoint's own folder")
    return found


def listing(place: Path) -> Iterator[str]:
    """A line per checkpoint."""
    yield f"{'checkpoint':16} {'step':>9} {'tokens':>18} {'size':>11} {'validation':>10}  {'saved':19}  layout"
    for path in checkpoints_of(place):
        try:
            m = Manifest.read(path)
        except (CheckpointError, StorageError, OSError) as error:
            if path.exists():  # else another process has deleted it meanwhile
                damaged = isinstance(error, CheckpointError) and not isinstance(error, OtherFormatError)
                yield f"{path.name:16} {'damaged: ' if damaged else ''}{_said(path, error)}"
            continue
        size = sum(entry["bytes"] for entry in m.files.values()) / 2**20
        validation = "" if m.validation is None else f"{m.validation:.4f}"
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(m.time)) if m.time else ""
        layout = ", ".join(f"{name} {n}" for name, n in m.layout.items() if name == "zero" or n > 1)
        yield f"{path.name:16} {m.step:9,} {m.tokens:18,} {size:7,.1f} MiB {validation:>10}  {saved:19}  {layout}"


def problems(path: Path) -> list[str]:
    """What is wrong with a checkpoint: every file and every tensor is compared with its checksum. [] if nothing is.

    Raises StorageError or OSError if a file cannot be read, which says nothing about its content, and OtherFormatError for what
    another version wrote.
    """
    try:
        manifest = Manifest.read(path)
    except OtherFormatError:
        raise
    except CheckpointError as error:
        return [str(error)]
    found = [problem for name, entry in sorted(manifest.files.items()) if (problem := check_file(path, name, entry))]
    if found:
        return [f"{path}: {problem}" for problem in found]
    files = CheckpointFiles(path, manifest.tensors)
    for key, of in manifest.tensors.items():
        held = sum(math.prod(extent) for _, _, extent in of["parts"])
        if held != math.prod(of["shape"]):
            found.append(f"{path}: its parts hold {held} of {math.prod(of['shape'])} elements of {key}")
        elif combine_digests(files.digests(key)) != of["checksum"]:
            found.append(f"{path}: {key} does not match its checksum: it was written otherwise than it was in memory")
    return found


def verified(place: Path) -> Iterator[tuple[int, str]]:
    """A line per checkpoint (more for several damages), each with an exit status: 0 whole, 1 damaged, 2 or StorageError's: not
    readable."""
    for path in checkpoints_of(place):
        try:
            found = problems(path)
        except (OtherFormatError, StorageError, OSError) as error:
            if path.exists():
                yield (
                    (StorageError.exit_status if isinstance(error, StorageError) or is_transient(error) else 2),
                    _said(path, error),
                )
            continue
        if found and not path.exists():
            continue  # another process has deleted it meanwhile
        yield (1, "\n".join(found)) if found else (0, f"{path}: whole")


def _said(path: Path, error: Exception) -> str:
    """Text of an error, with the file's path."""
    return f"{error.filename or path}: cannot be read ({error_reason(error)})" if isinstance(error, OSError) else str(error)


def differences(one: Path, other: Path) -> list[str]:
    """Differences between two checkpoints of any layouts, one line each; [] if they are equal."""
    a, b = Manifest.read(one), Manifest.read(other)
    found = []
    for name in ("step", "tokens", "adam_steps", "fingerprints", "data"):
        if getattr(a, name) != getattr(b, name):
            found.append(f"{name}: {_short(getattr(a, name))} -> {_short(getattr(b, name))}")
    lanes = [lane for lane in sorted(a.cursors.keys() | b.cursors.keys(), key=int) if a.cursors.get(lane) != b.cursors.get(lane)]
    if lanes:
        found.append(f"cursors of {len(lanes)} lanes, the first lane {lanes[0]}")
    files = CheckpointFiles(one, a.tensors), CheckpointFiles(other, b.tensors)
    for key in sorted(a.tensors.keys() | b.tensors.keys()):
        x, y = a.tensors.get(key), b.tensors.get(key)
        if x is None or y is None:
            found.append(f"{key}: only in {one if y is None else other}")
        elif (x["shape"], x["dtype"]) != (y["shape"], y["dtype"]):
            found.append(f"{key}: {x['dtype']} {x['shape']} -> {y['dtype']} {y['shape']}")
        elif x["checksum"] != y["checksum"]:
            found.append(f"{key}: {_how_far(files[0].whole(key), files[1].whole(key))}")
    return found


def _how_far(x: Tensor, y: Tensor) -> str:
    differing = int((x != y).sum())
    x, y = x.double(), y.double()
    norm = float(torch.linalg.vector_norm(x))
    relative = float(torch.linalg.vector_norm(x - y)) / norm if norm else math.inf
    return (
        f"{differing:,} of {x.numel():,} elements differ, by {float((x - y).abs().max()):.3g} at most, {relative:.3g} of the norm"
    )


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 60 else f"{text[:57]}..."


def pruned(place: Path, retention: Retention, *, delete: bool) -> list[Path]:
    """Prune a run's checkpoints; returns those deleted, or that would be (delete=False). Raises CheckpointError."""
    folder = checkpoints_of(place)[0].parent
    try:
        return prune(folder, retention, delete=delete)
    except OSError as error:
        if is_transient(error):
            raise
        raise CheckpointError(f"{error.filename or folder}: cannot be deleted ({error_reason(error)})") from None


def newest_whole(place: Path, step: int | None = None, say: Callable[[str], None] = lambda _: None) -> Path:
    """A run's newest checkpoint without a problem, or that of a step. say: called with a line for each that is damaged. Raises
    CheckpointError where there is none, and OtherFormatError where another version wrote it."""
    found = [path for path in checkpoints_of(place) if step is None or _step(path) == step]
    if not found:
        raise CheckpointError(f"{place}: no checkpoint of step {step}; `baton checkpoint list` shows what is there")
    for path in reversed(found):
        if not (found_problems := problems(path)):
            return path
        say(f"{path} is damaged ({found_problems[0].removeprefix(f'{path}: ')})")
    raise CheckpointError(f"{place}: no checkpoint is whole; `baton checkpoint verify` says what is wrong")


def _step(path: Path) -> int:
    """Of a checkpoint, which a run names by it."""
    number = path.name.removeprefix(PREFIX)
    return int(number) if number != path.name and number.isdigit() else Manifest.read(path).step


def whole_weights(path: Path) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint by name, float32 and whole; fused projections are split into their parts."""
    manifest = Manifest.read(path)
    files = CheckpointFiles(path, manifest.tensors)
    return {key.removeprefix(MASTER): files.whole(key) for key in manifest.tensors if key.startswith(MASTER)}


def export(place: Path, out: Path, dtype: torch.dtype | None = None) -> Path:
    """Write the weights of a checkpoint, or of a run's newest whole one, as one safetensors file; returns the checkpoint.

    Tensors are whole and have the parameters' names; fused projections are split into their parts. dtype: of floating-point
    tensors; None: fp32. Raises CheckpointError: no checkpoint is whole, or the file cannot be written.
    """
    path = newest_whole(place)
    manifest, tensors = Manifest.read(path), whole_weights(path)
    if dtype is not None:
        tensors = {name: x.to(dtype) for name, x in tensors.items()}
    about = {"step": str(manifest.step), "tokens": str(manifest.tokens)}
    about |= {f"fingerprint.{name}": value for name, value in manifest.fingerprints.items()}
    write_weights(tensors, out, about)
    return path


def write_weights(tensors: dict[str, torch.Tensor], out: Path, about: dict[str, str]) -> None:
    """Write a safetensors file that `load_weights` reads, whole or not at all. about: its metadata, besides the format.

    Raises CheckpointError if the file cannot be written.
    """
    aside = out.with_name(f".{out.name}.new")
    try:
        save_file(tensors, aside, metadata={"format": FORMAT, PACKAGE: own_version(), **about})
        os.replace(aside, out)
    except (OSError, SafetensorError) as error:
        aside.unlink(missing_ok=True)
        raise CheckpointError(f"{out}: cannot be written ({error}); choose another place") from None


def names_in(path: Path) -> set[str]:
    """Names of a safetensors file's tensors. Raises CheckpointError for a file that cannot be read."""
    with _weights_file(path) as file:
        return set(file.keys())


@contextmanager
def _weights_file(path: Path) -> Iterator[Any]:
    """An open safetensors file. Raises CheckpointError where it cannot be read, and an error that is retried where it may yet."""
    try:
        retry_transient(lambda: path.open("rb").close())  # safe_open calls every failure a missing file
        with safe_open(path, framework="pt") as file:
            check_format(path, file.metadata())
            yield file
    except (OSError, SafetensorError) as error:
        if is_transient(error):
            raise unreadable(path, error) from None
        what = "give a file of `baton import` or `checkpoint export`"
        raise CheckpointError(f"{path}: cannot be read as safetensors ({error}); {what}") from None


def load_weights(path: Path, boxes: dict[str, list[ShardBox]]) -> None:
    """Fill masters or parameters from a safetensors file with the names that `export` writes. Other boxes are left alone.

    Raises CheckpointError: the file cannot be read, or is of another model.
    """
    with _weights_file(path) as file:
        names, wanted = set(file.keys()), {key.removeprefix(MASTER) for key in boxes if key.startswith(MASTER)}
        if wanted - names:
            raise CheckpointError(f"{path}: it has no tensor {min(wanted - names)}; it is of another model")
        for name in wanted:
            there = file.get_slice(name)
            for box in boxes[f"{MASTER}{name}"]:
                if tuple(there.get_shape()) != box.whole:
                    raise CheckpointError(f"{path}: {name} has shape {tuple(there.get_shape())}, the model's {box.whole}")
                box.data.copy_(there[tuple(slice(o, o + n) for o, n in zip(box.offset, box.data.shape))])
