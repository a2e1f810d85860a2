"""The sbatch script of a run. It is the only part of a job that calls SLURM's commands, and short enough for an administrator to
read.

The script makes no decisions. `python -m baton.slurm.job` decides and says by its exit code what to do; the script does it, outside
any container. Tests compare the scripts of all shipped clusters with golden files.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path

from baton.launcher.cluster import Cluster
from baton.launcher.config import RunConfig
from baton.launcher.jobs_config import SlurmConfig
from baton.slurm import command

NAME = "job.sbatch"

AGAIN, NEXT_JOB, OTHER_NODES = 90, 91, 92
"""Exit codes by which `baton.slurm.job` asks for another attempt: in this job, in the next job, in a job without the bad nodes."""

BODY = r"""
set -u
cd @chdir@ || exit 2
run=@run@
python=@python@
export USER="${USER:-$(id -un)}"
@environment@
# Baton decides, this script acts: begin makes an attempt's folder and prints it, judge looks at what preflight found, and after
# says what is to be done next. It is told what SLURM says of nodes: a container need not have SLURM's commands.
job() { @here@"$python" -P -m baton.slurm.job "$@"; }
BATON_NODES=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)
states() { sinfo -h -N --nodes="$SLURM_JOB_NODELIST" -o '%N %T' | sort -u | paste -sd,; }
export BATON_NODES BATON_STATES
# While SLURM's controller does not answer, nothing is begun and no job is handed in; for half an hour.
answers() { for _ in {1..60}; do scontrol show job "$SLURM_JOB_ID" >/dev/null && return; sleep 30; done; }
# Another job: this one's variables (its memory, its cores) are not to be that one's.
submit() (
    for name in $(compgen -v SLURM_; compgen -v SRUN_); do case $name in @kept@) ;; *) unset "$name" ;; esac; done
    sbatch "$@"
)

# One process per node. COMMAND runs in the background, because a signal interrupts nothing but wait. --overlap: steps follow one
# another, but SLURM may hold one with a dead node for running yet. --immediate: a step that does not begin in a minute ends.
step=
on_nodes() { # on_nodes NODES SECONDS COMMAND...; SECONDS: how long the others may take when one has ended
    local count code nodes=$1 seconds=$2; shift 2
    count=$(tr ',' '\n' <<<"$nodes" | wc -l)
    srun --nodes="$count" --ntasks="$count" --ntasks-per-node=1 --nodelist="$nodes" \
        --cpus-per-task=@cpus@ --overlap --immediate=60 --kill-on-bad-exit=1 --wait="$seconds" @container@"$python" -P -m "$@" &
    step=$!
    while wait "$step"; code=$?; kill -0 "$step" 2>/dev/null; do :; done
    step=
    return "$code"
}

# SIGUSR1 comes @warning@ s before the time limit: ranks finish their step and save. SIGTERM comes when SLURM ends the job; it
# reaches ranks by itself, and whether the job is queued again is not for this script to say.
warned=0 ended=0
trap 'warned=1; [ -z "$step" ] || kill -USR1 "$step" 2>/dev/null' USR1
trap 'ended=1' TERM

@again@
@evaluate@while :; do
    answers
    BATON_STATES=$(states)
    attempt=$(job begin "$run"); code=$?
    if [ "$code" = 0 ]; then
@preflight@        if [ "$code" = 0 ] && [ "$warned$ended" = 00 ]; then
            on_nodes "$(cat "$attempt/nodes.txt")" 30 baton.slurm.agent "$attempt"; code=$?
        fi
        [ "$ended" = 0 ] || exit "$code"
@evaluate_last@        job after "$attempt" "$code" "$warned"; code=$?
    fi
    case $code in
        @here_again@) ;;                # again, at once, on the nodes of this job
        @next_job@) again ;;          # again in a job of its own
        @other_nodes@) again elsewhere ;; # again, without the nodes in excluded.txt
        *) over; exit "$code" ;;   # 0: done; else stopped for good
    esac
