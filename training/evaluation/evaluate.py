"""Validation: loss per token and bits per byte on a fixed set of whole documents; loss and accuracy on a synthetic task.

Every data rank evaluates its own batches, and sums are reduced once at the end. Tensor ranks evaluate the same batch, each
on its share of the vocabulary. Long rows are evaluated segment by segment with States passed on, so memory is that of one
segment.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from baton.data_pipeline.packing import IGNORE_INDEX, Batch
from baton.models.cross_entropy import token_cross_entropy
from baton.models.forward_context import ForwardContext
from baton.models.lm import LanguageModel, States
from baton.parallel.mesh import Mesh


@dataclass(frozen=True)
class TextEvaluation:
    """loss: nats per token. bits_per_byte: bits per byte of the documents' UTF-8 text, with their EOD tokens counted in the
    loss."""

    loss: float
    bits_per_byte: float


@torch.no_grad()
def evaluate(
    model: LanguageModel, batches: Sequence[Batch[Tensor]], text_bytes: int, tokens: int, mesh: Mesh, *, segments: int = 1
) -> TextEvaluation:
    """Evaluate this data rank's batches, laid out in `segments` segments. Collective.

    text_bytes, tokens: of the whole set, all ranks together.
    """
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    outputs_only = replace(model.forward_context, need_final_state=False)
    for batch in batches:
        parts = (batch.segment(s, segments) for s in range(segments))
        for part, hidden, _ in forward_segments(model, parts, segments, outputs_only):
            if hidden is not None:
                total += model.loss(hidden, part.labels)
    all_reduce_sums(total, mesh)
    nats = float(total)
    return TextEvaluation(nats / tokens, nats / math.log(2) / text_bytes)


@dataclass(frozen=True)
class TaskEvaluation:
    """loss: nats per label. accuracy: share of labels that are the most probable token, 0 to 1."""

    loss: float
    accuracy: float


@torch.no_grad()
def evaluate_task(
    model: LanguageModel, batches: Sequence[Batch[Tensor]], labels: int, mesh: Mesh, *, segments: int = 1
) -> TaskEvaluation:
    """Loss and accuracy at the labelled positions of this data rank's batches. labels: their number on all ranks together.
    Collective."""
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    outputs_only = replace(model.forward_context, need_final_state=False)
    for batch in batches:
        # such a batch only completes a round over the ranks; but a span without a question may be needed by the next one
        if mesh.layout.context == 1 and not bool((batch.labels != IGNORE_INDEX).any()):
            continue
        parts = (batch.segment(s, segments) for s in range(segments))
        for part, hidden, _ in forward_segments(model, parts, segments, outputs_only):
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
    model: LanguageModel, parts: Iterable[Batch[Tensor]], segments: int, forward_context: ForwardContext
) -> Iterator[tuple[Batch[Tensor], Tensor | None, States]]:
    """Forward pass of a batch, segment by segment; yields (this rank's span, hidden vectors [B, T, d_model] or None, final
    States).

    Hidden vectors are None except on the last pipeline stage.

    Args:
        parts: this rank's spans of the `segments` segments, in order; made on demand, so that they need not all be in
            memory.
        forward_context: of each segment's pass. More than one segment needs a link.
    """
    for number, part in enumerate(parts):
        link = forward_context.link
        if segments > 1 and link is None:
            raise ValueError("segments follow one another through a link, and there is none")
        with nullcontext() if link is None or segments == 1 else link.segment(number, count=segments):
            hidden, leaving = model.through_stages(part.tokens, part.pos, None, forward_context)
        yield part, hidden, leaving
        if segments > 1 and model.pipeline is not None:
            # or an early stage would run ahead, and what it has sent would wait in memory
            model.pipeline.wait()


@torch.no_grad()
def token_losses(model: LanguageModel, hidden: Tensor, labels: Tensor) -> Tensor:
    """Negative log-likelihood of each label, nats, fp32 [B, T]; 0 where labels int64 [B, T] are IGNORE_INDEX. On the last
    stage."""
    flat, chunk, vocab_size = labels.flatten(), model.config.loss_chunk, model.vocab_size
    found = [
        token_cross_entropy(model.local_logits(h), y, vocab_size)
        for h, y in zip(hidden.flatten(0, 1).split(chunk), flat.split(chunk), strict=True)
    ]
    return torch.cat(found).float().view(labels.shape)


def all_reduce_sums(sums: Tensor, mesh: Mesh) -> None:
    """Sum in place over data ranks and pipeline stages; all stages but the last contribute zeros."""
    dist.all_reduce(sums, group=mesh.data_group)
    if mesh.pipeline is not None:
        mesh.pipeline.sum(sums)


@torch.no_grad()
def greedy_tokens(model: LanguageModel, hidden: Tensor, mesh: Mesh) -> Tensor:
    """The most probable tokens, int64 [N], of hidden [N, d_model]; ties go to the lowest id in every layout.

    Logits stay split over the tensor group: each rank contributes its maximum. Padding rows of the vocabulary are never
    chosen.
    """
    vocab_size, found = model.vocab_size, []
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
