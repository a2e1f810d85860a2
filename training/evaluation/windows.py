"""Loss of documents in windows of any length, with the loss by how many tokens were seen before.

Several processes may each have a share of the windows; they need no groups, since only their sums are added.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baton.data_pipeline.evaluation import EvaluationStream
from baton.data_pipeline.packing import IGNORE_INDEX, Batch
from baton.models.lm import LanguageModel, States
from baton.training.evaluation.evaluate import token_losses
from baton.training.evaluation.prompts import SCORED_TOKENS


@dataclass(frozen=True)
class WindowsResult:
    """Attributes:
    loss: nats per token. tokens: labels, EOD tokens included.
    bits_per_byte: of the documents' UTF-8.
    by_position: (tokens seen before at least, mean nats, labels); each bucket reaches to twice its first, less one.
    """

    loss: float
    tokens: int
    bits_per_byte: float
    by_position: list[tuple[int, float, int]]

    def to_json(self, *, by_position: bool) -> dict[str, Any]:
        """Values of a row of evaluations.jsonl."""
        found: dict[str, Any] = {"loss": self.loss, "perplexity": math.exp(min(self.loss, 700.0)), "tokens": self.tokens}
        found["bits_per_byte"] = self.bits_per_byte
        if by_position:
            found["by_position"] = [{"from": first, "loss": loss, "labels": n} for first, loss, n in self.by_position]
        return found


@dataclass(frozen=True)
class WindowSums:
    """What one process adds to a WindowsResult.

    Attributes:
    nats, labels: sums by the first of a bucket's numbers of tokens seen before.
    tokens, text_bytes, documents: of the whole set, the same in each process.
    """

    nats: dict[int, float]
    labels: dict[int, int]
    tokens: int
    text_bytes: int
    documents: int


@torch.no_grad()
def evaluate_windows(model: LanguageModel, chosen: EvaluationStream, rank: int = 0, ranks: int = 1) -> WindowSums:
    """Evaluate a process's share of a set of windows [rows, length] each of which begins without a State: every ranks-th batch."""
    device = next(model.parameters()).device
    nats: defaultdict[int, float] = defaultdict(float)
    labels: defaultdict[int, int] = defaultdict(int)
    firsts = 2 ** torch.arange(31, device=device)
    for number, numpy_batch in enumerate(chosen.batches):
        if number % ranks != rank:
            continue
        # windows that only complete a round of micro-batches
        used = (numpy_batch.labels != IGNORE_INDEX).any(1)
        parts = (numpy_batch.tokens, numpy_batch.labels, numpy_batch.pos)
        tokens, labels_of_rows, pos = (torch.from_numpy(x[used]).to(device) for x in parts)
        batch: Batch[Tensor] = Batch(tokens, labels_of_rows, pos)
        for start, losses, part in _losses(model, batch):
            # of the document, and not before the window
            seen = torch.minimum(part.pos, torch.arange(start, start + losses.shape[1], device=device)) + 1
            counted = part.labels != IGNORE_INDEX
            octave = torch.bucketize(seen, firsts, right=True) - 1
            for place in octave[counted].unique().tolist():
                here = counted & (octave == place)
                nats[1 << place] += float(torch.where(here, losses, 0.0).sum(dtype=torch.float64))
                labels[1 << place] += int(here.sum())
    return WindowSums(nats, labels, chosen.tokens, chosen.text_bytes, chosen.documents)


def joined(shares: Sequence[WindowSums]) -> WindowsResult:
    """The result of all processes' shares of one set."""
    firsts, whole = sorted(set().union(*(share.labels for share in shares))), shares[0]
    sums = [(first, sum(x.nats.get(first, 0.0) for x in shares), sum(x.labels.get(first, 0) for x in shares)) for first in firsts]
    total = sum(nats for _, nats, _ in sums)
    rows = [(first, nats / n, n) for first, nats, n in sums]
    return WindowsResult(total / whole.tokens, whole.tokens, total / math.log(2) / max(1, whole.text_bytes), rows)


def _losses(model: LanguageModel, batch: Batch[Tensor]) -> Iterator[tuple[int, Tensor, Batch[Tensor]]]:
    """(first token, losses [rows, tokens], the part of the batch) of a window's pieces."""
    rows, length = batch.tokens.shape
    width = max(1, SCORED_TOKENS // rows)
    states: States | None = None
    for start in range(0, length, width):
        piece = slice(start, start + width)
        part: Batch[Tensor] = Batch(batch.tokens[:, piece], batch.labels[:, piece], batch.pos[:, piece])
        hidden, states = model(part.tokens, part.pos, states)
        yield start, token_losses(model, hidden, part.labels), part
