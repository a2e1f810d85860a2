"""Full attention over context ranks, segments and both: outputs and gradients are those of an explicit softmax over all pairs."""

from functools import cache, partial

import pytest
import torch
from support.compare import relative_error
from support.recurrences import positions, seeded
from torch.utils.checkpoint import checkpoint

from baton.kernels.window_attention.recurrence import FullAttention
from baton.parallel.context_parallel import ContextLink, add_gather
from baton.parallel.gathered_attention import _Pieces
from baton.parallel.state_passing import run_recurrence

B, HEADS, GROUPS, DIM = 2, 4, 2, 6
CPU = torch.device("cpu")
ATTENTION = FullAttention(sinks=True, soft_cap=1.5)


@cache
def case(tokens, dtype):
    """q, sinks, k, v, pos and the outputs' gradient: several documents, and one that began before the first token that is read."""
    g = seeded(tokens)
    q, k, v = (torch.randn(B, tokens, n, DIM, generator=g, dtype=dtype) for n in (HEADS, GROUPS, GROUPS))
    sinks = torch.randn(B, tokens, HEADS, generator=g, dtype=dtype)
    pos = positions(seeded(7), B, tokens, 0.06)
    pos[1] = torch.arange(tokens) + 5
    return q, sinks, k, v, pos, torch.randn(q.shape, generator=g, dtype=dtype)


@cache
def expected(tokens, dtype):
    *inputs, pos, dy = case(tokens, dtype)
    inputs = [x.clone().requires_grad_() for x in inputs]
    y, _ = ATTENTION.reference(tuple(inputs), pos, None)
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


def run(link, tokens, dtype, segments, *, at_once=True, recompute=False):
    """This rank's outputs and gradients, zero elsewhere; two layers' calls, so that one's keys are not taken for the other's."""
    *inputs, pos, dy = case(tokens, dtype)
    inputs = [x.clone().requires_grad_() for x in inputs]
    total, passes = torch.zeros_like(inputs[0]), []
    for s in range(segments):
        v, count = s * link.size + link.rank, link.size * segments
        span = slice(v * tokens // count, (v + 1) * tokens // count)

        def attend(*x, at=span):
            y, state = run_recurrence(link, ATTENTION, x, pos[:, at], None, "layers.0")
            assert state["k"].shape[1] == x[0].shape[1]
            q, _, k, v = x
            other, _ = run_recurrence(link, FullAttention(), (q, -k, 2 * v), pos[:, at], None, "layers.1")
            return y + 0 * other

        with link.segment(s, count=segments):
            own = [x[:, span] for x in inputs]
            y = partial(checkpoint, attend, use_reentrant=False, context_fn=link.recomputation)(*own) if recompute else attend(*own)
        total[:, span] = y.detach()
        passes.append((y, dy[:, span]))
    for roots in [passes] if at_once else [[one] for one in reversed(passes)]:
        torch.autograd.backward([y for y, _ in roots], [grad for _, grad in roots])
    link.wait()
    return [total, *(x.grad for x in inputs)]


def on_a_rank(mesh, *arguments, **options):
    torch.set_deterministic_debug_mode("error")
    add_gather(mesh.link, mesh.layout)
    return run(mesh.link, *arguments, **options), dict(mesh.link.sent)


def assert_equal(found, tokens, dtype, limit):
    for name, x, y in zip(("y", "dq", "dsinks", "dk", "dv"), found, expected(tokens, dtype), strict=True):
        assert relative_error(x, y) <= limit, name


@pytest.mark.parametrize(
    ("ranks", "spans", "segments", "options"),
    [(3, 1, 1, {}), (3, 7, 2, {"at_once": False, "recompute": True}), (2, 6, 3, {})],
    ids=str,
)
def test_ranks_and_segments_attend_as_one(pool, single_mesh, ranks, spans, segments, options):
    tokens = ranks * segments * spans
    results = pool.run(on_a_rank, tokens, torch.float64, segments, context=ranks, **options)
    assert_equal([sum(parts) for parts in zip(*(found for found, _ in results), strict=True)], tokens, torch.float64, 1e-12)
    for _, sent in results:
        # queries, sinks, positions, k and v, outputs; their gradients, and once more k and v
        assert sent["right", ATTENTION.name]
        assert sent["left bytes", ATTENTION.name]


@pytest.mark.parametrize("options", [{}, {"at_once": False}, {"recompute": True}], ids=str)
def test_one_rank_in_segments_attends_as_one(single_mesh, options):
    link = ContextLink(0, [0], CPU)
    assert_equal(run(link, 24, torch.float64, 4, **options), 24, torch.float64, 1e-12)
    assert not link.sent
    assert len(link.key_store.kept()) == 2
    assert all(not kept.rows and not kept.grads for kept in link.key_store.kept())


def test_an_evaluation_in_segments_keeps_nothing(single_mesh):
    link = ContextLink(0, [0], CPU)
    *inputs, pos, _ = case(24, torch.float64)
    outputs = []
    for s in range(3):
        span = slice(8 * s, 8 * (s + 1))
        with torch.no_grad(), link.segment(s, count=3):
            outputs.append(run_recurrence(link, ATTENTION, tuple(x[:, span] for x in inputs), pos[:, span], None, "a")[0])
    assert relative_error(torch.cat(outputs, dim=1), expected(24, torch.float64)[0]) <= 1e-12
    assert not link.key_store.kept()[0].rows


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_rank_reads_as_many_keys(size):
    """Each piece has one worker, and the workers' causal pairs differ by no more than a piece's own."""
    pieces, read = _Pieces(0, size, 10), []
    for rank in range(size):
        own = pieces.of_worker(rank)
        assert all(pieces.worker(piece) == rank for piece in own)
        read.append(sum(pieces.end(piece) for piece in own))
    assert sorted(piece for rank in range(size) for piece in pieces.of_worker(rank)) == list(range(pieces.each * size))
    assert len(set(read)) == 1
