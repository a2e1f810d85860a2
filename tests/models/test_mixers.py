"""The law for every mixer: split anywhere, packed or not, same outputs and same gradients."""

import pytest
import torch
from support.compare import relative_error

from baton.kernels import protocol
from baton.models.mixers.registry import MIXERS
from baton.parallel.layout import initialize_parameters
from baton.parallel.tensor import megatron_config

B, T, M = 2, 13, 6
DOCUMENTS = {
    "one document, begun before": [[5 + t for t in range(T)], [90 + t for t in range(T)]],
    "packed": [[3, 4, 0, 1, 2, 3, 0, 0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0]],
}


@pytest.fixture(scope="module", params=MIXERS)
def layer(request, single_mesh):
    settings, mixer = MIXERS[request.param]
    layer = mixer(M, 3, settings(expand=3, d_state=5, d_conv=4, dt_rank=2), megatron_config(1, False), torch.float64)
    initialize_parameters(layer, seed=1, tensor_rank=0, tensor_size=1)
    with torch.no_grad():  # distinct, non-trivial values everywhere, also where the initial ones are all equal
        g = torch.Generator().manual_seed(2)
        for p in layer.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=g))
    return layer.double()


def inputs(layer, pos):
    g = torch.Generator().manual_seed(3)
    make = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    x = make(B, T, M).requires_grad_()
    state = {leaf.name: make(B, *leaf.shape).requires_grad_() for leaf in layer.leaves}
    cotangents = (make(B, T, M), {leaf.name: make(B, *leaf.shape) for leaf in layer.leaves})
    return x, torch.tensor(pos, dtype=torch.int32), state, cotangents


def run(layer, cuts, pos):
    """Output, leaving state, and all gradients, with the sequence cut at `cuts`."""
    x, pos, state, (dy, dstate) = inputs(layer, pos)
    layer.zero_grad()
    carried, pieces = state, []
    for a, b in zip([0, *cuts], [*cuts, T]):
        y, carried = layer(x[:, a:b], pos[:, a:b], carried)
        pieces.append(y)
    y = torch.cat(pieces, dim=1)
    torch.autograd.backward([y, *carried.values()], [dy, *(dstate[name] for name in carried)])
    results = {"y": y, **{f"state.{n}": s for n, s in carried.items()}, "dx": x.grad}
    results |= {f"d0.{n}": s.grad for n, s in state.items()}
    results |= {f"d.{n}": p.grad for n, p in layer.named_parameters()}
    return {name: value.detach().clone() for name, value in results.items()}


def test_leaves_describe_the_state(layer):
    x, pos, _, _ = inputs(layer, DOCUMENTS["packed"])
    with torch.no_grad():
        _, state = layer(x, pos, None)
    protocol.check(state, layer.leaves, B)


@pytest.mark.parametrize("pos", DOCUMENTS.values(), ids=DOCUMENTS.keys())
@pytest.mark.parametrize("cuts", [*([t] for t in range(1, T)), [2, 3, 9], list(range(1, T))], ids=str)
def test_split_equals_whole(layer, cuts, pos):
    whole, split = run(layer, [], pos), run(layer, cuts, pos)
    assert whole.keys() == split.keys()
    for name in whole:
        assert whole[name].abs().max() > 0, f"{name} is zero: the comparison would be empty"
        assert relative_error(split[name], whole[name]) <= 1e-10, name


def test_none_is_the_zero_state(layer):
    x, pos, _, _ = inputs(layer, DOCUMENTS["packed"])
    zero = protocol.zeros(layer.leaves, B, "cpu")
    with torch.no_grad():
        (y, s), (y0, s0) = layer(x, pos, None), layer(x, pos, zero)
    assert torch.equal(y, y0)
    assert all(torch.equal(s[n], s0[n]) for n in s)


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
        other[:, changed] += 1.0
        y2, dx2 = outputs(other)
        assert not torch.equal(y2[:, changed], y[:, changed])
        for document in documents:
            if document != changed:
                assert torch.equal(y2[:, document], y[:, document])
                assert torch.equal(dx2[:, document], dx[:, document])
