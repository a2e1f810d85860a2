"""Plans a run without a GPU: memory per rank, bytes exchanged, time, and suggested changes.

Memory and bytes are counted (launcher.planner.memory, launcher.planner.comm_volume); times are estimated (launcher.planner.time).
"""

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from baton.launcher.cluster import MOST_GIB, Cluster
from baton.launcher.config import RunConfig
from baton.launcher.devices import Kind
from baton.launcher.planner import automatic
from baton.launcher.planner.comm_volume import exchanges
from baton.launcher.planner.host_memory import HostMemory, Node
from baton.launcher.planner.memory import Arithmetic, by_recomputation, of_stages
from baton.launcher.planner.parts import Memory
from baton.launcher.planner.size_text import row, size
from baton.launcher.planner.slow_paths import ASSUMED_TB_S, slow_paths
from baton.launcher.planner.suggestions import first_that_fits, larger_micro_batches
from baton.launcher.planner.time import UNCERTAINTY, Duration, Speed, bubble, run_duration, speed

GIB = 1 << 30
WORTH_SAYING = 0.99
"""Share of a step's time above which a larger micro-batch is not suggested."""

LARGEST_TENSOR = 8
"""Maximum size of a suggested tensor group if no cluster says how many GPUs a node has."""

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
class StagePlan:
    """Plan of one pipeline stage. Bytes are those of one rank.

    parameters: number of the stage's parameters over all tensor ranks.
    in_flight: passes (micro-batches, or segments of them) whose activations are in memory at the same time.
    exchange: bytes that a rank sends per optimizer step, by purpose.
    host: bytes of host memory for the copy of a save; without a GPU they are a part of memory. offloaded: bytes of it for keys and
        values of earlier segments, likewise.
    """

    layers: range
    parameters: int
    in_flight: int
    memory: Memory
    exchange: dict[str, int]
    host: int
    offloaded: int

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "layers": [self.layers.start, self.layers.stop - 1],
            "parameters": self.parameters,
            "in_flight": self.in_flight,
            "memory": {**asdict(self.memory), "peak": self.memory.peak},
            "exchange": self.exchange,
            "host": self.host,
            "offloaded": self.offloaded,
        }


