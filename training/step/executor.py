"""One optimizer step: forward and backward passes of all micro-batches, gradient finalization, checks, update.

The schedule (`parallel.pipeline.StepSchedule`) lists the step's operations explicitly, and `MicrobatchRunner` carries them out.
Autograd is called directly; gradients accumulate in fp32 `.grad`, and the ZeRO engine sees them only in `Engine.sum_gradients`. The
loss is divided by the number of labels in the global batch, which is known before the first backward pass. Nothing else is
divided anywhere.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from baton.data_pipeline.packing import Batch
from baton.models.lm import LanguageModel
from baton.parallel import zero
from baton.parallel.linear import fused_grad_accumulation
from baton.parallel.mesh import Mesh
from baton.parallel.pipeline import StepSchedule
from baton.parallel.replicated_parameters import broadcast_tied, finalize_model_grads
from baton.training.bptt.lane_states import LaneStates
from baton.training.errors import RunError
from baton.training.monitoring.anomaly_detection import AnomalyDetector
from baton.training.monitoring.nonfinite_trace import NonFiniteReport, NonFiniteTrace
from baton.training.monitoring.step_timer import StepTimer
from baton.training.step.cuda_graphs import CudaGraphRunner, CudaGraphs
from baton.training.step.microbatch_runner import MicrobatchRunner


@dataclass(frozen=True)
class StepResult:
    """Result of a step, the same on all ranks except for `checksum`.

    Attributes:
        loss: nats per label over the global batch.
        grad_norm: global gradient norm before clipping.
        labels: number of labels that counted.
        anomaly: why the step is anomalous, one line; None for an ordinary step.
        nonfinite: where the first non-finite value arose, if that was the anomaly and it was found again.
        update_norm: norm of the parameters' change; None unless `StepExecutor.compute_update_norm`.
        updated: whether parameters were updated. False for every anomaly but a spike of update_norm, which is seen after
            the update.
        checksum: checksum of the step's rows, on first-stage ranks that are first among those that share tensors.
    """

    loss: float
    grad_norm: float
    labels: int
    anomaly: str | None = None
    nonfinite: NonFiniteReport | None = None
    update_norm: float | None = None
    updated: bool = True
    checksum: int = 0


class StepExecutor:
    """Drives a model, or a pipeline stage of it, and its ZeRO engine.

    Args:
        timer: of the step's parts.
        schedule: how sequences are split in time; None: not. May be replaced between steps.
        lanes: States carried from step to step (truncated BPTT); None: none.
        anomaly_detector: judges finite losses and norms; None: accepts all.
        cuda_graphs: record and replay the passes as CUDA graphs; only on one stage, and in segments on one context rank.
    """

    def __init__(
        self,
        model: LanguageModel,
        engine: zero.Engine,
        mesh: Mesh,
        timer: StepTimer | None = None,
        *,
        schedule: StepSchedule | None = None,
        lanes: LaneStates | None = None,
        anomaly_detector: AnomalyDetector | None = None,
        cuda_graphs: CudaGraphs | None = None,
    ) -> None:
        self.model = model
        self.engine = engine
        self.mesh = mesh
        self.timer = timer or StepTimer(mesh.device)
        self.schedule, self.lanes, self.anomaly_detector, self._cuda_graphs = (
            schedule or StepSchedule(),
            lanes,
            anomaly_detector,
            cuda_graphs,
        )
        self.compute_update_norm = False  # whether steps compute the norm of the parameters' change

    def close(self) -> None:
        """Free the recorded CUDA graphs. Called behind the last step too, before the process groups are destroyed."""
        if self._cuda_graphs is not None:
            self._cuda_graphs.release()

    def step(
        self,
        batches: Sequence[Batch[Tensor]],
        lr: float | Mapping[str, float],
        checksum: int = 0,
        meanwhile: Callable[[], None] | None = None,
    ) -> StepResult:
        """Make one update from this data rank's micro-batches, unless the step is anomalous (see StepResult).

        After a step without an update, parameters and moments are as before. Lanes have the States that the step's tokens left,
        or zeros if the loss or a gradient is not finite.

        Args:
            batches: the same on every pipeline stage.
            lr: one learning rate, or one for each of the optimizer's lr_overrides ("" for all other parameters).
            checksum: StepBatches.checksum; it is summed in the same all-reduce as the number of labels.
            meanwhile: called when the passes are launched, before the host waits for what they have computed.
        """
        sums = torch.stack([b.count_labels() for b in batches]).sum().repeat(2)
        sums[1] = checksum
        dist.all_reduce(sums, group=self.mesh.data_group)
        # stays on the device, whose work the host is ahead of; without any label there is no loss and no gradient
        scale = 1.0 / sums[0].clamp(min=1).double()
        if self.lanes is not None:
            self.lanes.begin_step()
        runner = self._forward_backward(batches, scale)
        passed = self._read_later(sums, runner)
        if meanwhile is not None:
            meanwhile()
        labels, checksum, loss, norm, finite, recomputed_alike = passed()
        if not recomputed_alike:
            self._raise_mismatch(runner.mismatched_states())
        self._set_learning_rate(lr)
        detector, nonfinite = self.anomaly_detector, None
        anomalies: list[str] = []
        if finite and detector is not None:
            anomalies += [why for why in (detector.check_loss(loss),) if why is not None]
            if not anomalies:
                anomalies += [why for why in (detector.check_grad_norm(norm),) if why is not None]
        if anomalies or not finite or not math.isfinite(norm):
            self.engine.drop_gradients()
        else:
            self.engine.update(norm)
        if finite and not anomalies and not math.isfinite(norm):  # too large together
            anomalies.append("the gradients' norm is not finite, though each rank's gradients are")
        if not finite:
            del runner  # the trace needs the memory of what is recorded
            nonfinite, otherwise = self._trace_nonfinite(batches, scale)
            happened = "the loss or a gradient is not finite"
            if nonfinite is not None:
                anomalies = [f"{happened}: {nonfinite}"]
            else:
                anomalies = [otherwise or f"{happened}, and in a second run of the step all are"]
            if self.lanes is not None:
                self.lanes.zero_touched()
        elif not anomalies:
            broadcast_tied(self.model, self.mesh)
            if detector is not None:
                detector.record(loss, norm)
        update, updated = None, not anomalies
        if updated and self.compute_update_norm:
            update = self.engine.update_norm()
            anomalies += filter(None, [None if detector is None else detector.check_update_norm(update)])
        self.timer.mark("optimizer")
        return StepResult(loss, norm, labels, anomalies[0] if anomalies else None, nonfinite, update, updated, checksum)

    def _forward_backward(
        self, batches: Sequence[Batch[Tensor]], scale: Tensor, trace: NonFiniteTrace | None = None
    ) -> MicrobatchRunner | CudaGraphRunner:
        """Forward and backward passes up to finalized gradients; the runner's total is that of all ranks."""
        stage = self.model.stage
        # what looks at gradients sees those that autograd hands to parameters
        with self.engine.gradients(), fused_grad_accumulation() if trace is None else nullcontext():
            runner: MicrobatchRunner | CudaGraphRunner
            if self._cuda_graphs is not None and trace is None:
                runner = self._cuda_graphs.runner(batches, scale, self.schedule, self.lanes)
            else:
                runner = MicrobatchRunner(self.model, batches, scale, self.schedule, self.lanes, self.model.forward_context)
            for operation in self.schedule.operations(stage.index, stage.count, len(batches)):
                if trace is not None:
                    trace.operation = operation
                runner.run_operation(operation)
                self.timer.mark(operation.kind)
            runner.finish()
            self._wait_for_sends()
            if trace is not None:
                trace.check_loss(runner.total)
            finalize_model_grads(self.model, self.mesh)
            total = runner.total
            dist.all_reduce(total, group=self.mesh.data_group)
            if self.mesh.pipeline is not None:
                self.mesh.pipeline.sum(total)
            # before they are summed, which spreads non-finite values to other ranks
            self._norms = self.engine.local_norms()
            self._grads_finite = torch.isfinite(torch.stack(list(self._norms.values()))).all()
            if trace is not None:  # at ZeRO stage 2 they are gone when this context ends
                trace.summed_finite = torch.stack([torch.isfinite(p.grad).all() for p in self._norms if p.grad is not None]).all()
        return runner

    def _read_later(
        self, sums: Tensor, runner: MicrobatchRunner | CudaGraphRunner
    ) -> Callable[[], tuple[int, int, float, float, bool, bool]]:
        """What decides about the update, of all ranks: labels, checksum, loss, norm, whether loss and gradients are finite, whether
        segments that ran twice ended alike. The function waits for the passes, once for all of these."""
        loss = runner.total
        bad = ~torch.stack([self._grads_finite & torch.isfinite(loss), runner.states_match()])
        anywhere = bad.double()
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
        norm = self.engine.sum_gradients(self._norms)
        # as bits, so that one copy has both types
        found = torch.cat([sums, torch.stack([loss.double(), norm, *anywhere]).view(torch.int64)])

        def read() -> tuple[int, int, float, float, bool, bool]:
            here = found.cpu()
            labels, checksum = here[:2].tolist()
            loss, norm, nonfinite, differs = here[2:].view(torch.float64).tolist()
            return labels, checksum, loss, norm, not nonfinite, not differs

        return read

    def _trace_nonfinite(self, batches: Sequence[Batch[Tensor]], scale: Tensor) -> tuple[NonFiniteReport | None, str | None]:
        """Run the step again from the same States under `NonFiniteTrace`; its gradients are discarded. Returns the first value that
        is not finite; if all are, what is wrong with their sums, or None: nothing."""
        self.close()  # there may be no room for a plain pass beside the recorded ones, which the next step records again
        if self.lanes is not None:
            self.lanes.restore()
        trace = NonFiniteTrace(self.model, self.mesh, batches[0].tokens.shape[1] // self.schedule.segments)
        with trace.recording():
            self._forward_backward(batches, scale, trace)
        bad = torch.stack([~trace.summed_finite, ~self._grads_finite]).double()
        self.engine.drop_gradients()
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        infinite, too_large = bad.tolist()
        otherwise = None
        if infinite:
            otherwise = "a gradient is finite in each micro-batch, and not when they are summed"
        elif too_large:
            otherwise = "a gradient is finite, but so large that the square of its norm is not"
        found = trace.first_report()
        return found, None if found is not None else otherwise

    def _wait_for_sends(self) -> None:
        for link in (self.mesh.pipeline, self.model.link):
            if link is not None:
                link.wait()

    def _set_learning_rate(self, lr: float | Mapping[str, float]) -> None:
        for group in self.engine.param_groups:
            group["lr"] = lr if isinstance(lr, float) else lr[group["lr_override"]]

    def _raise_mismatch(self, differing: list[str]) -> None:
        """Raise RunError on all ranks because a segment's two forward passes ended in different States on one of them.

        differing: on this rank.
        """
        of_ranks: list[list[str]] = [[]] * self.mesh.world_size
        dist.all_gather_object(of_ranks, differing)
        count = sum(map(len, of_ranks))
        rank, names = next((rank, names) for rank, names in enumerate(of_ranks) if names)
        raise RunError(
            f"rank {rank}: a segment that was computed twice left another State the second time ({names[0]}; {count} in all), "
            f"and its gradient would be of another run. The parameters are as before this step. Set training.deterministic=true; "
            f"where it is, suspect the rank's memory or its device"
        )
