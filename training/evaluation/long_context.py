"""Validation on rows far longer than those of training: loss by position, and norms of every layer's State.

Rows consist of the longest documents of the validation split. They are read, evaluated and dropped segment by segment; only
States are passed on, so neither time per token nor memory grows with the row, except with full attention, whose keys are kept.
Positions are compared on the same documents, not on those that happen to be long enough.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.packing import IGNORE_INDEX, Batch, DocCursor, NumpyBatch, check_tokenizer, empty_batch, token_chunks
from baton.data_pipeline.tokenizer import Tokenizer
from baton.models.forward_context import ForwardContext
from baton.models.lm import LanguageModel
from baton.parallel.context_parallel import ContextLink
from baton.parallel.mesh import Mesh
from baton.training.evaluation.evaluate import all_reduce_sums, forward_segments, token_losses
from baton.training.step import batch_distribution

BOUNDARIES_PER_OCTAVE = 16
"""Of the borders between n and 2n spans into a row, so many are looked at: enough for a curve over the logarithm of the position,
few enough for a line of the record."""


class LongRows:
    """The documents of a split by decreasing length, dealt to `rows` rows: row r has documents r, r + rows, and so on.

    Longest first, because text far into a document is rare. Length is in UTF-8 bytes, which do not depend on a tokenizer.

    tokens: wanted per row. The attribute `tokens` is that, or less if the split has less; documents without a token count
    are counted by their bytes. Raises DataError: no such split, or another tokenizer's ids.
    """

    def __init__(self, dataset: Dataset, tokenizer: Tokenizer, *, rows: int, tokens: int, split: str = "validation") -> None:
        check_tokenizer(dataset, tokenizer)
        self._dataset, self._tokenizer, self.rows = dataset, tokenizer, rows
        self._shards = dataset.require(split)
        indexes = [dataset.index(shard) for shard in self._shards]
        lengths = np.concatenate([index.text_bytes for index in indexes])
        counted = np.concatenate([index.tokens for index in indexes])
        order = np.argsort(-lengths, kind="stable")
        shard_of = np.repeat(np.arange(len(indexes)), [len(index) for index in indexes])[order]
        sample_of = np.concatenate([np.arange(len(index)) for index in indexes])[order]
        self._places = np.stack([shard_of, sample_of], axis=1)
        most = np.where(counted < 0, lengths, counted)[order] + 1  # its mark
        self.tokens = min(tokens, max(int(most[row::rows].sum()) for row in range(rows)))

    def segments(self, rows: range, tokens: int) -> Iterator[NumpyBatch]:
        """Endless segments of `tokens` tokens of these rows as batches; labels are IGNORE_INDEX after a row's end.

        Memory: one segment, and a chunk of each open document.
        """
        documents = [self._documents(row) for row in rows]
        opened: list[DocCursor | None] = [next(d, None) for d in documents]
        while True:
            batch = empty_batch(len(rows), tokens, ())
            for row in range(len(rows)):
                column = 0
                while column < tokens and (document := opened[row]) is not None:
                    column = document.fill(batch, row, column)
                    if document.over:
                        opened[row] = next(documents[row], None)
                # what is left looks like a document, and never like one that goes on
                batch.tokens[row, column:] = self._tokenizer.eod_id
                batch.labels[row, column:] = IGNORE_INDEX
                batch.pos[row, column:] = np.arange(tokens - column)
            yield batch

    def _documents(self, row: int) -> Iterator[DocCursor]:
        for number, sample in self._places[row :: self.rows].tolist():
            shard = self._shards[number]
            payload = self._dataset.read_short(shard, sample, 1)[0]
            yield DocCursor(token_chunks(self._dataset, self._tokenizer, shard, sample, payload), 0, self._tokenizer.eod_id)


def long_row_batches(
    rows: LongRows, mesh: Mesh, *, micro_batch_size: int, segment: int, segments: int
) -> Iterator[Iterator[Batch[Tensor]]]:
    """This data rank's rows in groups of micro_batch_size; each group yields this rank's spans of the segments, read on
    demand.

    All ranks that work on the same rows must consume all of them.
    """
    for start in range(mesh.data_rank * micro_batch_size, rows.rows, mesh.layout.data * micro_batch_size):
        group = range(start, min(start + micro_batch_size, rows.rows))
        batches: Iterator[NumpyBatch | None] = rows.segments(group, segment) if batch_distribution.is_reader(mesh) else repeat(None)
        yield (batch_distribution.distribute(next(batches), mesh, (len(group), segment)) for _ in range(segments))


@dataclass(frozen=True)
class LongContextResult:
    """Loss and State norms by position.

    Attributes:
        losses: (first position, mean nats per label, number of labels) of each bucket of positions, first to 2 first - 1; a
            document's first
            token is at position 1.
        positions: tokens of a row read at each boundary that was recorded.
        norms: by State ("mamba.h") and layer, of the State at each boundary: root mean square over rows of its 2-norm.
            Rows without a
            document there are left out; None if all are.
    """

    losses: list[tuple[int, float, int]]
    positions: list[int]
    norms: dict[str, dict[str, list[float | None]]]

    def to_json(self) -> dict[str, Any]:
        """The values that metrics.jsonl records."""
        losses = [{"from": first, "loss": loss, "labels": labels} for first, loss, labels in self.losses]
        return {"losses": losses, "positions": self.positions, "states": self.norms}


@torch.no_grad()
def evaluate_long(
    model: LanguageModel, groups: Iterable[Iterable[Batch[Tensor]]], mesh: Mesh, *, segment: int, segments: int
) -> LongContextResult:
    """Evaluate rows of `segments` segments of `segment` tokens (all context ranks together). Collective; all ranks have the
    result.

    groups: this data rank's batches, each as this rank's spans of its segments.
    """
    ranks, span = mesh.layout.context, segment // mesh.layout.context
    kept = {border: n for n, border in enumerate(borders(ranks * segments))}
    losses = torch.zeros(2, (segment * segments).bit_length(), dtype=torch.float64, device=mesh.device)
    firsts = 2 ** torch.arange(losses.shape[1], device=mesh.device)
    # tensor ranks have parts of what is split, and all of what is not
    leaves = {
        (number, leaf.name): torch.zeros(len(kept), dtype=torch.float64, device=mesh.device)
        for number, of_layer in model.state_specs.items()
        for leaf in of_layer
        if leaf.grad and not leaf.grows and (leaf.tp is not None or mesh.tensor_rank == 0)
    }
    rows = torch.zeros(len(kept), dtype=torch.float64, device=mesh.device)
    forward_context = context_of_segments(model, mesh)
    for group in groups:
        for number, (part, hidden, leaving) in enumerate(forward_segments(model, group, segments, forward_context)):
            if hidden is not None:
                losses += _in_buckets(token_losses(model, hidden, part.labels), part, firsts)
            if (at := kept.get(number * ranks + mesh.context_rank + 1)) is not None:
                here = (part.labels[:, -1] != IGNORE_INDEX).double()
                rows[at] += here.sum()
                for (layer, name), squares in leaves.items():
                    norm = torch.linalg.vector_norm(leaving[layer][name].flatten(1), dim=1, dtype=torch.float64)
                    squares[at] += (norm.square() * here).sum()
    all_reduce_sums(losses, mesh)
    own = {key: squares.tolist() for key, squares in leaves.items()}
    if mesh.tensor_rank == mesh.pipeline_rank == 0:
        own["", "rows"] = rows.tolist()
    sums = sum_over_ranks(own)
    counts = sums.pop(("", "rows"))
    norms: dict[str, dict[str, list[float | None]]] = {}
    for (layer, name), of_rows in sorted(sums.items(), key=lambda item: int(item[0][0])):
        norms.setdefault(name, {})[layer] = [(x / n) ** 0.5 if n else None for x, n in zip(of_rows, counts, strict=True)]
    of_buckets = zip(firsts.tolist(), *losses.tolist(), strict=True)
    return LongContextResult([(f, nats / n, int(n)) for f, nats, n in of_buckets if n], [span * border for border in kept], norms)


def borders(count: int) -> list[int]:
    """Boundaries out of 1 to `count` that are recorded: BOUNDARIES_PER_OCTAVE per power of two, and the last."""
    return [n for n in range(1, count + 1) if n % max(1, (1 << (n.bit_length() - 1)) // BOUNDARIES_PER_OCTAVE) == 0 or n == count]


def context_of_segments(model: LanguageModel, mesh: Mesh) -> ForwardContext:
    """The context of passes in which segments pass on States: through a link of one rank if the model has none in training."""
    return ForwardContext(model.link or ContextLink(0, [mesh.rank], mesh.device))


def sum_over_ranks(own: dict[Any, list[float]]) -> dict[Any, list[float]]:
    """Elementwise sums of the ranks' lists by key. Collective over the world."""
    of_ranks: list[dict[Any, list[float]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    found: dict[Any, list[float]] = {}
    for key, values in (item for one in of_ranks for item in one.items()):
        found[key] = [a + b for a, b in zip(found[key], values, strict=True)] if key in found else values
    return found


def _in_buckets(losses: Tensor, part: Batch[Tensor], firsts: Tensor) -> Tensor:
    """Sums of losses and numbers of labels by bucket, float64 [2, buckets].

    One sum per bucket, because scatter-add has no deterministic order on a GPU.
    """
    counted = part.labels != IGNORE_INDEX
    bucket = torch.bucketize(part.pos + 1, firsts, right=True) - 1
    found = []
    for number in range(len(firsts)):
        mine = counted & (bucket == number)
        found.append(torch.stack([torch.where(mine, losses, 0.0).sum(dtype=torch.float64), mine.sum().double()]))
    return torch.stack(found, dim=1)
