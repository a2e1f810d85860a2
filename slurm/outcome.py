"""Determines how an attempt ended from the files that its agents wrote: the first failure, not those that it caused."""

import json
import os
import signal
from pathlib import Path
from typing import Any

from baton.slurm.exits import MEANING, Exit
from baton.slurm.policy import Outcome
from baton.slurm.run_files import nodes_of

BEGINS = "attempt {} begins on "
"""The line of the job's output with which an attempt starts."""


def gather(attempt: Path, code: int | None) -> Outcome:
    """The outcome of an attempt. code: srun's exit code; None: unknown, because the script ended before."""
    if (verdict := _read(attempt / "ending")) is not None:
        return Outcome(Exit(verdict["status"]), verdict["reason"], tuple(verdict["dead"]), tuple(verdict["suspects"]))
    if code in (Exit.PREFLIGHT, Exit.BAD_INPUT, Exit.STORAGE):
        return Outcome(Exit(code), _said(attempt) or MEANING[Exit(code)][0])
    nodes = nodes_of(attempt)
    ends = {node: end for node in nodes if (end := _read(attempt / "nodes" / f"{node}.end")) is not None}
    silent = [node for node in nodes if node not in ends]
    if not silent:
        status = next((s for s in (Exit.STOPPED, Exit.DONE) if any(end["status"] == s for end in ends.values())), Exit.FAILED)
        return Outcome(status, MEANING[status][0])
    began = [node for node in nodes if (attempt / "nodes" / node).exists()]
    if code == Exit.NOT_STARTED:
        return Outcome(Exit.NOT_STARTED, f"the checks did not start on any node: {said_by_srun(attempt)}")
    if not began and code and code < 128:
        return Outcome(Exit.NOT_STARTED, f"no rank was started{_how(code)}: {said_by_srun(attempt)}")
    if not began:
        return Outcome(Exit.FAILED if code else Exit.STOPPED, f"no rank was started{_how(code)}")
    if code is None or all(end["told"] for end in ends.values()):
        # the whole job ended: SLURM ended it, or its first node died
        return Outcome(Exit.STOPPED, f"the job was ended before {', '.join(silent)} could say how its ranks did")
    return Outcome(Exit.FAILED, f"the agent on {', '.join(silent)} died{_how(code)}", suspects=tuple(silent))


def _how(code: int | None) -> str:
    if not code:
        return ""
    return f" (srun: {signal.Signals(code - 128).name})" if 128 < code < 128 + 32 else f" (srun: status {code})"


def said_by_srun(attempt: Path) -> str:
    """The first error message of srun in this job's output since the attempt started."""
    output = attempt.parent / f"slurm-{os.environ.get('SLURM_JOB_ID')}.out"
    try:
        text = output.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "see what srun said in the job's output"
    since = text.rpartition(BEGINS.format(int(attempt.name)))[2]
    complaints = [line for line in since.splitlines() if line.startswith(("srun: error: ", "srun: fatal: "))]
    return complaints[0] if complaints else f"see {output}"


def _said(attempt: Path) -> str | None:
    """The nodes that failed preflight and why, in one line; None: none failed."""
    path = attempt / "preflight.jsonl"
    if not path.exists():
        return None
    from baton.slurm.preflight import results

    bad = [f"{r.node}: {r.problem}" for r in results(attempt, nodes_of(attempt, "allocated.txt")) if r.problem is not None]
    return "; ".join(bad) or None


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
