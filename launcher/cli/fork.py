"""`baton fork`: a new run directory that begins with a checkpoint of another run, under settings of its own.

The directory is made under a hidden name beside its place and renamed when all of it is there: a kill leaves nothing that looks
like a run, and the next call removes what it left.
"""

import argparse
import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from baton.launcher.cli.arguments import Subparsers, add_command

_SIZES = ("model", "data", "training.bptt")
"""Settings that shapes follow from."""


def add(commands: Subparsers) -> None:
    fork = add_command(commands, "fork", _fork, "begin a new run with a checkpoint of another one, under settings of its own")
    fork.add_argument("folder", metavar="RUN", type=Path, help="the run directory to begin from")
    fork.add_argument("overrides", metavar="key=value", nargs="*", help="settings over RUN's, e.g. training.steps=12000")
    fork.add_argument("--step", type=int, metavar="N", help="of the checkpoint (default: the newest whole one)")
    fork.add_argument("--out", type=Path, required=True, metavar="NEW", help="the new run directory")
    fork.add_argument(
        "--restart-data",
        action="store_true",
        help="keep weights, moments and the number of steps, and begin the data anew: it may be other data, in another order",
    )


def _fork(arguments: argparse.Namespace) -> None:
    print(fork(arguments.folder, arguments.out, arguments.overrides, step=arguments.step, restart_data=arguments.restart_data))


def fork(run: Path, out: Path, overrides: Sequence[str], *, step: int | None = None, restart_data: bool = False) -> str:
    """Make the run directory `out` from a checkpoint of `run`; a sentence that says what was made.

    Raises ConfigError, CheckpointError, DataError or RunError for what cannot be; BusyError when another process makes `out`;
    StorageError or OSError when something cannot be read or written. `out` is then not there.
    """
    from baton.launcher.changes import all_changes
    from baton.launcher.errors import ConfigError
    from baton.launcher.run_directory import forks_of, provenance, read_config, write_whole
    from baton.training.checkpoint.fork import describe_fork, link_checkpoint
    from baton.training.checkpoint.manifest import Manifest
    from baton.training.errors import CheckpointError
    from baton.training.monitoring.event_log import EVENTS, read_events

    old = read_config(run / "config.yaml")
    _check_place(run, out)
    new = _new_config(run, out, overrides)
    different = all_changes(old, new)
    _check_changes(run, old.training.carries_lane_states, new.training.carries_lane_states, different, restart_data=restart_data)

    def describe(manifest: Manifest) -> Manifest:
        if new.training.steps <= manifest.step:
            raise ConfigError(
                f"training.steps={new.training.steps}, and the checkpoint has {manifest.step} steps done, so that none would be "
                f"left; set training.steps to more, or give an earlier --step"
            )
        try:
            return describe_fork(manifest, new.model, new.data, new.training, restart_data=restart_data)
        except CheckpointError as error:
            keys = "; ".join(str(change) for change in different if change.is_of(_SIZES))
            raise ConfigError(f"{error}: a fork keeps all shapes ({keys or 'config.yaml is not of this checkpoint'})") from None

    with _made_whole(out) as work:
        origin = link_checkpoint(run, step, work / "checkpoints", describe, lambda text: print(text, flush=True))
        entry = {
            "run": str(run.absolute()),
            "step": origin.step,
            "tokens": origin.tokens,
            "manifest_sha256": origin.digest,
            "restart_data": restart_data,
            "changed": {change.key: [change.old, change.new] for change in different},
        }
        (work / "attempts").mkdir()
        # documents that the run left out behind this checkpoint, which does not know of them
        behind = [event for event in read_events(run) if event["kind"] == "rollback" and event["step"] > origin.step]
        if behind:
            write_whole(work / EVENTS, "".join(json.dumps(event | {"run": entry["run"]}) + "\n" for event in behind))
        write_whole(work / "provenance.json", json.dumps(provenance() | {"forks": [*forks_of(run), entry]}, indent=1))
        write_whole(work / "config.yaml", new.to_yaml())
    changed = f"; changed: {'; '.join(map(str, different))}" if different else ""
    return (
        f"{out}: begins with step {origin.step} of {run} ({origin.tokens:,} tokens)"
        f"{', its data from the beginning' if restart_data else ''}{changed}; `baton train {out / 'config.yaml'}` trains it"
    )


