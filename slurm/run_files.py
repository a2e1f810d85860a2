"""What a run of jobs keeps in its directory besides what every run does, and who reads it.

job.sbatch     what SLURM was given        cluster.yaml   the cluster file, resolved        submitted.json  the first job's id
excluded.txt   nodes not to be used        stop           asks the run to save and end (`baton cancel` makes it)
evaluate.sbatch, evaluations/, evaluations.jsonl   jobs for checkpoints, what they said and found (jobs.evaluate)
attempts/NNNN/allocated.txt, nodes.txt             nodes of the job, and those of them that train
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
    """The cluster that a run was submitted to. Raises ConfigError when it was not."""
    path = run / "cluster.yaml"
    try:
        cluster = Cluster.model_validate(yaml.safe_load(read_text(path)))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file: this run was never submitted (`baton submit RUN.yaml --cluster FILE`)") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be used ({' '.join(str(error).split())[:200]}); submit the run again") from None
    return cluster


def nodes_of(attempt: Path, file: str = "nodes.txt") -> list[str]:
    """Nodes of an attempt, in the order of their ranks."""
    return [name for name in (attempt / file).read_text(encoding="utf-8").strip().split(",") if name]


def node_name() -> str:
    """This node, as SLURM calls it."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


def write_excluded(run: Path) -> None:
    """excluded.txt anew: the nodes that the cluster file's options exclude (as they are written there, n[1-3] too), and the run's
    own. It is handed to sbatch as --exclude, which takes the place of the script's own #SBATCH --exclude."""
    slurm = cluster_of(run).slurm
    options = () if slurm is None else slurm.options
    named = [found[1] for option in options if (found := re.fullmatch(r"(?:--exclude[= ]|-x ?)\s*(\S+)", option.strip()))]
    write_whole(run / "excluded.txt", ",".join([*named, *policy.excluded(time_ledger.read_rows(run))]))
