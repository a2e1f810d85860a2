"""`baton status`, `baton cancel` and `baton readmit`, from the run's files and SLURM's queue. Torch-free."""

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from baton.launcher.config import RunConfig
from baton.launcher.errors import ConfigError
from baton.launcher.planner.memory import of_stages
from baton.launcher.run_directory import forks_of, last_attempt, last_step, read_config, recent_metrics
from baton.slurm import command, policy
from baton.slurm.exits import MEANING, Exit
from baton.slurm.run_files import cluster_of, write_excluded
from baton.slurm.script import job_name
from baton.training.monitoring import time_ledger
from baton.training.monitoring.goodput import compute_goodput

RECENT = 50
"""Number of last steps over which the current speed is averaged."""


@dataclass(frozen=True)
class Status:
    """Status of a run. None: unknown.

    state: one line for people.
    mfu: model FLOPs utilization relative to the cluster file's matmul_tflops.
    saved, saved_ago_s: step and age (seconds) of the newest checkpoint.
    eta_s: seconds of training that are left at the current speed.
    """

    run: str
    state: str
    step: int
    steps: int
    tokens: int
    loss: float | None
    tokens_per_s: float | None
    mfu: float | None
    goodput: float | None
    saved: int | None
    saved_ago_s: float | None
    eta_s: float | None
    excluded: tuple[str, ...]
    jobs: tuple[dict[str, str], ...]
    attempts: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> Iterator[str]:
        yield f"{self.run}: {self.state}"
        loss = "" if self.loss is None else f"  loss {self.loss:.4f}"
        yield f"  step {self.step:,} of {self.steps:,} ({self.step / self.steps:.1%})  {self.tokens:,} tokens{loss}"
        if self.tokens_per_s is not None:
            mfu = "" if self.mfu is None else f"  MFU {self.mfu:.1%}"
            eta = "" if self.eta_s is None else f"  ETA {_duration(self.eta_s)}"
            yield f"  {self.tokens_per_s:,.0f} tokens/s{mfu}{eta}"
        goodput = "" if self.goodput is None else f"  goodput {self.goodput:.1%}"
        saved = (
            "nothing saved yet" if self.saved is None else f"saved step {self.saved:,}, {_duration(self.saved_ago_s or 0.0)} ago"
        )
        yield f"  {saved}{goodput}"
        for job in self.jobs:
            more = (
                f"on {job['nodes']} nodes, {job['left']} left"
                if job["state"] == "RUNNING"
                else f"{job['reason']}, start {job['start']}"
            )
            yield f"  job {job['id']} {job['state'].lower()}: {more}{_advice(job)}"
        if self.excluded:
            yield f"  nodes not used any more: {', '.join(self.excluded)}"
        for attempt in self.attempts:
            steps = "" if attempt["from"] is None else f"from step {attempt['from']:,}"
            if steps and attempt["to"] is not None:
                steps = f"{steps} to {attempt['to']:,}" if attempt["to"] > attempt["from"] else f"{steps}, no new step"
            layout = " x ".join(f"{name} {size}" for name, size in attempt["layout"].items() if name != "zero" and size > 1)
            yield (
                f"  attempt {attempt['number']}: {attempt['began']}  on {attempt['nodes']} ({layout or '1 rank'})  "
                f"{steps or 'not one step'}  {attempt['end']}"
            )


_STUCK = {
    "JobHeldUser": "it waits until `scontrol release {id}`",
    "JobHeldAdmin": "an administrator holds it",
    "requeued held": "it could not be started on its nodes; `scontrol release {id}` tries again",
    "DependencyNeverSatisfied": "it never starts; `baton cancel` ends it, submit again without that dependency",
    "BadConstraints": "no node has what slurm.constraint and slurm.options ask for; `baton cancel`, and submit with others",
}
"""Advice for jobs that are pending for a reason other than free nodes, by SLURM's reason."""


def _advice(job: dict[str, str]) -> str:
    return next((f": {text.format(**job)}" for reason, text in _STUCK.items() if reason in job["reason"]), "")


def read_status(run: Path) -> Status:
    """Raises ConfigError for what is not a run."""
    config, rows = read_config(run / "config.yaml"), time_ledger.read_rows(run)
    train = [row for row in recent_metrics(run) if row.get("kind") == "train"]
    last = train[-1] if train else None
    speed = _speed(train)
    step = last_step(run)
    tokens = int(last["tokens"]) if last else forks[-1]["tokens"] if (forks := forks_of(run)) else 0
    left = (config.training.steps - step) * config.training.global_batch_tokens
    jobs = _jobs(config)
    saved = _saved(run)
    now = time.time()
    return Status(
        run=str(run),
        state=_state(rows, jobs),
        step=step,
        steps=config.training.steps,
        tokens=tokens,
        loss=last["loss"] if last else None,
        tokens_per_s=speed,
        mfu=None if speed is None else _mfu(run, speed),
        goodput=compute_goodput(run).goodput if any(row["kind"] == "attempt" for row in rows) else None,
        saved=None if saved is None else saved[0],
        saved_ago_s=None if saved is None else max(0.0, now - saved[1]),  # by the clock of the file server
        eta_s=left / speed if speed and left else None,
        excluded=tuple(policy.excluded(rows)),
        jobs=tuple(jobs or ()),
        attempts=tuple(_attempts(rows)),
    )