@dataclass(frozen=True)
class Plan:
    """A run's plan. Bytes are those of one rank.

    stages: the pipeline stages in order.
    fullest: index of the stage that needs the most memory.
    activations: bytes of a pass on it, {False: as configured, or with nothing recomputed, True: with full recomputation}.
    bubble: share of the passes' time in which a stage waits for others.
    duration: of the whole run; None: unknown.
    capacity: bytes that a rank can use; None: unknown. on_host: what the ranks of a node page-lock.
    larger: a larger micro-batch size that fits and is faster, and the bytes of a rank with it; None: there is none.
    choice: values chosen for settings that are `auto`, which the plan assumes; None: no setting is.
    advice: settings with which the run fits; () if it fits, or if nothing that was tried does.
    """

    config: RunConfig
    stages: tuple[StagePlan, ...]
    fullest: int
    activations: dict[bool, int]
    micro_batches: int
    bubble: float
    speed: Speed | None
    duration: Duration | None
    capacity: int | None
    larger: tuple[int, int] | None
    choice: automatic.Choice | None
    advice: tuple[str, ...]
    cluster: str | None
    on_host: HostMemory
    notes: tuple[str, ...]

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model."""
        return sum(stage.parameters for stage in self.stages)

    @property
    def memory(self) -> Memory:
        """Bytes of a rank of the fullest stage."""
        return self.stages[self.fullest].memory

    @property
    def host(self) -> int:
        """Bytes of host memory for the copy of a rank's save, on the stage with the most."""
        return max(stage.host for stage in self.stages)

    @property
    def offloaded(self) -> int:
        """Bytes of host memory for a rank's keys and values of earlier segments, on the stage with the most."""
        return max(stage.offloaded for stage in self.stages)

    @property
    def exchange(self) -> dict[str, int]:
        """Bytes that a rank sends per optimizer step, by purpose, on the stage that sends the most."""
        names = dict.fromkeys(name for stage in self.stages for name in stage.exchange)
        return {name: max(stage.exchange.get(name, 0) for stage in self.stages) for name in names}

    @property
    def fits(self) -> bool | None:
        """Whether the run fits; None if the capacity is unknown."""
        return None if self.capacity is None else self.memory.peak <= self.capacity and self.on_host.fits

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
            "offloaded": self.offloaded,
            "host_of_node": self.on_host.of_node,
            "host_capacity": self.on_host.capacity,
            "exchange": self.exchange,
            "stages": [stage.to_json() for stage in self.stages],
            "fullest_stage": self.fullest,
            "bubble": self.bubble,
            "seconds": None if self.speed is None else {**asdict(self.speed), "step": self.speed.step},
            "duration": None if self.duration is None else {**asdict(self.duration), "gpu_hours": self.duration.gpu_hours},
            "capacity": self.capacity,
            "larger_micro_batch_size": None if self.larger is None else self.larger[0],
            "fits": self.fits,
            "recompute": self.config.training.recompute,
            "cuda_graphs": self.config.training.cuda_graphs,
            "offload_kv": self.config.training.offload_kv,
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
                yield row(text, value)
        yield row("at the highest moment", self.memory.peak)
        other = config.training.recompute != "full"
        word = "full" if other else "none"
        yield f"  (a {self._pass}'s activations with training.recompute={word}: {size(self.activations[other])})"
        yield ""
        if not self.memory.saved:
            yield "host memory per rank" + (", on the stage that has most" if len(self.stages) > 1 else "")
            for text, value in self.on_host.rows():
                yield row(text, value)
            yield ""
        yield "sent by each rank per step" + (", on the stage that sends most" if len(self.stages) > 1 else "")
        if not self.exchange:
            yield "  nothing: one rank"
        for name, value in self.exchange.items():
            yield row(name, value)
        yield ""
        if self.speed is not None:
            yield "time per step, estimated, nothing overlapped, no waiting" + (" but for stages" if len(self.stages) > 1 else "")
            label = {"matrix": "matrix products", "elementwise": "elementwise arithmetic", "memory": "memory traffic"}
            label["attention"] = "matrix products of softmax attention"
            label["eager"] = "PyTorch's operators where no kernel is"
            label["fetch"] = "keys and values from the host"
            shown = {"bubble": len(self.stages) > 1} | {x: getattr(self.speed, x) > 0 for x in ("attention", "eager", "fetch")}
            for name in ("matrix", "attention", "elementwise", "memory", "eager", "exchange", "fetch", "bubble", "step"):
                if shown.get(name, True):
                    yield f"  {label.get(name, name):<44}{getattr(self.speed, name):>11.3f} s"
            yield f"  {self.speed.tokens_per_second:,.0f} tokens/s, {self.speed.utilisation:.0%} of the matrix rate"
            yield str(self.duration)
            yield UNCERTAINTY
            yield ""
        yield from self.notes
        if self.choice is not None:
            yield str(self.choice)
        yield self.verdict()

    def _parts(self) -> dict[str, str]:
        zero, kept = self.config.layout.zero, self.stages[self.fullest].in_flight
        held = f"moments of a part (ZeRO-{zero})" if zero else "moments, whole (ZeRO-0)"
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
            yield f"{number:<7}{layers:<12}{stage.parameters:>16,}{stage.in_flight:>21}{size(stage.memory.peak):>17}"
        yield f"bubble: {self.bubble:.0%} of the {self._passes}' time a stage waits for others"
        yield ""

    def _of_stage(self) -> str:
        return f" of stage {self.fullest}, which has most" if len(self.stages) > 1 else ""

    def verdict(self) -> str:
        """One line."""
        peak = size(self.memory.peak)
        if self.capacity is None:
            return f"needs {peak} per rank; --cluster FILE or --memory-gib N says whether that fits"
        off = size(abs(self.capacity - self.memory.peak))
        if self.fits:
            verdict = f"fits: {peak} of {size(self.capacity)} per rank, {off} to spare"
            if self.larger is None:
                return verdict
            return f"{verdict}; faster with training.micro_batch_size={self.larger[0]}, which fits too ({size(self.larger[1])})"
        if self.memory.peak <= self.capacity:
            return f"does not fit: {self.on_host.shortage()}"
        what = (
            f"fits with {shlex.join(self.advice)}"
            if self.advice
            else "nothing that was tried fits; take a smaller model or context"
        )
        host, choice = "", self.choice
        if choice is not None and not choice.offload_kv and (other := choice.excluded) is not None and other.usable is not None:
            host = f" (with training.offload_kv=true, {size(other.of_node)} of {size(other.usable)} of a node's host memory)"
        return f"does not fit: {peak} of {size(self.capacity)} per rank, {off} too much{host}; {what}"


