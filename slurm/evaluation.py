"""The script of evaluation jobs (jobs.evaluate), one job per new checkpoint, so that training does not wait for evaluations.

The job script submits them (script.EVALUATE), because a container may not have sbatch.
"""

import shlex
from pathlib import Path

from baton.launcher.cluster import Cluster
from baton.launcher.config import RunConfig
from baton.slurm.script import common_options, environment, job_name

NAME = "evaluate.sbatch"

BODY = r"""
# sbatch {name} STEP
set -u
cd {chdir} || exit 2
export USER="${{USER:-$(id -un)}}"
{environment}
status=0
{evaluations}
exit "$status"
"""
EVALUATION = 'srun --ntasks=1 {container}{python} -P -m baton.launcher.cli eval {run} --step "$1"{options} || status=$?'


def render(config: RunConfig, cluster: Cluster, *, where: Path, python: str, container: str) -> str:
    """The script; its argument is the checkpoint's step."""
    slurm = cluster.slurm
    assert slurm is not None
    options = [
        f"--job-name={job_name(config)}-evaluate",
        *common_options(slurm),
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={slurm.cpus_per_rank}",
        *(["--gres=gpu:1"] if slurm.gpus else []),
        f"--time={config.jobs.evaluate_time}",
        "--open-mode=append",
        f"--output={shlex.quote(str(config.folder / 'evaluations' / 'slurm-%j.out'))}",
    ]
    heading = f"# Evaluates a checkpoint of the Baton run {config.name}. Written by `baton submit`."
    run, python = shlex.quote(str(config.folder)), shlex.quote(slurm.python or python)
    lines = ["".join(f" {shlex.quote(word)}" for word in shlex.split(line)) for line in config.jobs.evaluations]
    body = BODY.format(
        name=NAME,
        chdir=shlex.quote(str(where)),
        environment="\n".join(environment(slurm)),
        evaluations="\n".join(EVALUATION.format(container=container, python=python, run=run, options=options) for options in lines),
    )
    return "\n".join(["#!/bin/bash", heading, *(f"#SBATCH {option}" for option in options)]) + "\n" + body
