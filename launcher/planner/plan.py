"""What a run will take, before it has a GPU: memory per rank, bytes exchanged, an estimate of its speed, and what to change.

The one thing to know: memory and bytes are counted (`arithmetic`), times are estimated: work at a cluster's rates, one kind after
the other, with nothing overlapped, as long as the slowest pipeline stage takes. What an estimate leaves out is waiting (for kernels
to start, for messages to arrive, for a recurrence's steps that follow one another), so it is what good kernels and long sequences
approach, not what any run reaches.
"""

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from baton.launcher.cluster import Cluster
from baton.launcher.config import RunConfig
from baton.launcher.planner import automatic
from baton.launcher.planner.comm_volume import exchanges
from baton.launcher.planner.memory import Arithmetic, Memory, Operations, of_stages
from baton.launcher.planner.slow_paths import ASSUMED_TB_S, seconds_by_mixer, slow_paths
from baton.launcher.planner.suggestions import first_that_fits

GIB = 1 << 30
LARGEST_TENSOR = 8
"""Ranks of a tensor group that advice goes up to where no cluster says how many GPUs a node has."""

_PARTS = {
    "parameters": "parameters, float32",
    "compute_copies": "compute copies, bfloat16",
    "gradients": "gradients, float32",
    "optimizer": "optimizer",
    "tokens": "the step's tokens",
    "lanes": "States of lanes, from step to step",
    "before": "States of lanes, as before the step",
    "saved": "copy of what a checkpoint holds",
    "states": "States that leave",
    "activations": "activations",
    "borders": "States at segment borders",
    "inputs": "hidden vectors at segment borders",
    "in_hand": "backward of a sub-block",
    "loss": "loss chunk and head gradient",
    "buffers": "optimizer step's buffers",
    "recorded": "recorded passes, beside these",
}


@dataclass(frozen=True)
class Speed:
    """Seconds of one optimizer step by what they go into on the slowest stage; bubble: in which it waits for the others; tokens per
    second of all ranks; the share of the matmul rate that the model's own arithmetic (without what is computed again) is worth.
    eager: recurrences without a kernel, which PyTorch's operators compute (launcher.planner.slow_paths)."""

    matrix: float
    elementwise: float
    memory: float
    eager: float
    exchange: float
    bubble: float
    tokens_per_second: float
    utilisation: float

    @property
    def step(self) -> float:
        return self.matrix + self.elementwise + self.memory + self.eager + self.exchange + self.bubble


@dataclass(frozen=True)
class StagePlan:
    """One pipeline stage; bytes are of one rank of it.

    parameters: that belong to it, all tensor ranks together. in_flight: passes (micro-batches, or segments of them) whose
    activations are kept at once. exchange: bytes that a rank sends per optimizer step, by purpose. host: bytes of host memory that
    a save is copied into, beside memory or, without a GPU, in it.
    """

    layers: range
    parameters: int
    in_flight: int
    memory: Memory
    exchange: dict[str, int]
    host: int

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "layers": [self.layers.start, self.layers.stop - 1],
            "parameters": self.parameters,
            "in_flight": self.in_flight,
            "memory": {**asdict(self.memory), "peak": self.memory.peak},
            "exchange": self.exchange,
            "host": self.host,
        }


