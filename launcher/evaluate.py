"""`baton evaluate`: one checkpoint of a run, loaded into one process whatever layout wrote it, on the run's own evaluation.

The one thing to know: it is the same evaluation as in training, on a fixed set, so its numbers belong beside those in
metrics.jsonl; they go to evaluations.jsonl, because the run itself may be writing its record at this moment.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import torch

from baton.data_pipeline.source import ShardSource, open_source
from baton.launcher.errors import ConfigError
from baton.launcher.run_directory import read_config
from baton.parallel import mesh as meshes
from baton.parallel.config import LayoutConfig
from baton.training.build import Built, build_model, make_deterministic, model_fingerprint
from baton.training.callbacks import Evaluator, TaskEvaluator
from baton.training.checkpoint.manifest import Manifest
from baton.training.checkpoint.rectangles import parameter_rectangles
from baton.training.checkpoint.store import CheckpointStore
from baton.training.config import with_vocabulary
from baton.training.errors import CheckpointError
from baton.training.executor import StepResult
from baton.training.monitor import Monitor
from baton.training.run import Callback, Progress, RunSettings

NAME = "evaluations.jsonl"


class _Sheet:
    """Stands where training has its monitor: a row, and the same on the console."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME

    def evaluation(self, step: int, tokens: int, loss: float, bits_per_byte: float, sample: str | None) -> None:
        self._write({"step": step, "tokens": tokens, "loss": loss, "bits_per_byte": bits_per_byte, "sample": sample})

    def accuracy(self, step: int, tokens: int, cases: dict[str, tuple[float, float]]) -> None:
        named = {name: {"loss": loss, "accuracy": accuracy} for name, (loss, accuracy) in cases.items()}
        means = {what: sum(of[what] for of in named.values()) / len(named) for what in ("loss", "accuracy")}
        self._write({"step": step, "tokens": tokens, **means, "cases": named})

    def _write(self, row: dict[str, Any]) -> None:
        line = json.dumps({"kind": "evaluation", **row, "time": time.time()})
        with self._path.open("a", encoding="utf-8") as f:
            f.write(line + "\n")
        print(line, flush=True)


def evaluate_checkpoint(folder: Path, step: int, device: str = "auto") -> None:
    """Evaluate the checkpoint of `step` and add a row to evaluations.jsonl. Raises ConfigError when it is not there,
    CheckpointError when it is not whole, or not of this run."""
    config = read_config(folder / "config.yaml")
    path = (folder / "checkpoints" / f"step-{step:08d}").absolute()
    if not path.is_dir():
        kept = config.training.checkpoint.keep_last
        raise ConfigError(f"{path}: no such checkpoint; the run keeps training.checkpoint.keep_last={kept}")
    make_deterministic(config.training)
    source = open_source(config.data)
    tokenizer = source.config.tokenizer if isinstance(source, ShardSource) else None
    model_config = with_vocabulary(config.model, source.vocab_size, tokenizer)
    evaluation = config.training.evaluation.model_copy(update={"every": 1})
    training = config.training.model_copy(update={"evaluation": evaluation})
    mesh = meshes.initialize(LayoutConfig(), device=meshes.local_device(0, 1, device), rank=0, store=torch.distributed.HashStore())
    try:
        built = Built(build_model(model_config, training, mesh.device, mesh), cast(Any, None), mesh)
        with tempfile.TemporaryDirectory() as alone:  # a store of this checkpoint and no other
            (Path(alone) / path.name).symlink_to(path)
            store = CheckpointStore(Path(alone), mesh, keep_last=1)

            def accept(manifest: Manifest) -> None:
                if manifest.fingerprints.get("model") != model_fingerprint(model_config):
                    raise CheckpointError(f"{path}: the checkpoint is not of the model that config.yaml describes")

            found = store.load_newest(accept, tidy=False)
            if found is None:
                raise CheckpointError(f"{path}: it has been removed meanwhile")
            store.read(found[0], parameter_rectangles(built.model, mesh))
        sheet = cast(Monitor, _Sheet(folder))
        settings = RunSettings(folder, model_config, config.data, training, "")
        evaluator: Callback
        if isinstance(source, ShardSource):
            evaluator = Evaluator(built, source, sheet, settings)
        else:
            evaluator = TaskEvaluator(built, source, sheet, settings)
        evaluator.after_step(Progress(found[1].step, found[1].tokens, {}), StepResult(0.0, 0.0, 0))
    finally:
        meshes.shutdown()