def _check_place(run: Path, out: Path) -> None:
    from baton.launcher.errors import ConfigError

    inside = out.resolve()
    if inside == run.resolve():
        raise ConfigError(f"--out {out} is the run itself; give the directory of a new run")
    if run.resolve() in inside.parents:
        raise ConfigError(f"--out {out} is inside the run {run}; give a directory elsewhere")
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"--out {out} exists already; give the directory of a new run")


def _new_config(run: Path, out: Path, overrides: Sequence[str]) -> Any:
    """The run's configuration with key=value words over it, for its new directory."""
    from baton.launcher.config import RunConfig, load
    from baton.launcher.errors import ConfigError
    from baton.launcher.run_directory import read_config

    keys = [word.partition("=")[0] for word in overrides]
    if "directory" in keys:
        raise ConfigError("directory=... is what --out says; leave it out")
    config = load(run / "config.yaml", list(overrides), resolved=True)
    if config.training.compute_dtype is None:  # as everywhere, what the run began with
        config = config.with_compute_dtype(read_config(run / "config.yaml").compute_dtype)
    own: dict[str, Any] = {"directory": str(out.absolute())}
    pattern = next(str(x.pattern) for x in RunConfig.model_fields["name"].metadata if getattr(x, "pattern", None))
    if "name" not in keys and re.fullmatch(pattern, out.name):
        own["name"] = out.name
    return config.model_copy(update=own)


def _check_changes(run: Path, carried: bool, carries: bool, different: Sequence[Any], *, restart_data: bool) -> None:
    from baton.launcher.changes import BEGINNING, MAY_CHANGE, ORDER
    from baton.launcher.errors import ConfigError

    for change in different:
        if change.is_of(BEGINNING):
            raise ConfigError(f"{change}: a fork begins with the checkpoint's weights; leave it out, or begin a new run")
    order = [change for change in different if change.is_of(ORDER) and not change.is_of(MAY_CHANGE)]
    if order and not restart_data:
        raise ConfigError(
            f"{'; '.join(map(str, order))}: the data of {run} cannot go on in another order; add --restart-data to begin it anew "
            f"with the checkpoint's weights and moments, or take the change back"
        )
    if carries and not carried and not restart_data:
        raise ConfigError(
            f"training.bptt.mode=truncated: lanes carry their States, and the checkpoints of {run} have none; add --restart-data "
            f"to begin documents and States anew, or take the change back"
        )


@contextmanager
def _made_whole(out: Path) -> Iterator[Path]:
    """A folder to fill, which is `out` when the context ends well, and gone when it does not."""
    from baton.data_pipeline.file_io import sync_folder
    from baton.data_pipeline.lock import LockHeldError, exclusive
    from baton.launcher.errors import BusyError, ConfigError

    aside = out.absolute().parent / f".{out.name}.fork"
    try:
        aside.mkdir(parents=True, exist_ok=True)
        with exclusive(aside / ".lock"):
            work = aside / "run"
            shutil.rmtree(work, ignore_errors=True)  # of a call that was killed
            work.mkdir()
            try:
                yield work
                for folder in (work, *(path for path in work.rglob("*") if path.is_dir())):
                    sync_folder(folder)
                os.rename(work, out)
                sync_folder(out.absolute().parent)
            finally:
                shutil.rmtree(work, ignore_errors=True)
                with contextlib.suppress(OSError):
                    (aside / ".lock").unlink()
    except LockHeldError as error:
        raise BusyError(f"{out} is being made by {error.holder}; wait for it{error.remedy}") from None
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise ConfigError(f"--out {out} exists by now; give the directory of a new run") from None
        error.filename = error.filename or str(out)  # a write does not say where; the command line names the file
        raise
    finally:
        with contextlib.suppress(OSError):
            aside.rmdir()
