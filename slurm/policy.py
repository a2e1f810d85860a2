"""Decides what follows an attempt: another attempt in this job, in another job, on other nodes, or none.

`decide` is a pure function of the time ledger's rows, so tests can check it on any history. A run is restarted only if that can
help: not after bad input, and not after several attempts without a new step. Hardware failures do not count against the run.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from baton.launcher.jobs_config import JobsConfig, SlurmConfig
from baton.slurm.exits import Exit
from baton.slurm.script import AGAIN, NEXT_JOB, OTHER_NODES

ROWS = list[dict[str, Any]]

OF_HARDWARE = (Exit.NODE_LOST, Exit.PREFLIGHT)
"""Failures of hardware, which do not count as failures of the run."""

WELL = (Exit.DONE, Exit.STOPPED)
"""Statuses that are not failures."""

UNSEEN_PATIENCE = 4
"""Factor of jobs.max_failures_without_progress for attempts that SLURM ended together with their job (preemption, requeue,
scancel). It is larger than 1 because a busy queue may preempt a job several times before its first step."""

CHECKED_PATIENCE = 2
"""Factor of jobs.max_failures_without_progress for attempts in which no node passed preflight."""


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended.

    status: the exit code.
    reason: one sentence for people.
    dead: nodes to exclude at once.
    suspects: nodes whose ranks crashed or hung, which count towards jobs.max_node_failures.
    """

    status: Exit
    reason: str
    dead: tuple[str, ...] = ()
    suspects: tuple[str, ...] = ()


@dataclass(frozen=True)
class Decision:
    """What follows an attempt.

    code: for the job script: AGAIN, NEXT_JOB, OTHER_NODES, or the job's exit code.
    sentence: the reason, for people.
    """

    code: int
    sentence: str

    @property
    def goes_on(self) -> bool:
        return self.code in (AGAIN, NEXT_JOB, OTHER_NODES)


def since_submitted(rows: ROWS) -> ROWS:
    """The rows since a user last ran `baton submit`. Earlier failures do not count."""
    first = max((n for n, row in enumerate(rows) if row["kind"] == "submitted" and row.get("by") == "user"), default=0)
    return rows[first:]


def excluded(rows: ROWS) -> list[str]:
    """Nodes that are excluded according to the ledger, oldest first."""
    nodes: list[str] = []
    for row in rows:
        if row["kind"] == "excluded":
            nodes.append(row["node"])
        elif row["kind"] == "readmitted":
            nodes = [node for node in nodes if node != row["node"]]
    return list(dict.fromkeys(nodes))


def struck_out(rows: ROWS, outcome: Outcome, max_node_failures: int) -> dict[str, str]:
    """Nodes to exclude because of this attempt, with the reasons. rows: the ledger's, including this attempt's end."""
    counts: dict[str, int] = {}
    for row in rows:
        for node in row.get("suspects", ()) if row["kind"] == "end" else ():
            counts[node] = counts.get(node, 0) + 1
    found = dict.fromkeys(outcome.dead, outcome.reason)
    for node in outcome.suspects:
        if counts.get(node, 0) >= max_node_failures:
            found.setdefault(node, f"{counts[node]} crashes or hangs there, the last: {outcome.reason}")
    known = excluded(rows)
    return {node: reason for node, reason in found.items() if node not in known}