def cancel(run: Path, *, now: bool) -> str:
    """End a run's jobs; what was done. now: without waiting for a save."""
    config = read_config(run / "config.yaml")
    command.require()
    jobs = command.jobs(job_name(config))
    if not jobs:
        raise ConfigError(f"{run} has no job that waits or runs")
    (run / "stop").touch()
    waiting = [job["id"] for job in jobs if job["state"] != "RUNNING"]
    running = [job["id"] for job in jobs if job["state"] == "RUNNING"]
    ended = waiting + (running if now else [])
    if ended:
        command.ask("scancel", *ended)
    if running and not now:
        return f"job {', '.join(running)} saves after its present step and ends; `baton submit` goes on from there"
    return f"cancelled job {', '.join(ended)}; `baton submit` goes on from the last checkpoint"


def readmit(run: Path, nodes: list[str]) -> str:
    """Use excluded nodes again, from the next attempt on; what was done. Raises ConfigError for nodes that are not excluded."""
    read_config(run / "config.yaml")
    known = policy.excluded(time_ledger.read_rows(run))
    if strangers := [node for node in nodes if node not in known]:
        raise ConfigError(f"{', '.join(strangers)}: not excluded from {run}; excluded are {', '.join(known) or 'none'}")
    for node in nodes:
        time_ledger.append_row(run, "readmitted", node=node)
    write_excluded(run)
    return f"{', '.join(nodes)}: used again from the next attempt on"


def _jobs(config: RunConfig) -> list[dict[str, str]] | None:
    """The run's jobs; none on a machine without SLURM. None: SLURM's controller does not respond."""
    try:
        return command.jobs(job_name(config), tries=1)
    except command.SlurmAwayError:
        return None
    except command.SlurmError:
        return []


def _state(rows: list[dict[str, Any]], jobs: list[dict[str, str]] | None) -> str:
    if jobs is None:
        return "not known, because SLURM's controller does not answer"
    last: dict[str, Any] = {kind: row for row in rows for kind in [row["kind"]]}
    if any(job["state"] == "RUNNING" for job in jobs):
        return "running"
    if jobs:
        return "waiting for nodes"
    stopped = last.get("stopped")
    if stopped is not None and rows[-1]["kind"] == "stopped":
        return str(stopped["reason"])
    end, began = last.get("end"), last.get("attempt")
    if began is None:
        return "not started"
    if end is None or end["attempt"] != began["attempt"]:
        return "training on this machine, or ended without a word: it has no job"
    return "done" if end["status"] == Exit.DONE else f"ended: {_ending(end)}; it has no job"


def _ending(end: dict[str, Any]) -> str:
    """Why an attempt ended."""
    known = end["status"] in (Exit.BAD_INPUT, Exit.STORAGE)  # said by `baton train` in a sentence of its own, which is not recorded
    return str(end.get("reason") or (MEANING[Exit(end["status"])][0] if known else f"status {end['status']}"))


def _speed(train: list[dict[str, Any]]) -> float | None:
    """Tokens per second of the last steps, from metrics.jsonl."""
    return float(train[-1]["tokens_per_s"]) if train else None


def _mfu(run: Path, speed: float) -> float | None:
    """Model FLOPs utilization of the last attempt's layout, relative to the cluster file's matmul_tflops."""
    from baton.launcher.inputs import with_known_vocabulary

    try:
        config = with_known_vocabulary(read_config(run / "attempts" / f"{last_attempt(run):04d}" / "config.yaml"))
        rate = getattr(cluster_of(run).matmul_tflops, config.compute_dtype) * 1e12
        useful = sum(one.useful_flops() for one in of_stages(config))
    except Exception as error:
        if getattr(error, "exit_status", None) != ConfigError.exit_status:
            raise
        return None  # the run was never submitted, or its tokenizer is not on this machine
    return speed * useful / (config.layout.world_size * rate)


def _saved(run: Path) -> tuple[int, float] | None:
    """Step of the newest checkpoint, and the time at which it was published in seconds since the epoch."""
    found = {int(p.name[5:]): p / "manifest.json" for p in (run / "checkpoints").glob("step-*") if p.name[5:].isdigit()}
    for step in sorted(found, reverse=True):
        with suppress(OSError):  # not published, unreadable, or being deleted
            return step, found[step].stat().st_mtime
    return None


def _attempts(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    starts: dict[int, int] = {}
    for row in rows:
        if row["kind"] == "start":
            starts.setdefault(row["attempt"], row["step"])  # a rollback adds another row, from an earlier step
    ends = {row["attempt"]: row for row in rows if row["kind"] == "end"}
    for row in rows:
        if row["kind"] == "attempt":
            number, end = row["attempt"], ends.get(row["attempt"])
            yield {
                "number": number,
                "began": datetime.fromtimestamp(row["time"]).strftime("%Y-%m-%d %H:%M:%S"),
                "nodes": ",".join(row.get("nodes", ["this machine"])),
                "layout": row["layout"],
                "from": starts.get(number),
                "to": None if end is None else end.get("step"),
                "status": None if end is None else end["status"],
                "end": "goes on" if end is None else _ending(end),
            }


def _duration(seconds: float) -> str:
    """A duration as text: 3d04h, 1h02m, 2m03s or 3s."""
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{s:02d}s" if minutes else f"{s}s"
