"""One optimizer step: forward and backward of every micro-batch, finalise, check, update.

Autograd is called directly and gradients add up in fp32 `.grad`; the DeepSpeed engine sees them only in `engine.step()`. The
loss is divided by the number of labels in the whole global batch, which is known before the first backward; nothing else is
divided anywhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from baton.models.lm import IGNORED, LanguageModel
from baton.parallel import zero
from baton.parallel.mesh import Mesh
from baton.parallel.tensor import drop_compute_copies
from baton.training.clock import StepClock
from baton.training.errors import RunError


@dataclass(frozen=True)
class TokenBatch:
    """tokens, labels int64 [B, T] (label IGNORED counts nothing), pos int32 [B, T]; on the model's device."""

    tokens: Tensor
    labels: Tensor
    pos: Tensor


@dataclass(frozen=True)
class StepResult:
    """loss: nats per label over the global batch. grad_norm: global, before clipping. labels: counted labels."""

    loss: float
    grad_norm: float
    labels: int


class StepExecutor:
    """Drives a model and its engine."""

    def __init__(self, model: LanguageModel, engine: Any, mesh: Mesh, clock: StepClock | None = None) -> None:
        self.model = model
        self.engine = engine
        self.mesh = mesh
        self.clock = clock or StepClock(mesh.device)

    def step(self, batches: Sequence[TokenBatch], lr: float | Mapping[str, float]) -> StepResult:
        """One update from this data rank's micro-batches. Raises RunError, before the update, if anything is not finite.

        lr: of all parameters, or of each of the optimizer's rates ("" is everybody else's).
        """
        labels = torch.stack([(b.labels != IGNORED).sum() for b in batches]).sum()
        dist.all_reduce(labels, group=self.mesh.data_group)
        scale = 1.0 / float(labels)
        total = torch.zeros((), device=self.mesh.device)
        for batch in batches:
            hidden, _ = self.model(batch.tokens, batch.pos)
            loss = self.model.loss(hidden, batch.labels) * scale
            self.clock.mark("forward")
            torch.autograd.backward([loss])
            total += loss.detach()
            self.clock.mark("backward")
        zero.finalise_gradients(self.model, self.mesh)
        dist.all_reduce(total, group=self.mesh.data_group)
        self._require_finite(total)
        self._set_learning_rate(lr)
        self.engine.step()
        drop_compute_copies(self.model)
        self.clock.mark("optimizer")
        return StepResult(float(total), float(self.engine.get_global_grad_norm()), int(labels))

    def _set_learning_rate(self, lr: float | Mapping[str, float]) -> None:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr if isinstance(lr, float) else lr[group["rate"]]

    def _require_finite(self, loss: Tensor) -> None:
        """The decision to stop is ours and every rank's at once; DeepSpeed would skip the step and say little."""
        norms = torch._foreach_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        finite = torch.isfinite(torch.stack([*norms, loss.detach()])).all().to(torch.int32)
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        if not bool(finite):
            raise RunError(
                "the loss or a gradient is not finite; the parameters are as before this step. Lower training.optimizer.lr or "
                "look at the documents of this step, then start the run again: it resumes from its last checkpoint"
            )
