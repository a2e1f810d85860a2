"""Page-locked memory of a node's host: the copies of saves, and keys and values of earlier segments."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.launcher.cluster import GIB, Cluster
from baton.launcher.planner.memory import Arithmetic
from baton.launcher.planner.size_text import size

SHARE = 0.9
"""Of a node's memory, what ranks may page-lock: the rest is for their processes, data workers and files that are being written."""


@dataclass(frozen=True)
class Node:
    """ranks: that run on a node. memory: bytes of its host; None: unknown."""

    ranks: int
    memory: int | None

    @classmethod
    def of(cls, cluster: Cluster) -> "Node":
        """Of a cluster."""
        gib = cluster.host_memory_gib
        return cls(cluster.ranks_per_node, None if gib is None else int(gib * GIB))


@dataclass(frozen=True)
class HostMemory:
    """What the ranks of a node page-lock.

    saves: bytes of a rank's copy of a save. offloaded: bytes of its keys and values of earlier segments. Both of the rank with
    most. ranks: of a node. of_node: bytes that all ranks of a node page-lock together, of the node with most. capacity: bytes of a
    node's memory; None: unknown. zero: the run's ZeRO stage.
    """

    saves: int
    offloaded: int
    ranks: int
    of_node: int
    capacity: int | None
    zero: int

    @classmethod
    def of(cls, stages: Sequence[Arithmetic], node: Node | None) -> "HostMemory":
        """Of a run's stages; nothing where ranks are on processors, which have it in their own memory. node: None: nodes are
        unknown, and a rank is looked at alone."""
        layout, capacity = stages[0].layout, None if node is None else node.memory
        ranks = 1 if node is None else min(node.ranks, layout.world_size)
        if not stages[0].work.gpu:
            return cls(0, 0, ranks, 0, capacity, layout.zero)
        nodes = [0] * -(-layout.world_size // ranks)
        for number, one in enumerate(stages):  # ranks are numbered stage by stage, in a stage by data, context and tensor rank
            first = number * layout.data * layout.context
            of_first_and_others = [[one.host_bytes_of(data, context) + one.offloaded for context in (0, 1)] for data in (0, 1)]
            for group in range(layout.data * layout.context):
                data, context = divmod(group, layout.context)
                held = of_first_and_others[data > 0][context > 0]
                for rank in range((first + group) * layout.tensor, (first + group + 1) * layout.tensor):
                    nodes[rank // ranks] += held
        saves, offloaded = max(one.host_bytes for one in stages), max(one.offloaded for one in stages)
        return cls(saves, offloaded, ranks, max(nodes), capacity, layout.zero)

    @property
    def usable(self) -> int | None:
        """Bytes of a node's memory that may be page-locked; None: unknown."""
        return None if self.capacity is None else int(SHARE * self.capacity)

    @property
    def fits(self) -> bool:
        """Whether a node has as much, as far as is known."""
        return self.usable is None or self.of_node <= self.usable

    def rows(self) -> Iterator[tuple[str, int]]:
        """Names and bytes for the plan's table."""
        yield "copy of what a checkpoint holds, page-locked", self.saves
        if self.offloaded:
            yield "keys, values of earlier segments, page-locked", self.offloaded
        if self.ranks > 1:
            yield f"{'both' if self.offloaded else 'copies'}, of a node's {self.ranks} ranks", self.of_node
        if self.usable is not None:
            yield f"{SHARE:.0%} of a node's memory", self.usable

    def shortage(self, *, needed: bool = False) -> str:
        """What is too much, and what makes it less. needed: GPUs have no room for what is offloaded."""
        usable = self.usable or 0
        divided = "layout.zero=1 and data ranks on more nodes" if not self.zero else "data ranks on more nodes (layout.data)"
        words = [f"{divided}, which divide a save's copy"] if self.saves else []
        if self.offloaded and not needed:
            words.append("training.offload_kv=false where GPUs have room for these")
        if self.offloaded:
            words.append("layout.context to spread a sequence over more nodes")
        return (
            f"{size(self.of_node)} of {size(usable)} of a node's host memory, {size(self.of_node - usable)} too much; use "
            f"{', or '.join([*words, 'nodes with more memory'])}"
        )
