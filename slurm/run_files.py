"""Files of a SLURM run in the run directory, in addition to those of every run:

job.sbatch                       the job script
cluster.yaml                     the resolved cluster file
submitted.json                   the first job's id
excluded.txt                     excluded nodes
stop                             its existence asks the run to save and end (created by `baton cancel`)
evaluate.sbatch                  the script of evaluation jobs (jobs.evaluate)
evaluations/, evaluations.jsonl  output and results of evaluation jobs
attempts/NNNN/allocated.txt      the nodes that an attempt can use
attempts/NNNN/nodes.txt          the nodes that it trains on
"""

import os
import platform
import re
from pathlib import Path

import yaml

from baton.launcher.cluster import Cluster
from baton.launcher.errors import ConfigError
from baton.launcher.run_directory import read_text, write_whole
from baton.slurm import policy
from baton.training.monitoring import time_ledger


def cluster_of(run: Path) -> Cluster:
    """The cluster that a run was submitted to. Raises ConfigError if it was not submitted."""
    path = run / "cluster.yaml"
    try:
        cluster = Cluster.model_validate(yaml.safe_load(read_text(path)))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file: this run was never submitted (`baton submit RUN.yaml --cluster FILE`)") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be used ({' '.join(str(error).split())[:200]}); submit the run again") from None
    return cluster


def nodes_of(attempt: Path, file: str = "nodes.txt") -> list[str]:
    """The nodes of an attempt in rank order."""
    return [name for name in (attempt / file).read_text(encoding="utf-8").strip().split(",") if name]


def node_name() -> str:
    """SLURM's name of this node."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


def write_excluded(run: Path) -> None:
    """Writes excluded.txt: the nodes that the cluster file's options exclude (as written there, ranges such as n[1-3] included) and
    those that the run has excluded. It is passed to sbatch as --exclude, which overrides an #SBATCH --exclude of the script."""
    slurm = cluster_of(run).slurm
    options = () if slurm is None else slurm.options
    named = [found[1] for option in options if (found := re.fullmatch(r"(?:--exclude[= ]|-x ?)\s*(\S+)", option.strip()))]
    write_whole(run / "excluded.txt", ",".join([*named, *policy.excluded(time_ledger.read_rows(run))]))
