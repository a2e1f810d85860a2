"""`baton.load`: opens a trained model from a run directory, a checkpoint's folder, or a model's folder of another library.

Checkpoints of any layout are read by one process, without process groups.
"""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from baton.data_pipeline.config import ShardsConfig
from baton.data_pipeline.tokenizer import Tokenizer, load_tokenizer
from baton.launcher.errors import ConfigError
from baton.launcher.interchange import Vocabulary, folder_tokenizer, read_model, require_rows
from baton.launcher.run_directory import checkpoint_steps, read_config
from baton.models.lm import LanguageModel
from baton.parallel.mesh import local_device
from baton.training.build import DTYPES, model_fingerprint
from baton.training.checkpoint.files import CheckpointFiles
from baton.training.checkpoint.manifest import Manifest
from baton.training.checkpoint.shard_boxes import parameter_boxes
from baton.training.checkpoint.tools import MASTER, newest_whole
from baton.training.config_checks import with_vocabulary
from baton.training.errors import CheckpointError
from baton.training.evaluation.loaded_model import LoadedModel

Say = Callable[[str], None]


def load_model(
    place: str | os.PathLike[str],
    *,
    step: int | None = None,
    device: str | torch.device = "auto",
    dtype: torch.dtype | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    say: Say = lambda _: None,
) -> LoadedModel:
    """See `baton.load`. say: called with a line for each damaged checkpoint that is passed over."""
    folder = Path(place).absolute()
    on = device_of(device)
    if not (folder / "manifest.json").exists() and (folder / "config.json").exists():
        if step is not None:
            raise ConfigError(f"{folder}: weights without checkpoints, so step={step} is none of them; leave step out")
        return _exported(folder, on, dtype, tokenizer)
    return load_checkpoint(find_checkpoint(folder, step, say), on, dtype, tokenizer)


def load_checkpoint(
    checkpoint: Path, on: torch.device, dtype: torch.dtype | None = None, tokenizer: str | os.PathLike[str] | None = None
) -> LoadedModel:
    """The model of a checkpoint's folder that `find_checkpoint` has found whole; on: its device."""
    config = read_config(checkpoint.parent.parent / "config.yaml")
    found: Tokenizer | None
    if isinstance(config.data, ShardsConfig):
        path = config.data.tokenizer if tokenizer is None else os.fspath(tokenizer)
        own = load_tokenizer(path, config.data.eod_token)
        model_config, found = with_vocabulary(config.model, own.vocab_size, path), own
    else:
        found = None if tokenizer is None else load_tokenizer(tokenizer)
        model_config = with_vocabulary(config.model, config.data.vocab_size, None)
        if found is not None:
            require_rows(Vocabulary(found.path, found.vocab_size), config.data.vocab_size, checkpoint)
    if Manifest.read(checkpoint).fingerprints.get("model") != model_fingerprint(model_config):
        raise CheckpointError(f"{checkpoint}: the checkpoint is not of the model that config.yaml describes")
    compute = DTYPES[config.training.compute_dtype_on(on.type)] if dtype is None else dtype
    with on:
        model = LanguageModel(model_config, compute_dtype=compute, residual_dtype=DTYPES[config.training.residual_dtype])
    files = CheckpointFiles(checkpoint, Manifest.read(checkpoint).tensors)
    for key, boxes in parameter_boxes(model, None).items():
        for box in boxes:
            files.fill(key, box)
    return LoadedModel(model, found)


def device_of(device: str | torch.device) -> torch.device:
    """The device; "auto" is a GPU if there is one."""
    return local_device(0, 1, "auto") if device == "auto" else torch.device(device)


def find_checkpoint(place: Path, step: int | None = None, say: Say = lambda _: None) -> Path:
    """A run's newest whole checkpoint, or that of a step, or the checkpoint that `place` is.

    Raises ConfigError where there is no run or no checkpoint yet, CheckpointError where none is whole.
    """
    if (place / "manifest.json").exists():
        return newest_whole(place, step, say)
    read_config(place / "config.yaml")  # says what is wrong with a folder that is no run
    if not checkpoint_steps(place):
        raise ConfigError(f"{place}: no checkpoint yet; train first with `baton train`")
    return newest_whole(place, step, say)


def _exported(
    folder: Path, device: torch.device, dtype: torch.dtype | None, tokenizer: str | os.PathLike[str] | None
) -> LoadedModel:
    """The model of a folder with config.json and weights, computed in float32 on a CPU and in the type of its weights elsewhere."""
    own = folder_tokenizer(folder) if tokenizer is None else load_tokenizer(tokenizer)
    read = read_model(folder, None if own is None else Vocabulary(own.path, own.vocab_size))
    compute = dtype or (torch.float32 if device.type == "cpu" or read.dtype not in DTYPES.values() else read.dtype)
    with device:
        model = LanguageModel(read.model, compute_dtype=compute)
    _copy(model, read.weights)
    return LoadedModel(model, own)


def _copy(model: LanguageModel, weights: dict[str, Tensor]) -> None:
    """Fills the parameters from whole tensors with the names of `baton checkpoint export`."""
    for key, boxes in parameter_boxes(model, None).items():
        for box in boxes:
            box.data.copy_(weights[key.removeprefix(MASTER)][tuple(slice(o, o + n) for o, n in zip(box.offset, box.data.shape))])
