"""Full attention over context ranks and segments: keys and values are gathered, and queries dealt out for equal work.

Every rank has a span of the sequence. Later tokens attend to more keys, so a rank that attended with its own queries would work
2 r + 1 times as long as rank 0. Each span is cut in two, and of the 2 P pieces rank r attends with those numbered r and
2 P - 1 - r (zigzag): together every rank reads equally many keys. Queries go to the rank that works on them and outputs come back,
which moves no more than a layer's hidden vectors; the other mixers keep their spans, and States their order. Keys and values are
gathered for the pass and dropped after it; the backward pass gathers them again, returns each rank's part of their gradient to its
owner, and the owner adds the parts in the order of the ranks.

With segments every rank keeps its own keys and values of the earlier segments of the sequence, and the gradients that later
segments have for them (`parallel.earlier_keys`). They are gathered from there for every segment.

All of this is collective over the context group: all its ranks call the same functions in the same order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels.protocol import GatheredRecurrence, Inputs, State
from baton.parallel.context_parallel import ContextLink, Direction, MessageTag
from baton.parallel.earlier_keys import EarlierKeys


@dataclass(frozen=True)
class _Pieces:
    """The pieces of a segment of `size` spans of `span` tokens: two a rank, or one where there is one rank or one token."""

    rank: int
    size: int
    span: int

    @property
    def each(self) -> int:
        return 2 if self.size > 1 and self.span > 1 else 1

    def worker(self, piece: int) -> int:
        """The rank that attends with the piece's queries."""
        return min(piece, 2 * self.size - 1 - piece) if self.each == 2 else piece

    def owner(self, piece: int) -> int:
        """The rank whose tokens they are."""
        return piece // self.each

    def of_owner(self, rank: int) -> list[int]:
        return [self.each * rank + n for n in range(self.each)]

    def of_worker(self, rank: int) -> list[int]:
        """In ascending order, which is also that of their owners."""
        return [piece for piece in range(self.each * self.size) if self.worker(piece) == rank]

    def place(self, piece: int) -> slice:
        """Where the piece lies in its owner's span."""
        if self.each == 1:
            return slice(0, self.span)
        half = self.span // 2
        return slice(half, self.span) if piece % 2 else slice(0, half)

    def end(self, piece: int) -> int:
        """Tokens of the segment up to the piece's last one."""
        return self.owner(piece) * self.span + self.place(piece).stop


