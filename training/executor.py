"""One optimizer step: forward and backward of every micro-batch, finalise, check, update.

A step is an explicit list of operations (parallel.pipeline.schedule), carried out one after the other; with one stage it is
forward, backward, forward, backward. Autograd is called directly and gradients add up in fp32 `.grad`; the engine sees them only in
`Engine.step`. The loss is divided by the number of labels in the whole global batch, which is known before the first backward;
nothing else is divided anywhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from baton.models.lm import IGNORED, LanguageModel
from baton.parallel import zero
from baton.parallel.mesh import Mesh
from baton.parallel.pipeline import Operation, schedule
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
    """Drives a model, or a stage of it, and its engine."""

    def __init__(self, model: LanguageModel, engine: zero.Engine, mesh: Mesh, clock: StepClock | None = None) -> None:
        self.model = model
        self.engine = engine
        self.mesh = mesh
        self.clock = clock or StepClock(mesh.device)

    def step(self, batches: Sequence[TokenBatch], lr: float | Mapping[str, float]) -> StepResult:
        """One update from this data rank's micro-batches. Raises RunError, before the update, if anything is not finite.

        Every stage is given the same batches. lr: of all parameters, or of each of the optimizer's rates ("" is everybody else's).
        """
        labels = torch.stack([(b.labels != IGNORED).sum() for b in batches]).sum()
        dist.all_reduce(labels, group=self.mesh.data_group)
        passes = _Passes(self.model, batches, 1.0 / float(labels))
        with self.engine.gradients():
            for operation in schedule(self.model.stage.index, self.model.stage.count, len(batches)):
                passes.do(operation)
                self.clock.mark(operation.kind)
            self._wait_for_sends()
            zero.finalise_gradients(self.model, self.mesh)
            total = passes.total
            dist.all_reduce(total, group=self.mesh.data_group)
            if self.mesh.pipeline is not None:
                self.mesh.pipeline.sum(total)
            self._require_finite(total)
        self._set_learning_rate(lr)
        norm = self.engine.step()
        zero.lend(self.model, self.mesh)
        drop_compute_copies(self.model)
        self.clock.mark("optimizer")
        return StepResult(float(total), norm, int(labels))

    def _wait_for_sends(self) -> None:
        for link in (self.mesh.pipeline, self.mesh.link):
            if link is not None:
                link.wait()

    def _set_learning_rate(self, lr: float | Mapping[str, float]) -> None:
        for group in self.engine.param_groups:
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


class _Passes:
    """The micro-batches' way through this stage. total: sum of the losses, scaled; 0 where no loss is."""

    def __init__(self, model: LanguageModel, batches: Sequence[TokenBatch], scale: float) -> None:
        self._model, self._batches, self._scale, self._link = model, batches, scale, model.pipeline
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.total = torch.zeros((), device=batches[0].tokens.device)

    def do(self, operation: Operation) -> None:
        if operation.kind == "forward":
            self._forward(operation.micro_batch)
        else:
            self._backward(operation.micro_batch)

    def _forward(self, n: int) -> None:
        stage, batch = self._model.stage, self._batches[n]
        x = batch.tokens if stage.first else self._receive("forward", n).requires_grad_()
        y, _ = self._model(x, batch.pos)
        if stage.last:
            y = self._model.loss(y, batch.labels) * self._scale
            self.total += y.detach()
        else:
            assert self._link is not None
            self._link.send("forward", y)
        self._kept[n] = x, y

    def _backward(self, n: int) -> None:
        stage = self._model.stage
        x, y = self._kept.pop(n)
        torch.autograd.backward([y], [None if stage.last else self._receive("backward", n)])
        if not stage.first:
            assert self._link is not None
            assert x.grad is not None
            self._link.send("backward", x.grad)

    def _receive(self, kind: Literal["forward", "backward"], n: int) -> Tensor:
        """Not a moment before its operation: on a GPU a receive is a kernel that spins, and CUDA, which loads a kernel when it is
        first launched, waits for what is running. With receives ahead of the schedule two stages would wait for each other."""
        assert self._link is not None
        return self._link.expect(kind, self._model.hidden_shape(self._batches[n].tokens)).wait()
