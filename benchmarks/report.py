"""The results of a benchmark: `results/NAME.json` for tables, and `results/NAME.log` with all lines that it printed.

A benchmark has one pair of files. A run of it replaces the rows that it measures again (the same case, metric and peer) and leaves
the others, each of which says what it was measured with. A comparison is printed only after its gates, checks that both sides do
the same thing; a failed gate ends the program with status 1 before any time is shown. Both files are written with every row. A
benchmark that is told to end (SIGTERM) ends the processes that it has started: a run that went on would share the GPU with the
next measurement.
"""

import fcntl
import importlib.metadata
import json
import math
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import kernel_version
import psutil

RESULTS = Path(__file__).parent / "results"
KEY = ("case", "metric", "peer_name")
"""The fields of a row that say what it measures: there is one row of each."""
PROVENANCE = ("command", "commit", "device", "date", "torch", "triton")
"""The fields of a row that say how it was measured."""
FIELDS = (*KEY, "ours", "peer", "ratio", "gate", *PROVENANCE, "kernels")
"""All fields of a row. kernels: their version (kernel_version.py), "" where the case is not about one mixer's kernels."""


def worst(errors: Iterable[float]) -> float:
    """The largest; NaN if any is NaN, which `max` passes over unless it comes first."""
    found = list(errors)
    return math.nan if any(map(math.isnan, found)) else max(found)


class Report:
    """Rows of one run of a benchmark.

    name: of the files, the benchmark's own; device: the accelerator, or this machine's processor if None; keep: whether files are
    written, which a run that only tries the program must not do; folder: where they are written.
    """

    def __init__(self, name: str, device: str | None = None, *, keep: bool = True, folder: Path = RESULTS) -> None:
        self.name, self._keep, self._folder = name, keep, folder
        self.rows: list[dict[str, Any]] = []
        self.provenance = {
            "command": shlex.join(["python", *sys.argv]),
            "commit": _commit(),
            "device": device or _processor(),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "torch": _installed("torch"),
            "triton": _installed("triton"),
        }
        self._gates: dict[str, str] = {}
        self._lines: list[str] = []
        signal.signal(signal.SIGTERM, _end_all)
        self.say(f"$ {self.provenance['command']}")
        self.say(", ".join(f"{key} {self.provenance[key]}" for key in PROVENANCE[1:]))

    def say(self, line: str) -> None:
        """Print a line, and keep it for the log."""
        print(line, flush=True)
        self._lines.append(line)

    def gate(self, case: str, passed: bool, detail: str) -> None:
        """Record a check that rows of `case` rest on, `detail` saying what was compared; a failed one ends the program."""
        self.say(f"gate {case}: {detail}: {'passed' if passed else 'FAILED'}")
        if not passed:
            self._fail()
        self._gates[case] = f"{detail}: passed"

    def row(
        self, case: str, metric: str, ours: float, peer_name: str, peer: float, *, gate: str, higher_is_better: bool = True
    ) -> None:
        """Add a comparison. metric: its name and unit; gate: the case of a gate that has passed. ratio > 1: ours is better."""
        if gate not in self._gates:
            self.say(f"row {case}: its gate {gate!r} was never checked")
            self._fail()
        ratio = ours / peer if higher_is_better else peer / ours
        row = {"case": case, "metric": metric, "peer_name": peer_name, "ours": ours, "peer": peer, "ratio": ratio}
        kernels = kernel_version.current(kernel_version.ops_of(case))
        self.rows.append({**row, "gate": self._gates[gate], **self.provenance, "kernels": kernels})
        self.say(f"{case:<28} {metric:<12} ours {_short(ours):>14}   {peer_name} {_short(peer):>14}   ratio {ratio:.2f}")
        self.save()

    def save(self) -> None:
        """Write both files."""
        if self._keep:
            with _lock(self._folder):
                path = self._folder / f"{self.name}.json"
                _write(path, dump(merged(load(path) if path.exists() else [], self.rows)))
                self._save_log()

    def _save_log(self) -> None:
        path = self._folder / f"{self.name}.log"
        kept = path.read_text(encoding="utf-8") if path.exists() else ""
        rows = load(path.with_suffix(".json")) if path.with_suffix(".json").exists() else []
        _write(path, log(kept, self._lines, rows))

    def _fail(self) -> NoReturn:
        if self._keep:
            with _lock(self._folder):
                self._save_log()
        sys.exit(1)


def load(path: Path) -> list[dict[str, Any]]:
    """The rows of a benchmark. Raises ValueError for a file that has none."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError("it is no list of rows")
        if odd := [row for row in rows if row.keys() != set(FIELDS)]:
            raise ValueError(f"the row {odd[0]} has other keys than {sorted(FIELDS)}")
        keys = [tuple(row[key] for key in KEY) for row in rows]
        if len(set(keys)) != len(keys):
            raise ValueError(f"{max(keys, key=keys.count)} is there twice")
    except ValueError as error:
        raise ValueError(f"{path}: not a benchmark's result: {error}") from None
    return rows


def dump(rows: Iterable[dict[str, Any]]) -> str:
    """JSON, a row to a line."""
    return "[\n" + ",\n".join(json.dumps({key: row[key] for key in FIELDS}) for row in rows) + "\n]\n"


def merged(old: Iterable[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Old rows, those that were measured again in their places, and then all that are new."""
    by_key = {tuple(row[key] for key in KEY): row for row in old}
    for row in new:
        by_key[tuple(row[key] for key in KEY)] = row
    return list(by_key.values())


def log(kept: str, lines: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    """A log of several runs, each of which begins with its command. This one's lines come last. An earlier run is left out if it
    had the same command, or if all its rows were replaced and it holds no profile, which docs/floors.md shows."""
    runs = [run for run in ("\n" + kept).split("\n$ ") if run.strip()]
    commands = {row["command"] for row in rows}
    sections = [f"$ {run.strip()}" for run in runs]

    def needed(section: str) -> bool:
        first = section.splitlines()[0].removeprefix("$ ")
        return f"$ {first}" != lines[0] and (first in commands or "profile of" in section or not has_rows(section))

    return "\n\n".join([*filter(needed, sections), "\n".join(lines)]) + "\n"


def has_rows(section: str) -> bool:
    """Whether a run's log has rows; one without shows that its gates passed."""
    return any("   ratio " in line for line in section.splitlines())


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Benchmarks on several GPUs may write to the same files."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _end_all(number: int, frame: Any) -> NoReturn:
    for process in psutil.Process().children(recursive=True):
        process.kill()
    os._exit(128 + number)


def _short(value: float) -> str:
    """Four digits, or all before the point."""
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4g}"


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _processor() -> str:
    model = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        model = next(
            (line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")), model
        )
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def _commit() -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=RESULTS.parent, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", ":/", ":!results")  # results of this very run are no change of the source
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + (" with changes" if changed else "")
