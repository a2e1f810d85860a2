"""Values of training.recompute, training.cuda_graphs and training.offload_kv that are `auto`, which is their default. Torch-free.

The possible forms are ordered by speed, and the first one is taken whose planned peak memory (launcher.planner.memory) fits the
device, and whose page-locked memory fits the node's host beside all its ranks' (launcher.planner.host_memory). A form that needs as
much memory as another one that ran out of memory on such a device before is left out.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from baton.launcher.cluster import reserved_bytes
from baton.launcher.config import RunConfig
from baton.launcher.devices import Kind
from baton.launcher.errors import ConfigError
from baton.launcher.planner.host_memory import HostMemory, Node
from baton.launcher.planner.memory import of_stages
from baton.launcher.planner.size_text import size
from baton.launcher.planner.slow_paths import slow_paths
from baton.models.stages import ATTENTION_COST

GIB = 1 << 30

BY_SPEED = (
    ("none", True),
    ("states", True),
    ("selective", True),
    ("none", False),
    ("states", False),
    ("selective", False),
    ("full", True),
    ("full", False),
)
"""Pairs of recompute and cuda_graphs, fastest first. Measured (train_step, mamba-1.4b, 8 x 2048 tokens): selective recomputation
costs 3 to 5 % of a step, full recomputation a forward pass; that of states is one launch of a recurrence's several. Graphs save the
time in which the GPU waits for the host, 0 to half of a step, which is why a graph of selective recomputation comes before no graph
of none."""

ASSUMED_MATMUL_TFLOPS, ASSUMED_HOST_GB_S = 600, 50
"""Rates of an H100 in a step, and of its PCIe 5 x16 link, with which full recomputation and copies of keys and values from the host
are compared. Other cards have about the same ratio: an A100 230 and 25."""


@dataclass(frozen=True)
class Choice:
    """The choice for a run.

    offload_kv: None: no keys and values are kept from segment to segment.
    peak: planned peak memory of a rank in bytes; None: unknown. capacity: bytes that a rank can use; None: unknown.
    on_host: what the ranks of a node page-lock; None: unknown.
    excluded: where no form fits, what they would page-lock with one that is left out for that alone; None: there is none.
    """

    recompute: str
    cuda_graphs: bool
    offload_kv: bool | None
    peak: int | None
    capacity: int | None
    on_host: HostMemory | None = None
    excluded: HostMemory | None = None

    @property
    def fits(self) -> bool:
        """Whether it fits the device, as far as is known."""
        return self.peak is None or self.capacity is None or self.peak <= self.capacity

    @property
    def fits_host(self) -> bool:
        """Whether it fits the node's host, as far as is known."""
        return self.on_host is None or self.on_host.fits

    def refusal(self) -> str | None:
        """Why a run does not start: host memory is all that is missing, and a machine without any is lost with all that runs on it.
        None: it starts."""
        if self.excluded is None:
            return None
        needed = self.offload_kv is False
        words = f"this machine, with what this job may have of it, has too little memory: {self.excluded.shortage(needed=needed)}"
        if needed and not self.fits and self.peak is not None and self.capacity is not None:
            words += f"; with training.offload_kv=false its GPU has: {size(self.peak)} of {size(self.capacity)} per rank"
        return words

    def __str__(self) -> str:
        words = f"auto: training.recompute={self.recompute}, training.cuda_graphs={str(self.cuda_graphs).lower()}"
        if self.offload_kv is not None:
            words += f", training.offload_kv={str(self.offload_kv).lower()}"
        if self.peak is None:
            return f"{words} (memory cannot be planned for this model)"
        if self.capacity is None:
            return f"{words} (planned: {self.peak / GIB:,.1f} GiB per rank)"
        planned = f"planned: {self.peak / GIB:,.1f} of {self.capacity / GIB:,.1f} GiB per rank"
        if self.offload_kv and self.on_host is not None and self.on_host.usable is not None:
            planned += f", {self.on_host.of_node / GIB:,.1f} of {self.on_host.usable / GIB:,.1f} GiB of a node's host"
        return f"{words} ({planned})" if self.fits else f"{words} ({planned}: too much; `baton plan` says what to change)"


def is_automatic(config: RunConfig) -> bool:
    """Whether any of the settings is `auto`."""
    training = config.training
    return "auto" in (training.recompute, training.cuda_graphs) or (training.offload_kv == "auto" and config.keeps_kv)


