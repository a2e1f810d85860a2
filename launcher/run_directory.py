"""The run directory: a contract. One folder per start, nothing truncated, and the configuration that every start agrees with."""

import fcntl
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import distributions
from pathlib import Path

import yaml

from baton.launcher.config import RunConfig, changes
from baton.launcher.errors import ConfigError

BEFORE_CONFIG = {"attempts", "checkpoints", "provenance.json", ".provenance.json.new", ".config.yaml.new"}
"""What is made before config.yaml: a start that was killed there leaves no more than these, and the next one goes on."""


@contextmanager
def open_attempt(config: RunConfig) -> Iterator[Path]:
    """Make (or reopen) the run directory and a folder for this start, RUN/attempts/NNNN with its config.yaml; the run directory is
    this process's alone until the context ends.

    Raises ConfigError when the directory belongs to another configuration, with what changed, is something else, or is in use.
    """
    with ExitStack() as held:
        yield _open_attempt(config, held)


def _open_attempt(config: RunConfig, held: ExitStack) -> Path:
    folder = config.folder
    recorded = folder / "config.yaml"
    if recorded.exists():
        different = changes(read_config(recorded), config)
        if different:
            raise ConfigError(
                f"{folder} belongs to another configuration: {'; '.join(different)}. Use another name (name=...) or directory "
                f"(directory=...), or take the changes back"
            )
    try:
        if not recorded.exists() and folder.exists() and not {p.name for p in folder.iterdir()} <= BEFORE_CONFIG:
            raise ConfigError(f"{folder} exists and is not a run (no config.yaml in it); use another directory=...")
        (folder / "attempts").mkdir(parents=True, exist_ok=True)
        _lock(folder, held)
        (folder / "checkpoints").mkdir(exist_ok=True)
        number = 1 + max((int(p.name) for p in (folder / "attempts").iterdir() if p.name.isdigit()), default=0)
        attempt = folder / "attempts" / f"{number:04d}"
        attempt.mkdir()
        _write(attempt / "config.yaml", config.to_yaml())
        if not recorded.exists():
            _write(folder / "provenance.json", json.dumps(provenance(), indent=1))
            _write(recorded, config.to_yaml())
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror}); choose another directory=...") from None
    return attempt


def _lock(folder: Path, held: ExitStack) -> None:
    """Two starts at once would cut each other's record. The system drops the lock when this process ends, however it ends."""
    lock = held.enter_context((folder / "attempts" / ".lock").open("w"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"{folder} is being trained by another process on this machine or one that shares it; wait for it, or end it first"
        ) from None


def read_config(path: Path) -> RunConfig:
    """A resolved configuration from a run directory."""
    try:
        return RunConfig.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; is this a run directory?") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); is {path.parent} a run directory?") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: not a resolved run configuration ({' '.join(str(error).split())[:200]})") from None


def provenance() -> dict[str, object]:
    """What made this run: command, source commit and uncommitted diff, packages, machine."""
    source = Path(__file__).resolve().parent.parent

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(source), *words], capture_output=True, text=True, timeout=30, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    return {
        "command": sys.argv,
        "commit": git("rev-parse", "HEAD"),
        "diff": git("diff", "HEAD"),
        "packages": {d.name: d.version for d in sorted(distributions(), key=lambda d: d.name.lower())},
        "python": platform.python_version(),
        "machine": {
            "host": platform.node(),
            "system": platform.platform(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
    }


def _write(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.new")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)
