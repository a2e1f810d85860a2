"""Ranks do not wait inside the stack: with slow layers and messages, a pass takes the time that `parallel.state_passing` states.

The time is logical. Every rank has a clock that moves only where a layer is slow and where a message arrives: a message carries the
time at which it was sent, and who waits for it goes on LATENCY seconds later at the earliest. The messages are real ones. No figure
depends on the machine's speed.
"""

from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from baton.models.forward_context import ForwardContext
from baton.models.mixer import Mixer, build_mixer
from baton.models.mixer_context import MixerContext
from baton.models.settings import SMALL_WIDTH, kinds
from baton.parallel.param_layout import initialize_parameters
from baton.parallel.tensor import megatron_config

LAYERS, RANKS, TOKENS = 6, 4, 32
LATENCY = 0.04


class Clock:
    """A rank's logical time in seconds."""

    def __init__(self):
        self.now = 0.0

    def sleep(self, seconds):
        self.now += seconds

    def meet(self):
        """All ranks wait for the last one."""
        latest = torch.tensor(self.now, dtype=torch.float64)
        dist.all_reduce(latest, dist.ReduceOp.MAX)
        self.now = float(latest)


CLOCK = Clock()


class Late:
    """A channel whose messages come LATENCY seconds after they were sent."""

    def __init__(self, channel):
        self.channel, self.flush = channel, channel.flush

    def send(self, message, to, what):
        now = torch.tensor([CLOCK.now], dtype=torch.float64)
        self.channel.send(torch.cat((message, now.view(torch.uint8))), to, what)

    def irecv(self, message, source, what):
        return LateArrival(self.channel.irecv(message.new_empty(message.numel() + 8), source, what))


class LateArrival:
    def __init__(self, arrival):
        self.arrival = arrival

    def wait(self):
        stamped = self.arrival.wait()
        sent_at = float(stamped[-8:].clone().view(torch.float64))
        CLOCK.now = max(CLOCK.now, sent_at + LATENCY)
        return stamped[:-8].clone()


class Slow(NamedTuple):
    """Seconds that a phase takes, and that a cotangent takes where it reaches what the phase made."""

    phase: str
    seconds: float
    back: float = 0.0


class Case(NamedTuple):
    """kind: of mixer. slow: (recurrence's folder and class, its slow phases). w: seconds from entering State to leaving one;
    back: the same of cotangents. exchange: of linear recurrences' States."""

    kind: str
    slow: tuple
    w: float
    back: float
    exchange: str = "ring"


EARLY = (Slow("begin", 0.04), Slow("finish", 0.06), Slow("begin_backward", 0.05), Slow("finish_backward", 0.07))
RUN = (Slow("run", 0.1, 0.12),)
LINEAR = {
    "mamba": ("selective_scan", "SelectiveScan"),
    "longhorn": ("longhorn", "Longhorn"),
    "gsa": ("gated_slot_attention", "GatedSlotAttention"),
    "gla": ("gated_linear_attention", "GatedLinearAttention"),
    "gated_delta_net": ("delta_rule", "DeltaRule"),
}
CASES = [
    Case("lattice", (("lattice", "Lattice", RUN),), 0.1, 0.12),
    *(Case(kind, ((*where, RUN),), 0.1, 0.12) for kind, where in LINEAR.items()),
    *(Case(kind, ((*where, EARLY),), 0.0, 0.0, "early") for kind, where in LINEAR.items()),
    # the memory is what trails: it is made from the entering one in 0.03 s, and made again before its cotangent is pulled back
    Case(
        "bmojo",
        (
            ("selective_scan", "SelectiveScan", (Slow("run", 0.02, 0.02),)),
            ("eidetic_attention", "EideticAttention", (Slow("final_state", 0.03, 0.04), Slow("forward_no_state", 0.07, 0.08))),
        ),
        0.03,
        0.07,
    ),
]


@contextmanager
def slowed(case):
    with ExitStack() as stack:
        for folder, name, phases in case.slow:
            recurrence = getattr(import_module(f"baton.kernels.{folder}.recurrence"), name)
            for slow in phases:
                stack.enter_context(patch.object(recurrence, slow.phase, sleeping(getattr(recurrence, slow.phase), slow)))
        yield


