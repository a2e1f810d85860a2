"""Loss of documents in windows of any length, with the loss by how many tokens were seen before. One process, no groups."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baton.data_pipeline.evaluation import EvaluationStream
from baton.data_pipeline.packing import IGNORE_INDEX, Batch
from baton.models.lm import LanguageModel, States
from baton.training.evaluation.evaluate import token_losses
from baton.training.evaluation.generation import PREFILL_TOKENS


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


@torch.no_grad()
def evaluate_windows(model: LanguageModel, chosen: EvaluationStream) -> WindowsResult:
    """Evaluate a set of windows [rows, length] each of which begins without a State."""
    device = next(model.parameters()).device
    buckets: dict[int, list[float]] = {}
    firsts = 2 ** torch.arange(31, device=device)
    for numpy_batch in chosen.batches:
        # windows that only complete a round of micro-batches
        used = (numpy_batch.labels != IGNORE_INDEX).any(1)
        parts = (numpy_batch.tokens, numpy_batch.labels, numpy_batch.pos)
        tokens, labels, pos = (torch.from_numpy(x[used]).to(device) for x in parts)
        batch: Batch[Tensor] = Batch(tokens, labels, pos)
        for start, losses, part in _losses(model, batch):
            # of the document, and not before the window
            seen = torch.minimum(part.pos, torch.arange(start, start + losses.shape[1], device=device)) + 1
            counted = part.labels != IGNORE_INDEX
            octave = torch.bucketize(seen, firsts, right=True) - 1
            for number in octave[counted].unique().tolist():
                here = counted & (octave == number)
                sums = buckets.setdefault(1 << number, [0.0, 0])
                sums[0] += float(torch.where(here, losses, 0.0).sum(dtype=torch.float64))
                sums[1] += int(here.sum())
    nats = sum(total for total, _ in buckets.values())
    rows = [(first, total / n, int(n)) for first, (total, n) in sorted(buckets.items())]
    return WindowsResult(nats / chosen.tokens, chosen.tokens, nats / math.log(2) / max(1, chosen.text_bytes), rows)


def _losses(model: LanguageModel, batch: Batch[Tensor]) -> Iterator[tuple[int, Tensor, Batch[Tensor]]]:
    """(first token, losses [rows, tokens], the part of the batch) of a window's pieces."""
    rows, length = batch.tokens.shape
    width = max(1, PREFILL_TOKENS // rows)
    states: States | None = None
    for start in range(0, length, width):
        piece = slice(start, start + width)
        part: Batch[Tensor] = Batch(batch.tokens[:, piece], batch.labels[:, piece], batch.pos[:, piece])
        hidden, states = model(part.tokens, part.pos, states)
        yield start, token_losses(model, hidden, part.labels), part
