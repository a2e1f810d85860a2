"""Processes that have imported everything and train the runs of an experiment one after another, each in its own directory.

The process that conducts the experiment imports what training needs and forks the trainers, so that the imports are paid once. A
run is one rank. Its directory is that of `baton train`: the same configuration, records, checkpoints and log, so an interrupted run
is resumed by either.
"""

import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from baton.data_pipeline.config import ShardsConfig
from baton.launcher.errors import explained
from baton.launcher.experiments.cells import Device, Trial
from baton.launcher.processes import STOPPED, log_of
from baton.launcher.run_directory import changed_since_last_start, end_attempt, open_attempt, read_config, run_settings, write_whole
from baton.training import preemption
from baton.training.monitoring import time_ledger
from baton.training.monitoring.metrics import read_metrics

RESULT = "result.json"
"""File of a run's directory that says how the run ended."""
WINDOW_TOKENS = 8192
"""Tokens of windows that are evaluated together."""


@dataclass(frozen=True)
class Result:
    """How a run ended. steps: training.steps of then. row: its last evaluation; None: it diverged, and `failure` says where.
    seconds: of all its starts."""

    steps: int
    row: dict[str, Any] | None
    failure: str | None
    seconds: float
    on: str
    commit: str | None
    date: str


def read_result(trial: Trial) -> Result | None:
    """The result of a finished run; None: it is not finished."""
    try:
        result = Result(**json.loads((trial.config.folder / RESULT).read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):  # another version's: it is written anew without training
        return None
    return result if result.steps == trial.config.training.steps else None


def serve(connection: Connection, device: Device, number: int, trainers: int, parent: int) -> None:
    """A trainer: trains the runs that the connection names until it is closed, and sends (status, sentence) for each. Status 0: it
    is finished, 75: stopped and saved, another: failed. number: of this trainer, which on a GPU is that of its device; trainers:
    how many there are."""
    from baton.launcher.worker import die_with_parent

    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's interrupt reaches all processes; the conductor passes it on
    preemption.install_handlers()
    os.environ["LOCAL_WORLD_SIZE"] = str(trainers)  # they share the cores
    mesh = _world(device, number)
    while True:
        try:
            trial: Trial = connection.recv()
        except EOFError:
            return
        connection.send(_train(trial, mesh))


def _world(device: Device, number: int) -> Any:
    import torch

    from baton.parallel import mesh as meshes
    from baton.parallel.config import LayoutConfig

    torch.set_num_threads(1)  # several trainers share the cores, and results do not depend on how many cores there are
    place = torch.device("cpu") if device == "cpu" else torch.device("cuda", number % torch.cuda.device_count())
    return meshes.initialize(LayoutConfig(), device=place, rank=0, store=torch.distributed.HashStore())


def _train(trial: Trial, mesh: Any) -> tuple[int, str]:
    os.environ[time_ledger.PROCESS_START_VARIABLE] = str(time_ledger.steady_time())  # the ledger's beginning of this start
    try:
        with open_attempt(trial.config) as attempt, _output_into(log_of(attempt, 0)):
            status, said = _run(trial, attempt, mesh)
            return end_attempt(attempt, status), said
    except Exception as error:
        refused, said = explained(error)
        if refused is None:
            traceback.print_exc()
        return refused or 1, said
    finally:
        gc.collect()  # DeepSpeed's engine is part of a cycle


def _run(trial: Trial, attempt: Path, mesh: Any) -> tuple[int, str]:
    from baton.training.errors import CheckpointError, RunError, StoppedError
    from baton.training.loop import train

    config = read_config(attempt / "config.yaml")
    settings = run_settings(config, attempt, changed_since_last_start(attempt, config))
    failure = None
    try:
        train(settings, mesh)
    except StoppedError as error:
        return STOPPED, str(error)
    except RunError as error:
        if isinstance(error, CheckpointError) or error.exit_status != RunError.exit_status or not _steps(config.folder):
            return error.exit_status, str(error)
        failure = str(error)  # training.guard has stopped it: a learning rate that is too high
        print(f"baton: {failure}", flush=True)
    except Exception as error:
        traceback.print_exc()
        status, said = explained(error)
        return status or 1, said or type(error).__name__
    rows = [row for row in _rows(config.folder) if row["kind"] == "evaluation" and row["step"] == config.training.steps]
    if failure is None and not rows:
        return 1, f"{config.folder}: no evaluation after the last step"
    row = None if failure else rows[-1]
    if row is not None and trial.windows:
        row = row | {"cases": _in_windows(trial, mesh)}
    _write(trial, mesh, row, failure)
    return 0, ""


def _in_windows(trial: Trial, mesh: Any) -> dict[str, dict[str, float]]:
    """Validation loss of the trained model by case: the same documents, cut into windows of each length, which begin without a
    State."""
    from baton.data_pipeline.dataset import Dataset
    from baton.data_pipeline.evaluation import EvaluationStream
    from baton.launcher.load import find_checkpoint, load_checkpoint
    from baton.training.evaluation.windows import evaluate_windows, joined

    data, training = trial.config.data, trial.config.training
    assert isinstance(data, ShardsConfig)
    loaded = load_checkpoint(find_checkpoint(trial.config.folder, training.steps), mesh.device)
    assert loaded.tokenizer is not None
    found = {}
    for case, length in trial.windows.items():
        rows = max(1, WINDOW_TOKENS // length)
        stream = EvaluationStream(
            Dataset.open(data.path),
            loaded.tokenizer,
            sequence_length=length,
            micro_batch_size=rows,
            max_tokens=training.evaluation.tokens,
        )
        found[case] = {"loss": joined([evaluate_windows(loaded.model, stream)]).loss}
    return found


def _write(trial: Trial, mesh: Any, row: dict[str, Any] | None, failure: str | None) -> None:
    import torch

    config = trial.config
    spans = [span for span in time_ledger.read_rows(config.folder) if span["kind"] == "spans"]
    seconds = sum(sum(span["seconds"].values()) for span in spans)
    on = "CPU" if mesh.device.type == "cpu" else torch.cuda.get_device_name(mesh.device)
    with suppress(OSError, ValueError):
        commit = json.loads((config.folder / "provenance.json").read_text(encoding="utf-8")).get("commit")
    kept = None if row is None else {key: value for key, value in row.items() if key in ("loss", "accuracy", "cases")}
    result = Result(config.training.steps, kept, failure, round(seconds, 1), on, commit, time.strftime("%Y-%m-%d"))
    write_whole(config.folder / RESULT, json.dumps(asdict(result), indent=1))


def _rows(folder: Path) -> list[dict[str, Any]]:
    return read_metrics(folder / "metrics.jsonl")


def _steps(folder: Path) -> int:
    try:
        return sum(row["kind"] == "train" for row in _rows(folder))
    except OSError:
        return 0


@contextmanager
def _output_into(log: Path) -> Iterator[None]:
    """What this process prints goes to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(number) for number in (1, 2)]
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        for number in (1, 2):
            os.dup2(file, number)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, before in zip((1, 2), saved, strict=True):
            os.dup2(before, number)
            os.close(before)
        os.close(file)
