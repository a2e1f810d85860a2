"""Pipeline parallelism: stages send hidden states to the next stage and gradients back.

Each direction has a communicator, and no send is waited for. In one communicator a stage's send and its neighbour's would wait for
each other unless they were issued as a pair, and pairs would tie a rank to its neighbour's order of work. That order is free here:
the ranks of a stage that share a sequence follow one another, each at its own pace.

`StepSchedule` orders the operations of a step; the step executor carries them out.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from baton.parallel.config import LayoutConfig
from baton.parallel.p2p import Channel, PendingRecv, make_channels

Kind = Literal["forward_no_grad", "forward", "backward"]


@dataclass(frozen=True)
class Operation:
    """One pass of one segment of a micro-batch through this stage. forward_no_grad: forward for the States alone, without a
    graph."""

    kind: Kind
    micro_batch: int
    segment: int = 0


@dataclass(frozen=True)
class StepSchedule:
    """How sequences are split in time, and the order of a step's operations that follows from it.

    segments: of a sequence. gradient_segments: segments that a gradient goes back through, a divisor of `segments`.
    """

    segments: int = 1
    gradient_segments: int = 1

    def operations(self, stage: int, stages: int, micro_batches: int) -> list[Operation]:
        """The operations of a pipeline stage, in order.

        Where no gradient goes from segment to segment: 1F1B (PipeDream-flush) over all segments: as many forwards ahead as there
        are later stages, so that at most `stages - stage` are kept at a time; then forward and backward alternate; then the
        remaining backwards. Otherwise, for every `gradient_segments` segments, all but the last run forward_no_grad; then, from the
        last to the first, each runs forward (all but the last for the second time) and backward, so that one is kept at a time.
        """
        if self.gradient_segments == 1:
            units = [(n, s) for n in range(micro_batches) for s in range(self.segments)]
            ahead = min(stages - stage - 1, len(units))
            found = [Operation("forward", *unit) for unit in units[:ahead]]
            for later, unit in zip(units[ahead:], units, strict=False):
                found += [Operation("forward", *later), Operation("backward", *unit)]
            return found + [Operation("backward", *unit) for unit in units[len(units) - ahead :]]
        found = []
        for n in range(micro_batches):
            for first in range(0, self.segments, self.gradient_segments):
                group = range(first, first + self.gradient_segments)
                found += [Operation("forward_no_grad", n, s) for s in group[:-1]]
                for s in reversed(group):
                    found += [Operation("forward", n, s), Operation("backward", n, s)]
        return found


class PipelineLink:
    """This rank's neighbours in its pipeline. stage, stages: its number, and how many there are; ranks, group: by stage."""

    def __init__(
        self,
        stage: int,
        ranks: list[int],
        forward: Channel,
        backward: Channel,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self.stage, self.stages, self._ranks = stage, len(ranks), ranks
        self._channels = {"forward": forward, "backward": backward}
        self.group, self._device = group, device

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1

    def send(self, kind: Literal["forward", "backward"], x: Tensor) -> None:
        """Send hidden states to the next stage, or their gradient to the previous one."""
        to = self.stage + (1 if kind == "forward" else -1)
        self._channels[kind].send(x.detach().contiguous(), self._ranks[to], f"stage {self.stage}'s {_NAMES[kind]}")

    def irecv(self, kind: Literal["forward", "backward"], shape: tuple[int, ...], dtype: torch.dtype) -> PendingRecv:
        """Begin to receive hidden states of `shape` from the previous stage, or their gradient from the next one."""
        source = self.stage - (1 if kind == "forward" else -1)
        message = torch.empty(shape, dtype=dtype, device=self._device)
        what = f"{_NAMES[kind]} for stage {self.stage} from stage {source}"
        return self._channels[kind].irecv(message, self._ranks[source], what)

    def wait(self) -> None:
        """Wait until everything sent has left this rank."""
        for channel in self._channels.values():
            channel.flush()

    def sum(self, x: Tensor) -> Tensor:
        """Sum x over the stages, in place on all of them."""
        dist.all_reduce(x, group=self.group)
        return x

    def from_last(self, x: Tensor) -> Tensor:
        """Broadcast the last stage's x to all stages, in place."""
        dist.broadcast(x, src=self._ranks[-1], group=self.group)
        return x


_NAMES = {"forward": "hidden vectors", "backward": "gradient of the hidden vectors"}


def pipeline_link(
    layout: LayoutConfig, rank: int, group: dist.ProcessGroup, device: torch.device, timeout_s: float
) -> PipelineLink | None:
    """This rank's link to the other stages; None with one stage. Every rank of the world calls it. timeout_s: seconds that hidden
    states may take to arrive."""
    if layout.pipeline == 1:
        return None
    stride = layout.world_size // layout.pipeline
    pipelines = [[first + n * stride for n in range(layout.pipeline)] for first in range(stride)]
    found = make_channels(pipelines, 2, device, timeout_s)
    assert found is not None
    return PipelineLink(rank // stride, pipelines[rank % stride], found[0], found[1], group, device)