@dataclass(frozen=True)
class Plan:
    """A run's plan; bytes are of one rank.

    stages: in order. fullest: number of the stage that needs most memory. activations: of a pass on it, {False: as they are kept,
    True: with recomputation}. bubble: share of the passes' time in which a stage waits for others. capacity: bytes that a rank may
    fill, None: not known. choice: for settings that are `auto`, with which all else is planned; None: none is. advice: settings
    that make it fit, () when it fits or nothing that was tried does.
    """

    config: RunConfig
    stages: tuple[StagePlan, ...]
    fullest: int
    activations: dict[bool, int]
    micro_batches: int
    bubble: float
    speed: Speed | None
    capacity: int | None
    choice: automatic.Choice | None
    advice: tuple[str, ...]
    cluster: str | None
    notes: tuple[str, ...]

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return sum(stage.parameters for stage in self.stages)

    @property
    def memory(self) -> Memory:
        """Of a rank of the fullest stage."""
        return self.stages[self.fullest].memory

    @property
    def host(self) -> int:
        """Bytes of host memory that a rank's saves are copied into, on the stage that has most of it."""
        return max(stage.host for stage in self.stages)

    @property
    def exchange(self) -> dict[str, int]:
        """Bytes that a rank sends per optimizer step, by purpose, on the stage that sends most of it."""
        names = dict.fromkeys(name for stage in self.stages for name in stage.exchange)
        return {name: max(stage.exchange.get(name, 0) for stage in self.stages) for name in names}

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
            "bptt": self._bptt(),
            "memory": {**asdict(self.memory), "peak": self.memory.peak},
            "activations": {"kept": self.activations[False], "recomputed": self.activations[True]},
            "host": self.host,
            "exchange": self.exchange,
            "stages": [stage.to_json() for stage in self.stages],
            "fullest_stage": self.fullest,
            "bubble": self.bubble,
            "seconds": None if self.speed is None else {**asdict(self.speed), "step": self.speed.step},
            "capacity": self.capacity,
            "fits": self.fits,
            "recompute": self.config.training.recompute,
            "cuda_graphs": self.config.training.cuda_graphs,
            "advice": list(self.advice),
            "notes": list(self.notes),
        }

    def _bptt(self) -> dict[str, Any] | None:
        """How sequences are cut; None: not at all."""
        training = self.config.training
        if training.bptt is None:
            return None
        return {
            "mode": training.bptt.mode,
            "segment": training.segment,
            "segments": training.segments,
            "gradient_segments": training.gradient_segments,
        }

    def lines(self) -> Iterator[str]:
        """The table, and the verdict as its last line."""
        config, layout = self.config, self.config.layout
        where = f" on {self.cluster}" if self.cluster else ""
        yield (
            f"{config.name}: {self.parameters:,} parameters, {layout.world_size} ranks{where} "
            f"(tensor {layout.tensor}, pipeline {layout.pipeline}, context {layout.context}, data {layout.data}, "
            f"ZeRO-{layout.zero}), {self.micro_batches} micro-batches of "
            f"{config.training.micro_batch_size} x {config.training.sequence_length} "
            f"tokens a step"
        )
        if (cut := self._bptt()) is not None:
            yield (
                f"{cut['mode']} backpropagation through time: {cut['segments']} segments of {cut['segment']} tokens a sequence, a "
                f"gradient through {cut['gradient_segments']} of them"
            )
        yield ""
        if len(self.stages) > 1:
            yield from self._stage_lines()
        yield f"memory per rank{self._of_stage()}"
        for name, text in self._parts().items():
            value = getattr(self.memory, name)
            if value:
                yield _row(text, value)
        yield _row("at the highest moment", self.memory.peak)
        other = config.training.recompute != "full"
        word = "full" if other else "none"
        yield f"  (a {self._pass}'s activations with training.recompute={word}: {_size(self.activations[other])})"
        yield ""
        if not self.memory.saved:
            yield "host memory per rank" + (", on the stage that has most" if len(self.stages) > 1 else "")
            yield _row("copy of what a checkpoint holds, page-locked", self.host)
            yield ""
        yield "sent by each rank per step" + (", on the stage that sends most" if len(self.stages) > 1 else "")
        if not self.exchange:
            yield "  nothing: one rank"
        for name, value in self.exchange.items():
            yield _row(name, value)
        yield ""
        if self.speed is not None:
            yield "time per step, estimated, nothing overlapped, no waiting" + (" but for stages" if len(self.stages) > 1 else "")
            label = {"matrix": "matrix products", "elementwise": "elementwise arithmetic", "memory": "memory traffic"}
            label["eager"] = "PyTorch's operators where no kernel is"
            shown = {"bubble": len(self.stages) > 1, "eager": self.speed.eager > 0}
            for name in ("matrix", "elementwise", "memory", "eager", "exchange", "bubble", "step"):
                if shown.get(name, True):
                    yield f"  {label.get(name, name):<44}{getattr(self.speed, name):>11.3f} s"
            yield f"  {self.speed.tokens_per_second:,.0f} tokens/s, {self.speed.utilisation:.0%} of the matrix rate"
            yield ""
        yield from self.notes
        if self.choice is not None:
            yield str(self.choice)
        yield self.verdict()

    def _parts(self) -> dict[str, str]:
        zero, kept = self.config.layout.zero, self.stages[self.fullest].in_flight
        held = f"master copy and moments (ZeRO-{zero})" if zero else "moments, whole (ZeRO-0)"
        return _PARTS | {
            "optimizer": held,
            "activations": f"activations of {f'a {self._pass}' if kept == 1 else f'{kept} {self._passes}'}",
        }

    @property
    def _pass(self) -> str:
        """What goes forwards and backwards at a time."""
        return "segment" if self.config.training.segments > 1 else "micro-batch"

    @property
    def _passes(self) -> str:
        return "segments" if self.config.training.segments > 1 else "micro-batches"

    def _stage_lines(self) -> Iterator[str]:
        yield f"{'stage':<7}{'layers':<12}{'parameters':>16}{f'{self._passes} kept':>21}{'highest moment':>17}"
        for number, stage in enumerate(self.stages):
            layers = f"{stage.layers.start}-{stage.layers.stop - 1}"
            size = _size(stage.memory.peak)
            yield f"{number:<7}{layers:<12}{stage.parameters:>16,}{stage.in_flight:>21}{size:>17}"
        yield f"bubble: {self.bubble:.0%} of the {self._passes}' time a stage waits for others"
        yield ""

    def _of_stage(self) -> str:
        return f" of stage {self.fullest}, which has most" if len(self.stages) > 1 else ""

    def verdict(self) -> str:
        """One line."""
        peak = _size(self.memory.peak)
        if self.capacity is None:
            return f"needs {peak} per rank; --cluster FILE or --memory-gib N says whether that fits"
        off = _size(abs(self.capacity - self.memory.peak))
        if self.fits:
            return f"fits: {peak} of {_size(self.capacity)} per rank, {off} to spare"
        what = (
            f"fits with {shlex.join(self.advice)}"
            if self.advice
            else "nothing that was tried fits; take a smaller model or context"
        )
        return f"does not fit: {peak} of {_size(self.capacity)} per rank, {off} too much; {what}"