class _Exchange:
    """The collectives of one recurrence in one pass."""

    def __init__(self, link: ContextLink, tag: MessageTag, span: int) -> None:
        self.link, self.tag, self.segment = link, tag, tag.virtual_rank.segment
        self.pieces = _Pieces(link.rank, link.size, span)

    def keys(self, own: Inputs, direction: Direction) -> Inputs:
        """All ranks' rows of all segments up to this one, [B, tokens, ...] in the sequence's order. own: this rank's."""
        return own if self.link.size == 1 else tuple(self._gathered(x, self.segment + 1, direction) for x in own)

    def to_workers(self, x: Tensor, direction: Direction) -> list[Tensor]:
        """The tokens of the pieces that this rank works on, from a tensor [B, span, ...] of every rank's tokens."""
        pieces = self.pieces
        if pieces.size == 1:
            return [x]
        own = {piece: x[:, pieces.place(piece)] for piece in pieces.of_owner(pieces.rank)}
        wanted = [[piece for piece in pieces.of_worker(pieces.rank) if pieces.owner(piece) == rank] for rank in range(pieces.size)]
        found = self._moved(own, pieces.worker, wanted, direction)
        return [found[piece] for piece in sorted(found)]

    def to_owners(self, parts: Sequence[Tensor], direction: Direction) -> Tensor:
        """The reverse of `to_workers`."""
        pieces = self.pieces
        if pieces.size == 1:
            return parts[0]
        done = dict(zip(pieces.of_worker(pieces.rank), parts, strict=True))
        wanted = [[piece for piece in pieces.of_owner(pieces.rank) if pieces.worker(piece) == rank] for rank in range(pieces.size)]
        found = self._moved(done, pieces.owner, wanted, direction)
        return torch.cat([found[piece] for piece in sorted(found)], dim=1)

    def key_grads(self, grads: Inputs, segments: int) -> list[list[Tensor]]:
        """The gradient of this rank's rows, by segment, from each rank's part of that of all rows [B, tokens, ...]. Sums are in
        float32, or the rows' wider dtype."""
        found: list[list[Tensor]] = [[] for _ in range(segments)]
        for x in grads:
            wide = torch.promote_types(x.dtype, torch.float32)
            shape = (x.shape[0], segments, self.link.size, self.pieces.span, *x.shape[2:])
            by_owner = x.view(shape).movedim(2, 0)
            if self.link.size == 1:
                total = by_owner[0].to(wide)
            else:
                parts = self._exchanged(list(by_owner), [by_owner[0].shape] * self.link.size, x.dtype, "left")
                total = parts[0].to(wide)
                for part in parts[1:]:
                    total += part
            for segment, rows in enumerate(total.unbind(1)):
                found[segment].append(rows)
        return found

    def _gathered(self, x: Tensor, segments: int, direction: Direction) -> Tensor:
        size, span = self.link.size, self.pieces.span
        rows = self._run(x, lambda flat: self.link.channels["gather"].gather(flat, self._label(direction)).wait())
        self.link.count(direction, self.tag, x.nbytes * (size - 1))
        of_ranks = rows.view(size, x.shape[0], segments, span, *x.shape[2:])
        return of_ranks.permute(1, 2, 0, *range(3, of_ranks.dim())).flatten(1, 3)

    def _moved(
        self, sent: dict[int, Tensor], to: Callable[[int], int], wanted: list[list[int]], direction: Direction
    ) -> dict[int, Tensor]:
        """Pieces from other ranks by number. sent: [B, tokens, ...] by number; to: who gets a piece; wanted: by source."""
        like, place = next(iter(sent.values())), self.pieces.place
        lengths = [[place(piece).stop - place(piece).start for piece in group] for group in wanted]
        by_rank = [[x for piece, x in sorted(sent.items()) if to(piece) == rank] for rank in range(self.pieces.size)]
        joined = [torch.cat(parts, dim=1) if parts else like[:, :0] for parts in by_rank]
        shapes = [(like.shape[0], sum(of_group), *like.shape[2:]) for of_group in lengths]
        found = self._exchanged(joined, shapes, like.dtype, direction)
        pieces = [x.split(of_group, dim=1) if of_group else () for x, of_group in zip(found, lengths, strict=True)]
        return {
            number: x for group, of_group in zip(wanted, pieces, strict=True) for number, x in zip(group, of_group, strict=True)
        }

    def _exchanged(
        self, sent: Sequence[Tensor], shapes: Sequence[Sequence[int]], dtype: torch.dtype, direction: Direction
    ) -> list[Tensor]:
        """A tensor from every rank, of `shapes`. sent: one for every rank."""
        message, channel = torch.cat([x.reshape(-1) for x in sent]), self.link.channels["gather"]
        outgoing = [x.nbytes for x in sent]
        counts = [torch.Size(shape).numel() for shape in shapes]
        incoming = [n * dtype.itemsize for n in counts]
        self.link.count(direction, self.tag, sum(outgoing) - outgoing[self.link.rank])
        found = self._run(message, lambda x: channel.all_to_all(x, outgoing, incoming, self._label(direction)).wait())
        return [x.view(*shape) for x, shape in zip(found.split(counts), shapes, strict=True)]

    def _run(self, x: Tensor, collective: Callable[[Tensor], Tensor]) -> Tensor:
        """A collective of bytes on the side stream, which this stream then waits for."""
        flat, stream = x.contiguous().view(-1).view(torch.uint8), self.link.side_stream
        stream.wait_current_stream()
        with stream.use():
            found = collective(flat)
        stream.join({"": found})
        return found.view(-1).view(x.dtype)

    def _label(self, direction: Direction) -> str:
        what = "the tokens" if direction == "right" else "the gradient of the tokens"
        segment = f", segment {self.segment}" if self.tag.virtual_rank.segments > 1 else ""
        return f"{what} of {self.tag.name} in {self.tag.where}{segment}"