done
"""

PREFLIGHT = r"""        # spares included; who does not answer is left out
        on_nodes "$(cat "$attempt/allocated.txt")" @patience@ baton.slurm.preflight "$attempt" >"$attempt/preflight.jsonl"
        code=0 # nodes that were interrupted are not to blame
        if [ "$warned$ended" = 00 ]; then job judge "$attempt"; code=$?; fi
"""

EVALUATE = r"""# A small job for each new checkpoint, once in the run's life.
evaluate() {
    local found step
    for found in "$run"/checkpoints/step-*/manifest.json; do
        step=${found%/manifest.json} step=${step##*/step-}
        if [ -e "$found" ] && (set -o noclobber; : >"$run/evaluations/step-$step.job") 2>/dev/null; then
            submit --parsable "$run/evaluate.sbatch" "$((10#$step))" >"$run/evaluations/step-$step.job"
        fi
    done
}
while sleep 5; do evaluate; done &

"""

REQUEUE = r"""# The same job again, or, where that is refused or other nodes are wanted, a new one that starts after it.
again() {
    answers
    [ $# = 0 ] && scontrol requeue "$SLURM_JOB_ID" && exec sleep infinity # SLURM ends it
    submit --dependency=singleton --exclude="$(cat "$run/excluded.txt" 2>/dev/null)" "$run/job.sbatch" && exit 0
    job refused "$run"; exit
}
over() { :; }
"""

CHAIN = r"""# The successor waits from the start (singleton: until no other job of this name runs): it comes however this job ends.
answers
successor=$(submit --parsable --dependency=singleton --exclude="$(cat "$run/excluded.txt" 2>/dev/null)" "$run/job.sbatch")
successor=${successor%%;*} # ";CLUSTER" follows where there are several
again() {
    [ $# = 0 ] || scontrol update jobid="$successor" ExcNodeList="$(cat "$run/excluded.txt")"
    [ -n "$successor" ] && exit 0
    job refused "$run"; exit
}
over() { scancel "$successor"; }
"""

ARRAY = r"""# The array's next task goes on, one at a time.
again() {
    [ $# = 0 ] || scontrol update jobid="$SLURM_ARRAY_JOB_ID" ExcNodeList="$(cat "$run/excluded.txt")"
    exit 0
}
over() { scancel --state=PENDING "$SLURM_ARRAY_JOB_ID"; }
"""


@dataclass(frozen=True)
class Nodes:
    """The minimum and maximum number of nodes of a job."""

    least: int
    most: int

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}-{self.most}"


def job_name(config: RunConfig) -> str:
    """The name of the run's jobs in SLURM, of which only one runs at a time."""
    return f"baton-{config.name}"


def render(config: RunConfig, cluster: Cluster, nodes: Nodes, *, where: Path, python: str) -> str:
    """The job script. where: absolute path of the run's working directory. python: the interpreter if slurm.python is not set."""
    slurm = cluster.slurm
    assert slurm is not None
    wide = Nodes(nodes.least, nodes.most + slurm.spare_nodes)
    options = [f"#SBATCH {option}" for option in _options(config, cluster, wide)]
    heading = (
        f"# Baton run {config.name} on {cluster.name}: {nodes} nodes of {cluster.ranks_per_node} ranks"
        f"{f' and {slurm.spare_nodes} to spare' if slurm.spare_nodes else ''}. Written by `baton submit`."
    )
    container = in_container(slurm)
    values = {
        "kept": " | ".join(sorted(command.KEPT)),
        "chdir": shlex.quote(str(where)),
        "run": shlex.quote(str(config.folder)),
        "python": shlex.quote(slurm.python or python),
        "environment": "\n".join(environment(slurm)),
        "here": here(slurm, container),
        "container": container,
        "cpus": str(slurm.cpus_per_rank * cluster.ranks_per_node),
        "warning": str(slurm.warning_s),
        "again": {"requeue": REQUEUE, "chain": CHAIN, "array": ARRAY}[slurm.restart],
        "preflight": PREFLIGHT if slurm.preflight.enabled else "",
        "evaluate": EVALUATE if config.jobs.evaluate else "",
        "evaluate_last": "        evaluate\n" if config.jobs.evaluate else "",
        # a bad node ends at once while good ones continue to measure; srun waits for them until their own timeout
        "patience": str(round(slurm.preflight.timeout_s) + 30),
        "here_again": str(AGAIN),
        "next_job": str(NEXT_JOB),
        "other_nodes": str(OTHER_NODES),
    }
    body = BODY
    for name, value in values.items():
        body = body.replace(f"@{name}@", value)
    return "\n".join(["#!/bin/bash", heading, *options]) + "\n" + body


def _options(config: RunConfig, cluster: Cluster, nodes: Nodes) -> list[str]:
    slurm = cluster.slurm
    assert slurm is not None
    wanted: list[str | None] = [
        f"--job-name={job_name(config)}",
        *common_options(slurm),
        f"--nodes={nodes}",
        # no --ntasks: with it, SLURM allocates the minimum of a range of nodes
        f"--cpus-per-task={slurm.cpus_per_rank * cluster.ranks_per_node}",
        # sites that allocate memory per core set --mem-per-cpu in options, and sbatch accepts only one of the two
        None if any(option.startswith("--mem-per-") for option in slurm.options) else f"--mem={slurm.memory}",
        _gpus(cluster),
        "--exclusive" if slurm.exclusive else None,
        f"--time={slurm.time}",
        f"--signal=B:USR1@{slurm.warning_s}",
        "--requeue" if slurm.restart == "requeue" else "--no-requeue",
        f"--array=1-{slurm.array_size}%1" if slurm.restart == "array" else None,
        "--dependency=singleton",
        "--no-kill",
        "--open-mode=append",
        f"--output={shlex.quote(str(config.folder / 'attempts' / 'slurm-%j.out'))}",
        *slurm.options,
    ]
    return [option for option in wanted if option]


def common_options(slurm: SlurmConfig) -> list[str]:
    """sbatch options that the run's jobs and its evaluation jobs share."""
    named = {"partition": slurm.partition, "account": slurm.account, "qos": slurm.qos}
    constraint = [f"--constraint={shlex.quote(slurm.constraint)}"] if slurm.constraint else []
    return [*(f"--{name}={value}" for name, value in named.items() if value), *constraint]


def _gpus(cluster: Cluster) -> str | None:
    slurm = cluster.slurm
    assert slurm is not None
    return f"--gres=gpu:{f'{slurm.gpu_type}:' if slurm.gpu_type else ''}{cluster.gpus_per_node}" if slurm.gpus else None


def in_container(slurm: SlurmConfig) -> str:
    """The words between srun's options and the program, followed by a space; empty without a container."""
    container = slurm.container
    if container is None:
        return ""
    mounts = ",".join(container.mounts)
    if container.runtime == "pyxis":
        words = [f"--container-image={container.image}", *([f"--container-mounts={mounts}"] if mounts else []), *container.options]
    else:
        devices = ["--nv"] if slurm.gpus else []
        words = ["apptainer", "exec", *devices, *(["--bind", mounts] if mounts else []), *container.options, container.image]
    return shlex.join(words) + " "


def here(slurm: SlurmConfig, container: str) -> str:
    """As `in_container`, for a program that the script itself runs. pyxis is a plugin of srun, so there it is a job step."""
    if slurm.container is None or slurm.container.runtime != "pyxis":
        return container
    return f'srun --overlap --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" {container}'


def environment(slurm: SlurmConfig) -> list[str]:
    """Shell lines: the site's setup, and exports for the ranks."""
    caches = {name: f"{slurm.scratch}/{folder}" for name, folder in _CACHES.items()}
    network = {} if slurm.interface is None else dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), slurm.interface)
    exports = [f"export {name}={_expanded(value)}" for name, value in {**caches, **network, **slurm.environment}.items()]
    return [*slurm.setup, *exports]


_CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "CUDA_CACHE_PATH": "cuda"}
"""Caches of compiled kernels. They are on a node-local disk because on shared file systems ranks corrupt each other's entries."""


def _expanded(value: str) -> str:
    """The value in double quotes, such that the shell expands $NAME and nothing else."""
    for character in ("\\", '"', "`"):
        value = value.replace(character, f"\\{character}")
    return f'"{value}"'
