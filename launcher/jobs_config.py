"""Settings of SLURM jobs: `SlurmConfig` (`slurm` in a cluster file) and `JobsConfig` (`jobs` in a run file).

Torch-free. They are separate so that a cluster file serves every run, and a run file every cluster.
"""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _duration(text: str) -> str:
    """SLURM's [DAYS-]HOURS:MINUTES:SECONDS and its shorter forms."""
    if not re.fullmatch(r"\d+|\d+:\d+|\d+:\d+:\d+|\d+-\d+(:\d+){0,2}", text):
        raise ValueError('a time limit as SLURM takes it: "24:00:00", "2-12:00:00", or minutes as "90"')
    return text


def _one_line(text: str) -> str:
    """Rejects line breaks: a value that is inserted into a script must not start a new line there."""
    if "\n" in text or "\r" in text:
        raise ValueError("must be one line, without line breaks")
    return text


Line = Annotated[str, Field(min_length=1), AfterValidator(_one_line)]
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.,:=@%+&|*/-]+$")]


def _partitions(text: object) -> object:
    """Removes spaces, and the asterisk with which sinfo marks the default partition, from a comma-separated list."""
    return ",".join(name.strip().removesuffix("*") for name in text.split(",")) if isinstance(text, str) else text


Partitions = Annotated[str, BeforeValidator(_partitions), Field(pattern=r"^[^\s,*]+(,[^\s,*]+)*$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class ContainerConfig(_Settings):
    """The container in which everything except the job script runs. It does not need SLURM's commands."""

    runtime: Literal["pyxis", "apptainer"] = Field(
        "pyxis", description="pyxis: SLURM's container plugin (srun --container-image); apptainer: apptainer exec"
    )
    image: Line = Field(description="image in the runtime's syntax: a .sqsh or .sif file, or registry#name:tag")
    mounts: tuple[Line, ...] = Field(
        (), description="bind mounts as HOST:CONTAINER; they must include the run directory and the data"
    )
    options: tuple[Line, ...] = Field(
        (), description="additional options of srun or apptainer exec, for example --container-writable"
    )


class PreflightConfig(_Settings):
    """Checks that a node must pass before ranks start on it. GPU checks are skipped on CPU nodes."""

    enabled: bool = Field(True, description="check nodes before ranks start; false: a bad node is found only when it fails")
    timeout_s: float = Field(120.0, gt=0, description="seconds for all checks of a node; a node that takes longer fails")
    matmul_share: float = Field(
        0.5, ge=0, le=1, description="minimum share of the cluster file's matmul_tflops.bfloat16 (CPU nodes: reported only)"
    )
    all_reduce_share: float = Field(
        0.25,
        ge=0,
        le=1,
        description="minimum share of the cluster file's bandwidth_gb_s in an all-reduce (CPU nodes: reported only)",
    )
    copy_gb_s: float = Field(5.0, ge=0, description="minimum rate of copies between host and GPU in GB/s (10^9 bytes)")
    files_mb_s: float = Field(
        5.0, ge=0, description="minimum rate of a synced 16 MiB write to the run directory in MB/s (10^6 bytes)"
    )
    skew_s: float = Field(5.0, gt=0, description="maximum difference of a node's clock from the nodes' median, in seconds")


class SlurmConfig(_Settings):
    """SLURM options of a site, and the resources of its nodes."""

    partition: Partitions | None = Field(
        None,
        description="partition, or several as gpu,cpu, of which SLURM uses the first with free nodes; null: SBATCH_PARTITION, or "
        "the cluster's default",
    )
    account: Word | None = Field(None, description="account that is charged; null: SBATCH_ACCOUNT, or the user's default")
    qos: Word | None = Field(None, description="quality of service; null: SBATCH_QOS, or the default")
    constraint: Line | None = Field(None, description="node features to require (--constraint); null: none")
    time: Annotated[str, AfterValidator(_duration)] = Field(
        "24:00:00", description="time limit of one job; the run continues in the next job"
    )
    ranks_per_node: int | None = Field(None, ge=1, description="ranks per node; null: gpus_per_node")
    gpus: bool = Field(True, description="request gpus_per_node GPUs on each node; false: CPU nodes")
    gpu_type: Word | None = Field(None, description="the site's name of the GPU type, for --gres=gpu:TYPE:N; null: any")
    cpus_per_rank: int = Field(8, ge=1, description="CPU cores per rank, including its data workers")
    memory: Word = Field(
        "0", description="memory per node (--mem), for example 64G; 0: all of it. Unused if options has --mem-per-cpu"
    )
    exclusive: bool = Field(True, description="do not share nodes with other jobs")
    options: tuple[Line, ...] = Field((), description="additional #SBATCH options, each as --name=value")
    setup: tuple[Line, ...] = Field((), description="shell lines at the start of the job, for example 'module load cuda'")
    environment: dict[Name, Line] = Field(
        default_factory=dict, description="environment variables of the ranks, for example NCCL's; the shell expands $NAME"
    )
    python: Line | None = Field(
        None, description="Python interpreter with Baton on the nodes or in the container; null: the interpreter that submits"
    )
    container: ContainerConfig | None = Field(None, description="container for the ranks; null: no container")
    scratch: Line = Field("/tmp/baton-$USER", description="node-local folder for kernel caches; the shell expands $NAME")
    interface: Word | None = Field(
        None, description="network interface of the rendezvous, for example ib0; null: the one of the node's host name"
    )
    ports: tuple[int, int] = Field((20000, 29999), description="port range of the rendezvous; the first free port is used")
    local_files: bool = Field(
        False, description="allow a run directory on a file system type that is local to one machine, for example ext4"
    )
    restart: Literal["requeue", "chain", "array"] = Field(
        "requeue",
        description="how a run continues after a job ends. requeue: the same job is requeued; chain: a dependent job is submitted "
        "(singleton); array: a job array that runs one job at a time. The last two are for sites that forbid requeueing",
    )
    array_size: int = Field(50, ge=1, description="restart=array: maximum number of jobs")
    warning_s: int = Field(
        300,
        ge=10,
        description="seconds before the time limit at which ranks are signalled to save a checkpoint; SLURM may signal 60 s early",
    )
    save_timeout_s: float = Field(
        240.0, gt=0, description="seconds from that signal until the checkpoint must be saved; then ranks are killed"
    )
    spare_nodes: int = Field(0, ge=0, description="additional nodes to request, as replacements for bad ones")
    preflight: PreflightConfig = Field(default_factory=PreflightConfig)


class HooksConfig(_Settings):
    """Notifications. Each hook is a shell command, which gets BATON_EVENT, BATON_RUN, BATON_ATTEMPT and BATON_TEXT in its
    environment, or a URL, to which the same values are posted as JSON."""

    start: Line | None = Field(None, description="called when an attempt starts; null: nothing")
    failure: Line | None = Field(None, description="called when an attempt has failed, also if the run continues; null: nothing")
    finish: Line | None = Field(None, description="called when the run is finished or stopped for good; null: nothing")


class JobsConfig(_Settings):
    """Restarts, failure limits and timeouts of a run's jobs."""

    elastic: Literal["data", "none"] = Field(
        "data",
        description="what to do if a job gets another number of nodes. data: set layout.data to the largest size that divides; the "
        "global batch, and thus the result, stays the same. none: refuse to start",
    )
    max_failures: int = Field(100, ge=0, description="failed attempts since the last `baton submit` after which the run is stopped")
    max_failures_without_progress: int = Field(
        2, ge=1, description="consecutive failed attempts without a new step after which the run is stopped"
    )
    max_node_failures: int = Field(
        2, ge=1, description="crashes or hangs on one node after which it is excluded; a dead node is excluded at once"
    )
    hang_timeout_s: float = Field(
        300.0,
        gt=0,
        description="seconds without progress on a rank of a job after which the attempt is restarted (without SLURM: "
        "layout.timeout_s). Every operation of a step, layer, evaluated batch and block of a save counts as progress. Ranks that "
        "wait make none, so it must exceed the time of the slowest rank's part of a save",
    )
    startup_timeout_s: float = Field(
        1800.0,
        gt=0,
        description="as hang_timeout_s, with and without SLURM, until the first step is done and in a first evaluation, which "
        "import modules, compile kernels and read the checkpoint and documents",
    )
    node_timeout_s: float = Field(60.0, gt=0, description="seconds without a heartbeat after which a node counts as dead")
    evaluate: bool = Field(False, description="evaluate each new checkpoint in a job of its own (one node, one rank)")
    evaluations: tuple[str, ...] = Field(
        ("",),
        min_length=1,
        description="what such a job runs, one after the other: options of `baton eval`, such as '--tasks arc_easy,piqa' or "
        "'--data /data/pg19 --length 65536'; '': the run's own validation set",
    )
    evaluate_time: Annotated[str, AfterValidator(_duration)] = Field("01:00:00", description="time limit of an evaluation job")
    hooks: HooksConfig = Field(default_factory=HooksConfig)
