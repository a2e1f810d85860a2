"""Context-parallel ranks, segments, and both together give the results of one rank that passes States to itself, for every
mixer."""

import math
from functools import cache, partial

import pytest
import torch
from support.compare import relative_error
from support.long_form import some
from support.recurrences import positions, seeded
from torch.utils.checkpoint import checkpoint

from baton.kernels.protocol import LinearRecurrence
from baton.kernels.short_conv.recurrence import ShortConv
from baton.models.forward_context import ForwardContext
from baton.models.mixer import Mixer, build_mixer
from baton.models.mixer_context import MixerContext
from baton.models.settings import SMALL_WIDTH, kinds
from baton.parallel.config import LayoutConfig
from baton.parallel.context_parallel import ContextLink, context_link
from baton.parallel.errors import CommError, LayoutError
from baton.parallel.param_layout import initialize_parameters
from baton.parallel.state_passing import run_recurrence
from baton.parallel.tensor import megatron_config

B, T = 2, 53  # spans of eight ranks are as long as the longest tail, and not all of one length
STATEFUL = [kind for kind, settings in kinds().items() if not settings.small().state_grows]
HALVES = STATEFUL[::2], STATEFUL[1::2]
FAMILIES = ["mamba", "gla", "gated_delta_net", "lattice", "bmojo", "attention"]
"""A mixer of each family of recurrences, and those with messages of a kind of their own: in each test's forms. Gathered effects are
those of every mixer, and so is every form in the long form."""
CPU = torch.device("cpu")


def layer_of(kind, dtype):
    context = MixerContext(SMALL_WIDTH, 1, 1e-5, megatron_config(1), dtype)
    layer = build_mixer(kinds()[kind].small(), context)
    initialize_parameters(layer, seed=1, tensor_rank=0, tensor_size=1)
    with torch.no_grad():
        g = seeded(2)
        for p in layer.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=g))
    for name, module in layer.named_modules(prefix=f"layers.0.{kind}"):
        if isinstance(module, Mixer):
            module.path = name
    return layer.to(dtype)


def case(kind, carried, dtype):
    """x, pos, cotangents of the outputs and of the leaving State, and an entering State (or None)."""
    g = seeded(3)
    x, dy = (torch.randn(B, T, SMALL_WIDTH, generator=g, dtype=dtype) for _ in range(2))
    pos = positions(seeded(4), B, T, 0.05)
    layer, state = layer_of(kind, dtype), None
    with torch.no_grad():
        before = pos[:, :1] - 9 + torch.arange(9)
        _, leaving = layer(torch.randn(B, 9, SMALL_WIDTH, generator=g, dtype=dtype), before.clamp(min=0), None)
    if carried:
        state = leaving
    cotangents = {name: torch.randn(x.shape, generator=g).to(x.dtype) for name, x in leaving.items() if x.is_floating_point()}
    return x, pos, dy, cotangents, state


def leaf(x):
    return x.clone().requires_grad_(x.is_floating_point())


