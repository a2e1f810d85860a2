"""Split invariance of every mixer: a sequence split anywhere, packed or not, gives the same outputs and gradients."""

import pytest
import torch
from support.compare import relative_error
from support.long_form import every_pair
from support.models import OPTIONS

from baton.kernels import protocol
from baton.models.mixer import build_mixer
from baton.models.mixer_context import MixerContext
from baton.models.settings import SMALL_WIDTH, kinds
from baton.parallel.param_layout import initialize_parameters
from baton.parallel.tensor import megatron_config

B, T, M = 2, 13, SMALL_WIDTH
DOCUMENTS = {
    "one document, begun before": [[5 + t for t in range(T)], [90 + t for t in range(T)]],
    "packed": [[3, 4, 0, 1, 2, 3, 0, 0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0]],
}


LAYERS = {
    **{kind: (kind, {}) for kind in kinds()},
    **{f"{kind}, groups": (kind, changes) for kind, changes in OPTIONS["groups"].items()},
    "attention, options": ("attention", OPTIONS["qwen"]["attention"]),
    "mamba3, several inputs": ("mamba3", OPTIONS["falcon"]["several"]),
}


@pytest.fixture(scope="module", params=LAYERS)
def layer(request, single_mesh):
    context = MixerContext(M, 3, 1e-5, megatron_config(1), torch.float64)
    kind, changes = LAYERS[request.param]
    layer = build_mixer(kinds()[kind].small().model_copy(update=changes), context)
    initialize_parameters(layer, seed=1, tensor_rank=0, tensor_size=1)
    with torch.no_grad():  # distinct, non-trivial values everywhere, also where the initial ones are all equal
        g = torch.Generator().manual_seed(2)
        for p in layer.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=g))
    return layer.double()


def run(layer, cuts, pos, entering):
    """Output, leaving state, and all gradients, with the sequence cut at `cuts`."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(B, T, M, generator=g, dtype=torch.float64).requires_grad_()
    dy = torch.randn(B, T, M, generator=g, dtype=torch.float64)
    state = None
    if entering is not None:
        state = {name: leaf.clone().requires_grad_(leaf.is_floating_point()) for name, leaf in entering.items()}
    layer.zero_grad()
    carried, pieces = state, []
    for a, b in zip([0, *cuts], [*cuts, T]):
        y, carried = layer(x[:, a:b], pos[:, a:b], carried)
        pieces.append(y)
    y = torch.cat(pieces, dim=1)
    moved = [leaf for leaf in carried.values() if leaf.requires_grad]
    torch.autograd.backward([y, *moved], [dy, *(torch.randn(s.shape, generator=g, dtype=s.dtype) for s in moved)])
    results = {"y": y, "dx": x.grad, **{f"leaving {name}": s for name, s in carried.items()}}
    if state is not None:
        results |= {f"d entering {n}": s.grad for n, s in state.items() if s.grad is not None}
    results |= {f"d {n}": p.grad for n, p in layer.named_parameters() if p.requires_grad}
    return {name: value.detach().clone() for name, value in results.items()}


def a_state_of_some_tokens(layer, pos):
    """The State that a random piece leaves which ends just before `pos` begins."""
    tokens = 7
    x = torch.randn(B, tokens, M, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    before = pos[:, :1] - tokens + torch.arange(tokens)
    with torch.no_grad():
        return layer(x, before.clamp(min=0).to(torch.int32), None)[1]


def test_leaves_describe_the_state(layer):
    pos = torch.tensor(DOCUMENTS["packed"], dtype=torch.int32)
    protocol.check(a_state_of_some_tokens(layer, pos), layer.state_specs, B)


FEW_CUTS = [[2, 3, 9], list(range(1, T))]


@pytest.mark.parametrize("many_cuts", [FEW_CUTS, pytest.param([[t] for t in range(1, T)], marks=pytest.mark.long)], ids=["", "all"])
@pytest.mark.parametrize(("documents", "entering"), every_pair(list(DOCUMENTS), ["a state arrives", "no state arrives"]))
def test_split_equals_whole(layer, documents, entering, many_cuts):
    """With a State in one document and without one in packed documents; the other two in the long form."""
    pos = torch.tensor(DOCUMENTS[documents], dtype=torch.int32)
    entering = a_state_of_some_tokens(layer, pos) if entering == "a state arrives" else None
    whole = run(layer, [], pos, entering)
    seen = {name for name, value in whole.items() if value.any()}
    assert {"y", "dx", *(f"d {name}" for name, p in layer.named_parameters() if p.requires_grad)} <= seen, "an empty comparison"
    for cuts in many_cuts:
        split = run(layer, cuts, pos, entering)
        assert whole.keys() == split.keys()
        for name in whole:
            assert relative_error(split[name], whole[name]) <= 1e-10, f"{name}, cut at {cuts}"


def test_a_document_that_starts_does_not_see_the_arriving_state(layer):
    pos = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3, 4, 5]] * B, dtype=torch.int32)
    x = torch.randn(B, T, M, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    with torch.no_grad():
        without, _ = layer(x, pos, None)
        with_state, _ = layer(x, pos, a_state_of_some_tokens(layer, pos + 30))
    assert relative_error(with_state, without) <= 1e-13


def test_nothing_leaks_across_documents(layer):
    """Change one document: the others' outputs, and their inputs' gradients, keep every bit."""
    pos = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4, 5]], dtype=torch.int32)
    documents = [slice(0, 4), slice(4, 7), slice(7, 13)]
    g = torch.Generator().manual_seed(4)
    x = torch.randn(1, T, M, generator=g, dtype=torch.float64)
    dy = torch.randn(1, T, M, generator=g, dtype=torch.float64)

    def outputs(x):
        x = x.clone().requires_grad_()
        y, _ = layer(x, pos, None)
        y.backward(dy)
        return y.detach(), x.grad

    y, dx = outputs(x)
    for changed in documents:
        other = x.clone()
        other[:, changed] += torch.randn(M, generator=g, dtype=torch.float64)
        y2, dx2 = outputs(other)
        assert not torch.equal(y2[:, changed], y[:, changed])
        for document in documents:
            if document != changed:
                assert torch.equal(y2[:, document], y[:, document])
                assert torch.equal(dx2[:, document], dx[:, document])


def test_decoding_a_token_at_a_time_from_any_point_is_the_parallel_form(layer):
    """And the State stays as large as it was, unless its leaf says that it grows."""
    pos = torch.arange(T, dtype=torch.int32).repeat(B, 1)
    x = torch.randn(B, T, M, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    with torch.no_grad():
        whole, _ = layer(x, pos, None)
        for prompt in (1, 6):
            y, state = layer(x[:, :prompt], pos[:, :prompt], None)
            for t in range(prompt, T):
                y, state = layer(x[:, t : t + 1], pos[:, t : t + 1], state)
                assert relative_error(y[:, 0], whole[:, t]) <= 1e-10
                protocol.check(state, layer.state_specs, B)
