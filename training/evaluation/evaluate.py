"""Validation: loss per token and bits per byte on a fixed set of whole documents; loss and accuracy on a synthetic task's set.

The one thing to know: every data rank scores its own batches and the sums meet once, at the end; tensor ranks score the same batch,
each on its share of the vocabulary. Long rows are scored segment by segment, States going from each to the next, so that memory is
that of a segment.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from baton.data_pipeline.packing import IGNORE_INDEX, Batch
from baton.models.cross_entropy import token_cross_entropy
from baton.models.lm import LanguageModel, States
from baton.parallel.mesh import Mesh


@dataclass(frozen=True)
class TextEvaluation:
    """loss: nats per token. bits_per_byte: of the documents' UTF-8 text, their end marks included."""

    loss: float
    bits_per_byte: float


@torch.no_grad()
def evaluate(
    model: LanguageModel, batches: Sequence[Batch[Tensor]], text_bytes: int, tokens: int, mesh: Mesh, *, segments: int = 1
) -> TextEvaluation:
    """Every data rank brings its own batches, laid out in `segments`; text_bytes and tokens are of the whole set, all ranks
    together."""
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for batch in batches:
        parts = (batch.segment(s, segments) for s in range(segments))
        for part, hidden, _ in forward_segments(model, parts, segments, state_wanted=False):
            if hidden is not None:
                total += model.loss(hidden, part.labels)
    all_reduce_sums(total, mesh)
    nats = float(total)
    return TextEvaluation(nats / tokens, nats / math.log(2) / text_bytes)


@dataclass(frozen=True)
class TaskEvaluation:
    """loss: nats per label. accuracy: share of the labels that are the model's likeliest token, 0 to 1."""

    loss: float
    accuracy: float


@torch.no_grad()
def evaluate_task(
    model: LanguageModel, batches: Sequence[Batch[Tensor]], labels: int, mesh: Mesh, *, segments: int = 1
) -> TaskEvaluation:
    """Loss and accuracy at the labelled places. Every data rank brings its own batches, laid out in `segments`; labels: how many,
    all ranks together."""
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    for batch in batches:
        # such a batch only completes a round over the ranks; but a span without a question may be needed by the next one
        if mesh.layout.context == 1 and not bool((batch.labels != IGNORE_INDEX).any()):
            continue
        parts = (batch.segment(s, segments) for s in range(segments))
        for part, hidden, _ in forward_segments(model, parts, segments, state_wanted=False):
            asked = part.labels != IGNORE_INDEX
            if hidden is None or not bool(asked.any()):
                continue
            # a task asks at few places: only those need logits
            chosen, wanted = hidden[asked], part.labels[asked]
            sums[0] += model.loss(chosen[None], wanted[None])
            sums[1] += (greedy_tokens(model, chosen, mesh) == wanted).sum()
    all_reduce_sums(sums, mesh)
    return TaskEvaluation(float(sums[0]) / labels, float(sums[1]) / labels)


@torch.no_grad()
def forward_segments(
    model: LanguageModel, parts: Iterable[Batch[Tensor]], segments: int, *, state_wanted: bool = True
) -> Iterator[tuple[Batch[Tensor], Tensor | None, States]]:
    """The forward pass of a batch, segment by segment: (this rank's span, its hidden vectors on the last stage and None on the
    others, leaving States).

    parts: this rank's spans of the `segments` segments, in order; made as they are asked for, they need not all be in memory. With
    more than one the model needs a link. state_wanted: whether the leaving States will be looked at.
    """
    for number, part in enumerate(parts):
        link = model.link
        if segments > 1 and link is None:
            raise ValueError("segments follow one another through a link, and the model has none")
        with nullcontext() if link is None or segments == 1 else link.segment(number, of=segments):
            hidden, leaving = model.through_stages(part.tokens, part.pos, state_wanted=state_wanted)
        yield part, hidden, leaving
        if segments > 1 and model.pipeline is not None:
            # or an early stage would run ahead, and what it has sent would wait in memory
            model.pipeline.wait()


@torch.no_grad()
def token_losses(model: LanguageModel, hidden: Tensor, labels: Tensor) -> Tensor:
    """Negative log-likelihood (nats, fp32 [B, T]) of each label of [B, T] int64, 0 where it is IGNORE_INDEX. On the last stage."""
    flat, chunk = labels.flatten(), model.config.loss_chunk
    found = [
        token_cross_entropy(model.local_logits(h), y)
        for h, y in zip(hidden.flatten(0, 1).split(chunk), flat.split(chunk), strict=True)
    ]
    return torch.cat(found).float().view(labels.shape)


def all_reduce_sums(sums: Tensor, mesh: Mesh) -> None:
    """Over data ranks and stages (all but the last have zeros), in place."""
    dist.all_reduce(sums, group=mesh.data_group)
    if mesh.pipeline is not None:
        mesh.pipeline.sum(sums)


@torch.no_grad()
def greedy_tokens(model: LanguageModel, hidden: Tensor, mesh: Mesh) -> Tensor:
    """The token with the greatest logit, hidden [N, d_model] to int64 [N]; of equal ones the first, whatever the layout.

    Logits stay split over the tensor group: each rank offers its best, the greatest wins. Rows that pad the vocabulary never do.
    """
    vocab_size, found = model.config.vocab_size, []
    assert vocab_size is not None, "a model that was built knows its vocabulary"
    for piece in hidden.split(model.config.loss_chunk):
        logits = model.local_logits(piece).float()
        ids = mesh.tensor_rank * logits.shape[-1] + torch.arange(logits.shape[-1], device=logits.device)
        best, place = logits.masked_fill(ids >= vocab_size, -torch.inf).max(dim=-1)
        token = ids[place]
        if mesh.layout.tensor > 1:
            greatest = best.clone()
            dist.all_reduce(greatest, op=dist.ReduceOp.MAX, group=mesh.tensor_group)
            token = torch.where(best == greatest, token, model.config.padded_vocab_size)
            dist.all_reduce(token, op=dist.ReduceOp.MIN, group=mesh.tensor_group)
        found.append(token)
    return torch.cat(found)
