"""Keys and values of earlier segments in the host's memory: the same bits, and nothing of them elsewhere between passes."""

import gc
import itertools
import weakref
from functools import partial

import psutil
import pytest
import torch
from support.long_form import every_pair, some
from support.recurrences import positions, seeded
from torch.utils.checkpoint import checkpoint

from baton.kernels.window_attention.recurrence import FullAttention
from baton.parallel import host_memory
from baton.parallel.context_parallel import ContextLink, add_gather
from baton.parallel.earlier_keys import EarlierKeys, OffloadedKeys
from baton.parallel.errors import HostMemoryError
from baton.parallel.host_memory import HostMemory
from baton.parallel.side_stream import SideStream
from baton.parallel.state_passing import run_recurrence

B, HEADS, GROUPS, DIM, SPAN = 2, 4, 2, 6, 5
CPU = torch.device("cpu")
LAYERS = (FullAttention(sinks=True, soft_cap=1.5), FullAttention())


def inputs_of(tokens, dtype):
    """q, sinks, k, v, pos and the outputs' gradient: grouped heads, several documents, and one that began before."""
    g = seeded(tokens)
    made = [torch.randn(B, tokens, n, DIM, generator=g).to(dtype) for n in (HEADS, GROUPS, GROUPS)]
    sinks = torch.randn(B, tokens, HEADS, generator=g).to(dtype)
    pos = positions(seeded(7), B, tokens, 0.06)
    pos[1] = torch.arange(tokens) + 5
    return [made[0], sinks, *made[1:]], pos, torch.randn(B, tokens, HEADS, DIM, generator=g).to(dtype)


def passes(link, segments, dtype, *, recompute=False, watch=lambda: None):
    """This rank's outputs of all segments, and the gradients, zero elsewhere, of two layers that read the same inputs: surveyed,
    then from the last segment on forwards and backwards, as a step runs them. watch: called between passes through layers."""
    inputs, pos, dy = inputs_of(SPAN * segments * link.size, dtype)
    inputs = [x.requires_grad_() for x in inputs]
    outputs = {}

    def stack(*x, at):
        q, sinks, k, v = x
        first, _ = run_recurrence(link, LAYERS[0], (q, sinks, k, v), at, None, "layers.0")
        watch()
        second, _ = run_recurrence(link, LAYERS[1], (first, 2 * k, -v), at, None, "layers.1")
        watch()
        return second

    def span_of(s):
        v = s * link.size + link.rank
        return slice(v * SPAN, (v + 1) * SPAN)

    contexts = [link.recomputation() for _ in range(segments)]
    for s in range(segments - 1):
        with torch.no_grad(), link.segment(s, count=segments), contexts[s][0]:
            outputs[s] = stack(*(x[:, span_of(s)] for x in inputs), at=pos[:, span_of(s)])
    for s in reversed(range(segments)):
        own, at = [x[:, span_of(s)] for x in inputs], pos[:, span_of(s)]
        run = partial(checkpoint, stack, use_reentrant=False, context_fn=link.recomputation) if recompute else stack
        with link.segment(s, count=segments), contexts[s][1 if s < segments - 1 else 0]:
            y = run(*own, at=at)
        if s < segments - 1:
            assert torch.equal(y, outputs[s])
        outputs[s] = y.detach()
        y.backward(dy[:, span_of(s)])
        watch()
    link.wait()
    return [*(outputs[s] for s in range(segments)), *(x.grad for x in inputs)]


def assert_same_bits(found, expected):
    assert len(found) == len(expected)
    for n, (x, y) in enumerate(zip(found, expected, strict=True)):
        assert x.dtype == y.dtype
        assert torch.equal(x, y), n
        assert x.isfinite().all()
        assert x.count_nonzero()


def on_a_rank(mesh, segments, dtype, options):
    torch.set_deterministic_debug_mode("error")
    add_gather(mesh.link, mesh.layout)
    found = []
    for offload in (False, True):
        mesh.link.key_store.offload = offload
        found.append(passes(mesh.link, segments, dtype, **options))
        assert (mesh.link.key_store.host.nbytes > 0) is offload
    return found


@pytest.mark.parametrize(
    ("ranks", "dtype", "options"),
    some(
        list(itertools.product((2, 3), (torch.float32, torch.bfloat16), ({}, {"recompute": True}))),
        [(2, torch.float32, {"recompute": True}), (3, torch.bfloat16, {})],
    ),
    ids=str,
)
def test_ranks_with_offloaded_keys_have_the_same_bits(pool, ranks, dtype, options):
    for kept, offloaded in pool.run(on_a_rank, 4, dtype, options, context=ranks):
        assert_same_bits(offloaded, kept)


