"""The order in which messages are sent, on which the wavefront depends; without a clock (test_wavefront.py has one)."""

from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest
import torch

from baton.kernels.registry import recurrences
from baton.models.forward_context import ForwardContext
from baton.models.mixer import build_mixer
from baton.models.mixer_context import MixerContext
from baton.models.settings import SMALL_WIDTH, kinds
from baton.parallel.context_parallel import ContextLink
from baton.parallel.p2p import Channel
from baton.parallel.param_layout import initialize_parameters
from baton.parallel.tensor import megatron_config

LINEAR = {
    "mamba": "selective_scan",
    "longhorn": "longhorn",
    "gsa": "gated_slot_attention",
    "gla": "gated_linear_attention",
    "gated_delta_net": "gated_delta_rule",
}
# kind: (the carrier whose State the wavefront waits for, what comes before it leaves, what comes after; the same of cotangents)
ORDERS = {
    **{kind: (carrier, ["arrival", "run"], [], ["arrival"], []) for kind, carrier in LINEAR.items()},
    "lattice": ("lattice", ["arrival", "run"], [], ["arrival"], []),
    "bmojo": ("eidetic_attention", ["arrival", "final_state"], ["forward_no_state"], ["arrival", "final_state"], []),
    "attention": ("window_attention", ["tail_state"], ["arrival", "forward_no_state"], [], ["arrival"]),
}
EARLY = {kind: (carrier, ["begin"], ["finish"], ["begin_backward"], ["finish_backward"]) for kind, carrier in LINEAR.items()}
PHASES = ("begin", "finish", "begin_backward", "finish_backward", "final_state", "forward_no_state", "tail_state", "run", "vjp")


@contextmanager
def logged(log):
    """Phases of recurrences, and the messages of States, in the order in which they happen; only the outermost phase counts."""
    depth = [0]

    def watch(name, method):
        def call(self, *args, **kwargs):
            if not depth[0]:
                log.append((self.name, name))
            depth[0] += 1
            try:
                return method(self, *args, **kwargs)
            finally:
                depth[0] -= 1

        return call

    send, receive = ContextLink.send, ContextLink.irecv

    def sent(self, direction, carrier, *args):
        log.append((carrier.name, f"sent {direction}"))
        return send(self, direction, carrier, *args)

    def received(self, direction, carrier, *args):
        wait = receive(self, direction, carrier, *args)

        def waited():
            log.append((carrier.name, f"arrival {direction}"))
            return wait()

        return waited

    with ExitStack() as stack:
        for cls in {type(r) for r in recurrences()}:
            for name in PHASES:
                if hasattr(cls, name):
                    stack.enter_context(patch.object(cls, name, watch(name, getattr(cls, name))))
        stack.enter_context(patch.object(ContextLink, "send", sent))
        stack.enter_context(patch.object(ContextLink, "irecv", received))
        yield


def events(mesh, names):
    """Of one layer's forward and of its backward pass, for each kind."""
    found = {}
    for kind in names:
        settings = kinds()[kind].small()
        if settings.state_grows:
            settings = settings.model_copy(update={"window": 4})
        layer = build_mixer(settings, MixerContext(SMALL_WIDTH, 1, 1e-5, megatron_config(1), torch.float32))
        initialize_parameters(layer, 1, 0, 1)
        x = torch.randn(1, 24, SMALL_WIDTH, generator=torch.Generator().manual_seed(mesh.rank))
        pos = torch.arange(24)[None] + 24 * mesh.rank
        forward, backward = [], []
        with logged(forward):
            y, _ = layer(x, pos, None, ForwardContext(mesh.link))
        with logged(backward):
            y.sum().backward()
        mesh.link.wait()
        found[kind] = forward, backward
    return found


