"""`baton submit`: checks the run, writes the run directory and submits the script to SLURM. All checks precede the submission."""

import getpass
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from baton.launcher.cluster import Cluster
from baton.launcher.config import RunConfig
from baton.launcher.errors import ConfigError
from baton.launcher.run_directory import check_run, open_run, settled, write_whole
from baton.slurm import command, evaluation, policy
from baton.slurm.elastic import fitted, nodes_for
from baton.slurm.run_files import write_excluded
from baton.slurm.script import NAME, Nodes, in_container, job_name, render
from baton.training.monitoring import time_ledger

LOCAL_TYPES = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "ramfs", "f2fs", "reiserfs"}
"""File system types that are local to one machine."""


_NOT_IN_PATHS = frozenset("%'\"\\\n")


@dataclass(frozen=True)
class Submission:
    """A job that can be submitted.

    config: the configuration, with an absolute directory.
    script: the job script.
    evaluation: the script of evaluation jobs; None without jobs.evaluate.
    """

    config: RunConfig
    cluster: Cluster
    nodes: Nodes
    script: str
    evaluation: str | None

    @property
    def run(self) -> Path:
        return self.config.folder


def prepare(config: RunConfig, cluster: Cluster, nodes: str | None, *, change: bool = False) -> Submission:
    """Renders the scripts of a checked configuration without writing anything. Raises ConfigError.

    nodes: "2" or "1-4"; None: as many as the layout needs.
    change: as in `check_run`.
    """
    if cluster.slurm is None:
        raise ConfigError(f"the cluster {cluster.name} has no section slurm: it is only planned for; add one to submit to it")
    warning, save = cluster.slurm.warning_s, cluster.slurm.save_timeout_s
    if save >= warning:
        raise ConfigError(
            f"slurm.save_timeout_s={save:g} must be less than slurm.warning_s={warning}: a save that hangs must end in time"
        )
    if cluster.slurm.container is not None and cluster.slurm.python is None:
        raise ConfigError(
            f"slurm.container is set, and slurm.python is not: name the Python in {cluster.slurm.container.image} that "
            f"Baton is installed in, as python3"
        )
    if 0 < (limit := seconds_of(cluster.slurm.time)) <= warning:
        raise ConfigError(
            f"slurm.time={cluster.slurm.time} ({limit} s) leaves nothing before slurm.warning_s={warning}, when ranks are told to "
            f"save: set slurm.time longer, or slurm.warning_s and slurm.save_timeout_s shorter"
        )
    if clusters := [o for o in cluster.slurm.options if o.startswith(("--clusters", "--cluster", "-M"))]:
        raise ConfigError(
            f"slurm.options: {clusters[0]}: only sbatch would see it, and not squeue, sinfo and scancel; remove it, and set "
            f"SLURM_CLUSTERS in the environment, which all of them read, whenever you use baton for this run"
        )
    absolute = config.model_copy(update={"directory": str(config.folder.absolute())})
    if odd := sorted({c for c in str(absolute.folder) if c in _NOT_IN_PATHS}):
        raise ConfigError(
            f"directory={absolute.folder} holds {' '.join(odd)}, which SLURM reads in its own way; use another directory="
        )
    absolute = settled(absolute, "cpu" if config.device == "cpu" else cluster.kind)
    check_run(absolute, change=change)
    wanted = _nodes(absolute, cluster, nodes)
    script = render(absolute, cluster, wanted, where=Path.cwd(), python=sys.executable)
    evaluating = None
    if config.jobs.evaluate:
        container = in_container(cluster.slurm)
        evaluating = evaluation.render(absolute, cluster, where=Path.cwd(), python=sys.executable, container=container)
    return Submission(absolute, cluster, wanted, script, evaluating)


def seconds_of(limit: str) -> int:
    """Seconds of a time limit in SLURM's syntax (minutes, MM:SS, HH:MM:SS, or D-HH[:MM[:SS]]); 0: no limit."""
    days, dash, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return 86400 * int(days or 0) + sum(part * unit for part, unit in zip(parts, units))


def _nodes(config: RunConfig, cluster: Cluster, text: str | None) -> Nodes:
    ranks = cluster.ranks_per_node
    if text is None:
        count = nodes_for(config, ranks)
        return Nodes(count, count)
    first, _, last = text.partition("-")
    if not first.isdigit() or (last and not last.isdigit()) or not 1 <= int(first) <= int(last or first):
        raise ConfigError(f"--nodes {text}: expected a number of nodes, or a range as 1-4")
    for count in (int(first), int(last or first)):
        fitted(config, count, ranks)
    return Nodes(int(first), int(last or first))


