"""Runs whose ranks live in the pool: what `baton.launcher.worker` does, in processes whose imports are paid."""

import contextlib
import gc
import io
from pathlib import Path

import torch


def train_run(mesh, folder: str, run: str | None = None) -> str:
    """Train a run from where it is, in this folder; what the rank prints. run: a run file, at a first start; None: what the folder
    has."""
    from baton.launcher.config import load
    from baton.launcher.run_directory import read_config
    from baton.training.loop import train
    from baton.training.run import RunSettings

    own = Path(folder)
    config = read_config(own / "config.yaml") if run is None else load(Path(run), [f"directory={folder}"])
    if run is not None and mesh.is_main:
        own.mkdir()
        (own / "config.yaml").write_text(config.to_yaml())
    settings = {"model": config.model, "data": config.data, "training": config.training, "config_text": config.to_yaml()}
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            train(RunSettings(folder=own, **settings), mesh)
    finally:
        gc.collect()  # DeepSpeed's engine imports modules when it is collected, which must not happen in another import
    return out.getvalue()


def train_attempt(mesh, attempt: str) -> str | None:
    """Train what an attempt's folder describes; the sentence of a refusal."""
    from baton.launcher.run_directory import changed_since_last_start, read_config, run_settings
    from baton.training.errors import RunError
    from baton.training.loop import train

    path = Path(attempt)
    config = read_config(path / "config.yaml")
    settings = run_settings(config, path, changed_since_last_start(path, config))
    try:
        train(settings, mesh)
    except RunError as error:
        return str(error)
    finally:
        torch.set_deterministic_debug_mode("default")  # the pool serves other tests
        # DeepSpeed's engine imports modules when it is collected, which must not happen in the middle of another import
        gc.collect()
    return None
