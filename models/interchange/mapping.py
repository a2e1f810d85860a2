"""How tensors of one format become those of another, in both directions from one declaration.

Baton's tensors are those of a weights file (training.checkpoint.tools): whole, with fused projections in their parts.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


class InterchangeError(ValueError):
    """A configuration or tensors that have no counterpart: what, and what to do, in one line."""

    exit_status = 2


@dataclass(frozen=True)
class TensorMap:
    """One tensor of the other format, and the tensors of Baton's that it consists of.

    theirs: its name. parts: names and shapes of Baton's, concatenated along dimension 0. axis: where the other format has a
    dimension of size 1 that Baton's does not, as a convolution's weight; None: nowhere. rows: of a vocabulary, how many of Baton's
    first rows the other format has; the others are padding, which is 0. None: all. by_group: name of a part whose rows are of two
    kinds and so many groups, by group in Baton's tensor and by kind in the other format's (B and C of Mamba-2); None: of none.
    by_head: number of heads, each of which has rows in every part; theirs lie by head, then by part. None: by part alone. offset:
    what Baton's numbers are more than the other format's, as for norms that add 1 to their weight.
    """

    theirs: str
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    axis: int | None = None
    rows: int | None = None
    by_group: tuple[str, int] | None = None
    by_head: int | None = None
    offset: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the other format's tensor."""
        first = self.parts[0][1]
        shape = [self.rows or sum(shape[0] for _, shape in self.parts), *first[1:]]
        if self.axis is not None:
            shape.insert(self.axis, 1)
        return tuple(shape)

    def to_theirs(self, ours: Mapping[str, Tensor]) -> Tensor:
        """The other format's tensor. Raises InterchangeError for a tensor of another shape."""
        for name, shape in self.parts:
            checked(name, ours, shape)
        pieces = [self._reordered(name, ours[name], ours=False) for name, _ in self.parts]
        if self.by_head is not None:
            found = torch.cat([x.unflatten(0, (self.by_head, -1)) for x in pieces], dim=1).flatten(0, 1)
        else:
            found = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        if self.offset:
            found = found - self.offset
        if self.rows is not None:
            found = found[: self.rows]
        return (found if self.axis is None else found.unsqueeze(self.axis)).contiguous()

    def to_ours(self, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Baton's tensors by name. Raises InterchangeError for a tensor that is missing or of another shape."""
        whole = checked(self.theirs, theirs, self.shape)
        if self.axis is not None:
            whole = whole.squeeze(self.axis)
        if self.rows is not None:
            (name, shape), *_ = self.parts
            padded = whole.new_zeros(shape)
            padded[: self.rows] = whole
            return {name: padded}
        if self.offset:
            whole = whole.float() + self.offset
        counts = [shape[0] for _, shape in self.parts]
        if self.by_head is not None:
            pieces = whole.unflatten(0, (self.by_head, -1)).split([count // self.by_head for count in counts], dim=1)
            pieces = tuple(x.flatten(0, 1) for x in pieces)
        else:
            pieces = whole.split(counts)
        return {name: self._reordered(name, x, ours=True).contiguous() for (name, _), x in zip(self.parts, pieces, strict=True)}

    def _reordered(self, name: str, x: Tensor, *, ours: bool) -> Tensor:
        """A part with its rows in the other order. ours: from theirs to ours."""
        if self.by_group is None or name != self.by_group[0]:
            return x
        first = 2 if ours else self.by_group[1]
        return x.unflatten(0, (first, 2 * self.by_group[1] // first, -1)).transpose(0, 1).flatten(0, 2)


def one(theirs: str, ours: str, *shape: int, axis: int | None = None) -> TensorMap:
    """A tensor that both formats have."""
    return TensorMap(theirs, ((ours, shape),), axis)


def to_ours(maps: Iterable[TensorMap], theirs: Mapping[str, Tensor], ignored: Iterable[str] = ()) -> dict[str, Tensor]:
    """All of Baton's tensors. ignored: names of theirs that say nothing new. Raises InterchangeError for others that no map has."""
    maps = list(maps)
    if unknown := sorted(set(theirs) - {one.theirs for one in maps} - set(ignored)):
        raise InterchangeError(f"{unknown[0]} has no counterpart in Baton's model (and {len(unknown) - 1} more)")
    return {name: x for one in maps for name, x in one.to_ours(theirs).items()}


def to_theirs(maps: Iterable[TensorMap], ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of the other format. Raises InterchangeError where one of Baton's is in no map."""
    maps = list(maps)
    if unknown := sorted(set(ours) - {name for one in maps for name, _ in one.parts}):
        raise InterchangeError(f"{unknown[0]} has no counterpart in the other format (and {len(unknown) - 1} more)")
    return {one.theirs: one.to_theirs(ours) for one in maps}


def checked(name: str, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    """A tensor by name. Raises InterchangeError where it is missing or of another shape."""
    if name not in tensors:
        raise InterchangeError(f"there is no tensor {name}, which the configuration promises")
    if tuple(tensors[name].shape) != shape:
        raise InterchangeError(f"{name} has shape {tuple(tensors[name].shape)}, and the configuration promises {shape}")
    return tensors[name]