def resolve(
    config: RunConfig, capacity: int | None, kind: Kind | None = None, failed: Iterable[int] = (), node: Node | None = None
) -> tuple[RunConfig, Choice | None]:
    """The configuration with all values, and what was chosen; None where the run has set all.

    Args:
        config: its vocabulary is known; if not, memory is not planned, and the first form is taken.
        capacity: bytes that a rank may fill; None: not known, and the first form that has not failed is taken.
        kind: of device; None: as the configuration says, where auto is a GPU.
        failed: planned peaks, in bytes, of starts that ran out of memory on such a device. What needs as much is not tried again.
        node: whose host has the ranks' page-locked memory; None: not known, and not compared.

    Where no form fits, the one that needs least memory is taken, of those that fit the host, or that need least of it.
    """
    if not is_automatic(config):
        return config, None
    kind = kind or ("cpu" if config.device == "cpu" else "cuda")
    limit = min(failed, default=None)
    choices = [
        (candidate, _choice(candidate, capacity, node if kind == "cuda" else None)) for candidate in _candidates(config, kind)
    ]
    on_device = [
        (candidate, choice)
        for candidate, choice in choices
        if choice.fits and (limit is None or choice.peak is None or choice.peak < limit)
    ]
    for candidate, choice in on_device:
        if choice.fits_host:
            return candidate, choice
    least = min((choice.on_host.of_node for _, choice in choices if choice.on_host is not None), default=0)
    on_host = [one for one in choices if one[1].fits_host]
    left_out = on_device if on_host else on_device or choices
    excluded = min((one.on_host for _, one in left_out if one.on_host is not None), key=lambda one: one.of_node, default=None)
    rest = on_host or [one for one in choices if one[1].on_host is not None and one[1].on_host.of_node == least]
    candidate, choice = next((one for one in rest if one in on_device), min(rest, key=lambda one: one[1].peak or 0))
    return candidate, replace(choice, excluded=excluded)


def rank_by_speed(config: RunConfig) -> tuple[int, bool]:
    """Index of a resolved configuration's pair in BY_SPEED, and whether it copies keys and values from the host."""
    training = config.training
    assert training.recompute != "auto"
    assert training.cuda_graphs != "auto"
    return BY_SPEED.index((training.recompute, training.cuda_graphs)), training.offload_kv is True


def host_has_room(config: RunConfig, node: Node) -> bool:
    """Whether a node's host has room for what its ranks page-lock, as far as is known."""
    on_host = _planned(config, node)[1]
    return on_host is None or on_host.fits


def planned_peak(config: RunConfig) -> int | None:
    """Planned bytes of a rank of the fullest stage; None: unknown."""
    return _planned(config, None)[0]


def capacity_of(memory: int, ranks: int = 1) -> int:
    """Bytes that each of the `ranks` ranks of one device may fill. memory: the device's, in bytes."""
    return max(0, memory - reserved_bytes(memory) * ranks) // ranks


def _planned(config: RunConfig, node: Node | None) -> tuple[int | None, HostMemory | None]:
    """Bytes of a rank of the fullest stage, and what a node's ranks page-lock; None: unknown."""
    try:
        stages = of_stages(config)
    except ConfigError:
        return None, None
    return max(one.memory().peak for one in stages), None if node is None else HostMemory.of(stages, node)


def _choice(config: RunConfig, capacity: int | None, node: Node | None) -> Choice:
    training = config.training
    assert training.recompute != "auto"
    offload = training.offload_kv is True if config.keeps_kv else None
    peak, on_host = _planned(config, node)
    return Choice(training.recompute, training.cuda_graphs is True, offload, peak, capacity, on_host)


def _is_recordable(settings: object) -> bool:
    """Whether a mixer's passes are known not to synchronize with the host; Baton's mixers are tested for it."""
    return type(settings).__module__.startswith("baton.models.settings")


def _seconds(config: RunConfig) -> float:
    """Of a step's matrix products, and of the copies from the host, at assumed rates; 0: unknown."""
    try:
        counted = of_stages(config)
    except ConfigError:
        return 0.0
    work, copies = ASSUMED_MATMUL_TFLOPS * 1e12, ASSUMED_HOST_GB_S * 1e9
    done = [(one.operations(), one.fetched) for one in counted]
    return max((found.matrix + ATTENTION_COST * found.attention) / work + fetched / copies for found, fetched in done)


def _candidates(config: RunConfig, kind: Kind) -> Iterator[RunConfig]:
    """Configurations that a run may take, fastest first."""
    training = config.training
    may_record = kind == "cuda" and not config.unrecordable() and all(map(_is_recordable, config.model.mixers.values()))
    may_record = may_record and not slow_paths(config, kind)
    places = (training.offload_kv,) if training.offload_kv != "auto" else (False, True) if config.keeps_kv else (False,)
    found = []
    for (recompute, graphs), offload in product(BY_SPEED, places):
        if training.recompute not in ("auto", recompute) or training.cuda_graphs not in ("auto", graphs):
            # what the run has set itself was checked when it was read
            continue
        if graphs and training.cuda_graphs == "auto" and not may_record:
            continue
        if offload and training.offload_kv == "auto" and kind == "cpu":
            continue
        changes = {"recompute": recompute, "cuda_graphs": graphs, "offload_kv": offload}
        found.append(config.model_copy(update={"training": training.model_copy(update=changes)}))
    # passes that keep keys and values are not recorded as graphs: what is computed again and what is copied differ
    yield from sorted(found, key=_seconds) if config.keeps_kv else found
