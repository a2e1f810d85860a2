"""`longest_tail` of every mixer: that many tokens determine every tail without earlier tokens, and one token less does not."""

import pytest
import torch
from support.recurrences import piece, seeded

from baton.kernels.eidetic_attention.recurrence import EideticAttention
from baton.models.mixer import Mixer, build_mixer
from baton.models.mixer_context import MixerContext
from baton.models.settings import SMALL_WIDTH, kinds
from baton.models.settings.mamba import MambaConfig
from baton.parallel.param_layout import initialize_parameters
from baton.parallel.tensor import megatron_config

T = 24

VARIANTS = {
    **{kind: (kind, {}) for kind in kinds()},
    "a wider window": ("attention", {"window": 9}),
    "a window of one": ("attention", {"window": 1}),
    "a wider convolution": ("mamba", {"d_conv": 7}),
    "Lattice's wider convolution": ("lattice", {"d_conv": 6}),
    # each of the tails is the longest in one of them
    "B'MOJO's window": ("bmojo", {"window": 9}),
    "B'MOJO's fading tokens": ("bmojo", {"window": 5, "fading_tokens": 5}),
    "B'MOJO's sliding fading tokens": ("bmojo", {"fading": "sliding"}),
    "B'MOJO's predictor": ("bmojo", {"predictor": 6}),
    "B'MOJO's convolution": ("bmojo", {"ssm": MambaConfig(expand=3, d_state=5, d_conv=8, dt_rank=2)}),
}


def carriers_of(settings, monkeypatch):
    """The recurrences that a mixer runs, and their inputs, in the middle of a document."""
    found = []
    run_recurrence = Mixer.run_recurrence

    def watched(self, recurrence, inputs, pos, state, context):
        found.append((recurrence, tuple(x.detach() for x in inputs)))
        return run_recurrence(self, recurrence, inputs, pos, state, context)

    monkeypatch.setattr(Mixer, "run_recurrence", watched)
    mixer = build_mixer(settings, MixerContext(SMALL_WIDTH, 1, 1e-5, megatron_config(1), torch.float32))
    initialize_parameters(mixer, seed=1, tensor_rank=0, tensor_size=1)
    mixer(torch.randn(2, T, SMALL_WIDTH, generator=seeded(2)), 100 + torch.arange(T).repeat(2, 1), None)
    return found


def is_early(recurrence, inputs, n):
    pos = 100 + torch.arange(T).repeat(2, 1)
    return recurrence.tail_state(piece(recurrence, inputs, T - n, T), pos[:, T - n :]) is not None


def forgets(recurrence, inputs, n):
    """Whether n tokens leave the same tails of keys and values whatever State entered."""
    pos, leaving = 100 + torch.arange(T).repeat(2, 1), []
    for seed in (3, 4):
        before = tuple(torch.randn(x.shape, generator=seeded(seed)) for x in inputs)
        _, state = recurrence.run(before, pos - T, None)
        _, state = recurrence.run(piece(recurrence, inputs, T - n, T), pos[:, :n], state)
        leaving.append({name: x for name, x in state.items() if name in ("k", "v", "fading_k", "fading_v")})
    return all(torch.equal(x, leaving[1][name]) for name, x in leaving[0].items())


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_span_of_the_longest_tail_is_enough_and_one_token_less_is_not(variant, single_mesh, monkeypatch):
    kind, changes = VARIANTS[variant]
    settings = kinds()[kind].small().model_copy(update=changes)
    needs = {}
    for number, (recurrence, inputs) in enumerate(carriers_of(settings, monkeypatch)):
        enough = forgets if isinstance(recurrence, EideticAttention) else is_early
        if not enough(recurrence, inputs, T):
            continue  # what enters always reaches what leaves, however long the span: no tail
        # a span of no tokens is no span
        forgotten = [enough(recurrence, inputs, n) for n in range(1, T + 1)]
        needs[number, recurrence.name] = least = forgotten.index(True) + 1
        assert forgotten == [n >= least for n in range(1, T + 1)]
    longest = max(needs.values(), default=0)
    assert settings.longest_tail == longest or (settings.longest_tail, longest) == (0, 1), needs