def spans(pieces):
    return [slice(n * T // pieces, (n + 1) * T // pieces) for n in range(pieces)]


def found(outputs, states, x, entering, layer, **more):
    """What is compared: outputs and leaving States by virtual segment, and gradients."""
    return {
        "y": {v: y.detach() for v, y in outputs.items()},
        "leaving": {v: {name: s.detach() for name, s in state.items()} for v, state in states.items()},
        "dx": x.grad,
        "dentering": {} if entering is None else {name: s.grad for name, s in entering.items() if s.grad is not None},
        "parameters": {name: p.grad for name, p in layer.named_parameters()},
        **more,
    }


def roots_of(state, cotangents):
    moving = [name for name, s in state.items() if s.requires_grad]
    return [state[name] for name in moving], [cotangents[name] for name in moving]


@cache
def by_hand(kind, carried, dtype, pieces, exchange="ring"):
    """One rank, which hands the States on from call to call and leaves the cotangents to autograd."""
    x, pos, dy, cotangents, state = case(kind, carried, dtype)
    layer, context = layer_of(kind, dtype), ForwardContext(ContextLink(0, [0], CPU, exchange=exchange))
    x.requires_grad_()
    entering = None if state is None else {name: leaf(s) for name, s in state.items()}
    outputs, states, passed = {}, {}, entering
    for v, span in enumerate(spans(pieces)):
        outputs[v], passed = layer(x[:, span], pos[:, span], passed, context)
        states[v] = passed
    last, dlast = roots_of(passed, cotangents)
    torch.autograd.backward([*outputs.values(), *last], [*(dy[:, span] for span in spans(pieces)), *dlast])
    return found(outputs, states, x, entering, layer)


def through_the_link(kind, carried, dtype, link, segments, *, at_once=True, recompute=False):
    """This rank's spans of all segments; nothing is handed from call to call. sent: each State and cotangent that left a span."""
    x, pos, dy, cotangents, state = case(kind, carried, dtype)
    layer = layer_of(kind, dtype)
    sent, send = {}, link.send
    numbers = {}

    def noted(direction, carrier, state, leaves):
        v = carrier.virtual_rank.segment * link.size + link.rank
        n = numbers[direction, v] = numbers.get((direction, v), -1) + 1
        sent[direction, v, n, carrier.name] = {leaf.name: state[leaf.name].detach().clone() for leaf in leaves}
        send(direction, carrier, state, leaves)

    link.send = noted
    x.requires_grad_()
    entering = None if state is None or link.rank else {name: leaf(s) for name, s in state.items()}
    outputs, states, passes = {}, {}, []
    for s in range(segments):
        v = s * link.size + link.rank
        span = spans(link.size * segments)[v]
        run = partial(checkpoint, layer, use_reentrant=False, context_fn=link.recomputation) if recompute else layer
        with link.segment(s, count=segments):
            outputs[v], states[v] = run(x[:, span], pos[:, span], entering if v == 0 else None, ForwardContext(link))
        roots, cots = [outputs[v]], [dy[:, span]]
        if v == link.size * segments - 1:
            last, dlast = roots_of(states[v], cotangents)
            roots, cots = roots + last, cots + dlast
        passes.append((roots, cots))
    if at_once:
        passes = [([y for roots, _ in passes for y in roots], [dy for _, cots in passes for dy in cots])]
    for roots, cots in reversed(passes):
        torch.autograd.backward(roots, cots)
    link.wait()
    link.send = send
    result = found(outputs, states, x, entering, layer, sent=sent, counted=dict(link.sent), layers=dict(link.sent_by_layer))
    link.sent.clear()
    link.sent_by_layer.clear()
    return result


def on_a_rank(mesh, names, carried, dtype, segments=1, **options):
    torch.set_deterministic_debug_mode("error")
    return {kind: through_the_link(kind, carried, dtype, mesh.link, segments, **options) for kind in names}


def assert_same_bits(ranks, expected, kind):
    """Every virtual segment's output and leaving State, the entering State's cotangent; what is summed over spans to rounding."""
    seen = set()
    for rank in ranks:
        for v, y in rank["y"].items():
            assert torch.equal(y, expected["y"][v]), f"{kind}: outputs of segment {v}"
            assert expected["leaving"][v].keys() == rank["leaving"][v].keys()
            for name, state in rank["leaving"][v].items():
                assert torch.equal(state, expected["leaving"][v][name]), f"{kind}: {name} leaving segment {v}"
            seen.add(v)
    assert seen == set(expected["y"])
    assert relative_error(sum(rank["dx"] for rank in ranks), expected["dx"]) <= 1e-6, f"{kind}: gradient of the inputs"
    for name, grad in expected["dentering"].items():
        assert torch.equal(ranks[0]["dentering"][name], grad), f"{kind}: cotangent of the entering {name}"
    for name, grad in expected["parameters"].items():
        parts = [rank["parameters"][name] for rank in ranks if rank["parameters"][name] is not None]
        assert relative_error(sum(parts), grad) <= 1e-5, f"{kind}: {name}"


def assert_same_messages(ranks, expected, kind):
    """Every State and cotangent on its way, and the gradient of the inputs, bit for bit."""
    sent = {key: state for rank in ranks for key, state in rank["sent"].items()}
    assert sent.keys() == expected["sent"].keys()
    for key, state in sent.items():
        for name, x in state.items():
            assert torch.equal(x, expected["sent"][key][name]), f"{kind}: {name} of {key}"
    assert torch.equal(sum(rank["dx"] for rank in ranks), expected["dx"]), f"{kind}: gradient of the inputs"


@cache
def alone(kind, carried, segments):
    return through_the_link(kind, carried, torch.float32, ContextLink(0, [0], CPU), segments)


def names_of(kinds):
    """The id of a form's mixers."""
    return f"{len(kinds)} mixers, {kinds[0]} first" if isinstance(kinds, list) else str(kinds)


@pytest.mark.parametrize(
    ("ranks", "carried", "names"),
    [
        (3, True, FAMILIES),
        pytest.param(2, False, HALVES[0][::2], marks=pytest.mark.long),
        pytest.param(3, True, HALVES[1], marks=pytest.mark.long),
        pytest.param(2, False, STATEFUL, marks=pytest.mark.long),
        *(pytest.param(n, True, STATEFUL, marks=pytest.mark.long) for n in (2, 3, 4, 8)),
    ],
    ids=names_of,
)
def test_ranks_are_segments_bit_for_bit(pool, single_mesh, ranks, carried, names):
    """Outputs, States and cotangents, with a State carried in and a cotangent on the leaving one."""
    results = pool.run(on_a_rank, names, carried, torch.float32, context=ranks)
    for kind in names:
        rows = [result[kind] for result in results]
        assert_same_bits(rows, by_hand(kind, carried, torch.float32, ranks), kind)
        assert_same_messages(rows, alone(kind, carried, ranks), kind)
        assert_as_counted(rows, alone(kind, carried, ranks), kind)


@pytest.mark.parametrize(
    ("ranks", "segments", "options", "names"),
    [
        (2, 2, {"at_once": False, "recompute": True}, FAMILIES[:4]),
        pytest.param(2, 2, {}, HALVES[0][1::2], marks=pytest.mark.long),
        pytest.param(2, 2, {"at_once": False, "recompute": True}, HALVES[1][::2], marks=pytest.mark.long),
        pytest.param(2, 2, {}, STATEFUL, marks=pytest.mark.long),
        pytest.param(2, 2, {"recompute": True}, STATEFUL, marks=pytest.mark.long),
        pytest.param(3, 2, {"at_once": False, "recompute": True}, STATEFUL, marks=pytest.mark.long),
        pytest.param(2, 3, {"at_once": False}, STATEFUL, marks=pytest.mark.long),
        pytest.param(4, 2, {"at_once": False, "recompute": True}, STATEFUL, marks=pytest.mark.long),
    ],
    ids=names_of,
)
def test_a_ring_of_ranks_and_segments_is_all_segments_on_one_rank(pool, single_mesh, ranks, segments, options, names):
    """Backwards in one call or one per segment; recomputation exchanges nothing."""
    results = pool.run(on_a_rank, names, True, torch.float32, segments, context=ranks, **options)
    for kind in names:
        rows = [result[kind] for result in results]
        assert_same_bits(rows, by_hand(kind, True, torch.float32, ranks * segments), kind)
        assert_same_messages(rows, alone(kind, True, ranks * segments), kind)
        assert_as_counted(rows, alone(kind, True, ranks * segments), kind)


ONE_RANK = {}, {"at_once": False}, {"recompute": True}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(kind, options, marks=[] if n % len(ONE_RANK) == m else pytest.mark.long)
        for n, kind in enumerate(STATEFUL)
        for m, options in enumerate(ONE_RANK)
    ],
    ids=str,
)
def test_one_rank_with_segments_is_that_rank_handing_states_on(single_mesh, kind, options):
    link = ContextLink(0, [0], CPU)
    result = through_the_link(kind, True, torch.float32, link, 4, **options)
    assert_same_bits([result], by_hand(kind, True, torch.float32, 4), kind)
    assert not result["counted"], "messages to itself"
    assert not link.local.waiting()


