"""What every benchmark writes: `results/NAME.json` for tables, and `results/NAME.log`, the lines it printed.

The one thing to know: a comparison is only printed after the gates, checks that both sides do the same thing; a red gate ends the
program with status 1 before any time is shown. Both files are written anew with every row. A benchmark that is told to end
(SIGTERM) ends whatever it has started: a run that went on would share the GPU with what is measured next.
"""

import json
import os
import platform
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import psutil

RESULTS = Path(__file__).parent / "results"


class Report:
    """Rows of one benchmark. name: of the files; device: what it ran on (none: this machine's processor); keep: whether the files
    are written, which a run that only tries the program must not do."""

    def __init__(self, name: str, device: str | None = None, *, keep: bool = True) -> None:
        self.name, self._keep = name, keep
        self.device = device or _processor()
        self.command = shlex.join(["python", *sys.argv])
        self.commit = _commit()
        self.rows: list[dict[str, Any]] = []
        self._gates: dict[str, str] = {}
        self._lines: list[str] = []
        signal.signal(signal.SIGTERM, _end_all)
        self.say(f"$ {self.command}")
        self.say(f"commit {self.commit}, on {self.device}")

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
        """Add a comparison. metric: what and in which unit; gate: the case of a gate that has passed. ratio > 1: ours is better."""
        if gate not in self._gates:
            self.say(f"row {case}: its gate {gate!r} was never checked")
            self._fail()
        ratio = ours / peer if higher_is_better else peer / ours
        row = {"case": case, "metric": metric, "ours": ours, "peer_name": peer_name, "peer": peer, "ratio": ratio}
        self.rows.append({**row, "gate": self._gates[gate]})
        self.say(f"{case:<28} {metric:<12} ours {_short(ours):>14}   {peer_name} {_short(peer):>14}   ratio {ratio:.2f}")
        self.save()

    def save(self) -> None:
        """Write both files."""
        if not self._keep:
            return
        RESULTS.mkdir(exist_ok=True)
        value = {"command": self.command, "commit": self.commit, "device": self.device, "rows": self.rows}
        _write(RESULTS / f"{self.name}.json", json.dumps(value, indent=1) + "\n")
        self._save_log()

    def _save_log(self) -> None:
        if not self._keep:
            return
        RESULTS.mkdir(exist_ok=True)
        _write(RESULTS / f"{self.name}.log", "\n".join(self._lines) + "\n")

    def _fail(self) -> NoReturn:
        self._save_log()
        sys.exit(1)


def _end_all(number: int, frame: Any) -> NoReturn:
    for process in psutil.Process().children(recursive=True):
        process.kill()
    os._exit(128 + number)


def _short(value: float) -> str:
    """Four digits, or all before the point."""
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4g}"


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


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
    return (git("rev-parse", "HEAD") or "unknown") + (" with changes" if changed else "")
