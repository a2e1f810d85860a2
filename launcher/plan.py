"""What a run will take, before it has a GPU: memory per rank, bytes exchanged, an estimate of its speed, and what to change.

The one thing to know: memory and bytes are counted (`arithmetic`), times are estimated: work at a cluster's rates, one kind after
the other, with nothing overlapped. What an estimate leaves out is waiting (for kernels to start, for messages to arrive, for a
recurrence's steps that follow one another), so it is what good kernels and long sequences approach, not what any run reaches.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from baton.launcher.arithmetic import Arithmetic, Memory
from baton.launcher.cluster import Cluster
from baton.launcher.config import RunConfig
from baton.launcher.errors import ConfigError
from baton.parallel.config import divisors

GIB = 1 << 30
LARGEST_TENSOR = 8
"""Ranks of a tensor group that advice goes up to where no cluster says how many GPUs a node has."""

_PARTS = {
    "parameters": "parameters, float32",
    "compute_copies": "compute copies, bfloat16",
    "gradients": "gradients, float32",
    "optimizer": "master copy and moments (ZeRO-1)",
    "states": "carried states",
    "activations": "activations of a micro-batch",
    "in_hand": "backward of a sub-block",
    "loss": "loss chunk and head gradient",
    "buffers": "optimizer step's buffers",
}


@dataclass(frozen=True)
class Speed:
    """Seconds of one optimizer step by what they go into; tokens per second of all ranks; the share of the matmul rate that the
    model's own arithmetic (without what is computed again) is worth."""

    matrix: float
    elementwise: float
    memory: float
    exchange: float
    tokens_per_second: float
    utilisation: float

    @property
    def step(self) -> float:
        return self.matrix + self.elementwise + self.memory + self.exchange


@dataclass(frozen=True)
class Plan:
    """A run's plan; bytes are of one rank.

    activations: of a micro-batch, {False: as they are kept, True: with recomputation}. exchange: bytes that a rank sends per
    optimizer step, by purpose. capacity: bytes that a rank may fill, None: not known. advice: settings that make it fit, "" when it
    fits or nothing that was tried does.
    """

    config: RunConfig
    parameters: int
    memory: Memory
    activations: dict[bool, int]
    exchange: dict[str, int]
    micro_batches: int
    speed: Speed | None
    capacity: int | None
    advice: tuple[str, ...]
    cluster: str | None
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool | None:
        """None where nobody said how much memory there is."""
        return None if self.capacity is None else self.memory.peak <= self.capacity

    def to_json(self) -> dict[str, Any]:
        """Plain values: bytes, seconds, counts."""
        return {
            "name": self.config.name,
            "layout": self.config.layout.model_dump(mode="json"),
            "ranks": self.config.layout.world_size,
            "cluster": self.cluster,
            "parameters": self.parameters,
            "micro_batches": self.micro_batches,
            "memory": {**asdict(self.memory), "peak": self.memory.peak},
            "activations": {"kept": self.activations[False], "recomputed": self.activations[True]},
            "exchange": self.exchange,
            "seconds": None if self.speed is None else {**asdict(self.speed), "step": self.speed.step},
            "capacity": self.capacity,
            "fits": self.fits,
            "advice": list(self.advice),
            "notes": list(self.notes),
        }

    def lines(self) -> Iterator[str]:
        """The table, and the verdict as its last line."""
        config, layout = self.config, self.config.layout
        where = f" on {self.cluster}" if self.cluster else ""
        yield (
            f"{config.name}: {self.parameters:,} parameters, {layout.world_size} ranks{where} "
            f"(tensor {layout.tensor}, sequence {layout.sequence}, data {layout.data}), "
            f"{self.micro_batches} micro-batches of {config.training.micro_batch} x {config.training.context} tokens a step"
        )
        yield ""
        yield "memory per rank"
        for name, text in _PARTS.items():
            value = getattr(self.memory, name)
            if value:
                yield _row(text, value)
        yield _row("at the highest moment", self.memory.peak)
        other = not config.training.recompute
        yield f"  (activations with training.recompute={str(other).lower()}: {_size(self.activations[other])})"
        yield ""
        yield "sent by each rank per step"
        if not self.exchange:
            yield "  nothing: one rank"
        for name, value in self.exchange.items():
            yield _row(name, value)
        yield ""
        if self.speed is not None:
            yield "time per step, estimated, nothing overlapped, no waiting"
            for name in ("matrix", "elementwise", "memory", "exchange", "step"):
                label = {"matrix": "matrix products", "elementwise": "elementwise arithmetic", "memory": "memory traffic"}
                yield f"  {label.get(name, name):<44}{getattr(self.speed, name):>11.3f} s"
            yield f"  {self.speed.tokens_per_second:,.0f} tokens/s, {self.speed.utilisation:.0%} of the matrix rate"
            yield ""
        yield from self.notes
        yield self.verdict()

    def verdict(self) -> str:
        """One line."""
        peak = _size(self.memory.peak)
        if self.capacity is None:
            return f"needs {peak} per rank; --cluster FILE or --memory-gib N says whether that fits"
        off = _size(abs(self.capacity - self.memory.peak))
        if self.fits:
            return f"fits: {peak} of {_size(self.capacity)} per rank, {off} to spare"
        what = (
            f"fits with {' '.join(self.advice)}" if self.advice else "nothing that was tried fits; take a smaller model or context"
        )
        return f"does not fit: {peak} of {_size(self.capacity)} per rank, {off} too much; {what}"


