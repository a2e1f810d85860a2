"""Page-locked memory of a node's host: the copies of saves, and keys and values of earlier segments."""

from collections.abc import Iterator
from dataclasses import dataclass

from baton.launcher.planner.size_text import size

SHARE = 0.9
"""Of a node's memory, what ranks may page-lock: the rest is for their processes, data workers and files that are being written."""


@dataclass(frozen=True)
class HostMemory:
    """What the ranks of a node page-lock.

    saves: bytes of a rank's copy of a save. offloaded: bytes of its keys and values of earlier segments. ranks: of a node.
    capacity: bytes of a node's memory; None: unknown.
    """

    saves: int
    offloaded: int
    ranks: int
    capacity: int | None

    @property
    def of_node(self) -> int:
        """Bytes that all ranks of a node page-lock."""
        return self.ranks * (self.saves + self.offloaded)

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

    def shortage(self) -> str:
        """What is too much, and what makes it less."""
        usable = self.usable or 0
        words = ["more data ranks, which divide a save's copy"] if self.saves else []
        if self.offloaded:
            words += ["training.offload_kv=false", "layout.context to spread a sequence over more ranks"]
        return (
            f"{size(self.of_node)} of {size(usable)} of a node's host memory, {size(self.of_node - usable)} too much; use "
            f"{', or '.join([*words, 'nodes with more memory'])}"
        )
