"""How long a run's steps take, estimated: work at a cluster's rates, one kind after the other, as long as the slowest stage takes.

Nothing overlaps, and nothing waits: not for kernels to start, for messages to arrive, nor for a recurrence's steps that follow one
another. An estimate is what good kernels and long sequences approach. On one and four H200s, steps of Mamba and GSA at 1.3B with
16,384 tokens a micro-batch took 0.95 to 1.15 times as long as estimated (benchmarks/results/scaling.json, with which
tests/launcher/test_plan_command.py compares); two of the clusters' rates were set by them. A third, softmax attention's, was set by
full attention over 65,536 and 1,048,576 tokens (full_attention.json, long_context.json). Where the GPU waits for the host, with
2,048 tokens, a step took four times as long.
"""

from dataclasses import dataclass

from baton.launcher.cluster import Cluster
from baton.launcher.config import RunConfig
from baton.launcher.planner.comm_volume import exchanges
from baton.launcher.planner.memory import Arithmetic, of_stages
from baton.launcher.planner.operations import Operations
from baton.launcher.planner.slow_paths import seconds_by_mixer

UNCERTAINTY = (
    "an estimate from the cluster's rates, not a measurement: steps can take longer, several times as long where micro-batches "
    "are small and the GPU waits for the host; once a run has begun, its measured tokens/s are the better basis"
)


_Seconds = tuple[float, float, float, float, float, float, float]


@dataclass(frozen=True)
class Speed:
    """Seconds of one optimizer step by what they go into on the slowest stage; bubble: in which it waits for the others; tokens per
    second of all ranks; the share of the matmul rate that the model's own arithmetic (without what is computed again) is worth.
    attention: softmax attention's matrix products. eager: recurrences without a kernel, which PyTorch's operators compute
    (launcher.planner.slow_paths). fetch: copies of keys and values from the host, where they are offloaded."""

    matrix: float
    attention: float
    elementwise: float
    memory: float
    eager: float
    exchange: float
    fetch: float
    bubble: float
    tokens_per_second: float
    utilisation: float

    @property
    def step(self) -> float:
        return self.matrix + self.attention + self.elementwise + self.memory + self.eager + self.exchange + self.fetch + self.bubble


@dataclass(frozen=True)
class Duration:
    """Of a whole run's steps, without evaluations, saves and failures. gpus: ranks, each with a GPU."""

    steps: int
    tokens: int
    seconds: float
    gpus: int

    @property
    def gpu_hours(self) -> float:
        return self.seconds * self.gpus / 3600

    def __str__(self) -> str:
        return (
            f"whole run, at this estimate: {self.steps:,} steps, {self.tokens:,} tokens, {self.seconds / 3600:,.1f} hours on "
            f"{self.gpus:,} GPU{'s' if self.gpus > 1 else ''}, {self.gpu_hours:,.1f} GPU-hours; without evaluations, saves and "
            f"failures"
        )


def run_duration(config: RunConfig, cluster: Cluster) -> Duration:
    """Of all steps, those of the warm-up of batch size and sequence length each at their own speed. Raises ConfigError."""
    phases = config.training.phases
    firsts = [first for first, _ in phases]
    seconds, tokens = 0.0, 0
    for (first, settings), after in zip(phases, (*firsts[1:], config.training.steps), strict=True):
        phase = config.model_copy(update={"training": settings})
        seconds += (after - first) * speed(phase, of_stages(phase), cluster).step
        tokens += (after - first) * settings.global_batch_tokens
    return Duration(config.training.steps, tokens, seconds, config.layout.world_size)


def bubble(counted: tuple[Arithmetic, ...]) -> float:
    """Share of the passes' time in which the slowest stage waits for others.

    The stages fill and empty once a round, and each then waits for as many passes, forwards and backwards, as there are other
    stages: (stages - 1) / (passes + stages - 1), or less where some of them are surveyed besides.
    """
    slowest = max(counted, key=lambda one: one.operations().cost + one.surveying().cost)
    own, waits = 1 + slowest.surveying().cost / slowest.operations().cost, (len(counted) - 1) / slowest.round
    return waits / (own + waits)


def speed(config: RunConfig, counted: tuple[Arithmetic, ...], cluster: Cluster) -> Speed:
    """Of an optimizer step. counted: the configuration's stages."""
    waits = (len(counted) - 1) / counted[0].round
    rate = getattr(cluster.matmul_tflops, config.compute_dtype) * 1e12
    found = [_stage_seconds(one, rate, cluster) for one in counted]
    # a stage waits for the slowest one's passes, whichever stage the whole step waits for
    of_stage = (*max((own for own, _ in found), key=sum), waits * max(passes for _, passes in found))
    seconds, tokens = sum(of_stage), config.training.global_batch_tokens
    useful = sum(one.useful_flops() for one in counted) * tokens / (config.layout.world_size * seconds * rate)
    return Speed(*of_stage, tokens / seconds, useful)


def _stage_seconds(arithmetic: Arithmetic, rate: float, cluster: Cluster) -> tuple[_Seconds, float]:
    """Seconds of a stage's ranks in Speed's order without waiting, and those of its passes, for which other stages wait."""
    sent = exchanges(arithmetic).values()

    def seconds(work: Operations) -> tuple[float, float, float, float]:
        bandwidth, rates = cluster.memory_bandwidth_tb_s * 1e12, cluster.matmul_tflops
        products = work.matrix / (rate * rates.share_in_passes), work.attention / (rate * rates.share_in_attention)
        return *products, work.vector / (rates.float32 * 1e12), work.memory / bandwidth

    def sending(*, once: bool, survey: bool) -> float:
        these = [one for one in sent if one.once is once and one.survey is survey]
        share = cluster.bandwidth_gb_s.share_in_passes
        return sum(
            cluster.seconds(one.bytes, one.members, one.stride, pairs=one.pairs) / (1 if once or one.pairs else share)
            for one in these
        )

    work = arithmetic.operations()
    own, surveyed = seconds(work), seconds(arithmetic.surveying())
    each = sending(once=False, survey=False)
    matrix, attention, elementwise, memory = (a + b for a, b in zip(own, surveyed, strict=True))
    exchange = each + sending(once=False, survey=True) + sending(once=True, survey=False)
    eager = sum(seconds_by_mixer(arithmetic, cluster.memory_bandwidth_tb_s).values()) if arithmetic.work.gpu else 0.0
    # the update and its communication wait for no other stage; surveys are synchronous with the forward passes
    update = work.update / (cluster.memory_bandwidth_tb_s * 1e12)
    fetch = arithmetic.fetched / (cluster.bandwidth_gb_s.to_host * 1e9)
    return (matrix, attention, elementwise, memory + update, eager, exchange, fetch), sum(own) + eager + each + fetch