@pytest.mark.parametrize(
    ("dtype", "options", "segments"), every_pair((torch.float32, torch.bfloat16), ({}, {"recompute": True}), (2, 5)), ids=str
)
def test_one_rank_with_offloaded_keys_has_the_same_bits(single_mesh, dtype, options, segments):
    kept, link = passes(ContextLink(0, [0], CPU), segments, dtype, **options), ContextLink(0, [0], CPU)
    link.key_store.offload = True
    for _ in range(2):  # the second time in the memory of the first
        assert_same_bits(passes(link, segments, dtype, **options), kept)
        # two layers' k and v of all segments but the last, and their gradients in float32
        numbers = 2 * 2 * B * (segments - 1) * SPAN * GROUPS * DIM
        assert link.key_store.host.nbytes == numbers * (dtype.itemsize + 4)


def test_the_keys_are_on_the_host_and_only_one_layers_anywhere_else(single_mesh, monkeypatch):
    """Joined rows of one layer are gone when the next one's are made, and between passes no tensor but the host's has any."""
    link, alive, seen = ContextLink(0, [0], CPU), [], []
    link.key_store.offload = True
    joined = OffloadedKeys.join
    gc.collect()
    gc.freeze()  # what there is need not be looked at each time

    def join(self, segment, own, *, keep):
        gc.collect()
        assert not any(x() is not None for x in alive)
        found = joined(self, segment, own, keep=keep)
        alive[:] = [weakref.ref(x) for x in found] if segment else []
        return found

    def watch():
        gc.collect()
        assert not any(x() is not None for x in alive)
        for layer in link.key_store.kept():
            assert isinstance(layer, OffloadedKeys)
            assert not layer.rows
            assert not layer.grads
            assert not layer._leaving
        seen.append([(x.stored, len(x.summed)) for x in link.key_store.kept()])

    monkeypatch.setattr(OffloadedKeys, "join", join)
    passes(link, 4, torch.float32, watch=watch)
    assert [(3, 3), (3, 3)] in seen, "three segments' rows, and gradients from the last one"
    assert seen[-1] == [(0, 0), (0, 0)]


def test_the_host_has_the_rows_and_the_sums(single_mesh):
    """What `OffloadedKeys` keeps, as read from the host's memory, is what `EarlierKeys` keeps on the device."""
    host, g = HostMemory(CPU), seeded(3)
    kept, offloaded = EarlierKeys(), OffloadedKeys(host, SideStream(CPU), 3)
    own = [tuple(torch.randn(B, SPAN, GROUPS, DIM, generator=g).bfloat16() for _ in range(2)) for _ in range(3)]
    for segment in range(3):
        found = [one.join(segment, own[segment], keep=segment < 2) for one in (kept, offloaded)]
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert offloaded.host_rows[1].dtype == torch.bfloat16
    assert torch.equal(offloaded.host_rows[1], torch.cat([rows[1] for rows in kept.rows], dim=1))
    for count in (2, 1):  # of the last segment, of the one before
        grads = [[torch.randn(B, SPAN, GROUPS, DIM, generator=g) for _ in range(2)] for _ in range(count)]
        for one in (kept, offloaded):
            one.add_grads([[x.clone() for x in of_segment] for of_segment in grads])
        for n in range(count):
            assert all(torch.equal(x[:, n * SPAN : (n + 1) * SPAN], kept.grads[n][i]) for i, x in enumerate(offloaded.host_grads))
        expected, found = (one.take_grads(count - 1) for one in (kept, offloaded))
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert offloaded.take_grads(count - 1) is None
    blocks = {x.data_ptr() for x in (*offloaded.host_rows, *offloaded.host_grads)}
    assert set(host._used) == blocks
    offloaded.clear()
    assert not host._used


def test_an_evaluation_gives_the_hosts_memory_back(single_mesh):
    link = ContextLink(0, [0], CPU)
    link.key_store.offload = True
    (q, _, k, v), pos, _ = inputs_of(3 * SPAN, torch.float32)
    for _ in range(3):
        outputs = []
        for s in range(3):
            span = slice(SPAN * s, SPAN * (s + 1))
            with torch.no_grad(), link.segment(s, count=3):
                outputs.append(
                    run_recurrence(link, FullAttention(), tuple(x[:, span] for x in (q, k, v)), pos[:, span], None, "a")[0]
                )
        whole, _ = FullAttention().reference((q, k, v), pos, None)
        torch.testing.assert_close(torch.cat(outputs, dim=1), whole)
        assert link.key_store.host.nbytes == 2 * 2 * SPAN * B * GROUPS * DIM * 4
        assert not link.key_store.host._used


