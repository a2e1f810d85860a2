"""Which layers each pipeline stage has: contiguous, cut so that the slowest stage is as fast as it can be. Torch-free.

The one thing to know: stages are balanced by what their layers cost, not by how many they are: a hybrid's attention is not its
scan, and the head of a large vocabulary costs as much as several layers. The embedding only looks up and counts nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from baton.models.config import ModelConfig
from baton.parallel.errors import LayoutError

VECTOR_COST = 16
"""What an operation outside the matrix units counts: on A100 to H200 they are 15 to 16 times slower in bfloat16's favour."""

MATMUL_PASSES = 3
"""A projection runs once forwards, and in backward for the gradients of its input and of its weight."""

RECURRENCE_PASSES = 4
"""A recurrence's chunks run again in backward, and so does the head, whose logits are never whole."""


@dataclass(frozen=True)
class Stage:
    """One stage: its number, how many there are, and its layers' numbers in the whole model."""

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


def whole(config: ModelConfig) -> Stage:
    """The only stage of a model that is not cut."""
    return Stage(0, 1, range(config.n_layers))


def cut(config: ModelConfig, count: int, sequence_length: int) -> tuple[Stage, ...]:
    """`count` stages of at least one layer, the slowest as fast as can be, the others as even as that leaves them.

    context: tokens of a sequence, on which attention's cost depends. The head counts where the vocabulary is known.
    Raises LayoutError for more stages than layers, or a kind of mixer without `activation_costs`.
    """
    if count == 1:
        return (whole(config),)
    if count > config.n_layers:
        raise LayoutError(
            f"layout.pipeline={count} is more stages than model.n_layers={config.n_layers} layers; set layout.pipeline to "
            f"{config.n_layers} or less"
        )
    costs = layer_costs(config, sequence_length)
    edges = [0, *_best_cuts(costs, head_cost(config), count), len(costs)]
    return tuple(Stage(n, count, range(edges[n], edges[n + 1])) for n in range(count))


def layer_costs(config: ModelConfig, sequence_length: int) -> list[float]:
    """Of each layer, per token of a training step: operations on matrix units, and VECTOR_COST times those elsewhere."""
    of: dict[str, float] = {}
    for name, settings in config.mixers.items():
        try:
            costs = settings.costs(config.d_model)
        except ValueError as error:
            raise LayoutError(f"layout.pipeline: stages are cut by cost, and model.mixers.{name}: {error}") from None
        matrix, vector = costs.recurrence_flops(sequence_length)
        matmuls = sum(2.0 * p.uses * p.numel for p in costs.parameters)
        of[name] = MATMUL_PASSES * matmuls + RECURRENCE_PASSES * (matrix + VECTOR_COST * vector)
    return [sum(of[name] for name in layer) for layer in config.layers]


def head_cost(config: ModelConfig) -> float:
    """Of the head, in layer_costs' unit; 0 where the vocabulary is not known."""
    if config.vocab_size is None:
        return 0.0
    return RECURRENCE_PASSES * 2.0 * config.d_model * config.padded_vocab_size


def _best_cuts(costs: list[float], head: float, count: int) -> list[int]:
    """Where to cut so that the largest sum is least, the last piece's with the head; of those, the least sum of squares.

    Both are the classic linear partition; pieces that cannot be the answer's are not looked at, so time is about n^2 log(count).
    """
    sums = [0.0, *accumulate(costs)]

    def piece(begin: int, end: int) -> float:
        return sums[end] - sums[begin] + (head if end == len(costs) else 0.0)

    limit, _ = _partition(piece, len(costs), count, max, inf)
    _, cuts = _partition(piece, len(costs), count, lambda before, own: before + own * own, limit)
    return cuts


def _partition(
    piece: Callable[[int, int], float], n: int, count: int, join: Callable[[float, float], float], limit: float
) -> tuple[float, list[int]]:
    """The least value of n items in `count` pieces none of which exceeds `limit`, and where it cuts. join: the value of some pieces
    and one more."""
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
