"""One optimizer step: forward and backward of every micro-batch, finalise, check, update.

A step is an explicit list of operations (parallel.pipeline.schedule), carried out one after the other (training.passes); with one
stage and whole sequences it is forward, backward, forward, backward. Autograd is called directly and gradients add up in fp32
`.grad`; the engine sees them only in `Engine.step`. The loss is divided by the number of labels in the whole global batch, which is
known before the first backward; nothing else is divided anywhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from baton.models.lm import LanguageModel
from baton.parallel import zero
from baton.parallel.mesh import Mesh
from baton.parallel.pipeline import schedule
from baton.parallel.tensor import drop_compute_copies
from baton.training.clock import StepClock
from baton.training.errors import RunError
from baton.training.lane_states import LaneStates
from baton.training.passes import Passes, Segments, TokenBatch


@dataclass(frozen=True)
class StepResult:
    """loss: nats per label over the global batch. grad_norm: global, before clipping. labels: counted labels."""

    loss: float
    grad_norm: float
    labels: int


class StepExecutor:
    """Drives a model, or a stage of it, and its engine.

    segments: how sequences are cut (None: not at all), may change between steps. lanes: what they carry from step to step.
    """

    def __init__(
        self,
        model: LanguageModel,
        engine: zero.Engine,
        mesh: Mesh,
        clock: StepClock | None = None,
        *,
        segments: Segments | None = None,
        lanes: LaneStates | None = None,
    ) -> None:
        self.model = model
        self.engine = engine
        self.mesh = mesh
        self.clock = clock or StepClock(mesh.device)
        self.segments, self.lanes = segments or Segments(), lanes

    def step(self, batches: Sequence[TokenBatch], lr: float | Mapping[str, float]) -> StepResult:
        """One update from this data rank's micro-batches. Raises RunError, before the update, if anything is not finite.

        Every stage is given the same batches. lr: of all parameters, or of each of the optimizer's rates ("" is everybody else's).
        """
        labels = torch.stack([b.count_labels() for b in batches]).sum()
        dist.all_reduce(labels, group=self.mesh.data_group)
        stage, segments = self.model.stage, self.segments
        passes = Passes(self.model, batches, 1.0 / float(labels), segments, self.lanes)
        with self.engine.gradients():
            for operation in schedule(stage.index, stage.count, len(batches), segments.count, segments.gradient):
                passes.do(operation)
                self.clock.mark(operation.kind)
            passes.finish()
            self._wait_for_sends()
            zero.finalise_gradients(self.model, self.mesh)
            total = passes.total
            dist.all_reduce(total, group=self.mesh.data_group)
            if self.mesh.pipeline is not None:
                self.mesh.pipeline.sum(total)
            self._require_finite(total)
            self._require_equal(passes.differing())
        self._set_learning_rate(lr)
        norm = self.engine.step()
        zero.lend(self.model, self.mesh)
        drop_compute_copies(self.model)
        self.clock.mark("optimizer")
        return StepResult(float(total), norm, int(labels))

    def _wait_for_sends(self) -> None:
        for link in (self.mesh.pipeline, self.model.link):
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

    def _require_equal(self, differing: list[str]) -> None:
        """Segments that ran twice must have left the same States."""
        if self.segments.gradient == 1:
            return
        count = torch.tensor(len(differing), device=self.mesh.device)
        dist.all_reduce(count)
        if not int(count):
            return
        of_ranks: list[list[str]] = [[]] * self.mesh.world_size
        dist.all_gather_object(of_ranks, differing)
        rank, names = next((rank, names) for rank, names in enumerate(of_ranks) if names)
        raise RunError(
            f"rank {rank}: a segment that was computed twice left another State the second time ({names[0]}; {int(count)} in all), "
            f"and its gradient would be of another run. The parameters are as before this step. Set training.deterministic=true; "
            f"where it is, suspect the rank's memory or its device"
        )