def check(submission: Submission) -> None:
    """Checks the file system, the partition and the account. Raises ConfigError."""
    slurm, run = submission.cluster.slurm, submission.run
    assert slurm is not None
    command.require()
    kind = file_system(run)
    if kind in LOCAL_TYPES and not slurm.local_files:
        raise ConfigError(
            f"{run} is on a file system of type {kind}, which other nodes do not see; use a shared one (directory=...), or set "
            f"slurm.local_files=true in the cluster file if all nodes share this machine's disk"
        )
    _check_partition(submission)
    if slurm.account is not None:
        accounts = _accounts()
        if accounts is not None and slurm.account.lower() not in accounts:  # SLURM stores them in lower case
            raise ConfigError(
                f"slurm.account={slurm.account}: {getpass.getuser()} has no such account; "
                f"{'yours: ' + ', '.join(accounts) if accounts else 'there is none'}"
            )


def _check_partition(submission: Submission) -> None:
    """Raises ConfigError for partitions that do not exist or are too small. Without a partition or a default, sbatch decides."""
    slurm, there = submission.cluster.slurm, _partitions()
    assert slurm is not None
    default = next((name for name, (_, is_default) in there.items() if is_default), "")
    wanted = [name for name in (slurm.partition or os.environ.get("SBATCH_PARTITION") or default).split(",") if name]
    if missing := [name for name in wanted if name not in there]:
        raise ConfigError(
            f"slurm.partition={','.join(missing)}: no such partition; this cluster has {', '.join(sorted(there)) or 'none'}"
        )
    most = max((there[name][0] for name in wanted), default=None)
    if most is not None and submission.nodes.least > most:
        raise ConfigError(f"{submission.nodes} nodes are wanted, and the partition {' or '.join(wanted)} has {most}")


def _partitions() -> dict[str, tuple[int, bool]]:
    """The number of nodes of each partition, hidden ones included, and whether it is the default (an asterisk in sinfo)."""
    found: dict[str, tuple[int, bool]] = {}
    for line in command.ask("sinfo", "-a", "-h", "-o", "%P %D").splitlines():
        name, _, count = line.partition(" ")
        if not count.strip().isdigit():  # a heading, for example "CLUSTER: name" with SLURM_CLUSTERS
            continue
        before = found.get(name.rstrip("*"), (0, False))[0]
        found[name.rstrip("*")] = (before + int(count), name.endswith("*"))
    return found


def _accounts() -> list[str] | None:
    """The user's accounts; None if this cluster has no accounting."""
    try:
        out = command.ask("sacctmgr", "-n", "-P", "show", "assoc", f"user={getpass.getuser()}", "format=account", tries=1)
    except command.SlurmError:
        return None
    return sorted({line.strip() for line in out.splitlines() if line.strip()})


def file_system(path: Path) -> str:
    """The file system type of a path, which need not exist yet."""
    there = next(p for p in (path, *path.parents) if p.exists()).resolve()
    best, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, point, type_of, *_ = line.split()
        point = point.replace("\\040", " ")
        if (there.is_relative_to(point)) and len(point) >= len(best):
            best, kind = point, type_of
    return kind


def test_only(submission: Submission) -> str:
    """Output of sbatch --test-only. Raises SlurmError if SLURM would reject the script."""
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".sbatch") as script:
        script.write(submission.script)
        script.flush()
        return command.ask("sbatch", "--test-only", script.name, slurm=submission.cluster.slurm)


def _hand_in(submission: Submission, *options: str) -> str:
    """Submits the script and returns the job's id. sbatch is not retried, because the job may exist although its answer was lost;
    in that case the id is looked up in the queue."""
    script = str(submission.run / NAME)
    try:
        said = command.ask("sbatch", "--parsable", *options, script, tries=1, slurm=submission.cluster.slurm)
    except command.SlurmAwayError:
        if not (there := command.jobs(job_name(submission.config))):
            raise
        return there[-1]["id"]
    return said.strip().partition(";")[0]


def submit(submission: Submission) -> str:
    """Checks the job, writes the run directory and submits the script. Returns the job's id. Raises ConfigError."""
    check(submission)
    test_only(submission)
    run = submission.run
    running = command.jobs(job_name(submission.config))
    if running:
        known = ", ".join(f"{job['id']} ({job['state'].lower()})" for job in running)
        raise ConfigError(f"{run} has a job already: {known}; `baton cancel {run}` ends it, or use another name=...")
    open_run(submission.config)
    write_whole(run / "config.yaml", submission.config.to_yaml())
    write_whole(run / "cluster.yaml", yaml.safe_dump(submission.cluster.model_dump(mode="json"), sort_keys=False))
    write_whole(run / NAME, submission.script)
    if submission.evaluation is not None:
        (run / "evaluations").mkdir(exist_ok=True)
        write_whole(run / evaluation.NAME, submission.evaluation)
    bad = policy.excluded(time_ledger.read_rows(run))
    write_excluded(run)
    (run / "stop").unlink(missing_ok=True)
    exclude = [f"--exclude={(run / 'excluded.txt').read_text(encoding='utf-8')}"] if bad else []
    time_ledger.append_row(run, "submitted", by="user", nodes=[submission.nodes.least, submission.nodes.most])
    job = _hand_in(submission, *exclude)
    write_whole(run / "submitted.json", json.dumps({"job": job, "host": os.uname().nodename, "user": getpass.getuser()}))
    return job
