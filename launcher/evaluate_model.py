"""`baton eval --data`, `--tasks` and `--long-context`: a trained model on any dataset, on lm_eval's tasks, and on long texts."""

import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.evaluation import EvaluationStream
from baton.launcher.errors import ConfigError, ProcessEndedError
from baton.launcher.evaluate import NAME, sheet_of
from baton.launcher.inputs import read_text
from baton.launcher.load import device_of, find_checkpoint, load_checkpoint, load_model
from baton.launcher.run_directory import read_config
from baton.parallel.mesh import local_device
from baton.training.checkpoint.manifest import Manifest
from baton.training.evaluation.loaded_model import LoadedModel
from baton.training.evaluation.windows import WindowSums, evaluate_windows, joined


@dataclass(frozen=True)
class _Windows:
    """What to evaluate: a model, a dataset's split, windows of `length` tokens, `batch` together, and labels at most."""

    place: Path
    checkpoint: Path | None
    step: int | None
    data: str
    split: str
    length: int
    tokens: int | None
    batch: int


def evaluate_data(
    place: Path,
    data: str,
    *,
    step: int | None,
    device: str,
    out: Path | None,
    length: int | None,
    tokens: int | None,
    split: str,
    by_position: bool,
    batch: int,
    ranks: int | None,
) -> None:
    """Loss, perplexity and bits per byte of a split's documents in windows of `length` tokens; appends a row to evaluations.jsonl.

    ranks: processes, each of which has a share of the windows, and a GPU of its own; None: one for each GPU, one on a CPU.

    Raises ConfigError for a place that is no model, DataError for no such dataset or split, and for another tokenizer's ids, and
    LayoutError for more ranks than GPUs.
    """
    checkpoint, row, folder = _found(place, step)
    if length is None and checkpoint is None:
        raise ConfigError(f"{place}: a model's folder does not say the length of training; give --length")
    length = length or read_config(folder / "config.yaml").training.sequence_length
    Dataset.open(data).require(split)  # refused before a model is loaded or a process started
    sheet = sheet_of(folder, out)
    wanted = _Windows(place, checkpoint, step, data, split, length, tokens, batch)
    if ranks is None:
        ranks = max(1, torch.cuda.device_count()) if device != "cpu" else 1
    local_device(0, ranks, device)  # refuses more than there are
    if ranks == 1:
        shares = [_share(wanted, device, 0, 1)]
    else:
        with ProcessPoolExecutor(ranks, multiprocessing.get_context("spawn")) as pool:
            working = [pool.submit(_share, wanted, device, rank, ranks) for rank in range(ranks)]
            try:
                shares = [one.result() for one in working]
            except BrokenProcessPool:
                raise ProcessEndedError("a process was ended, maybe for lack of memory; give fewer --ranks") from None
    about = {**row, "data": data, "split": split, "length": length, "documents": shares[0].documents}
    sheet.write({**about, **joined(shares).to_json(by_position=by_position)})


def _share(wanted: _Windows, device: str, rank: int, ranks: int) -> WindowSums:
    """One process's sums."""
    on = local_device(rank, ranks, device)
    if on.type == "cuda":
        torch.cuda.set_device(on)
    elif ranks > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    loaded = _loaded(wanted.place, wanted.checkpoint, wanted.step, on)
    assert loaded.tokenizer is not None
    chosen = EvaluationStream(
        Dataset.open(wanted.data),
        loaded.tokenizer,
        split=wanted.split,
        sequence_length=wanted.length,
        micro_batch_size=wanted.batch,
        max_tokens=wanted.tokens,
    )
    return evaluate_windows(loaded.model, chosen, rank, ranks)


