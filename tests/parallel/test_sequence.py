"""A rank is a segment: sequence ranks agree with one rank that has the whole sequence, for every mixer."""

import pytest
import torch
from support.compare import relative_error
from support.recurrences import positions, seeded

from baton.models.mixer import Mixer, Site, build_mixer
from baton.models.settings import SMALL_WIDTH, kinds
from baton.parallel.layout import initialize_parameters
from baton.parallel.sequence import SequenceLink
from baton.parallel.tensor import megatron_config

B, T = 2, 24
STATEFUL = [kind for kind, settings in kinds().items() if not settings.small().state_grows]


def layer_of(kind, link, dtype):
    site = Site(SMALL_WIDTH, 1, 1e-5, megatron_config(1, False), dtype)
    layer = build_mixer(kinds()[kind].small(), site)
    initialize_parameters(layer, seed=1, tensor_rank=0, tensor_size=1)
    with torch.no_grad():
        g = seeded(2)
        for p in layer.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=g))
    for module in layer.modules():
        if isinstance(module, Mixer):
            module.link = link
    return layer.to(dtype)


def case(kind, carried, dtype):
    """x, pos, cotangents of the outputs and of the leaving State, and an entering State (or None)."""
    g = seeded(3)
    x, dy = (torch.randn(B, T, SMALL_WIDTH, generator=g, dtype=dtype) for _ in range(2))
    pos = positions(seeded(4), B, T, 0.08)
    layer, state = layer_of(kind, None, dtype), None
    with torch.no_grad():
        before = pos[:, :1] - 9 + torch.arange(9)
        _, leaving = layer(torch.randn(B, 9, SMALL_WIDTH, generator=g, dtype=dtype), before.clamp(min=0), None)
    if carried:
        state = leaving
    cotangents = {name: torch.randn(x.shape, generator=g).to(x.dtype) for name, x in leaving.items() if x.is_floating_point()}
    return x, pos, dy, cotangents, state


def pieces_of(kind, carried, dtype, pieces, link=None, rank=None):
    """Outputs, leaving State and gradients: of all pieces on one rank, or of this rank's piece."""
    x, pos, dy, cotangents, state = case(kind, carried, dtype)
    layer = layer_of(kind, link, dtype)
    spans = [slice(n * T // pieces, (n + 1) * T // pieces) for n in range(pieces)]
    if rank is not None:
        spans = [spans[rank]]
    x.requires_grad_()
    entering = state
    if state is not None:
        entering = {name: s.clone().requires_grad_(s.is_floating_point()) for name, s in state.items()}
    outputs, carried_on = [], entering
    for span in spans:
        y, carried_on = layer(x[:, span], pos[:, span], carried_on)
        outputs.append(y)
    roots, cots = list(outputs), [dy[:, span] for span in spans]
    if rank is None or rank == pieces - 1:
        moving = [name for name, s in carried_on.items() if s.requires_grad]
        roots, cots = roots + [carried_on[name] for name in moving], cots + [cotangents[name] for name in moving]
    torch.autograd.backward(roots, cots)
    if link is not None:
        link.wait()
    grads = {name: p.grad for name, p in layer.named_parameters()}
    first = {} if entering is None else {name: s.grad for name, s in entering.items() if s.grad is not None}
    leaving = {name: s.detach() for name, s in carried_on.items()}
    counted = {} if link is None else dict(link.counted)
    return [y.detach() for y in outputs], x.grad, leaving, first, grads, counted


def on_a_rank(mesh, kind, carried, dtype):
    torch.use_deterministic_algorithms(True)
    return pieces_of(kind, carried, dtype, mesh.layout.sequence, mesh.link, mesh.sequence_rank)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", STATEFUL)
def test_ranks_are_segments_bit_for_bit_and_both_are_the_whole(pool, single_mesh, kind, ranks):
    """Outputs, leaving states and the entering state's cotangent; with a State carried in and a cotangent on the leaving one."""
    carried = ranks == 4
    alone = SequenceLink(0, 1, [0], None, None, torch.device("cpu"))
    segments = pieces_of(kind, carried, torch.float32, ranks, alone)
    found = pool.run(on_a_rank, kind, carried, torch.float32, sequence=ranks)
    for rank, (outputs, *_) in enumerate(found):
        assert torch.equal(outputs[0], segments[0][rank]), f"outputs of rank {rank}"
    for name, leaving in segments[2].items():
        assert torch.equal(found[-1][2][name], leaving), f"leaving {name}"
    assert relative_error(sum(r[1] for r in found), segments[1]) <= 1e-6
    for name, grad in segments[3].items():
        assert torch.equal(found[0][3][name], grad), f"entering {name}"
    for name, grad in segments[4].items():
        parts = [r[4][name] for r in found if r[4][name] is not None]
        assert relative_error(sum(parts), grad) <= 1e-5, name

    # and in float64 the whole sequence in one piece is the same to rounding
    exact = pieces_of(kind, carried, torch.float64, 1)
    found = pool.run(on_a_rank, kind, carried, torch.float64, sequence=ranks)
    assert relative_error(torch.cat([r[0][0] for r in found], dim=1), exact[0][0]) <= 1e-10
    assert relative_error(sum(r[1] for r in found), exact[1]) <= 1e-10
    for name, grad in exact[3].items():
        assert relative_error(found[0][3][name], grad) <= 1e-10, f"entering {name}"
    for name, grad in exact[4].items():
        parts = [r[4][name] for r in found if r[4][name] is not None]
        assert relative_error(sum(parts), grad) <= 1e-10, name


def test_messages_are_one_per_carrier_and_as_large_as_its_leaves(pool, single_mesh):
    """Of a Mamba layer: a tail and a state to the right, their cotangents to the left; 16-byte padding; nothing at the ends."""
    found = pool.run(on_a_rank, "mamba", False, torch.float32, sequence=4)
    d_inner = 3 * SMALL_WIDTH
    tail, state = 4 * B * 3 * d_inner, 4 * B * d_inner * 5
    for rank, (*_, counted) in enumerate(found):
        for direction, here in (("right", rank < 3), ("left", rank > 0)):
            for name, size in (("short_conv-silu", tail), ("selective_scan-euler", state)):
                assert counted.get((direction, name), 0) == int(here)
                assert counted.get((f"{direction} bytes", name), 0) == (size if here else 0)