@pytest.mark.parametrize(("exchange", "orders"), [("ring", ORDERS), ("early", EARLY)], ids=["ring", "early"])
def test_what_the_next_rank_waits_for_leaves_as_early_as_it_can(pool, exchange, orders):
    _, middle, _ = pool.run(events, list(orders), context=3, context_comm=exchange)
    for kind, (carrier, before, after, back_before, back_after) in orders.items():
        forward, backward = ([event for name, event in log if name.startswith(carrier)] for log in middle[kind])
        for log, direction, earlier, later in (
            (forward, "right", before, after),
            (backward, "left", back_before, back_after),
        ):
            assert log.count(f"sent {direction}") == 1, (kind, log)
            at = log.index(f"sent {direction}")
            for event in (f"arrival {direction}" if event == "arrival" else event for event in earlier):
                assert event in log[:at], (kind, event, log)
            for event in (f"arrival {direction}" if event == "arrival" else event for event in later):
                assert event in log[at:], (kind, event, log)
                assert event not in log[:at], (kind, event, log)


def test_a_recurrence_runs_once_forwards_and_not_again_backwards(pool):
    """A rank computes what it computes without other ranks."""
    _, middle, _ = pool.run(events, list(ORDERS), context=3)
    for kind, (carrier, *_) in ORDERS.items():
        forward, backward = ([event for name, event in log if name.startswith(carrier)] for log in middle[kind])
        phase = "forward_no_state" if kind in ("bmojo", "attention") else "run"
        assert forward.count(phase) == 1, (kind, forward)
        assert not {"run", "forward_no_state", "vjp", "begin_backward"} & set(backward), (kind, backward)


@pytest.mark.parametrize("kind", ["mamba", "attention"])
def test_a_tail_leaves_before_anything_arrives(pool, kind):
    _, (forward, backward), _ = (rank[kind] for rank in pool.run(events, [kind], context=3))
    name = "short_conv" if kind == "mamba" else "window_attention"
    for log, direction in ((forward, "right"), (backward, "left")):
        own = [event for carrier, event in log if carrier.startswith(name)]
        assert own.index(f"sent {direction}") < own.index(f"arrival {direction}"), own


def messages(mesh):
    """What this rank hands to its channels in three segments, forwards and then backwards in one call: (channel, act, what)."""
    link, log = mesh.link, []
    names = {id(channel): name for name, channel in link.channels.items()}

    def noted(act, method):
        def call(self, message, peer, what):
            log.append((names[id(self)], act, what))
            return method(self, message, peer, what)

        return call

    layer = build_mixer(kinds()["mamba"].small(), MixerContext(SMALL_WIDTH, 1, 1e-5, megatron_config(1), torch.float32))
    initialize_parameters(layer, 1, 0, 1)
    with (
        patch.object(Channel, "send", noted("send", Channel.send)),
        patch.object(Channel, "irecv", noted("irecv", Channel.irecv)),
    ):
        total = 0.0
        for s in range(3):
            with link.segment(s, count=3):
                pos = torch.arange(12)[None] + 12 * (s * mesh.layout.context + mesh.context_rank)
                x = torch.randn(1, 12, SMALL_WIDTH, requires_grad=True)
                total = total + layer(x, pos, None, ForwardContext(link))[0].sum()
        total.backward()
        link.wait()
    return log


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_goes_around_waits_until_the_segment_is_done(pool, ranks):
    """Else, on a GPU, all ranks may wait for each other: see ContextLink."""
    logs = pool.run(messages, context=ranks)
    for direction, noun, log in (("right", "the State", logs[-1]), ("left", "the gradient", logs[0])):
        own = [(channel, act, what) for channel, act, what in log if what.startswith(noun)]
        sent = [n for n, (channel, act, _) in enumerate(own) if (channel, act) == (f"wraparound {direction}", "send")]
        assert len(sent) == 2 * 2  # two carriers, two borders between segments
        for n in sent:
            segment = own[n][2].rpartition(", ")[2]
            others = [m for m, (channel, _, what) in enumerate(own) if what.endswith(segment) and channel == direction]
            assert others
            assert max(others) < n, own