def make_plan(config: RunConfig, cluster: Cluster | None = None, memory_gib: float | None = None) -> Plan:
    """The plan of a checked configuration whose vocabulary is known.

    cluster: where it would run; None: no times. memory_gib: GiB that a rank may fill; None: the cluster's.
    Raises ConfigError for what cannot be counted.
    """
    if memory_gib is None and cluster is not None:
        memory_gib = cluster.memory_gib - cluster.reserved_gib
    capacity = None if memory_gib is None else int(memory_gib * GIB)
    arithmetic = Arithmetic(config)
    memory = arithmetic.memory()
    advice: tuple[str, ...] = ()
    if capacity is not None and memory.peak > capacity:
        advice = _first_that_fits(config, capacity, LARGEST_TENSOR if cluster is None else cluster.gpus_per_node)
    return Plan(
        config=config,
        parameters=arithmetic.parameter_count,
        memory=memory,
        activations={again: arithmetic.activations(recompute=again) for again in (False, True)},
        exchange={name: one.bytes for name, one in arithmetic.exchange().items()},
        micro_batches=arithmetic.micro_batches,
        speed=None if cluster is None else _speed(config, arithmetic, cluster),
        capacity=capacity,
        advice=advice,
        cluster=None if cluster is None else cluster.name,
        notes=() if cluster is None else tuple(_notes(config, cluster)),
    )


def _speed(config: RunConfig, arithmetic: Arithmetic, cluster: Cluster) -> Speed:
    work, rates = arithmetic.operations(), cluster.matmul_tflops
    rate = getattr(rates, config.training.precision) * 1e12
    matrix, elementwise = work.matrix / rate, work.vector / (rates.float32 * 1e12)
    memory = work.memory / (cluster.memory_tb_s * 1e12)
    exchange = sum(cluster.seconds(one.bytes, one.members, one.stride, pairs=one.pairs) for one in arithmetic.exchange().values())
    seconds, tokens = matrix + elementwise + memory + exchange, config.training.global_batch_tokens
    useful = arithmetic.useful_flops() * tokens / (config.layout.world_size * seconds * rate)
    return Speed(matrix, elementwise, memory, exchange, tokens / seconds, useful)


def _notes(config: RunConfig, cluster: Cluster) -> Iterator[str]:
    layout, node = config.layout, cluster.gpus_per_node
    if layout.tensor > node or (layout.world_size > node and node % layout.tensor):
        yield f"note: groups of layout.tensor={layout.tensor} ranks reach over nodes of {node} GPUs: every layer waits for it"
    if layout.world_size > node and layout.world_size % node:
        yield f"note: {layout.world_size} ranks leave GPUs idle on nodes of {node}"


def _first_that_fits(config: RunConfig, capacity: int, largest_tensor: int) -> tuple[str, ...]:
    for words, candidate in _candidates(config, largest_tensor):
        if Arithmetic(candidate).memory().peak <= capacity:
            return words
    return ()


def _candidates(config: RunConfig, largest_tensor: int) -> Iterator[tuple[tuple[str, ...], RunConfig]]:
    """Legal changes, the least costly first: on the same ranks recomputation, then smaller micro-batches, then both; the same with
    more data ranks (each then has less of the optimizer), and with more tensor ranks."""
    training, layout = config.training, config.layout
    smaller = [n for n in reversed(divisors(training.micro_batch)) if n < training.micro_batch]
    savings: list[dict[str, Any]] = [{}]
    if not training.recompute:
        savings.append({"recompute": True})
    savings += [{"micro_batch": n} for n in smaller]
    if not training.recompute:
        savings += [{"recompute": True, "micro_batch": n} for n in smaller]
    data = [n for n in divisors(training.sequences_per_step) if n > layout.data]
    tensor = [layout.tensor * n for n in range(2, largest_tensor // layout.tensor + 1)]
    for ranks in ({}, *({"data": n} for n in data), *({"tensor": n} for n in tensor)):
        for saving in savings:
            if not ranks and not saving:
                continue
            candidate = config.model_copy(
                update={"training": training.model_copy(update=saving), "layout": layout.model_copy(update=ranks)}
            )
            if _is_legal(candidate):
                words = [f"training.{name}={str(value).lower()}" for name, value in saving.items()]
                yield (*words, *(f"layout.{name}={value}" for name, value in ranks.items())), candidate


def _is_legal(config: RunConfig) -> bool:
    try:
        config.check()
    except Exception as error:
        if getattr(error, "exit_status", None) != ConfigError.exit_status:
            raise
        return False
    return True


def _size(nbytes: int) -> str:
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:,.2f} {name}"
    return f"{nbytes} bytes"


def _row(text: str, nbytes: int) -> str:
    return f"  {text:<44}{_size(nbytes):>14}"
