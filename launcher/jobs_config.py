"""Settings of jobs: what a site's SLURM wants (the cluster file's `slurm`), and how a run is kept alive (the run's `jobs`).

Torch-free. The one thing to know: a cluster file holds nothing of one run, and a run's file nothing of one cluster.
"""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _duration(text: str) -> str:
    """SLURM's [DAYS-]HOURS:MINUTES:SECONDS and its shorter forms."""
    if not re.fullmatch(r"\d+|\d+:\d+|\d+:\d+:\d+|\d+-\d+(:\d+){0,2}", text):
        raise ValueError('a time limit as SLURM takes it: "24:00:00", "2-12:00:00", or minutes as "90"')
    return text


def _one_line(text: str) -> str:
    """What stands in a script must not begin another line of it."""
    if "\n" in text or "\r" in text:
        raise ValueError("one line, please")
    return text


Line = Annotated[str, Field(min_length=1), AfterValidator(_one_line)]
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.,:=@%+&|*/-]+$")]


def _partitions(text: object) -> object:
    """A list as SLURM takes it; spaces, and the asterisk by which sinfo marks the default one, are left out."""
    return ",".join(name.strip().removesuffix("*") for name in text.split(",")) if isinstance(text, str) else text


Partitions = Annotated[str, BeforeValidator(_partitions), Field(pattern=r"^[^\s,*]+(,[^\s,*]+)*$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class ContainerConfig(_Settings):
    """A container that everything but the script runs in. It need not have SLURM's commands."""

    runtime: Literal["pyxis", "apptainer"] = Field(
        "pyxis", description="SLURM's plugin (srun --container-image), or apptainer exec"
    )
    image: Line = Field(description="image, as the runtime takes it: a .sqsh or .sif file, or registry#name:tag")
    mounts: tuple[Line, ...] = Field((), description="FROM:TO; the run directory and the data must be among them")
    options: tuple[Line, ...] = Field((), description="more options for srun or for apptainer exec, as --container-writable")


class PreflightConfig(_Settings):
    """What a node must show before ranks start on it. Shares are of the cluster file's rates. CPU nodes have no GPU checks."""

    enabled: bool = Field(True, description="false: ranks start at once, and a bad node is found by what it breaks")
    timeout_s: float = Field(120.0, gt=0, description="seconds for all checks together; a node that takes longer is bad")
    matmul_share: float = Field(0.5, ge=0, le=1, description="of matmul_tflops.bfloat16 (CPU nodes: not judged, but reported)")
    all_reduce_share: float = Field(0.25, ge=0, le=1, description="of bandwidth_gb_s that an all-reduce must reach (CPU: reported)")
    copy_gb_s: float = Field(5.0, ge=0, description="GB/s (10^9 bytes) from host to GPU and back")
    files_mb_s: float = Field(5.0, ge=0, description="MB/s (10^6 bytes) of a synced write of 16 MiB into the run directory")
    skew_s: float = Field(5.0, gt=0, description="seconds that a node's clock may differ from the others' median")


class SlurmConfig(_Settings):
    """What a site's SLURM wants to hear, and what its nodes offer."""

    partition: Partitions | None = Field(
        None, description="one, or several as gpu,cpu: whichever has nodes first; null: SBATCH_PARTITION, or the cluster's default"
    )
    account: Word | None = Field(None, description="who pays; null: SBATCH_ACCOUNT, or the user's default")
    qos: Word | None = Field(None, description="quality of service; null: SBATCH_QOS, or the default")
    constraint: Line | None = Field(None, description="features that nodes must have")
    time: Annotated[str, AfterValidator(_duration)] = Field("24:00:00", description="limit of one job; the run goes on in the next")
    ranks_per_node: int | None = Field(None, ge=1, description="processes that train on a node; null: gpus_per_node")
    gpus: bool = Field(True, description="ask for gpus_per_node GPUs; false: CPU nodes")
    gpu_type: Word | None = Field(None, description="as the site names it, for --gres=gpu:TYPE:N; null: any")
    cpus_per_rank: int = Field(8, ge=1, description="cores per rank: the rank itself and its readers")
    memory: Word = Field("0", description="--mem per node, as 64G; 0: all of it; not used where options has --mem-per-cpu")
    exclusive: bool = Field(True, description="no other jobs on the nodes")
    options: tuple[Line, ...] = Field((), description="more #SBATCH options, each as --name=value")
    setup: tuple[Line, ...] = Field((), description="shell lines before anything else, as 'module load cuda'")
    environment: dict[Name, Line] = Field(
        default_factory=dict, description="variables for the ranks, as NCCL's; the shell expands $NAME"
    )
    python: Line | None = Field(
        None, description="Python that Baton is installed in, as VENV/bin/python, or the container's; null: the one that submits"
    )
    container: ContainerConfig | None = Field(None, description="null: none")
    scratch: Line = Field("/tmp/baton-$USER", description="node-local folder for kernel caches; the shell expands $NAME")
    interface: Word | None = Field(None, description="network interface of the rendezvous, as ib0; null: the node's name says")
    ports: tuple[int, int] = Field((20000, 29999), description="where the rendezvous may listen; the first free port is taken")
    local_files: bool = Field(False, description="allow a run directory on a file system that is of one machine by its type")
    restart: Literal["requeue", "chain", "array"] = Field(
        "requeue",
        description="how a run goes on after its job: the same job again; where that is forbidden a successor that waits "
        "(singleton), or a job array that runs one at a time",
    )
    array_size: int = Field(50, ge=1, description="array: jobs at most")
    warning_s: int = Field(
        300, ge=10, description="seconds before the time limit at which ranks are told to save; SLURM may be 60 early"
    )
    save_timeout_s: float = Field(
        240.0, gt=0, description="seconds after that within which a save must have ended; then ranks are killed"
    )
    spare_nodes: int = Field(0, ge=0, description="nodes beyond those that train, for when one is bad")
    preflight: PreflightConfig = Field(default_factory=PreflightConfig)


class HooksConfig(_Settings):
    """What is told of a run's life: a shell command (BATON_EVENT, BATON_RUN, BATON_ATTEMPT, BATON_TEXT in its environment), or a
    URL that is sent the same as JSON."""

    start: Line | None = Field(None, description="an attempt starts")
    failure: Line | None = Field(None, description="an attempt failed, whether or not the run goes on")
    finish: Line | None = Field(None, description="the run is over: done, or stopped for good")


class JobsConfig(_Settings):
    """How a run is kept alive over its jobs."""

    elastic: Literal["data", "none"] = Field(
        "data",
        description="what follows the number of nodes that a job got: layout.data (the largest that divides; the global batch, and "
        "so what is learned, stays), or nothing: other numbers are refused",
    )
    max_failures: int = Field(100, ge=0, description="failed attempts since the last `baton submit` before the run is stopped")
    max_failures_without_progress: int = Field(
        2, ge=1, description="failed attempts in a row without one new step before the run is stopped"
    )
    max_node_failures: int = Field(
        2, ge=1, description="crashes or hangs of ranks on one node before it is excluded; a dead node is at once"
    )
    hang_timeout_s: float = Field(
        300.0,
        gt=0,
        description="seconds that a rank of a job may give no sign of life (without SLURM: layout.timeout_s); every operation of a "
        "step, layer, evaluated batch and block of a save gives one. A rank that waits for others gives none: longer than the "
        "slowest rank takes for its part of a save, which the others wait for",
    )
    startup_timeout_s: float = Field(
        1800.0,
        gt=0,
        description="the same, with and without SLURM, until the first step is done and in a first evaluation: imports, kernels "
        "compiled, checkpoint and documents read",
    )
    node_timeout_s: float = Field(60.0, gt=0, description="seconds without a sign of life of a node before it counts as dead")
    evaluate: bool = Field(False, description="evaluate each new checkpoint in a small job of its own (one node, one rank)")
    evaluate_time: Annotated[str, AfterValidator(_duration)] = Field("01:00:00", description="limit of such a job")
    hooks: HooksConfig = Field(default_factory=HooksConfig)