def make_plan(config: RunConfig, cluster: Cluster | None = None, memory_gib: float | None = None) -> Plan:
    """The plan of a checked configuration whose vocabulary is known.

    cluster: where it would run; None: no times. memory_gib: GiB that a rank may fill; None: the cluster's.
    Raises ConfigError for what cannot be counted.
    """
    if memory_gib is None and cluster is not None:
        memory_gib = cluster.usable_gib
    capacity = None if memory_gib is None else int(memory_gib * GIB)
    kind = None if cluster is None or config.device != "auto" else cluster.kind
    given = config
    config, choice = automatic.resolve(given, capacity, kind)
    counted = of_stages(config)
    stages = tuple(
        StagePlan(
            layers=one.stage.layers,
            parameters=one.parameter_count,
            in_flight=one.in_flight,
            memory=one.memory(),
            exchange={name: exchanged.bytes for name, exchanged in exchanges(one).items()},
            host=one.host_bytes,
        )
        for one in counted
    )
    fullest = max(range(len(stages)), key=lambda n: stages[n].memory.peak)
    advice: tuple[str, ...] = ()
    if capacity is not None and stages[fullest].memory.peak > capacity:
        advice = first_that_fits(given, capacity, LARGEST_TENSOR if cluster is None else cluster.gpus_per_node)
    return Plan(
        config=config,
        stages=stages,
        fullest=fullest,
        activations={full: counted[fullest].activations(full_recompute=full) for full in (False, True)},
        micro_batches=counted[0].micro_batches,
        bubble=_bubble(counted),
        speed=None if cluster is None else _speed(config, counted, cluster),
        capacity=capacity,
        choice=choice,
        advice=advice,
        cluster=None if cluster is None else cluster.name,
        notes=tuple(_notes(config, counted[0], cluster)),
    )