def test_the_cotangents_that_come_to_what_is_handed_on_first_keep_their_bits(single_mesh):
    """What a leaving State's cotangent adds is added to a copy: who else holds what came, as a hook does, reads what came."""
    came = []

    class Watched(ShortConv):
        def forward_no_state(self, inputs, pos, state):
            for x in inputs:
                x.register_hook(lambda cotangent: came.append((cotangent, cotangent.clone())))
            return super().forward_no_state(inputs, pos, state)

    g, link, recurrence = seeded(5), ContextLink(0, [0], CPU), Watched()
    inputs, tail = recurrence.example(g, B, 2 * 9, torch.float64, wide=False)
    inputs = tuple(x.requires_grad_() for x in inputs)
    pos = torch.arange(5, 5 + 2 * 9).expand(B, -1)
    outputs = []
    for n in range(2):
        span = slice(9 * n, 9 * (n + 1))
        with link.segment(n, count=2):
            y, _ = run_recurrence(
                link, recurrence, (inputs[0][:, span], *inputs[1:]), pos[:, span], tail if n == 0 else None, "conv"
            )
        outputs.append(y)
    dy = torch.randn(B, 2 * 9, 5, generator=g, dtype=torch.float64)
    torch.autograd.backward(outputs, list(dy.split(9, dim=1)))
    link.wait()
    assert len(came) == 2 * len(inputs)
    for cotangent, bits in came:
        assert torch.equal(cotangent, bits)
    whole = [x.grad for x in inputs]
    expected = torch.autograd.grad(recurrence.run(inputs, pos, tail)[0], inputs, dy)
    for grad, wanted in zip(whole, expected, strict=True):
        assert relative_error(grad, wanted) < 1e-12


