"""Makes a checkpoint of one run the first checkpoint of another: checked against its settings, linked, verified.

Weights, moments and the number of steps are kept, and so are the lanes' cursors and States unless the new run begins its
data anew. Files are hard links where the file system has them, because a checkpoint is never modified in place.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from baton.data_pipeline.config import DataConfig
from baton.data_pipeline.errors import DataError
from baton.data_pipeline.file_io import read_text
from baton.data_pipeline.run_source import ShardSource, TaskSource, open_source
from baton.kernels.compile.aot import META
from baton.models.config import ModelConfig
from baton.parallel import mesh as meshes
from baton.parallel.config import LayoutConfig
from baton.training.bptt.lane_states import LANE_STATE_PREFIX, LaneStates
from baton.training.build import build_model
from baton.training.checkpoint.manifest import NAME, Manifest, TensorEntry, check_file
from baton.training.checkpoint.shard_boxes import parameter_boxes
from baton.training.checkpoint.store import PREFIX, published
from baton.training.config import TrainingConfig
from baton.training.config_checks import with_vocabulary
from baton.training.errors import CheckpointError, OtherFormatError
from baton.training.run import fingerprints_of, stream_order


@dataclass(frozen=True)
class Origin:
    """The checkpoint from which a fork was made. digest: SHA-256 of its manifest."""

    step: int
    tokens: int
    digest: str


def link_checkpoint(
    run: Path, step: int | None, folder: Path, describe: Callable[[Manifest], Manifest], say: Callable[[str], None]
) -> Origin:
    """Put a checkpoint of a run into `folder`, with another manifest.

    Args:
        step: of the checkpoint; None: the newest whole one.
        describe: makes the new manifest, or raises.
        say: receives lines about damaged checkpoints that are skipped.

    Raises:
        CheckpointError: there is no such checkpoint, or none is whole.
        StorageError, OSError: something cannot be read or written.
    """
    there = published(run / "checkpoints")
    if step is not None:
        wanted = [path for path in there if int(path.name.removeprefix(PREFIX)) == step]
        if not wanted:
            steps = ", ".join(str(int(path.name.removeprefix(PREFIX))) for path in there) or "none"
            raise CheckpointError(f"{run} has no checkpoint of step {step}; it has those of steps {steps}")
    elif not there:
        raise CheckpointError(f"{run}: no checkpoint yet; train first with `baton train`")
    for path in [*reversed(there)] if step is None else wanted:
        target = folder / path.name
        manifest, problem = None, None
        try:
            manifest = Manifest.read(path)
        except OtherFormatError:
            raise
        except CheckpointError as error:
            problem = str(error)
        if manifest is not None:
            mine = describe(manifest)
            problem = _link(path, target, manifest)
        if manifest is not None and problem is None:
            mine.write(target)
            digest = json.loads(read_text(path / NAME))["sha256"]
            return Origin(manifest.step, manifest.tokens, digest)
        shutil.rmtree(target, ignore_errors=True)
        if step is not None:
            raise CheckpointError(f"{path} is damaged: {problem}; give another --step, or none to take the newest whole one")
        say(f"checkpoint {path.name} is damaged: {problem}; looking at the one before it")
    raise CheckpointError(f"{run}: no checkpoint is whole; `baton checkpoint verify {run}` says what is wrong")


def _link(path: Path, target: Path, manifest: Manifest) -> str | None:
    """Link, or copy, a checkpoint's files; returns what is wrong with one of them, or None."""
    target.mkdir(parents=True)
    for name, expected in sorted(manifest.files.items()):
        source = (path / name).resolve()
        try:
            os.link(source, target / name)
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError:  # another file system, or one without links
            shutil.copyfile(source, target / name)
            with open(target / name, "rb+") as f:
                os.fsync(f.fileno())
        if problem := check_file(target, name, expected):
            return problem
    return None


def describe_fork(
    manifest: Manifest, model: ModelConfig, data: DataConfig, training: TrainingConfig, *, restart_data: bool
) -> Manifest:
    """The manifest for a run with these settings. restart_data: lanes begin their data anew, with zero States.

    Raises:
        CheckpointError: the checkpoint's tensors are not those of the model.
        DataError: the data is not what the checkpoint has read.
    """
    source = open_source(data)
    tokenizer = source.config.tokenizer if isinstance(source, ShardSource) else None
    config = with_vocabulary(model, source.vocab_size, tokenizer)
    tensors = manifest.tensors
    if restart_data:
        tensors = {key: of for key, of in tensors.items() if not key.startswith(LANE_STATE_PREFIX)}
    problem = shape_mismatch(tensors, config, training, carried=training.carries_lane_states and not restart_data)
    if problem is not None:
        raise CheckpointError(problem)
    if not restart_data:
        _require_same_data(manifest, source, training)
        return dataclasses.replace(manifest, fingerprints=fingerprints_of(config, source, training))
    return dataclasses.replace(
        manifest,
        cursors={str(lane): source.beginning.to_json() for lane in range(training.lane_count)},
        fingerprints=fingerprints_of(config, source, training),
        data=source.state(),
        validation=None,
        tensors=tensors,
    )


def _require_same_data(manifest: Manifest, source: ShardSource | TaskSource, training: TrainingConfig) -> None:
    hint = "a fork with other data begins it anew (--restart-data)"
    cursors = manifest.cursors_of(source.cursor)
    try:
        source.adopt(manifest.data, cursors, **stream_order(training))
    except DataError as error:
        raise DataError(f"{error}; {hint}") from error
    if source.fingerprint(**stream_order(training)) != manifest.fingerprints.get("stream"):
        raise DataError(f"the data, its settings or the tokenizer are not what the checkpoint of step {manifest.step} read; {hint}")


def shape_mismatch(
    tensors: Mapping[str, TensorEntry], config: ModelConfig, training: TrainingConfig, *, carried: bool
) -> str | None:
    """How the checkpoint's tensors differ in name or shape from those that a run with these settings saves; None: not.

    carried: whether lanes' States are among them.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    mesh = meshes.initialize(LayoutConfig(), device=META, rank=0, store=FakeStore())
    try:
        model = build_model(config, training, META, mesh)
        boxes = parameter_boxes(model, mesh)
        if carried:
            boxes |= LaneStates(model, training, mesh).boxes(for_save=True)
    finally:
        meshes.shutdown()
    wanted = {key: box[0].whole for key, box in boxes.items()}
    for key, shape in wanted.items():
        if key not in tensors:
            return f"the checkpoint has no tensor {key}"
        there = tuple(tensors[key]["shape"])
        if there != shape:
            return f"{key} has shape {there} in the checkpoint, and {shape} with these settings"
    more = next((key for key in tensors if key.startswith("master.") and key not in wanted), None)
    return None if more is None else f"the checkpoint has a tensor {more}, and these settings none"