def test_memory_is_used_again_and_smaller_blocks_make_room():
    host = HostMemory(CPU)
    small, large = host.empty((10,), torch.float32), host.empty((4, 5), torch.float64)
    small.fill_(3)
    large.fill_(4)
    assert (small == 3).all()
    assert host.nbytes == 40 + 160
    host.give_back(large)
    host.give_back(small)
    again = host.empty((5,), torch.float64)
    assert again.data_ptr() == small.data_ptr(), "the smallest that holds it"
    assert host.empty((19,), torch.float64).data_ptr() == large.data_ptr()
    host.give_back(again)
    host.empty((6,), torch.float64)
    assert host.nbytes == 160 + 48, "the free block was too small, and is gone"


def test_too_little_memory_of_the_host_is_said_in_one_line():
    free = host_memory.free_bytes()
    assert 0 < free <= psutil.virtual_memory().total
    with pytest.raises(HostMemoryError) as caught:
        HostMemory(CPU).empty((1 << 50,), torch.uint8)
    words = str(caught.value)
    assert "\n" not in words
    assert "1,048,576.0 GiB" in words
    assert "set training.offload_kv=false" in words
    assert caught.value.exit_status == 2


@pytest.mark.gpu
@pytest.mark.parametrize("late", ["computing", "copying"])
def test_streams_wait_for_each_other(late):
    """With either stream 10 ms behind at every step, so that a copy that does not wait for what it reads, or memory that is used
    again before a copy has ended, gives other numbers."""
    device, segments, shape = torch.device("cuda"), 4, (2, 2048, 8, 64)
    host, stream, g = HostMemory(device), SideStream(device), torch.Generator(device).manual_seed(1)

    def fall_behind():
        if late == "computing":
            torch.cuda._sleep(20_000_000)
            return
        with stream.use():
            torch.cuda._sleep(20_000_000)

    def made(dtype):
        return [torch.randn(shape, generator=g, device=device).to(dtype) for _ in range(2)]

    for _ in range(2):  # the second time in the memory of the first
        kept, offloaded, pairs = EarlierKeys(), OffloadedKeys(host, stream, segments), []
        for segment in range(segments):
            own = made(torch.bfloat16)
            expected = kept.join(segment, tuple(x.clone() for x in own), keep=segment < segments - 1)
            fall_behind()
            own = tuple(x.mul(1) for x in own)  # made late
            found = offloaded.join(segment, own, keep=segment < segments - 1)
            pairs += [(x, y.clone()) for x, y in zip(expected, found, strict=True)]
            del own, found
            offloaded.end_pass()
            made(torch.bfloat16)  # in the memory that was let go
        for segment in reversed(range(segments)):
            grads = [made(torch.float32) for _ in range(segment)]
            kept.add_grads([[x.clone() for x in of_segment] for of_segment in grads])
            fall_behind()
            offloaded.add_grads([[x.mul(1) for x in of_segment] for of_segment in grads])
            expected, found = (one.take_grads(segment) for one in (kept, offloaded))
            assert (expected is None) is (found is None) is (segment == segments - 1)
            pairs += [] if found is None else zip(expected, found, strict=True)
            offloaded.end_pass()
            made(torch.float32)
        assert all(x.is_pinned() for x in (*offloaded.host_rows, *offloaded.host_grads))
        blocks = {x.data_ptr() for x in (*offloaded.host_rows, *offloaded.host_grads)}
        offloaded.clear()
        assert {x.data_ptr() for x in host._free} == blocks
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for x, y in pairs)
    assert host.nbytes == 2 * (segments - 1) * 2 * 2048 * 8 * 64 * (2 + 4)


@pytest.mark.gpu
def test_blocks_are_page_locked_until_they_are_dropped():
    host = HostMemory(torch.device("cuda"))
    small = host.empty((1000,), torch.float32)
    assert small.is_pinned()
    x = torch.arange(1000.0, device="cuda")
    small.copy_(x, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(small, x.cpu())
    host.give_back(small)
    large = host.empty((5000,), torch.float32)
    assert large.is_pinned()
    assert host.nbytes == 20_000
    assert len(host._registered) == 1
    registered = host._registered
    del host
    gc.collect()
    assert not registered
    assert not large.is_pinned()
