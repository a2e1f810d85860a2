"""Baton: pretraining of recurrent language models. `load` opens a trained model; the rest is in the subpackages.

`import baton` imports nothing else: torch and the subpackages are imported by what uses them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os

    import torch

    from baton.training.evaluation.loaded_model import LoadedModel

__all__ = ["load"]


def load(
    place: str | os.PathLike[str],
    *,
    step: int | None = None,
    device: str | torch.device = "auto",
    dtype: torch.dtype | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
) -> LoadedModel:
    """A trained model and its tokenizer, on one device.

    Args:
        place: a run directory, a checkpoint's folder in one, or a model's folder: what `baton export` wrote, or
            another library in a format that `baton import` reads.
        step: of the checkpoint of a run directory; None: the newest whole one.
        device: "auto" is a GPU if there is one.
        dtype: of matmuls and activations; None: the run's. Parameters and States are float32.
        tokenizer: file or folder; None: the run's, or the one in the folder.

    Raises baton.launcher.errors.ConfigError for a place that is none of these, CheckpointError where no checkpoint is whole, and
    DataError where the tokenizer cannot be read.
    """
    from baton.launcher.load import load_model

    return load_model(place, step=step, device=device, dtype=dtype, tokenizer=tokenizer)
