"""The run directory: configuration, attempts, records and locks of a run.

Each start has a folder of its own, nothing is truncated, and every start uses the same configuration, apart from settings that may
change (launcher.changes).
"""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from baton.data_pipeline.errors import StorageError, is_transient
from baton.data_pipeline.file_io import read_text
from baton.data_pipeline.lock import LockHeldError, exclusive
from baton.data_pipeline.own_yaml import parse_own_yaml
from baton.data_pipeline.written_by import by_another, installed_packages
from baton.launcher.changes import changes, refusal, with_changes_in_place
from baton.launcher.config import RunConfig, resolved_by
from baton.launcher.devices import Kind, gpu_memory, kind_here
from baton.launcher.errors import BusyError, ConfigError
from baton.launcher.validation import first_problem
from baton.models.config import with_settings_of_once
from baton.parallel.control_groups import host_memory
from baton.training.monitoring import time_ledger

if TYPE_CHECKING:
    from baton.launcher.planner.automatic import Choice
    from baton.training.run import RunSettings

BEFORE_CONFIG = {"attempts", "ledger.jsonl", "checkpoints", "provenance.json", ".provenance.json.new", ".config.yaml.new"}
"""Entries that are created before config.yaml. A start that was killed before it leaves no others, so the next start continues."""

OUT_OF_MEMORY = "out_of_memory.json"
"""File of an attempt in which a rank ran out of memory."""


@contextmanager
def open_attempt(config: RunConfig, *, change: bool = False) -> Iterator[Path]:
    """Creates or reopens the run directory, and creates a folder for this start, RUN/attempts/NNNN, with its config.yaml. The run
    directory is locked until the context ends. change: as in `check_run`.

    Raises ConfigError, which names the changed settings, if the directory belongs to another configuration or is not a run
    directory, and BusyError if another process holds it.
    """
    config = settled(config, kind_here(config.device))
    check_run(config, change=change)
    with ExitStack() as held:
        with _writing(config.folder):
            (config.folder / "attempts").mkdir(parents=True, exist_ok=True)
            held.enter_context(hold(config.folder))
        check_run(config, change=change)  # again, now that it is locked: another process may have trained the run meanwhile
        fitting = for_this_machine(config)
        open_run(config)
        yield _attempt(fitting)


def settled(config: RunConfig, kind: Kind) -> RunConfig:
    """The configuration with training.compute_dtype set: that of the run if it has started, else the default of the device kind. If
    they differ, a line on stderr says so. Writes nothing. Raises ConfigError if the run's configuration cannot be read."""
    if config.training.compute_dtype is not None:
        return config
    usual, recorded = config.training.compute_dtype_on(kind), config.folder / "config.yaml"
    own = read_config(recorded).training.compute_dtype if recorded.exists() else None
    if own not in (None, usual):
        where = "GPU" if kind == "cuda" else "CPU"
        print(
            f"note: {config.folder} goes on with training.compute_dtype={own}, as it began; "
            f"a new run on a {where} would have {usual}",
            file=sys.stderr,
        )
    return config.with_compute_dtype(own or usual)


def check_run(config: RunConfig, *, change: bool = False) -> None:
    """Raises ConfigError if a run directory belongs to another configuration or is not a run directory. Writes nothing.

    change: accept changes of the learning rate, the schedule and optimizer settings.
    """
    folder = config.folder
    recorded = folder / "config.yaml"
    if recorded.exists():
        refused = refusal(folder, read_config(recorded), config, max(checkpoint_steps(folder), default=0), change=change)
        if refused is not None:
            raise ConfigError(refused)
        if not checkpoint_steps(folder) and (forks := forks_of(folder)):
            origin = forks[-1]
            raise ConfigError(
                f"{folder} began as a fork of {origin['run']} at step {origin['step']} and has no checkpoint any more: it would "
                f"begin anew from step 0; remove it and fork again"
            )
        return
    with _writing(folder):
        if folder.exists() and not {p.name for p in folder.iterdir()} <= BEFORE_CONFIG:
            raise ConfigError(f"{folder} exists and is not a run (no config.yaml in it); use another directory=...")