@pytest.mark.parametrize("kind", STATEFUL)
def test_what_waits_for_the_next_segment_takes_no_more_memory_than_it_needs(single_mesh, kind):
    """A tail is the end of a span; it must not keep the span."""
    link, (x, pos, *_) = ContextLink(0, [0], CPU), case(kind, False, torch.float32)
    layer = layer_of(kind, torch.float32)
    with torch.no_grad(), link.segment(0, count=2):
        layer(x, pos, None, ForwardContext(link))
    waiting = [x for states in link.local.waiting().values() for state in states for x in state.values()]
    assert bool(waiting) == bool(layer.state_specs)
    for tensor in waiting:
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize(
    ("ranks", "segments", "options", "names"),
    [
        (2, 2, {"recompute": True}, FAMILIES[:3]),
        pytest.param(3, 1, {}, HALVES[0][::2], marks=pytest.mark.long),
        pytest.param(2, 2, {"recompute": True}, HALVES[1][1::2], marks=pytest.mark.long),
        pytest.param(3, 1, {}, STATEFUL, marks=pytest.mark.long),
        pytest.param(2, 2, {"recompute": True}, STATEFUL, marks=pytest.mark.long),
    ],
    ids=names_of,
)
def test_effects_sent_early_fold_to_the_same_bits(pool, single_mesh, ranks, segments, options, names):
    """Outputs, States and cotangents; what is recomputed, too, begins with what entered."""
    results = pool.run(on_a_rank, names, True, torch.float32, segments, context=ranks, context_comm="early", **options)
    for kind in names:
        rows = [result[kind] for result in results]
        assert_same_bits(rows, by_hand(kind, True, torch.float32, ranks * segments, "early"), kind)
        assert_as_counted(rows, alone(kind, True, ranks * segments), kind)


@pytest.mark.parametrize("kind", some(STATEFUL, HALVES[0]))
def test_sent_early_or_when_it_has_run_is_the_same_to_rounding(single_mesh, kind):
    early, relayed = (by_hand(kind, True, torch.float64, 3, exchange) for exchange in ("early", "ring"))
    for part in ("y", "dx", "dentering", "parameters"):
        for name, x in relayed[part].items() if isinstance(relayed[part], dict) else [("x", relayed[part])]:
            other = early[part][name] if isinstance(early[part], dict) else early[part]
            assert relative_error(other, x) <= 1e-10, (part, name)


@pytest.mark.parametrize("ranks", [3, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 4))])
def test_gathered_effects_fold_to_the_same_bits(pool, single_mesh, ranks):
    """Outputs, States and cotangents of early and of gathered exchange; one gathered message per linear carrier and direction."""
    results = pool.run(on_a_rank, STATEFUL, True, torch.float32, context=ranks, context_comm="all_gather")
    gathered = 0
    for kind in STATEFUL:
        rows = [result[kind] for result in results]
        assert_same_bits(rows, by_hand(kind, True, torch.float32, ranks, "early"), kind)
        linear = {name for recurrence, _, name in carriers_of(kind) if isinstance(recurrence, LinearRecurrence)}
        for row in rows:
            for name in linear:
                for direction in ("right", "left"):
                    assert row["counted"][direction, name] == 1
                    assert row["counted"][f"{direction} bytes", name] >= (ranks - 1) * flat(kind, name)
                gathered += 1
    assert gathered >= 5 * ranks