def decide(
    rows: ROWS, jobs: JobsConfig, slurm: SlurmConfig, *, told_to_stop: bool, time_is_up: bool, allocated: Sequence[str], needed: int
) -> Decision:
    """What follows the attempt whose end is the last one in `rows`.

    Args:
        rows: the ledger's rows.
        jobs, slurm: the settings.
        told_to_stop: whether a user has asked the run to stop.
        time_is_up: whether this job's time limit is near.
        allocated: this job's nodes.
        needed: minimum number of nodes for an attempt.
    """
    recent = since_submitted(rows)
    ends = [row for row in recent if row["kind"] == "end"]
    status = Exit(ends[-1]["status"])
    if status == Exit.DONE:
        return Decision(Exit.DONE, "the run is done")
    if status == Exit.BAD_INPUT:
        return Decision(Exit.BAD_INPUT, f"the run is stopped: {ends[-1]['reason']}")
    if told_to_stop:
        return Decision(Exit.STOPPED, "the run is stopped, as asked")
    bad = excluded(rows)
    usable = [node for node in allocated if node not in bad]
    if status == Exit.BUSY:
        return Decision(NEXT_JOB, "another process trains the run; the next job looks again")
    failures = [row for row in ends if row["status"] not in (*WELL, Exit.BUSY)]
    if status not in WELL and len(failures) > jobs.max_failures:
        return Decision(
            Exit.NO_RETRIES, f"the run is stopped: {len(failures)} attempts failed, and jobs.max_failures={jobs.max_failures}"
        )
    if (why := _fruitless(rows, recent, jobs, slurm)) is not None:
        return Decision(Exit.NO_PROGRESS, f"the run is stopped: {why}")
    if status == Exit.STOPPED:
        return Decision(OTHER_NODES if len(usable) < len(allocated) else NEXT_JOB, "the run goes on in the next job")
    if len(usable) >= needed and not time_is_up and status not in (Exit.SAVE_TOO_LONG, Exit.NOT_STARTED):
        return Decision(AGAIN, f"starting again on {len(usable)} of this job's {len(allocated)} nodes")
    if len(usable) < len(allocated):
        return Decision(OTHER_NODES, f"starting again in a job without {', '.join(bad)}")
    return Decision(NEXT_JOB, "starting again in the next job")


def _fruitless(rows: ROWS, recent: ROWS, jobs: JobsConfig, slurm: SlurmConfig) -> str | None:
    """Why the run is not restarted, if its attempts make no progress; None: it may be restarted."""
    last = next(row for row in reversed(recent) if row["kind"] == "end")
    seen, unseen = without_progress(rows, recent)
    if seen >= jobs.max_failures_without_progress and last["status"] == Exit.STOPPED:
        return (
            f"{seen} attempts in a row made no new step; the last was told to stop before it had made one. A job of slurm.time="
            f"{slurm.time} must have room for its start and for steps before its last slurm.warning_s={slurm.warning_s} s: set "
            f"slurm.time longer, or slurm.warning_s and slurm.save_timeout_s shorter"
        )
    if seen >= jobs.max_failures_without_progress:
        return f"{seen} attempts in a row made no new step; the last: {last['reason']}"
    if seen + unseen >= UNSEEN_PATIENCE * jobs.max_failures_without_progress:
        return (
            f"{seen + unseen} attempts in a row made no new step, and SLURM ended {unseen} of them with their job "
            f"(`sacct -j JOB` has its reasons); set "
            f"jobs.max_failures_without_progress={jobs.max_failures_without_progress} higher to allow more of them"
        )
    checked = _none_passed(recent)
    if checked >= CHECKED_PATIENCE * jobs.max_failures_without_progress:
        return (
            f"no node passed preflight in {checked} attempts in a row, so the nodes are probably not the cause; the last: "
            f"{last['reason']}. Fix that, `baton readmit` the nodes, and submit again"
        )
    return None


def without_progress(rows: ROWS, recent: ROWS) -> tuple[int, int]:
    """Numbers of consecutive attempts up to the last one that made no progress: (ended by themselves, ended with their job).

    A failed attempt has made progress if it reached a step that no earlier attempt had reached. An attempt that was told to stop
    has saved, so any step after its start is progress. Hardware failures and attempts that found the run busy are left out.
    """
    highest, seen, unseen = 0, 0, 0
    known = {id(row) for row in recent}
    starts = {row["attempt"]: row["step"] for row in rows if row["kind"] == "start"}
    for row in _ends(rows):
        step = row.get("step", 0)
        saved = row["status"] == Exit.STOPPED and row["attempt"] in starts and step > starts[row["attempt"]]
        if step > highest or saved or row["status"] == Exit.DONE:
            seen, unseen = 0, 0
        elif row["status"] not in (*OF_HARDWARE, Exit.BUSY) and id(row) in known:
            if row.get("seen", True):
                seen += 1
            else:
                unseen += 1
        highest = max(highest, step)
    return seen, unseen


def _none_passed(recent: ROWS) -> int:
    """Number of consecutive preflights up to the last one that no node passed."""
    count = 0
    for row in recent:
        if row["kind"] == "preflight":
            count = 0 if row.get("passed", 1) else count + 1
    return count


def _ends(rows: ROWS) -> Iterable[dict[str, Any]]:
    return (row for row in rows if row["kind"] == "end")