def open_run(config: RunConfig) -> None:
    """Creates the run directory with its configuration and origin. An existing configuration is kept, except for settings that
    `check_run` lets a run change."""
    folder = config.folder
    with _writing(folder):
        for name in ("attempts", "checkpoints"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        if not (folder / "config.yaml").exists():
            write_whole(folder / "provenance.json", json.dumps(provenance(), indent=1))
            write_whole(folder / "config.yaml", config.to_yaml())
            return
        recorded = read_config(folder / "config.yaml")
        kept = with_changes_in_place(recorded, config)
        if kept != recorded:
            write_whole(folder / "config.yaml", kept.to_yaml())


def new_attempt(config: RunConfig, ranks: int | None = None, **what: Any) -> Path:
    """Creates the folder of one start, with the configuration that `for_this_machine` returns.

    ranks: number of ranks on this machine; None: all. what: additional fields of the ledger's row.
    """
    return _attempt(for_this_machine(config, ranks), **what)


def _attempt(config: RunConfig, **what: Any) -> Path:
    """Creates the folder of one start, of a configuration that `for_this_machine` returned."""
    folder = config.folder
    with _writing(folder):
        attempt = folder / "attempts" / f"{1 + last_attempt(folder):04d}"
        attempt.mkdir()
        write_whole(attempt / "config.yaml", config.to_yaml())
        time_ledger.append_row(folder, "attempt", attempt=int(attempt.name), layout=config.layout.sizes(), **what)
    return attempt


def for_this_machine(config: RunConfig, ranks: int | None = None) -> RunConfig:
    """The configuration with values for settings that are `auto`, chosen for this machine's GPUs and reported on stderr.

    ranks: number of ranks on this machine; None: all. Values with which a start of this run ran out of memory are not chosen again.
    One process chooses for all ranks of all nodes, which read it in their attempt's config.yaml. Raises ConfigError where the host
    has too little memory for what would fit its GPUs.
    """
    config, choice = _chosen(config, ranks)
    if choice is not None and (refused := choice.refusal()) is not None:
        raise ConfigError(f"{config.name}: {refused}")
    if choice is not None:
        print(f"note: {choice}", file=sys.stderr)
    return config


def _chosen(config: RunConfig, ranks: int | None) -> tuple[RunConfig, "Choice | None"]:
    """The configuration, and the choice; None if the run leaves nothing to choose."""
    from baton.launcher.inputs import with_known_vocabulary
    from baton.launcher.planner import automatic
    from baton.launcher.planner.host_memory import Node

    if not automatic.is_automatic(config):
        return config, None
    kind = kind_here(config.device)
    gpus, memory = (gpu_memory() if kind == "cuda" else None) or (0, None)
    here = min(ranks or config.layout.world_size, config.layout.world_size)
    capacity = None if memory is None else automatic.capacity_of(memory, -(-here // gpus))
    failed = []
    for path in sorted(config.folder.glob(f"attempts/*/{OUT_OF_MEMORY}")):
        with suppress(ConfigError, OSError, ValueError, LookupError, TypeError):  # it was removed, or another version wrote it
            if json.loads(path.read_text(encoding="utf-8"))["memory"] == memory:  # not on another kind of GPU
                failed.append(automatic.planned_peak(with_known_vocabulary(read_config(path.with_name("config.yaml")))))
    peaks = [peak for peak in failed if peak is not None]
    resolved, choice = automatic.resolve(with_known_vocabulary(config), capacity, kind, peaks, Node(here, host_memory()))
    # the vocabulary stays as the run has it: ranks take it from the tokenizer
    return config.model_copy(update={"training": resolved.training}), choice if kind == "cuda" or peaks else None


def say_out_of_memory(attempt: Path, rank: int, said: str) -> None:
    """Records in an attempt's folder that a rank ran out of memory. said: the error in one line."""
    _, memory = gpu_memory() or (0, None)
    with suppress(OSError):  # no room on the disk either
        write_whole(attempt / OUT_OF_MEMORY, json.dumps({"rank": rank, "said": said, "memory": memory}))


def needs_less_memory(config: RunConfig, attempt: Path) -> bool:
    """Whether an attempt ran out of memory and another start would choose settings that need less."""
    if not (attempt / OUT_OF_MEMORY).exists():
        return False
    before, then = read_config(attempt / "config.yaml").training, _chosen(config, None)[0].training
    chosen = ("recompute", "cuda_graphs", "offload_kv")
    return any(getattr(before, name) != getattr(then, name) for name in chosen)


def end_attempt(attempt: Path, status: int) -> int:
    """Records how a start ended. Returns the exit status of the command, which is not 0 if the end could not be recorded."""
    folder = attempt.parent.parent
    try:
        time_ledger.append_row(folder, "end", attempt=int(attempt.name), status=status, step=last_step(folder))
    except OSError as error:
        print(f"baton: {folder / time_ledger.NAME}: the end could not be recorded ({error.strerror}); make room", file=sys.stderr)
        return status or StorageError.exit_status
    return status


def last_attempt(folder: Path) -> int:
    """The number of the last start; 0: none."""
    attempts = folder / "attempts"
    return max((int(p.name) for p in attempts.iterdir() if p.name.isdigit()), default=0) if attempts.is_dir() else 0


def changed_since_last_start(attempt: Path, config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Settings that affect the result and differ between the start of `attempt` and the last earlier start that made steps, as
    {key: (old, new)}."""
    folder = attempt.parent.parent
    starts = [row for row in time_ledger.read_rows(folder) if row["kind"] == "start" and row["attempt"] < int(attempt.name)]
    for row in sorted(starts, key=lambda row: row["attempt"], reverse=True):
        try:
            before = read_config(attempt.with_name(f"{row['attempt']:04d}") / "config.yaml")
        except ConfigError:  # it was removed, or another version wrote it
            return {}
        if row["step"] < before.training.steps:
            return {change.key: (change.old, change.new) for change in changes(before, config)}
    return {}


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of a run's published checkpoints in ascending order, without verification. Raises OSError if the folder cannot be
    listed, where `glob` would return nothing."""
    try:
        found = [*(folder / "checkpoints").iterdir()]
    except FileNotFoundError:
        return []
    found = [p for p in found if p.name.startswith("step-") and p.name[5:].isdigit()]
    return sorted(int(p.name[5:]) for p in found if (p / "manifest.json").exists())


def last_step(folder: Path) -> int:
    """The last step in metrics.jsonl, of which only the end is read; without one, as in a fork, that of the newest checkpoint;
    else 0."""
    last = max(checkpoint_steps(folder), default=0)
    for row in recent_metrics(folder):
        if row.get("kind") == "train":
            last = max(last, int(row["step"]))
    return last


def recent_metrics(folder: Path, size: int = 1 << 18) -> list[dict[str, Any]]:
    """The last rows of metrics.jsonl, from its last `size` bytes."""
    try:
        with (folder / "metrics.jsonl").open("rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - size))
            lines = f.read().splitlines()
    except OSError:
        return []
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # cut by where reading began, or by a kill
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


@contextmanager
def hold(folder: Path, wait_s: float = 0.0) -> Iterator[None]:
    """Locks the run directory, because two starts at the same time would truncate each other's metrics.jsonl. The operating system
    releases the lock when this process ends, if the file system supports locks. Raises BusyError, which names the holder, if
    another process still holds the lock after `wait_s` seconds."""
    deadline = time.monotonic() + wait_s
    with ExitStack() as held:
        while True:
            try:
                held.enter_context(exclusive(folder / "attempts" / ".lock"))
                break
            except LockHeldError as error:
                if time.monotonic() >= deadline:
                    raise _busy(folder, error) from None
            time.sleep(min(1.0, wait_s))
        yield


def _busy(folder: Path, error: LockHeldError) -> BusyError:
    job, since = error.record.get("job"), error.record.get("since")
    began = f" since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(since))}" if isinstance(since, int | float) else ""
    end = f"end it first (`baton cancel {folder}` ends a job of this run)" if job else "end it first"
    return BusyError(f"{folder} is being trained by {error.holder}{began}; wait for it, or {end}{error.remedy}", job)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if is_transient(error):
            raise StorageError(
                f"{folder}: cannot be written at present ({error.strerror}); start again once there is room"
            ) from None
        raise ConfigError(f"{folder}: cannot be written ({error.strerror}); choose another directory=...") from None


def read_config(path: Path) -> RunConfig:
    """Reads a resolved configuration from a run directory."""
    text = ""
    try:
        text = read_text(path)
        values = parse_own_yaml(text)
        if isinstance(values, dict) and "model" in values:
            values["model"] = with_settings_of_once(values["model"])
        return RunConfig.model_validate(values)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; is this a run directory?") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); is {path.parent} a run directory?") from None
    except ValidationError as error:
        problem = f"not a resolved run configuration: {first_problem(error, RunConfig)}"
        raise ConfigError(f"{path}: {problem}{by_another(resolved_by(text))}") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: not a resolved run configuration ({' '.join(str(error).split())[:200]})") from None


@cache
def source_state() -> dict[str, str | None]:
    """The source's commit and uncommitted diff when this is first called: what this process has imported does not change when
    somebody commits."""
    source = Path(__file__).resolve().parent.parent

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(source), *words], capture_output=True, text=True, timeout=30, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    return {"commit": git("rev-parse", "HEAD"), "diff": git("diff", "HEAD")}


def provenance() -> dict[str, object]:
    """The origin of a run: command, source commit and uncommitted diff, packages, machine."""
    return {
        "command": sys.argv,
        **source_state(),
        "packages": installed_packages(),
        "python": platform.python_version(),
        "machine": {
            "host": platform.node(),
            "system": platform.platform(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
    }


def forks_of(run: Path) -> list[dict[str, Any]]:
    """The runs that a run was forked from, the oldest first; [] if it is not a fork."""
    try:
        found = json.loads((run / "provenance.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    forks = found.get("forks", []) if isinstance(found, dict) else []
    return [fork for fork in forks if isinstance(fork, dict) and {"run", "step"} <= fork.keys()] if isinstance(forks, list) else []


def write_whole(path: Path, text: str) -> None:
    """Writes a file atomically."""
    aside = path.with_name(f".{path.name}.new")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


def run_settings(config: RunConfig, attempt: Path, changed: dict[str, tuple[Any, Any]], **more: Any) -> "RunSettings":
    """What the training loop gets of a run's configuration. attempt: its folder. changed: of `changed_since_last_start`. more:
    other fields of RunSettings."""
    from baton.training.run import RunSettings

    return RunSettings(
        folder=config.folder,
        model=config.model,
        data=config.data,
        training=config.training,
        config_text=config.to_yaml(),
        attempt=int(attempt.name) if attempt.name.isdigit() else 0,
        changed=changed,
        **more,
    )