def make_plan(config: RunConfig, cluster: Cluster | None = None, memory_gib: float | None = None) -> Plan:
    """Plans a checked configuration whose vocabulary size is known.

    cluster: the cluster; None: no times. memory_gib: GiB that a rank can use; None: the cluster's. Raises ConfigError if a mixer's
    costs are unknown.
    """
    if memory_gib is None and cluster is not None:
        memory_gib = cluster.usable_gib
    capacity = None if memory_gib is None else int(min(memory_gib, MOST_GIB) * GIB)
    kind = None if cluster is None or config.device != "auto" else cluster.kind
    if kind == "cpu":  # what a rank has in memory, and where its copies lie, is another thing than beside a GPU
        config = config.model_copy(update={"device": "cpu"})
    given, node = config, None if cluster is None else Node.of(cluster)
    config, choice = automatic.resolve(given, capacity, kind, node=node)
    counted = of_stages(config)
    estimate = None if cluster is None else speed(config, counted, cluster)
    stages = tuple(
        StagePlan(
            layers=one.stage.layers,
            parameters=one.parameter_count,
            in_flight=one.in_flight,
            memory=one.memory(),
            exchange={name: exchanged.bytes for name, exchanged in exchanges(one).items()},
            host=one.host_bytes,
            offloaded=one.offloaded,
        )
        for one in counted
    )
    fullest = max(range(len(stages)), key=lambda n: stages[n].memory.peak)
    advice: tuple[str, ...] = ()
    if capacity is not None and stages[fullest].memory.peak > capacity:
        largest = LARGEST_TENSOR if cluster is None else cluster.gpus_per_node
        advice = first_that_fits(given, capacity, largest, lambda stages: HostMemory.of(stages, node).fits)
    larger = None
    if capacity is not None and stages[fullest].memory.peak <= capacity:
        larger = _larger(given, capacity, kind, cluster, estimate)
    return Plan(
        config=config,
        stages=stages,
        fullest=fullest,
        activations=by_recomputation(config, fullest),
        micro_batches=counted[0].micro_batches,
        bubble=bubble(counted),
        speed=estimate,
        duration=None if cluster is None else run_duration(config, cluster),
        larger=larger,
        capacity=capacity,
        choice=choice,
        advice=advice,
        cluster=None if cluster is None else cluster.name,
        on_host=HostMemory.of(counted, node),
        notes=tuple(_notes(config, counted[0], cluster)),
    )


def _larger(
    given: RunConfig, capacity: int, kind: Kind | None, cluster: Cluster | None, now: Speed | None
) -> tuple[int, int] | None:
    """Plan.larger. now: the speed with the present size, None without a cluster: then a larger micro-batch is assumed to be faster
    if there is only one pipeline stage."""
    node = None if cluster is None else Node.of(cluster)
    for candidate in larger_micro_batches(given, capacity, kind, node):
        counted = of_stages(candidate)
        if not HostMemory.of(counted, node).fits:
            continue
        if cluster is None or now is None:
            faster = len(counted) == 1
        else:
            faster = speed(candidate, counted, cluster).step <= WORTH_SAYING * now.step
        if faster:
            return candidate.training.micro_batch_size, max(one.memory().peak for one in counted)
    return None


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