def _bubble(counted: tuple[Arithmetic, ...]) -> float:
    """Of the slowest stage. The stages fill and empty once a round, and each then waits for as many passes, forwards and backwards,
    as there are other stages: (stages - 1) / (passes + stages - 1), or less where some of them are surveyed besides."""
    slowest = max(counted, key=lambda one: one.operations().cost + one.surveying().cost)
    own, waits = 1 + slowest.surveying().cost / slowest.operations().cost, (len(counted) - 1) / slowest.round
    return waits / (own + waits)


def _speed(config: RunConfig, counted: tuple[Arithmetic, ...], cluster: Cluster) -> Speed:
    waits = (len(counted) - 1) / counted[0].round
    rate = getattr(cluster.matmul_tflops, config.compute_dtype) * 1e12
    of_stage = max((_stage_seconds(one, rate, waits, cluster) for one in counted), key=lambda seconds: sum(seconds))
    seconds, tokens = sum(of_stage), config.training.global_batch_tokens
    useful = sum(one.useful_flops() for one in counted) * tokens / (config.layout.world_size * seconds * rate)
    return Speed(*of_stage, tokens / seconds, useful)


def _stage_seconds(
    arithmetic: Arithmetic, rate: float, waits: float, cluster: Cluster
) -> tuple[float, float, float, float, float, float]:
    """Seconds of a stage's ranks in Speed's order. waits: passes' worth of waiting for other stages, per pass."""
    sent = exchanges(arithmetic).values()

    def seconds(work: Operations) -> tuple[float, float, float]:
        bandwidth = cluster.memory_bandwidth_tb_s * 1e12
        return work.matrix / rate, work.vector / (cluster.matmul_tflops.float32 * 1e12), work.memory / bandwidth

    def sending(*, once: bool, survey: bool) -> float:
        these = [one for one in sent if one.once is once and one.survey is survey]
        return sum(cluster.seconds(one.bytes, one.members, one.stride, pairs=one.pairs) for one in these)

    work = arithmetic.operations()
    own, surveyed = seconds(work), seconds(arithmetic.surveying())
    each = sending(once=False, survey=False)
    matrix, elementwise, memory = (a + b for a, b in zip(own, surveyed, strict=True))
    exchange = each + sending(once=False, survey=True) + sending(once=True, survey=False)
    eager = sum(seconds_by_mixer(arithmetic, cluster.memory_bandwidth_tb_s).values()) if arithmetic.work.gpu else 0.0
    # the update, and what is exchanged for it, waits for nobody; surveys are in step with the passes forwards
    update, bubble = work.update / (cluster.memory_bandwidth_tb_s * 1e12), (sum(own) + eager + each) * waits
    return matrix, elementwise, memory + update, eager, exchange, bubble


def _notes(config: RunConfig, one: Arithmetic, cluster: Cluster | None) -> Iterator[str]:
    layout = config.layout
    yield from config.notes()
    if one.round < layout.pipeline and one.together > 1:
        yield (
            f"note: {one.round} segments that a gradient goes through together do not fill layout.pipeline={layout.pipeline} "
            f"stages, which wait for each other; take shorter segments (training.bptt.segment), or fewer stages"
        )
    elif one.round < layout.pipeline:
        yield (
            f"note: {one.round} {'segments' if config.training.segments > 1 else 'micro-batches'} do not fill "
            f"layout.pipeline={layout.pipeline} stages, which wait for each other; take more of them "
            f"(smaller training.micro_batch_size, larger training.global_batch_tokens, smaller layout.data), or fewer stages"
        )
    device = "cuda" if one.work.gpu else "cpu"
    yield from map(str, slow_paths(config, device, ASSUMED_TB_S if cluster is None else cluster.memory_bandwidth_tb_s))
    if cluster is None:
        return
    node = cluster.gpus_per_node
    if layout.tensor > node or (layout.world_size > node and node % layout.tensor):
        yield f"note: groups of layout.tensor={layout.tensor} ranks reach over nodes of {node} GPUs: every layer waits for it"
    if layout.world_size > node and layout.world_size % node:
        yield f"note: {layout.world_size} ranks leave GPUs idle on nodes of {node}"


def _size(nbytes: int) -> str:
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:,.2f} {name}"
    return f"{nbytes} bytes"


def _row(text: str, nbytes: int) -> str:
    return f"  {text:<44}{_size(nbytes):>14}"