def sleeping(method, slow):
    def slowly(self, *args):
        CLOCK.sleep(slow.seconds)
        result = method(self, *args)
        made = result.values() if isinstance(result, dict) else result if isinstance(result, tuple) else (result,)
        moving = [x for x in made if isinstance(x, torch.Tensor) and x.requires_grad]
        if slow.back and moving:
            # a cotangent reaches this tensor when the pull-back begins
            moving[0].register_hook(lambda _: CLOCK.sleep(slow.back))
        return result

    return slowly


def stack_of(kind):
    layers = []
    for n in range(LAYERS):
        layer = build_mixer(kinds()[kind].small(), MixerContext(SMALL_WIDTH, 1, 1e-5, megatron_config(1), torch.float32))
        initialize_parameters(layer, seed=n, tensor_rank=0, tensor_size=1)
        for name, module in layer.named_modules(prefix=f"layers.{n}.{kind}"):
            if isinstance(module, Mixer):
                module.path = name
        layers.append(layer)
    return layers


def passes(mesh, n, segments):
    """Moments at which this rank began and ended all its segments forwards, and backwards. n: the number of the case."""
    case, link, CLOCK.now = CASES[n], mesh.link, 0.0
    link.channels = {name: Late(channel) for name, channel in link.channels.items()}
    link.exchange = case.exchange
    layers, outputs, moments = stack_of(case.kind), [], []
    pos = (TOKENS * mesh.context_rank + torch.arange(TOKENS)).expand(1, -1)
    x = torch.randn(1, TOKENS, SMALL_WIDTH, generator=torch.Generator().manual_seed(mesh.context_rank))
    with slowed(case):
        moments.append(CLOCK.now)
        for s in range(segments):
            with link.segment(s, count=segments):
                h = x
                for layer in layers:
                    h = h + layer(h, pos, None, ForwardContext(link))[0]
                outputs.append(h)
        moments.append(CLOCK.now)
        CLOCK.meet()
        moments.append(CLOCK.now)
        torch.autograd.backward(outputs, [torch.ones_like(h) for h in outputs])
        moments.append(CLOCK.now)
    link.wait()
    return moments


def makespans(rows):
    """Seconds from the first rank's beginning to the last one's end, of both passes."""
    return max(row[1] for row in rows) - min(row[0] for row in rows), max(row[3] for row in rows) - min(row[2] for row in rows)


def nominal(case, backward):
    """Seconds that a layer takes alone."""
    every = [slow for _, _, phases in case.slow for slow in phases]
    if not backward:
        return sum(slow.seconds for slow in every if not slow.phase.endswith("_backward"))
    again = ("final_state", "begin_backward", "finish_backward")
    return sum(slow.back + slow.seconds * (slow.phase in again) for slow in every)


def jobs():
    """(number of a case, segments); test_order.py has the order of the long ones too."""
    for n, case in enumerate(CASES):
        often = case.kind in ("lattice", "bmojo") or (case.kind, case.exchange) in (("mamba", "ring"), ("gated_delta_net", "early"))
        name = f"{case.kind}-{case.exchange}-1"
        yield pytest.param(n, 1, id=name, marks=() if often else pytest.mark.long)
    yield pytest.param(0, 3, id=f"{CASES[0].kind}-{CASES[0].exchange}-3")


def formula(case, segments, backward):
    """L t + (P - 1) (m + w). What goes around from the last rank to the first leaves when the segment is done, see ContextLink:
    segments follow one another, with a message between."""
    wave = LAYERS * nominal(case, backward) + (RANKS - 1) * (LATENCY + (case.back if backward else case.w))
    return segments * wave + (segments - 1) * LATENCY


@pytest.mark.parametrize(("n", "segments"), jobs())
def test_a_pass_takes_what_the_formula_says(pool, n, segments):
    """And never L P t."""
    spans = makespans(pool.run(passes, n, segments, context=RANKS))
    for span, backward in zip(spans, (False, True), strict=True):
        assert span == pytest.approx(formula(CASES[n], segments, backward))
        assert span < 0.6 * segments * LAYERS * RANKS * nominal(CASES[n], backward)
