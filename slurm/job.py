"""Commands of the job script: `python -m baton.slurm.job begin RUN | judge ATTEMPT | after ATTEMPT CODE TIME_IS_UP | refused RUN`.

- begin creates an attempt's folder and prints its path.
- judge selects the nodes that passed preflight.
- after records how the attempt ended, and says by its exit code what the script does next (see script.py).
- refused records that SLURM accepted no further job.

A node may die before `after` has run. begin therefore first records the end of the previous attempt if that is missing.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from baton.launcher.config import RunConfig
from baton.launcher.errors import BusyError, ConfigError, explained
from baton.launcher.run_directory import for_this_machine, hold, last_attempt, last_step, new_attempt, read_config, write_whole
from baton.slurm import policy
from baton.slurm.elastic import fitted
from baton.slurm.exits import Exit
from baton.slurm.hooks import tell
from baton.slurm.outcome import BEGINS, gather
from baton.slurm.policy import ROWS, Decision, Outcome
from baton.slurm.preflight import results
from baton.slurm.run_files import cluster_of, nodes_of, write_excluded
from baton.slurm.script import NEXT_JOB, OTHER_NODES
from baton.training.monitoring import time_ledger

LOCK_S = 120.0
"""Seconds to wait for another process that holds the run, because on some file systems locks outlive their node."""

FILES_TRIES, FILES_PAUSE_S = 60, 30.0
"""Number of tries of `begin` while the run directory cannot be read or written, and the seconds between two tries. Together half an
hour, as long as the script waits for SLURM's controller."""

DOWN = frozenset({"down", "fail", "failing", "error", "inval"})
"""States of sinfo's %T in which a node does not recover by itself."""

LEAVING = frozenset({"drained", "draining", "drain"})
"""States in which an administrator admits no new work to a node, which a new attempt would be."""


def say(text: str) -> None:
    """Prints to stderr, the job's output. The script reads the attempt's folder from stdout, so nothing else may be printed
    there."""
    print(text, file=sys.stderr, flush=True)


def begin(run: Path) -> int:
    """Creates the next attempt's folder and prints its path. Returns 0, or the script's code if there is no attempt."""
    config = read_config(run / "config.yaml")
    rows = time_ledger.read_rows(run)
    try:
        with hold(run, LOCK_S):
            pass
    except BusyError as busy:
        say(f"baton: {busy}")
        return _give_way(busy, rows)
    rows = time_ledger.read_rows(run)
    if not (allocated := _told("BATON_NODES")):
        raise ConfigError(f"the script did not say which nodes the job has; `baton submit` writes {run / 'job.sbatch'} anew")
    if (unclosed := _unclosed(run, rows)) is not None:
        decision = _close(unclosed, None, allocated, time_is_up=False)
        if not decision.goes_on:
            return _over(run, decision)
        # SLURM requeued the job by itself
        time_ledger.append_row(run, "submitted", job=os.environ["SLURM_JOB_ID"], by="slurm", time=outcome_time(unclosed))
    elif (run / "stop").exists():
        return _over(run, Decision(Exit.STOPPED, "the run is stopped, as asked"))
    _exclude(run, dict.fromkeys(_down(allocated), "SLURM holds it for down or failing"))
    leaving = _leaving(allocated)
    for node in leaving:
        say(f"{node} is being drained, and is not used by this attempt")
    bad = policy.excluded(time_ledger.read_rows(run))
    usable = [node for node in allocated if node not in (*bad, *leaving)]
    least, most = _wanted(rows)
    if len(usable) < least:
        say(f"baton: {len(usable)} of {len(allocated)} nodes are left, and {least} are needed")
        return OTHER_NODES
    attempt = _make(config, run, usable, most)
    say(f"{BEGINS.format(int(attempt.name))}{','.join(nodes_of(attempt))}")
    tell(
        config.jobs.hooks.start, "start", run, attempt.name, f"attempt {int(attempt.name)} begins on {','.join(nodes_of(attempt))}"
    )
    print(attempt)
    return 0


def _give_way(busy: BusyError, rows: ROWS) -> int:
    """The script's code if another process holds the run: end for good if it is another job of this run, else try in the next
    job."""
    others = {row.get("job") for row in rows if row["kind"] == "attempt"} - {None, os.environ.get("SLURM_JOB_ID")}
    return Exit.SUPERSEDED if busy.job in others else NEXT_JOB


