"""Validation: loss per token and bits per byte on a fixed set of whole documents."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from baton.models.lm import LanguageModel
from baton.parallel.mesh import Mesh
from baton.training.executor import TokenBatch


@dataclass(frozen=True)
class Evaluation:
    """loss: nats per token. bits_per_byte: of the documents' UTF-8 text, their end marks included."""

    loss: float
    bits_per_byte: float


@torch.no_grad()
def evaluate(model: LanguageModel, batches: Sequence[TokenBatch], text_bytes: int, tokens: int, mesh: Mesh) -> Evaluation:
    """Every data rank brings its own batches; text_bytes and tokens are of the whole set, all ranks together."""
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for batch in batches:
        hidden, _ = model(batch.tokens, batch.pos)
        total += model.loss(hidden, batch.labels)
    dist.all_reduce(total, group=mesh.data_group)
    nats = float(total)
    return Evaluation(nats / tokens, nats / math.log(2) / text_bytes)