def test_gathering_gives_way_to_the_relay_over_segments(pool, single_mesh):
    results = pool.run(on_a_rank, ["mamba"], True, torch.float32, 2, context=2, context_comm="all_gather")
    rows = [result["mamba"] for result in results]
    assert_same_bits(rows, by_hand("mamba", True, torch.float32, 4), "mamba")
    assert_same_messages(rows, alone("mamba", True, 4), "mamba")


@pytest.mark.parametrize(
    "names", [FAMILIES, *(pytest.param(x, marks=pytest.mark.long) for x in (HALVES[1], STATEFUL))], ids=names_of
)
def test_ranks_are_the_whole_sequence(pool, single_mesh, names):
    """In float64, to rounding: cutting changes neither outputs nor gradients."""
    results = pool.run(on_a_rank, names, True, torch.float64, context=3)
    for kind in names:
        rows, exact = [result[kind] for result in results], by_hand(kind, True, torch.float64, 1)
        assert relative_error(torch.cat([row["y"][v] for v, row in enumerate(rows)], dim=1), exact["y"][0]) <= 1e-10
        assert relative_error(sum(row["dx"] for row in rows), exact["dx"]) <= 1e-10
        for name, grad in exact["dentering"].items():
            assert relative_error(rows[0]["dentering"][name], grad) <= 1e-10, f"{kind}: entering {name}"
        for name, grad in exact["parameters"].items():
            parts = [row["parameters"][name] for row in rows if row["parameters"][name] is not None]
            assert relative_error(sum(parts), grad) <= 1e-10, f"{kind}: {name}"


@cache
def carriers_of(kind):
    """(recurrence, its leaves, its name) of every call of `run_recurrence`, and the mixer's leaves."""
    calls, layer = [], layer_of(kind, torch.float32)
    run_recurrence = Mixer.run_recurrence

    def noted(self, recurrence, inputs, pos, state, context):
        calls.append((recurrence, recurrence.state_specs(inputs), recurrence.name))
        return run_recurrence(self, recurrence, inputs, pos, state, context)

    Mixer.run_recurrence = noted
    try:
        layer(torch.zeros(B, 8, SMALL_WIDTH), torch.arange(8).expand(B, -1), None)
    finally:
        Mixer.run_recurrence = run_recurrence
    shapes = {(leaf.shape, leaf.dtype, leaf.grad) for _, leaves, _ in calls for leaf in leaves}
    # nothing is carried that the mixer does not say, and it says nothing that is not carried
    assert shapes == {(leaf.shape, leaf.dtype, leaf.grad) for leaf in layer.state_specs}
    return calls


