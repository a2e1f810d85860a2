"""Consecutive heads that share a key, as sequences of their own whose heads all share one.

An operator that computes sequences whose heads all have the same key and query computes groups of heads as well: a group is a
sequence of the batch. So kernels know nothing of groups, what a group shares is read once, and its gradient is a sum over the
group's heads in a fixed order. States are views. Outputs are copied into their order, and of several sequences q, k and v into
theirs; backwards likewise. By an H200's bandwidth, not measured, that is a tenth of the kernels' time for Mamba-2 with 64 channels
a head; a copy of the keys for each head would move three times as many bytes.

Shapes: B batch, G groups, R heads of each, T time.
"""

from typing import NamedTuple

from torch import Tensor


class HeadGroups(NamedTuple):
    """batch: number of sequences; groups: number of groups of each."""

    batch: int
    groups: int

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> "HeadGroups | None":
        """Of keys [B, T, G, d_key] and values [B, T, G R, d_value]; None where every head has a key of its own, or all one."""
        return cls(k.shape[0], k.shape[2]) if 1 < k.shape[2] < v.shape[2] else None

    def split(self, x: Tensor) -> Tensor:
        """[B G, T, heads / G, ...] from [B, T, heads, ...]; a single head is that of all groups."""
        x = x.expand(-1, -1, self.groups, *x.shape[3:]) if x.shape[2] == 1 else x
        return x.unflatten(2, (self.groups, -1)).transpose(1, 2).flatten(0, 1)

    def joined(self, x: Tensor) -> Tensor:
        """[B, T, G R, ...] from [B G, T, R, ...]."""
        return x.unflatten(0, (self.batch, self.groups)).transpose(1, 2).flatten(2, 3)

    def positions(self, pos: Tensor | None) -> Tensor | None:
        """[B G, T] from [B, T]."""
        return None if pos is None else pos.repeat_interleave(self.groups, dim=0)

    def split_state(self, S: Tensor | None) -> Tensor | None:
        """[B G, R, ...] from [B, G R, ...]."""
        return None if S is None else S.unflatten(1, (self.groups, -1)).flatten(0, 1)

    def joined_state(self, S: Tensor) -> Tensor:
        """[B, G R, ...] from [B G, R, ...]."""
        return S.unflatten(0, (self.batch, self.groups)).flatten(1, 2)
