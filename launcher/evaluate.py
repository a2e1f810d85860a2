"""`baton eval`: evaluates one checkpoint of a run in a single process, whatever layout wrote it.

It is the evaluation that training makes, on the same fixed set, so its results are comparable with those in metrics.jsonl. They are
written to evaluations.jsonl, because the run itself may be writing metrics.jsonl at the same time.
"""

import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, cast

import torch

from baton.data_pipeline.errors import error_reason, is_transient
from baton.data_pipeline.file_io import append_line
from baton.data_pipeline.run_source import ShardSource, open_source
from baton.launcher.errors import ConfigError
from baton.launcher.run_directory import read_config
from baton.parallel import mesh as meshes
from baton.parallel.config import LayoutConfig
from baton.training.build import TrainState, build_model, make_deterministic, model_fingerprint
from baton.training.callbacks.callback import Callback
from baton.training.callbacks.task_evaluation import TaskEvaluationCallback
from baton.training.callbacks.text_evaluation import TextEvaluationCallback
from baton.training.checkpoint.manifest import Manifest
from baton.training.checkpoint.shard_boxes import parameter_boxes
from baton.training.checkpoint.store import CheckpointStore, newest
from baton.training.config_checks import with_vocabulary
from baton.training.errors import CheckpointError
from baton.training.monitoring.metrics import MetricsLogger
from baton.training.run import RunProgress, RunSettings
from baton.training.step.executor import StepResult

NAME = "evaluations.jsonl"


class Sheet:
    """Rows of evaluations.jsonl, which are printed on the console too. It takes the place of training's metrics.jsonl.

    run: the run directory whose TensorBoard shows them; None: none does.
    """

    def __init__(self, path: Path, run: Path | None = None) -> None:
        """Raises ConfigError if `path` cannot be written, so that a long evaluation does not lose its result at the end. The first
        row makes the file."""
        self._path, self._run = path, run
        try:
            if path.exists():
                path.open("a").close()
            else:
                TemporaryFile(dir=path.parent).close()
        except OSError as error:
            if is_transient(error):
                raise
            raise ConfigError(f"{path}: cannot be written ({error.strerror}); choose another file with --out") from None

    def log_evaluation(self, step: int, tokens: int, loss: float, bits_per_byte: float, sample: str | None) -> None:
        self.write({"step": step, "tokens": tokens, "loss": loss, "bits_per_byte": bits_per_byte, "sample": sample})

    def log_task_evaluation(self, step: int, tokens: int, cases: dict[str, tuple[float, float]]) -> None:
        named = {name: {"loss": loss, "accuracy": accuracy} for name, (loss, accuracy) in cases.items()}
        means = {what: sum(of[what] for of in named.values()) / len(named) for what in ("loss", "accuracy")}
        self.write({"step": step, "tokens": tokens, **means, "cases": named})

    def write(self, row: dict[str, Any]) -> None:
        line = json.dumps({"kind": "evaluation", **row, "time": time.time()})
        print(line, flush=True)  # first: should the disk be full by now, the result is not lost
        append_line(self._path, line)
        if self._run is not None:
            from baton.training.monitoring.evaluation_tensorboard import show_evaluation

            try:
                show_evaluation(self._run, row)
            except OSError as error:
                print(f"note: {self._run}: TensorBoard does not show this row ({error_reason(error)})", file=sys.stderr)


def sheet_of(folder: Path, out: Path | None) -> Sheet:
    """The file --out, or a folder's own: of a run directory TensorBoard shows the rows too. Raises ConfigError as Sheet does."""
    return Sheet(out) if out is not None else Sheet(folder / NAME, folder if (folder / "config.yaml").exists() else None)


def evaluate_checkpoint(folder: Path, step: int | None = None, device: str = "auto", out: Path | None = None) -> None:
    """Evaluates the checkpoint of `step` (None: the newest) and appends a row to `out` (None: the run's evaluations.jsonl).

    Raises ConfigError if the checkpoint does not exist or `out` cannot be written, and CheckpointError if the checkpoint is
    incomplete or belongs to another run.
    """
    if (folder / "config.json").exists() and not (folder / "config.yaml").exists():
        raise ConfigError(f"{folder}: a model's folder has no validation set; give --data SHARDS, --tasks or --long-context")
    config = read_config(folder / "config.yaml")
    path = newest(folder / "checkpoints") if step is None else folder / "checkpoints" / f"step-{step:08d}"
    if path is None:
        raise ConfigError(f"{folder}: no checkpoint yet; train first with `baton train`")
    path = path.absolute()
    if not path.is_dir():
        kept = config.training.checkpoint.keep_last
        raise ConfigError(f"{path}: no such checkpoint; the run keeps training.checkpoint.keep_last={kept}")
    # TensorBoard has this evaluation from training
    sheet = cast(MetricsLogger, Sheet(folder / NAME if out is None else out))
    make_deterministic(config.training)
    source = open_source(config.data)
    tokenizer = source.config.tokenizer if isinstance(source, ShardSource) else None
    model_config = with_vocabulary(config.model, source.vocab_size, tokenizer)
    evaluation = config.training.evaluation.model_copy(update={"every": 1, "tokens": config.training.evaluation_tokens})
    training = config.training.model_copy(update={"evaluation": evaluation})
    mesh = meshes.initialize(LayoutConfig(), device=meshes.local_device(0, 1, device), rank=0, store=torch.distributed.HashStore())
    try:
        train_state = TrainState(build_model(model_config, training, mesh.device, mesh), cast(Any, None), mesh)
        store = CheckpointStore(path.parent, mesh, keep_last=1)

        def accept(manifest: Manifest) -> None:
            if manifest.fingerprints.get("model") != model_fingerprint(model_config):
                raise CheckpointError(f"{path}: the checkpoint is not of the model that config.yaml describes")

        found = store.load_newest(accept, cleanup=False, only=path)
        if found is None:
            raise CheckpointError(f"{path}: it has been removed meanwhile")
        store.read(found[0], parameter_boxes(train_state.model, mesh))
        settings = RunSettings(folder, model_config, config.data, training, "")
        evaluator: Callback
        if isinstance(source, ShardSource):
            evaluator = TextEvaluationCallback(train_state, source, sheet, settings)
        else:
            evaluator = TaskEvaluationCallback(train_state, source, sheet, settings)
        evaluator.after_step(RunProgress(found[1].step, found[1].tokens, {}), StepResult(0.0, 0.0, 0))
    finally:
        meshes.shutdown()
