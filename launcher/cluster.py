"""A cluster: memory, compute rates, bandwidths and SLURM settings of its nodes. Torch-free.

All rates are achieved rates and not those of data sheets. The shipped files in configs/clusters say where their figures come from.
A file with rates measured on your own cluster gives better plans.
"""

from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from baton.launcher.devices import Kind
from baton.launcher.errors import ConfigError
from baton.launcher.jobs_config import SlurmConfig
from baton.launcher.validation import first_problem
from baton.launcher.yaml_file import parse_yaml, read_yaml

GIB = 1 << 30

MOST_GIB = GIB
"""Of any memory, GiB: an exbibyte."""


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_truth(cls, value: Any) -> Any:
        """YAML's true would be the number 1."""
        if isinstance(value, bool):
            raise ValueError("a number is wanted, not true or false")
        return value


class MatmulRates(_Settings):
    """Matmul rates of one GPU in TFLOP/s (10^12 operations; a multiply-add counts as two)."""

    bfloat16: float = Field(gt=0, description="large matrix products in bfloat16 with float32 sums")
    float32: float = Field(
        gt=0, description="in float32 without TensorFloat-32; elementwise arithmetic is counted at this rate too"
    )
    share_in_passes: float = Field(1.0, gt=0, le=1, description="of these rates, what matrix products reach within a step")
    share_in_attention: float = Field(
        0.6,
        gt=0,
        le=1,
        description="of these rates, what softmax attention's products reach, forwards and backwards; the default is that of "
        "Hopper GPUs with long sequences",
    )


class Bandwidth(_Settings):
    """Bandwidths of one GPU in one direction in GB/s (10^9 bytes), achieved in large collectives."""

    in_node: float = Field(gt=0, description="to the other GPUs of its node")
    between_nodes: float = Field(gt=0, description="to other nodes, its share of the node's network")
    to_host: float = Field(
        50.0,
        gt=0,
        description="from and to page-locked memory of its host, while all GPUs of the node copy; the default is four fifths of a "
        "PCIe 5 x16 link's 63",
    )
    share_in_passes: float = Field(
        1.0,
        gt=0,
        le=1,
        description="of these rates, what collectives within a layer reach: those of tensor ranks, which are small, and begin when "
        "the slowest rank comes",
    )


class Cluster(_Settings):
    """A cluster of nodes with equal GPUs, with as many nodes as a run's layout needs."""

    name: str = Field(min_length=1, description="of the cluster, for the plan's heading")
    gpus_per_node: int = Field(ge=1, description="GPUs that the fast network joins")
    memory_gib: float = Field(gt=0, le=MOST_GIB, description="memory of one GPU, GiB (2^30 bytes)")
    reserved_gib: float | None = Field(
        None,
        ge=0,
        le=MOST_GIB,
        description="memory of one GPU that no tensor gets, GiB: the CUDA context, NCCL's and cuBLAS's buffers, gaps between the "
        "allocator's blocks, and what an estimate may be wrong by; null: 3 GiB and 3 % of the memory",
    )
    host_memory_gib: float | None = Field(
        None,
        gt=0,
        le=MOST_GIB,
        description="memory of a node's host, GiB, of which ranks page-lock nine tenths at most, for copies of saves and keys and "
        "values of earlier segments; null: unknown, and not compared",
    )
    matmul_tflops: MatmulRates
    memory_bandwidth_tb_s: float = Field(gt=0, description="reading and writing a GPU's memory, TB/s (10^12 bytes)")
    bandwidth_gb_s: Bandwidth
    slurm: SlurmConfig | None = Field(None, description="how jobs are submitted; null: this cluster is only planned for")

    @property
    def usable_gib(self) -> float:
        """Memory of one GPU that a rank can use, in GiB."""
        reserved = self.reserved_gib
        return max(0.0, self.memory_gib - (reserved_bytes(int(self.memory_gib * GIB)) / GIB if reserved is None else reserved))

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks that a job starts on a node."""
        return (self.slurm.ranks_per_node if self.slurm is not None else None) or self.gpus_per_node

    @property
    def kind(self) -> Kind:
        """Kind of device of the ranks."""
        return "cuda" if self.slurm is None or self.slurm.gpus else "cpu"

    def seconds(self, sent: int, members: int, stride: int, *, pairs: bool = False) -> float:
        """Seconds to send `sent` bytes per rank in a ring of `members` ranks whose numbers are `stride` apart.

        A ring enters and leaves a node once, through as many network shares as it has members there. With pairs each rank sends to
        its neighbour, and the time is that of the slowest, whose neighbour is on another node.
        """
        if members * stride <= self.gpus_per_node:
            rate = self.bandwidth_gb_s.in_node
        else:
            together = 1 if pairs else min(members, max(1, self.gpus_per_node // stride))
            outside = together * self.bandwidth_gb_s.between_nodes
            rate = outside if together == 1 else min(self.bandwidth_gb_s.in_node, outside)
        return sent / (rate * 1e9)


def reserved_bytes(memory: int) -> int:
    """Bytes of a GPU that tensors cannot use, if no cluster file says it. memory: the GPU's bytes.

    On an H100 (79.2 GiB for PyTorch) a run that was planned to take 74.8 GiB (mamba-1.4b, 8 x 2048) ran out of memory, and one of
    73.8 GiB (longhorn-1.3b) did not: benchmarks/results/steps_before_and_after_renames.log.
    """
    return 3 * GIB + memory * 3 // 100


def load_cluster(where: str) -> Cluster:
    """A shipped cluster by name (configs/clusters), or one from a .yaml file. Raises ConfigError with one line."""
    shipped = files("baton.configs") / "clusters"
    names = sorted(entry.name.removesuffix(".yaml") for entry in shipped.iterdir() if entry.name.endswith(".yaml"))
    if where not in names and not where.endswith((".yaml", ".yml")):
        raise ConfigError(f"no cluster is called {where!r}; known: {', '.join(names)} (or the path of a .yaml file)")
    if where in names:
        values = parse_yaml((shipped / f"{where}.yaml").read_text(encoding="utf-8"))
    else:
        values = read_yaml(Path(where), "the file: ")
    try:
        return Cluster.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{where}: {first_problem(error, Cluster, words=False)}") from None