def _make(config: RunConfig, run: Path, usable: list[str], most: int) -> Path:
    """Creates the attempt's folder for as many nodes as the layout uses. The other nodes are spares."""
    cluster = cluster_of(run)
    fitting, count = fitted(config, min(len(usable), most), cluster.ranks_per_node)
    job = os.environ["SLURM_JOB_ID"]
    attempt = new_attempt(fitting, cluster.ranks_per_node, job=job, nodes=usable[:count], since=_job_began())
    write_whole(attempt / "allocated.txt", ",".join(usable))
    write_whole(attempt / "nodes.txt", ",".join(usable[:count]))
    (attempt / "job.sbatch").write_text((run / "job.sbatch").read_text(encoding="utf-8"), encoding="utf-8")
    latest = run / "attempts" / "latest"
    latest.unlink(missing_ok=True)
    latest.symlink_to(attempt.name)
    return attempt


def judge(attempt: Path) -> int:
    """Selects nodes that passed preflight and excludes those that did not. Writes nodes.txt, and config.yaml with a layout that
    fits. Returns the script's code."""
    run, allocated = attempt.parent.parent, nodes_of(attempt, "allocated.txt")
    found = results(attempt, allocated)
    if not any((attempt / "preflight" / f"{node}.here").exists() for node in allocated) and not _answers(attempt):
        return Exit.NOT_STARTED
    bad = {result.node: result.problem for result in found if result.problem is not None}
    seconds = max((result.seconds for result in found), default=0.0)
    time_ledger.append_row(run, "preflight", attempt=int(attempt.name), seconds=seconds, bad=bad, passed=len(found) - len(bad))
    for node, problem in bad.items():
        say(f"{node}: {problem}")
    _exclude(run, {node: f"preflight: {problem}" for node, problem in bad.items()})
    good = [node for node in allocated if node not in bad]
    least, most = _wanted(time_ledger.read_rows(run))
    if len(good) < least:
        say(f"baton: {len(good)} of {len(allocated)} nodes passed preflight, and {least} are needed")
        return Exit.PREFLIGHT
    ranks = cluster_of(run).ranks_per_node
    config, count = fitted(read_config(run / "config.yaml"), min(len(good), most), ranks)
    write_whole(attempt / "config.yaml", for_this_machine(config, ranks).to_yaml())
    write_whole(attempt / "nodes.txt", ",".join(good[:count]))
    return 0


def after(attempt: Path, code: int, time_is_up: bool) -> int:
    """Records how the attempt ended. code: srun's exit code. Returns the script's code."""
    run = attempt.parent.parent
    decision = _close(attempt, code, nodes_of(attempt, "allocated.txt"), time_is_up=time_is_up)
    if not decision.goes_on:
        return _over(run, decision)
    say(decision.sentence)
    time_ledger.append_row(run, "submitted", job=os.environ.get("SLURM_JOB_ID"), by="job", next=decision.code)
    return decision.code


def refused(run: Path) -> int:
    """Records that SLURM accepted no further job. Returns the script's code."""
    bad = ", ".join(policy.excluded(time_ledger.read_rows(run)))
    without = f" without {bad}: repair them and `baton readmit` them" if bad else "; what it said is above"
    return _over(run, Decision(Exit.NO_JOB, f"the run is stopped: SLURM takes no job{without}"))


def _close(attempt: Path, code: int | None, allocated: list[str], *, time_is_up: bool) -> Decision:
    """Records the attempt's end, excludes bad nodes and decides what follows. code: srun's exit code; None: unknown, because the
    script ended before."""
    run, config = attempt.parent.parent, read_config(attempt / "config.yaml")
    outcome = gather(attempt, code)
    if code is None and (dead := _down(nodes_of(attempt))):
        outcome = Outcome(Exit.NODE_LOST, f"node {', '.join(dead)} went down under the job", dead=tuple(dead))
    time_ledger.append_row(
        run,
        "end",
        attempt=int(attempt.name),
        status=int(outcome.status),
        reason=outcome.reason,
        suspects=list(outcome.suspects),
        step=last_step(run),
        **({} if code is not None else {"time": outcome_time(attempt), "seen": False}),
    )
    say(f"attempt {int(attempt.name)}: {outcome.reason}")
    rows = time_ledger.read_rows(run)
    _exclude(run, policy.struck_out(rows, outcome, config.jobs.max_node_failures))
    rows, (least, _) = time_ledger.read_rows(run), _wanted(rows)
    slurm = cluster_of(run).slurm
    assert slurm is not None
    decision = policy.decide(
        rows, config.jobs, slurm, told_to_stop=(run / "stop").exists(), time_is_up=time_is_up, allocated=allocated, needed=least
    )
    if outcome.status not in policy.WELL:
        tell(config.jobs.hooks.failure, "failure", run, attempt.name, f"{outcome.reason}; {decision.sentence}")
    return decision