def run_gathered(
    link: ContextLink, recurrence: GatheredRecurrence, inputs: Inputs, pos: Tensor, where: str
) -> tuple[Tensor, State]:  # fmt: skip
    """Outputs of this rank's tokens, and what they add to the State: other than elsewhere, no rank has the whole State.

    inputs: [B, span, ...] of this rank's tokens, all with a time dimension. A sequence begins with the first segment's first token;
    positions say where documents begin.
    """
    exchange = _Exchange(link, MessageTag(recurrence.name, where, link.virtual_rank), inputs[0].shape[1])
    earlier = link.earlier_keys(exchange.tag)
    y: Tensor = _Gathered.apply(exchange, recurrence, earlier, pos, *inputs)
    if not torch.is_grad_enabled() and exchange.segment == link.virtual_rank.segments - 1:
        earlier.clear()  # no segment comes, and no backward pass
    return y, {name: x.detach() for name, x in recurrence.span_state(inputs, pos).items()}


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exchange: _Exchange, recurrence: GatheredRecurrence, earlier: EarlierKeys, pos: Tensor, *inputs: Tensor
    ) -> Tensor:
        n, segment = recurrence.num_queries, exchange.segment
        queries = [exchange.to_workers(x, "right") for x in inputs[:n]]
        positions = exchange.to_workers(pos, "right")
        own = tuple(x.detach() for x in inputs[n:])
        keep = exchange.tag.virtual_rank.segments > segment + 1
        keys = exchange.keys(earlier.join(segment, own, keep=keep), "right")
        saved, outputs = [], []
        pieces = exchange.pieces.of_worker(exchange.pieces.rank)
        for piece, of_piece, at in zip(pieces, zip(*queries, strict=True), positions, strict=True):
            y, more = recurrence.attend(of_piece, _visible(exchange, keys, piece), at)
            outputs.append(y)
            saved += [at, y, *of_piece, *more]
        earlier.end_pass()
        ctx.exchange, ctx.recurrence, ctx.earlier, ctx.per_piece = exchange, recurrence, earlier, len(saved) // len(outputs)
        ctx.save_for_backward(*inputs[n:], *saved)
        return exchange.to_owners(outputs, "right")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        exchange, recurrence, earlier = ctx.exchange, ctx.recurrence, ctx.earlier
        n, segment, tensors = recurrence.num_queries, exchange.segment, list(ctx.saved_tensors)
        own = tuple(tensors[: (first := len(recurrence.input_names) - n)])
        keys = exchange.keys(earlier.join(segment, own, keep=False), "left")
        dkeys = [torch.zeros_like(x) for x in keys]
        dqueries: list[list[Tensor]] = [[] for _ in range(n)]
        pieces = exchange.pieces.of_worker(exchange.pieces.rank)
        for number, (piece, dpiece) in enumerate(zip(pieces, exchange.to_workers(dy, "left"), strict=True)):
            at, y, *rest = tensors[first + number * ctx.per_piece :][: ctx.per_piece]
            visible = _visible(exchange, keys, piece)
            dx, dvisible = recurrence.attend_backward(tuple(rest[:n]), visible, at, y, tuple(rest[n:]), dpiece)
            for found, grad in zip(dqueries, dx, strict=True):
                found.append(grad)
            for total, grad in zip(dkeys, dvisible, strict=True):
                total[:, : grad.shape[1]] += grad
        del keys
        *before, grads = exchange.key_grads(tuple(dkeys), segment + 1)
        del dkeys
        earlier.add_grads(before)
        if (later := earlier.take_grads(segment)) is not None:
            grads = [a + b for a, b in zip(grads, later, strict=True)]
        earlier.end_pass()
        if segment == 0:
            earlier.clear()
        dinputs = [exchange.to_owners(parts, "left") for parts in dqueries]
        return (None,) * 4 + (*dinputs, *(grad.to(x.dtype) for grad, x in zip(grads, own, strict=True)))


def _visible(exchange: _Exchange, keys: Inputs, piece: int) -> Inputs:
    """The keys up to a piece's last token."""
    end = exchange.segment * exchange.link.size * exchange.pieces.span + exchange.pieces.end(piece)
    return tuple(x[:, :end] for x in keys)