def padded(leaves):
    return sum(-(-B * math.prod(leaf.shape) * leaf.dtype.itemsize // 16) * 16 for leaf in leaves)


def flat(kind, name):
    return sum(padded(leaves) for _, leaves, other in carriers_of(kind) if other == name)


def assert_as_counted(rows, expected, kind):
    """One message per carrier and direction for every span that has a neighbour there, as large as its leaves, 16-byte padded."""
    messages, layers = {}, {}
    for recurrence, leaves, name in carriers_of(kind):
        moving = [leaf for leaf in leaves if leaf.grad] if recurrence.differentiable else []
        for direction, carried in (("right", list(leaves)), ("left", moving)):
            if carried:
                hops = len(expected["y"]) - 1
                messages[direction, name] = messages.get((direction, name), 0) + hops
                messages[f"{direction} bytes", name] = messages.get((f"{direction} bytes", name), 0) + hops * padded(carried)
    for counts, key in ((messages, "counted"), (layers, "layers")):
        for row in rows:
            assert all(n > 0 for n in row[key].values())
        total = {name: sum(row[key].get(name, 0) for row in rows) for name in {name for row in rows for name in row[key]}}
        if key == "counted":
            assert total == counts, kind
        else:
            assert all(where.startswith(f"layers.0.{kind}") for _, where, _ in total)
            assert {(what, name): n for (what, _, name), n in total.items()} == messages, kind


def leaking(mesh, names):
    """Per kind: whether an earlier document's tokens change a later one's outputs, and the largest gradient back into it; and the
    same of the last token that the second rank has of the later document itself."""
    torch.set_deterministic_debug_mode("error")
    size, rank, results = mesh.layout.context, mesh.context_rank, {}
    span = spans(size)[rank]
    # the second document begins inside the second rank's span and goes on over the next ones; the first one began before
    start = T // size + 4
    at = torch.arange(T)
    pos = torch.where(at < start, at + 3, at - start).expand(B, -1)
    later, earlier = at[span] >= start, at[span] < start
    for kind in names:
        x = torch.randn(B, T, SMALL_WIDTH, generator=seeded(5))
        dy = torch.randn(B, T, SMALL_WIDTH, generator=seeded(6))
        other = torch.where((at < start)[:, None], torch.randn(x.shape, generator=seeded(7)), x)
        same = torch.where((at == spans(size)[1].stop - 1)[:, None], torch.randn(x.shape, generator=seeded(7)), x)
        layer, context = layer_of(kind, torch.float32), ForwardContext(mesh.link)
        with torch.no_grad():
            ys = [layer(each[:, span], pos[:, span], None, context)[0][:, later] for each in (x, other, same)]
        own = x[:, span].clone().requires_grad_()
        layer(own, pos[:, span], None, context)[0].backward(dy[:, span] * later[:, None])
        passed = x[:, span].clone().requires_grad_()
        layer(passed, pos[:, span], None, context)[0].backward(dy[:, span] * float(rank > 1))
        results[kind] = {
            "changed": not torch.equal(ys[0], ys[1]),
            "changed by its own": not torch.equal(ys[0], ys[2]),
            "gradient": float(own.grad[:, earlier].abs().max()) if earlier.any() else 0.0,
            "gradient over ranks": float(passed.grad[:, later].abs().max()) if later.any() else 0.0,
        }
    mesh.link.wait()
    return results


@pytest.mark.parametrize(
    "names", [FAMILIES, *(pytest.param(x, marks=pytest.mark.long) for x in (HALVES[0], STATEFUL))], ids=names_of
)
def test_nothing_leaks_into_a_document_from_the_one_before(pool, names):
    """Bit for bit forwards and exactly zero backwards, where documents straddle ranks."""
    results = pool.run(leaking, names, context=4)
    for kind in names:
        rows = [result[kind] for result in results]
        assert not any(row["changed"] for row in rows), kind
        assert all(row["gradient"] == 0.0 for row in rows), kind
        # its own tokens do reach over ranks: the test would see a leak
        carried = bool(carriers_of(kind))
        assert rows[1]["changed by its own"], kind
        assert rows[2]["changed by its own"] == carried, kind
        assert (rows[1]["gradient over ranks"] > 0.0) == carried, kind


def test_segments_out_of_order_are_refused(single_mesh):
    link = ContextLink(0, [0], CPU)
    layer, context = layer_of("mamba", torch.float32), ForwardContext(link)
    x, pos = torch.zeros(1, 8, SMALL_WIDTH), torch.arange(8)[None]
    with pytest.raises(ValueError, match="segment 2 of 2"), link.segment(2, count=2):
        pass
    with (
        link.segment(1, count=2),
        pytest.raises(CommError, match=r"State of short_conv-silu in layers\.0\.mamba, segment 1 is not there"),
    ):
        layer(x, pos, None, context)
    with link.segment(0, count=2):
        layer(x, pos, None, context)
    with pytest.raises(CommError, match="was not taken in the pass before"), link.segment(0, count=2):
        pass


def test_one_hardware_queue_is_refused_before_any_group_is_made(monkeypatch):
    """On a GPU with one the ring would stand still: see context_link."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(LayoutError, match="CUDA_DEVICE_MAX_CONNECTIONS=1 is set"):
        context_link(LayoutConfig(context=2), 0, torch.device("cuda"), 1.0)
