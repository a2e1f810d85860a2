"""On a GPU: a forward pass without a graph has the bits of one with a graph, at the widths and lengths that users run.

Exact BPTT runs segments twice, first without a graph, and refuses a step whose second pass ends in another State. Small tests
do not show it: a compiler that may round either product of a b + c d chooses for each compiled kernel, of which there is one for
each set of block sizes.
"""

import re
from collections import defaultdict
from operator import itemgetter

import pytest
import torch
from support.presets import presets
from support.recurrences import positions, seeded

from baton.models.config import ModelConfig
from baton.models.forward_context import ForwardContext
from baton.models.library import language_model
from baton.parallel.context_parallel import ContextLink

pytestmark = pytest.mark.gpu


def shortest(model: ModelConfig) -> ModelConfig:
    """With one layer of each kind that the model has, and a small vocabulary."""
    layers = list(dict.fromkeys(model.sub_blocks))
    pattern = ["+".join(map("|".join, layer)) for layer in layers]
    return ModelConfig(**model.model_dump() | {"n_layers": len(layers), "pattern": pattern, "vocab_size": 512})


def narrowest_and_widest():
    """Of each family of presets."""
    families = defaultdict(list)
    for name, model in presets().items():
        families[re.sub(r"-[\d.]+[mb]$", "", name)].append((model.d_model, name, model))
    ends = {
        name: model
        for found in families.values()
        for _, name, model in (min(found, key=itemgetter(0)), max(found, key=itemgetter(0)))
    }
    return [pytest.param(shortest(model), id=name) for name, model in ends.items()]


@pytest.mark.timeout(600)  # kernels are compiled
@pytest.mark.parametrize("model", narrowest_and_widest())
def test_a_pass_without_a_graph_has_the_bits_of_one_with(model):
    """Two segments of three in bfloat16, of which the second begins with the first one's State, for a length that kernels split
    among programs and one that they do not."""
    built = language_model(model, dtype=torch.bfloat16, device="cuda", seed=3)
    for rows, length in ((1, 16384), (8, 1024)):
        tokens = torch.randint(512, (rows, 3 * length), generator=seeded(5)).cuda()
        pos = positions(seeded(6), rows, 3 * length, 0.002).cuda().to(torch.int32)
        link = ContextLink(0, [0], torch.device("cuda"))
        passes = []
        for number in range(2):
            span = slice(number * length, (number + 1) * length)
            first, again = built.recomputation(link)
            with torch.no_grad(), link.segment(number, count=3), first:
                y, states = built(tokens[:, span], pos[:, span], None, ForwardContext(link))
            passes.append((span, again, y, states))
        for number, (span, again, y, states) in enumerate(passes):
            with again, link.segment(number, count=3):
                y_again, states_again = built(tokens[:, span], pos[:, span], None, ForwardContext(link))
            differing = [
                f"{name} of layer {layer}"
                for layer, state in states.items()
                for name, x in state.items()
                if not torch.equal(x, states_again[layer][name])
            ]
            assert not differing, (rows, number)
            assert torch.equal(y, y_again), (rows, number)
            del y_again, states_again
