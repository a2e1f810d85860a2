"""Partitions the layers into contiguous pipeline stages so that the slowest stage is as fast as possible. Torch-free.

Stages are balanced by the cost of their layers, not by their number: attention and scans of a hybrid cost differently, and the head
of a large vocabulary costs as much as several layers. The embedding is a lookup and costs nothing here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import inf

from baton.models.config import ModelConfig
from baton.parallel.errors import LayoutError

VECTOR_COST = 16
"""Cost of a FLOP outside the matrix units, which do 15 to 16 times as many in bfloat16 on A100 to H200."""

ATTENTION_COST = 1.5
"""Cost of a FLOP of softmax attention, whose kernels reach less of the matrix units' rate than projections do."""

MATMUL_PASSES = 3
"""Matmuls of a projection in a training step: forward, the gradient of its input, the gradient of its weight."""

RECURRENCE_PASSES = 4
"""Forward passes that a recurrence or the head costs: both are computed again in chunks for the backward pass."""

ATTENTION_PASSES = 4.5
"""Forward passes that softmax attention costs. Its backward pass has seven matrix products where the forward pass has two: the
gradients of queries, and those of keys and values, compute the scores and their gradients each on their own."""


@dataclass(frozen=True)
class Stage:
    """One stage: its index, the number of stages, and the numbers of its layers in the whole model."""

    index: int
    count: int
    layers: range

    @property
    def first(self) -> bool:
        """Whether it has the embedding."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether it has the final norm, the head and the loss."""
        return self.index == self.count - 1


def single_stage(config: ModelConfig) -> Stage:
    """The only stage of a model without pipeline parallelism."""
    return Stage(0, 1, range(config.n_layers))


def partition_layers(config: ModelConfig, count: int, sequence_length: int) -> tuple[Stage, ...]:
    """`count` stages of at least one layer: the slowest as fast as possible, then the others as even as possible.

    sequence_length: tokens of a sequence, on which attention's cost depends. The head counts where the vocabulary is known.
    Raises LayoutError for more stages than layers, or a kind of mixer without `activation_costs`.
    """
    if count == 1:
        return (single_stage(config),)
    if count > config.n_layers:
        raise LayoutError(
            f"layout.pipeline={count} is more stages than model.n_layers={config.n_layers} layers; set layout.pipeline to "
            f"{config.n_layers} or less"
        )
    for name, settings in config.mixers.items():
        if tensors := ", ".join(settings.reads(config.d_model)):
            raise LayoutError(
                f"layout.pipeline={count}: model.mixers.{name} reads {tensors} of an earlier layer, which stages do not send; set "
                f"layout.pipeline=1, or value_residual=none for every name"
            )
    costs = layer_costs(config, sequence_length)
    edges = [0, *_best_boundaries(tuple(costs), head_cost(config), count), len(costs)]
    return tuple(Stage(n, count, range(edges[n], edges[n + 1])) for n in range(count))


def layer_costs(config: ModelConfig, sequence_length: int) -> list[float]:
    """The cost of each layer per token of a training step: FLOPs on matrix units, plus VECTOR_COST times the others, and
    ATTENTION_COST times those of softmax attention."""
    by_name: dict[str, float] = {}
    for name, settings in config.mixers.items():
        try:
            costs = settings.costs(config.d_model)
        except ValueError as error:
            raise LayoutError(f"layout.pipeline: stages are cut by cost, and model.mixers.{name}: {error}") from None
        found = costs.recurrence_flops(sequence_length)
        matmuls = sum(2.0 * p.uses * p.numel for p in costs.parameters)
        by_name[name] = MATMUL_PASSES * matmuls + RECURRENCE_PASSES * (found.matrix + VECTOR_COST * found.vector)
        by_name[name] += ATTENTION_PASSES * ATTENTION_COST * found.attention
    return [sum(by_name[name] for name in layer) for layer in config.layers]


def head_cost(config: ModelConfig) -> float:
    """The cost of the head, in the unit of `layer_costs`; 0 where the vocabulary is not known."""
    if config.vocab_size is None:
        return 0.0
    return RECURRENCE_PASSES * 2.0 * config.d_model * config.padded_vocab_size


@lru_cache(maxsize=64)
def _best_boundaries(costs: tuple[float, ...], head: float, count: int) -> tuple[int, ...]:
    """Boundaries that minimise the largest sum, with the head in the last one, and among those the sum of squares.

    Both are the linear partition problem; dominated pieces are skipped, so the time is about n^2 log(count). Results are kept,
    because a plan compares many settings of one model.
    """
    sums = [0.0, *accumulate(costs)]

    def piece(begin: int, end: int) -> float:
        return sums[end] - sums[begin] + (head if end == len(costs) else 0.0)

    limit, _ = _partition(piece, len(costs), count, max, inf)
    _, cuts = _partition(piece, len(costs), count, lambda before, own: before + own * own, limit)
    return tuple(cuts)


def _partition(
    piece: Callable[[int, int], float], n: int, count: int, join: Callable[[float, float], float], limit: float
) -> tuple[float, list[int]]:
    """The least value of n items in `count` pieces of at most `limit` each, and the boundaries that give it.

    piece(begin, end): the cost of a piece. join(value, cost): the value of a partition with one piece more.
    """
    best = [0.0] + [inf] * n
    begins: list[list[int]] = []
    for k in range(1, count + 1):
        row, places = [inf] * (n + 1), [0] * (n + 1)
        for end in range(k, n + 1):
            for begin in range(end - 1, k - 2, -1):
                own = piece(begin, end)
                # a longer piece is only larger
                if own > limit or join(0.0, own) >= row[end]:
                    break
                value = join(best[begin], own)
                if value < row[end]:
                    row[end], places[end] = value, begin
        best = row
        begins.append(places)
    cuts, end = [], n
    for places in reversed(begins[1:]):
        end = places[end]
        cuts.append(end)
    return best[n], cuts[::-1]