def outcome_time(attempt: Path) -> float:
    """The last known time of an attempt whose end was not recorded: the modification time of its newest file or its last ledger
    row, in seconds since the epoch."""
    files = [p.stat().st_mtime for p in (attempt, *attempt.rglob("*")) if not p.is_symlink()]
    rows = [row["time"] for row in time_ledger.read_rows(attempt.parent.parent) if row.get("attempt") == int(attempt.name)]
    return min(time.time(), max([*files, *rows]))


def _over(run: Path, decision: Decision) -> int:
    """Records that the run is not restarted automatically. Returns the script's code."""
    time_ledger.append_row(run, "stopped", status=decision.code, reason=decision.sentence)
    say(f"baton: {decision.sentence}")
    tell(read_config(run / "config.yaml").jobs.hooks.finish, "finish", run, f"{last_attempt(run):04d}", decision.sentence)
    return decision.code


def _unclosed(run: Path, rows: ROWS) -> Path | None:
    """The last attempt's folder if its end was not recorded; else None."""
    number = last_attempt(run)
    if not number or any(row["kind"] == "end" and row["attempt"] == number for row in rows):
        return None
    attempt = run / "attempts" / f"{number:04d}"
    return attempt if (attempt / "nodes.txt").exists() else None


def _wanted(rows: ROWS) -> tuple[int, int]:
    """Minimum and maximum number of nodes for an attempt, as submitted."""
    least, most = next(row["nodes"] for row in reversed(rows) if row["kind"] == "submitted" and row.get("by") == "user")
    return least, most


def _exclude(run: Path, nodes: dict[str, str]) -> None:
    known = policy.excluded(time_ledger.read_rows(run))
    for node, reason in nodes.items():
        if node not in known:
            time_ledger.append_row(run, "excluded", node=node, reason=reason)
            say(f"{node} is not used any more: {reason}")
    write_excluded(run)


def _told(name: str) -> list[str]:
    """A comma-separated list from the script's environment, in SLURM's order. The job's first node runs the script."""
    return [word for word in os.environ.get(name, "").split(",") if word]


def _states() -> dict[str, str]:
    """The state of each of the job's nodes in the format of sinfo's %T: a word, followed by "*" if the node does not respond."""
    return {node: state for word in _told("BATON_STATES") for node, _, state in [word.partition(" ")]}


def _in(states: frozenset[str], nodes: list[str]) -> list[str]:
    known = _states()
    return [node for node in nodes if known.get(node, "").lower().rstrip("*~#!%$@^-+") in states]


def _down(nodes: list[str]) -> list[str]:
    """The nodes that SLURM reports as down or failing, or that do not respond to it."""
    known = _states()
    return [node for node in nodes if node in _in(DOWN, nodes) or known.get(node, "").endswith("*")]


def _leaving(nodes: list[str]) -> list[str]:
    """The nodes that are being drained. They need not be excluded: SLURM allocates them to no job until they are back."""
    return _in(LEAVING, nodes)


def _job_began() -> float | None:
    """When SLURM started this job, in seconds since the epoch; None if this version of SLURM does not say."""
    began = os.environ.get("SLURM_JOB_START_TIME")
    return float(began) if began else None


def _answers(attempt: Path) -> bool:
    """Whether any node has printed a preflight result."""
    path = attempt / "preflight.jsonl"
    return path.exists() and any(line.startswith("{") for line in path.read_text(encoding="utf-8", errors="replace").splitlines())


def main(words: list[str]) -> int:
    try:
        match words:
            case ["begin", run]:
                return _when_files_answer(lambda: begin(Path(run)))
            case ["judge", attempt]:
                return judge(Path(attempt))
            case ["refused", run]:
                return refused(Path(run))
            case ["after", attempt, code, time_is_up]:
                return after(Path(attempt), int(code), time_is_up == "1")
        raise ConfigError("begin RUN, judge ATTEMPT, or after ATTEMPT CODE TIME_IS_UP")
    except Exception as error:
        status, text = explained(error)
        if status is None:
            raise
        say(f"baton: {text}")
        # begin in the next job records how the attempt ended
        return NEXT_JOB if words[:1] == ["after"] and status == Exit.STORAGE else status


def _when_files_answer(work: Callable[[], int]) -> int:
    """Returns work(), with retries for FILES_TRIES * FILES_PAUSE_S seconds while files cannot be read or written. Without them, one
    outage of the file system at the start of a job would end the run."""
    for _ in range(FILES_TRIES - 1):
        try:
            return work()
        except Exception as error:
            status, text = explained(error)
            if status != Exit.STORAGE:
                raise
            say(f"baton: {text}; trying again in {FILES_PAUSE_S:.0f} s")
        time.sleep(FILES_PAUSE_S)
    return work()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
