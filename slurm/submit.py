"""`baton submit`: check, write the run directory, hand the script to SLURM. Everything that can be refused is, before anything is
submitted."""

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
from baton.launcher.run_directory import check_run, open_run, write_whole
from baton.slurm import command, evaluation, policy
from baton.slurm.elastic import fitted, nodes_for
from baton.slurm.script import NAME, Nodes, in_container, job_name, render
from baton.training import ledger

LOCAL_TYPES = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "ramfs", "f2fs", "reiserfs"}
"""File systems that one machine has to itself."""


_NOT_IN_PATHS = frozenset("%'\"\\\n")


@dataclass(frozen=True)
class Submission:
    """What would be handed to SLURM. config: with an absolute directory."""

    config: RunConfig
    cluster: Cluster
    nodes: Nodes
    script: str
    evaluation: str | None

    @property
    def run(self) -> Path:
        return self.config.folder


def prepare(config: RunConfig, cluster: Cluster, nodes: str | None, *, change: bool = False) -> Submission:
    """The script of a checked configuration; nothing is written. nodes: "2" or "1-4"; None: as many as the layout fills. change:
    as in `check_run`.

    Raises ConfigError.
    """
    if cluster.slurm is None:
        raise ConfigError(f"the cluster {cluster.name} has no section slurm: it is only planned for; add one to submit to it")
    warning, save = cluster.slurm.warning_s, cluster.slurm.save_s
    if save >= warning:
        raise ConfigError(f"slurm.save_s={save:g} must be less than slurm.warning_s={warning}: a save that hangs must end in time")
    if cluster.slurm.container is not None and cluster.slurm.python is None:
        raise ConfigError(
            f"slurm.container is set, and slurm.python is not: name the Python in {cluster.slurm.container.image} that "
            f"Baton is installed in, as python3"
        )
    absolute = config.model_copy(update={"directory": str(config.folder.absolute())})
    if odd := sorted({c for c in str(absolute.folder) if c in _NOT_IN_PATHS}):
        raise ConfigError(
            f"directory={absolute.folder} holds {' '.join(odd)}, which SLURM reads in its own way; use another directory="
        )
    check_run(absolute, change=change)
    wanted = _nodes(absolute, cluster, nodes)
    script = render(absolute, cluster, wanted, where=Path.cwd(), python=sys.executable)
    evaluating = None
    if config.jobs.evaluate:
        container = in_container(cluster.slurm)
        evaluating = evaluation.render(absolute, cluster, where=Path.cwd(), python=sys.executable, container=container)
    return Submission(absolute, cluster, wanted, script, evaluating)


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
    """Refuse what this SLURM, or this file system, will not take. Raises ConfigError."""
    slurm, run = submission.cluster.slurm, submission.run
    assert slurm is not None
    command.require()
    kind = file_system(run)
    if kind in LOCAL_TYPES and not slurm.local_files:
        raise ConfigError(
            f"{run} is on a file system of type {kind}, which other nodes do not see; use a shared one (directory=...), or set "
            f"slurm.local_files=true in the cluster file if all nodes share this machine's disk"
        )
    partitions = _partitions()
    partition = slurm.partition or next((name for name, (_, default) in partitions.items() if default), None)
    if partition is None or partition not in partitions:
        raise ConfigError(f"slurm.partition={partition}: no such partition; this cluster has {', '.join(sorted(partitions))}")
    there = partitions[partition][0]
    if submission.nodes.least > there:
        raise ConfigError(f"{submission.nodes} nodes are wanted, and the partition {partition} has {there}")
    if slurm.account is not None:
        accounts = _accounts()
        if accounts is not None and slurm.account not in accounts:
            raise ConfigError(
                f"slurm.account={slurm.account}: {getpass.getuser()} has no such account; "
                f"{'yours: ' + ', '.join(accounts) if accounts else 'there is none'}"
            )


def _partitions() -> dict[str, tuple[int, bool]]:
    """Of each partition: its nodes, and whether it is the default."""
    found: dict[str, tuple[int, bool]] = {}
    for line in command.ask("sinfo", "-h", "-o", "%P %D").splitlines():
        name, count = line.split()
        before = found.get(name.rstrip("*"), (0, False))[0]
        found[name.rstrip("*")] = (before + int(count), name.endswith("*"))
    return found


def _accounts() -> list[str] | None:
    """The user's; None where this cluster keeps no accounts."""
    try:
        out = command.ask("sacctmgr", "-n", "-P", "show", "assoc", f"user={getpass.getuser()}", "format=account", tries=1)
    except command.SlurmError:
        return None
    return sorted({line.strip() for line in out.splitlines() if line.strip()})


def file_system(path: Path) -> str:
    """The type of the file system that a path is, or would be, on."""
    there = next(p for p in (path, *path.parents) if p.exists()).resolve()
    best, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, point, type_of, *_ = line.split()
        point = point.replace("\\040", " ")
        if (there.is_relative_to(point)) and len(point) >= len(best):
            best, kind = point, type_of
    return kind


def test_only(submission: Submission) -> str:
    """What SLURM would do with the script. Raises SlurmError with what it has against it."""
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".sbatch") as script:
        script.write(submission.script)
        script.flush()
        return command.ask("sbatch", "--test-only", script.name)


def submit(submission: Submission) -> str:
    """Write the run directory and hand the script over; returns the job's id. Raises ConfigError."""
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
    bad = policy.excluded(ledger.read(run))
    write_whole(run / "excluded.txt", ",".join(bad))
    (run / "stop").unlink(missing_ok=True)
    exclude = [f"--exclude={','.join(bad)}"] if bad else []
    ledger.append(run, "submitted", by="user", nodes=[submission.nodes.least, submission.nodes.most])
    job = command.ask("sbatch", "--parsable", *exclude, str(run / NAME), tries=1).strip().partition(";")[0]
    write_whole(run / "submitted.json", json.dumps({"job": job, "host": os.uname().nodename, "user": getpass.getuser()}))
    return job
