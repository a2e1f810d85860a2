"""Pipeline stages are contiguous, and no other partition has a faster slowest stage."""

import itertools
import random
from math import log2

import pytest
from support.presets import presets

from baton.models import stages
from baton.models.config import ModelConfig
from baton.models.stages import Stage, _best_boundaries, head_cost, layer_costs, partition_layers, single_stage
from baton.parallel.errors import LayoutError


def shipped(name, **changes):
    return ModelConfig(**presets()[name].model_dump() | changes)


def sums_of(costs, head, cuts):
    edges = [0, *cuts, len(costs)]
    sums = [sum(costs[a:b]) for a, b in itertools.pairwise(edges)]
    return [*sums[:-1], sums[-1] + head]


@pytest.mark.parametrize("seed", range(60))
def test_no_other_cut_is_better(seed):
    """Against every cut there is: the slowest stage is as fast, and of such cuts the sum of squares is as small."""
    draw = random.Random(seed)
    n = draw.randint(2, 9)
    # whole numbers, so that sums are exact; a few large ones, also last and first
    costs = [float(draw.choice([1, 2, 3, draw.randint(1, 30)])) for _ in range(n)]
    head = float(draw.choice([0, 1, 5, 40]))
    for count in range(2, n + 1):
        found = sums_of(costs, head, _best_boundaries(tuple(costs), head, count))
        every = [sums_of(costs, head, cuts) for cuts in itertools.combinations(range(1, n), count - 1)]
        slowest = min(max(sums) for sums in every)
        assert max(found) == slowest
        assert sum(x * x for x in found) == min(sum(x * x for x in sums) for sums in every if max(sums) == slowest)


@pytest.mark.parametrize("name", presets())
def test_stages_are_contiguous_nonempty_and_all_layers(name):
    config = shipped(name)
    assert partition_layers(config, 1, 2048) == (single_stage(config),)
    if any(settings.reads(config.d_model) for settings in config.mixers.values()):
        with pytest.raises(LayoutError, match="which stages do not send"):
            partition_layers(config, 2, 2048)
        return
    for count in (2, 3, 4, 7, config.n_layers):
        stages = partition_layers(config, count, 2048)
        assert [n for stage in stages for n in stage.layers] == list(range(config.n_layers))
        assert [(stage.index, stage.count) for stage in stages] == [(n, count) for n in range(count)]
        assert all(stage.layers for stage in stages)
        assert [stage.first for stage in stages] == [True] + [False] * (count - 1)
        assert [stage.last for stage in stages] == [False] * (count - 1) + [True]
        assert partition_layers(config.model_copy(), count, 2048) == stages


def test_the_head_is_on_the_last_stage():
    """Mamba 130m has 24 equal layers and a head that costs as much as several of them."""
    config = shipped("mamba-130m")
    costs, head = layer_costs(config, 2048), head_cost(config)
    layers = [len(stage.layers) for stage in partition_layers(config, 4, 2048)]
    assert len(set(costs)) == 1
    assert head > 3 * costs[0]
    assert layers[-1] < min(layers[:-1])
    without = partition_layers(config.model_copy(update={"vocab_size": None}), 4, 2048)
    assert [len(stage.layers) for stage in without] == [6, 6, 6, 6]


def slowest_of(config, stages, sequence_length):
    costs, head = layer_costs(config, sequence_length), head_cost(config)
    return max(sum(costs[n] for n in stage.layers) + head * stage.last for stage in stages)


@pytest.mark.parametrize(("window", "length"), [(2048, 65536), (None, 32768)])
def test_a_hybrid_is_cut_by_cost_not_by_count(window, length):
    """Every eighth layer of the shipped hybrid is attention and an MLP, which a long context makes dearer than a Mamba layer."""
    config = shipped("hybrid-130m", mixers={"attention": {"window": window}})
    costs = layer_costs(config, length)
    assert costs[7] == costs[15] == costs[23] > 1.1 * costs[0]
    found = partition_layers(config, 6, length)
    by_count = [Stage(n, 6, range(4 * n, 4 * n + 4)) for n in range(6)]
    assert [len(stage.layers) for stage in found] != [4] * 6
    assert slowest_of(config, found, length) < 0.85 * slowest_of(config, by_count, length)


def test_a_long_context_moves_the_cut_towards_attention():
    config = shipped("hybrid-130m", mixers={"attention": {"window": None}}, n_layers=12, vocab_size=None)
    # layer 7 is the only attention
    assert [len(stage.layers) for stage in partition_layers(config, 3, 1024)] == [4, 4, 4]
    assert [len(stage.layers) for stage in partition_layers(config, 3, 262144)] == [7, 1, 4]


def test_the_largest_cuts_look_at_few_pieces(monkeypatch):
    """About n^2 log(count) of them and not n^2 count, twice: counted, since a time would be the machine's."""
    partition, looked = stages._partition, []

    def counting(piece, *words):
        def seen(begin, end):
            looked.append((begin, end))
            return piece(begin, end)

        return partition(seen, *words)

    monkeypatch.setattr(stages, "_partition", counting)
    n, count = 128, 16
    assert len(partition_layers(shipped("hybrid-130m", n_layers=n), count, 2048)) == count
    print(f"{len(looked):,} pieces")
    assert len(looked) < 2 * n**2 * log2(count)
    assert len(looked) < n**2 * count / 2


def test_more_stages_than_layers_are_refused():
    with pytest.raises(
        LayoutError, match=r"layout\.pipeline=25 is more stages than model\.n_layers=24 layers; set .* to 24 or less"
    ):
        partition_layers(shipped("mamba-130m"), 25, 2048)