def evaluate_tasks(
    place: Path,
    tasks: Sequence[str],
    *,
    step: int | None,
    device: str,
    out: Path | None,
    include: Path | None,
    shots: int | None,
    limit: int | None,
    batch: int,
) -> None:
    """lm_eval's metrics of each task; appends a row to evaluations.jsonl.

    Raises ConfigError for unknown tasks, for those whose file or data lm_eval cannot use, and where lm_eval is not installed.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager

        from baton.training.evaluation.lm_harness import HarnessModel
    except ImportError as error:
        raise ConfigError(f"--tasks: {error.name} is not installed; pip install 'baton-lm[eval]'") from None
    if include is not None and not include.is_dir():
        raise ConfigError(f"--include: {include}: not a folder; give one with task files")
    # lm_eval's own tasks are thousands of files, which take seconds to look through
    managers = [] if include is None else [TaskManager(include_path=str(include), include_defaults=False)]
    if not managers or set(tasks) - set(managers[0].all_tasks):
        managers = [TaskManager(include_path=None if include is None else str(include))]
    if unknown := [task for task in tasks if task not in managers[0].all_tasks]:
        raise ConfigError(f"--tasks: {unknown[0]}: no such task; see `lm-eval ls tasks`, or give your own folder with --include")
    checkpoint, row, folder = _found(place, step)
    sheet = sheet_of(folder, out)
    model = HarnessModel(_loaded(place, checkpoint, step, device), batch)
    try:
        found = simple_evaluate(
            model,
            tasks=list(tasks),
            num_fewshot=shots,
            limit=limit,
            task_manager=managers[0],
            bootstrap_iters=1000,
            log_samples=False,
        )
    except Exception as error:
        if model.answering:
            raise
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ConfigError(
            f"--tasks {','.join(tasks)}: lm_eval cannot use them ({said}); correct the task's file or its data"
        ) from error
    results = {task: {key: x for key, x in of.items() if isinstance(x, int | float)} for task, of in found["results"].items()}
    sheet.write({**row, "tasks": results, "shots": shots, "limit": limit})


def evaluate_long_context(
    place: Path,
    tasks: Sequence[str],
    *,
    step: int | None,
    device: str,
    out: Path | None,
    text: Path | None,
    lengths: Sequence[str],
    depths: int,
    samples: int,
    seed: int,
    batch: int,
    plot: Path | None,
) -> None:
    """Share of answers found by task, length and depth; appends a row to evaluations.jsonl and draws it as a heat map.

    Raises ConfigError for unknown tasks, lengths that have no room for them, and a text that cannot be read.
    """
    from baton.training.evaluation.long_context_scores import score_tasks
    from baton.training.evaluation.long_context_tasks import TASKS
    from baton.training.monitoring.score_map import plot_scores

    tasks = list(TASKS) if list(tasks) == ["all"] else list(dict.fromkeys(tasks))
    if unknown := [task for task in tasks if task not in TASKS]:
        raise ConfigError(f"--long-context: {unknown[0]}: no such task; there are {', '.join(TASKS)}, or all")
    if wrong := [length for length in lengths if not length.isdecimal() or int(length) == 0]:
        raise ConfigError(f"--lengths: {wrong[0]!r} is not a number of tokens; give whole numbers separated by commas")
    if text is None:
        raise ConfigError("--long-context: what is asked for is put into running text; give a file of it with --text")
    running = read_text(text, "--text")
    checkpoint, row, folder = _found(place, step)
    sheet = sheet_of(folder, out)
    loaded = _loaded(place, checkpoint, step, device)
    try:
        rows = score_tasks(
            loaded,
            tasks,
            running,
            sorted({int(length) for length in lengths}),
            depths=depths,
            samples=samples,
            batch=batch,
            seed=seed,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
    except ValueError as error:
        raise ConfigError(f"--long-context: {error}; give other --lengths, or another --text") from None
    sheet.write({**row, "text": str(text), "seed": seed, "long_context": rows})
    named = f"{place.name or place}, step {row['step']}" if row else str(place.name)
    file = f"long_context-step-{row['step']:08d}.png" if row else "long_context.png"
    picture = plot_scores(rows, named, plot or (out or folder / NAME).with_name(file))
    print(f"wrote {picture}", file=sys.stderr)


def _found(place: Path, step: int | None) -> tuple[Path | None, dict[str, Any], Path]:
    """The checkpoint (None: an exported folder), its step and the length of training, and where its evaluations are."""
    if (place / "config.json").exists() and not (place / "manifest.json").exists():
        return None, {}, place
    checkpoint = find_checkpoint(place.absolute(), step, lambda text: print(text, file=sys.stderr))
    folder = checkpoint.parent.parent
    return checkpoint, {"step": Manifest.read(checkpoint).step}, folder


def _loaded(place: Path, checkpoint: Path | None, step: int | None, device: str | torch.device) -> LoadedModel:
    loaded = load_model(place, step=step, device=device) if checkpoint is None else load_checkpoint(checkpoint, device_of(device))
    if loaded.tokenizer is None:
        what = "give a run on data.kind=shards" if checkpoint else "put the model's tokenizer.model or tokenizer.json there"
        raise ConfigError(f"{place}: there is no tokenizer, so no text can be scored; {what}")
    return loaded
