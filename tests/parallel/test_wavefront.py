"""Nothing waits inside the stack: on ranks with slow layers and slow messages a pass takes as long as `parallel.carry` says.

Layers and messages are slow by sleeping, so that the ranks of a small machine do not compete for it; the messages are real ones.
"""

import time
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from baton.models.mixer import Mixer, Site, build_mixer
from baton.models.settings import SMALL_WIDTH, kinds
from baton.parallel.layout import initialize_parameters
from baton.parallel.tensor import megatron_config

pytestmark = pytest.mark.long  # it measures time; what leaves when is tested in test_order.py
LAYERS, RANKS, TOKENS = 6, 4, 32
LATENCY = 0.04


class Late:
    """A channel whose messages come LATENCY seconds after they were sent."""

    def __init__(self, channel):
        self.channel, self.flush = channel, channel.flush

    def send(self, message, to, what):
        now = torch.tensor([time.monotonic()], dtype=torch.float64)  # one clock for all processes of a machine
        self.channel.send(torch.cat((message, now.view(torch.uint8))), to, what)

    def expect(self, message, source, what):
        return LateArrival(self.channel.expect(message.new_empty(message.numel() + 8), source, what))


class LateArrival:
    def __init__(self, arrival):
        self.arrival = arrival

    def wait(self):
        stamped = self.arrival.wait()
        sent_at = float(stamped[-8:].clone().view(torch.float64))
        time.sleep(max(0.0, sent_at + LATENCY - time.monotonic()))
        return stamped[:-8].clone()


class Slow(NamedTuple):
    """Seconds that a phase sleeps, and when a cotangent reaches what it made."""

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
    exchange: str = "relay"


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
    Case("lattice", (("orthogonal_state", "OrthogonalState", RUN),), 0.1, 0.12),
    *(Case(kind, ((*where, RUN),), 0.1, 0.12) for kind, where in LINEAR.items()),
    *(Case(kind, ((*where, EARLY),), 0.0, 0.0, "early") for kind, where in LINEAR.items()),
    # the memory is what trails: it is made from the entering one in 0.03 s, and made again before its cotangent is pulled back
    Case(
        "bmojo",
        (
            ("selective_scan", "SelectiveScan", (Slow("run", 0.02, 0.02),)),
            ("eidetic_attention", "EideticAttention", (Slow("leave", 0.03, 0.04), Slow("outputs", 0.07, 0.08))),
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
        time.sleep(slow.seconds)
        result = method(self, *args)
        made = result.values() if isinstance(result, dict) else result if isinstance(result, tuple) else (result,)
        moving = [x for x in made if isinstance(x, torch.Tensor) and x.requires_grad]
        if slow.back and moving:
            # a cotangent reaches this tensor when the pull-back begins
            moving[0].register_hook(lambda _: time.sleep(slow.back))
        return result

    return slowly


def stack_of(kind, link):
    layers = []
    for n in range(LAYERS):
        layer = build_mixer(kinds()[kind].small(), Site(SMALL_WIDTH, 1, 1e-5, megatron_config(1), torch.float32))
        initialize_parameters(layer, seed=n, tensor_rank=0, tensor_size=1)
        for name, module in layer.named_modules(prefix=f"layers.{n}.{kind}"):
            if isinstance(module, Mixer):
                module.link, module.where = link, name
        layers.append(layer)
    return layers


def passes(mesh, case, segments=1):
    """Moments at which this rank began and ended all its segments forwards, and backwards."""
    link = mesh.link
    link.exchange = case.exchange
    layers, outputs, moments = stack_of(case.kind, link), [], []
    pos = (TOKENS * mesh.sequence_rank + torch.arange(TOKENS)).expand(1, -1)
    x = torch.randn(1, TOKENS, SMALL_WIDTH, generator=torch.Generator().manual_seed(mesh.sequence_rank))
    with slowed(case):
        dist.barrier()
        moments.append(time.monotonic())
        for s in range(segments):
            with link.segment(s, of=segments):
                h = x
                for layer in layers:
                    h = h + layer(h, pos, None)[0]
                outputs.append(h)
        moments.append(time.monotonic())
        dist.barrier()
        moments.append(time.monotonic())
        torch.autograd.backward(outputs, [torch.ones_like(h) for h in outputs])
        moments.append(time.monotonic())
    link.wait()
    return moments


def several(mesh, jobs):
    """The passes of each (number of a case, segments); before each, one that is not slow: a first one does what others need not."""
    channels, found = dict(mesh.link.channels), []
    for n, segments in jobs:
        mesh.link.channels = channels
        passes(mesh, CASES[n]._replace(slow=()), 1)
        mesh.link.channels = {name: Late(channel) for name, channel in channels.items()}
        found.append(passes(mesh, CASES[n], segments))
    return found


def makespans(rows):
    """(seconds from the first rank's beginning to the last one's end, seconds of the rank that waits for nobody) of both passes."""
    forward = max(row[1] for row in rows) - min(row[0] for row in rows), rows[0][1] - rows[0][0]
    backward = max(row[3] for row in rows) - min(row[2] for row in rows), rows[-1][3] - rows[-1][2]
    return forward, backward


def nominal(case, backward):
    """Seconds that a layer sleeps."""
    every = [slow for _, _, phases in case.slow for slow in phases]
    if not backward:
        return sum(slow.seconds for slow in every if not slow.phase.endswith("_backward"))
    again = ("leave", "begin_backward", "finish_backward")
    return sum(slow.back + slow.seconds * (slow.phase in again) for slow in every)


JOBS = [(n, 1) for n in range(len(CASES))] + [(0, 3)]


def formulas(case, times):
    """S L t + (P - 1) (m + w) forwards and backwards, with S L t as it was measured on the rank that waits for nobody."""
    found = []
    for (_, alone), w in zip(times, (case.w, case.back)):
        found.append(alone + (RANKS - 1) * (LATENCY + w))
    return found


def holds(n, times):
    return all(abs(span - formula) <= 0.15 * formula for (span, _), formula in zip(times, formulas(CASES[n], times)))


@pytest.fixture(scope="module")
def measured(pool):
    """By (number of a case, segments): `makespans`. What else runs on the machine only adds time, so the least of up to five."""
    least, left = {}, JOBS
    for _ in range(5):
        results = pool.run(several, left, sequence=RANKS, timeout_s=300)
        for at, job in enumerate(left):
            now = makespans([row[at] for row in results])
            least[job] = [tuple(map(min, *pair)) for pair in zip(now, least.get(job, now))]
        left = [job for job in left if not holds(job[0], least[job])]
        if not left:
            break
    return least


@pytest.mark.parametrize(("n", "segments"), JOBS, ids=[f"{CASES[n].kind}-{CASES[n].exchange}-{segments}" for n, segments in JOBS])
def test_a_pass_takes_what_the_formula_says(measured, n, segments):
    """To 15 %, and never L P t. With three segments rank 0 goes on with the next one while the others are in this one."""
    case, times = CASES[n], measured[n, segments]
    for (span, alone), formula, backward in zip(times, formulas(case, times), (False, True)):
        t = alone / (segments * LAYERS)
        print(
            f"{case.kind}, {segments} segments: t {t:.4f} s, measured {span:.3f} s, formula {formula:.3f} s, {span / formula:.3f}"
        )
        assert t >= nominal(case, backward), "the layers did not sleep"
        assert span == pytest.approx(formula, rel=0.15)
        assert span < 0.6 * segments * LAYERS * RANKS * t
