"""A segment's passes as CUDA graphs, each launched at once instead of kernel by kernel; a sequence that is not cut in time is one
segment.

A graph replays its kernels on the memory with which they were recorded. So everything that changes from pass to pass
(tokens, the loss scale, weights in the compute dtype, the State that enters a segment) is copied to where the kernels read it, and
gradients accumulate in fixed buffers. Python code runs only while the passes are recorded: for all layers, whose passes never
synchronize with the host. Segments have the passes of their roles (`fixed_passes`), in the order of the schedule. Collectives of
tensor-parallel ranks, the messages between context-parallel ranks and what observes them are recorded with the rest; all of these
ranks record and replay alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from baton.data_pipeline.packing import Batch
from baton.models.lm import LanguageModel
from baton.parallel.cast_weights import CastWeightCache
from baton.parallel.context_parallel import StateObserver
from baton.parallel.linear import overwriting
from baton.parallel.pipeline import Kind, Operation, StepSchedule
from baton.training.bptt.lane_states import LaneStates
from baton.training.step.fixed_passes import FixedPasses, Role, role_of
from baton.training.step.graph_recorder import CudaGraphRecorder, GraphRecorder, Run
from baton.training.step.microbatch_runner import mismatched_states


@dataclass(frozen=True)
class _Saved:
    """What is kept of the segments between their two forward passes, a row for each.

    states: of those that entered them, but for the first, whose lane's State stays in place, and the last, which runs once; uint8
    [segments - 2, bytes]. results: of what is not computed again, uint8 [segments - 1, bytes], None: there is none. prints: of the
    States that left, int64 [segments - 1, States].
    """

    states: Tensor | None
    results: Tensor | None
    prints: Tensor


@dataclass(frozen=True)
class _RecordedGraphs:
    """The recorded passes and what they read and write.

    replays: by kind of operation and role. gradient_segments: of the schedule. read: addresses of the parameters. added: the
    gradients that a backward pass adds to; it replaces the others. once: it does, so a step has one backward pass.
    """

    recorder: GraphRecorder
    passes: FixedPasses
    replays: dict[tuple[Kind, Role], Run]
    saved: _Saved
    gradient_segments: int
    lanes: LaneStates | None
    copies: Sequence[tuple[CastWeightCache, Tensor]]
    gradients: Sequence[tuple[nn.Parameter, Tensor]]
    added: Sequence[Tensor]
    once: bool
    read: tuple[int, ...]
    observer: StateObserver | None


class CudaGraphs:
    """The recorded passes of one model. Gradient buffers live on from step to step; the graphs' pool holds all activations."""

    def __init__(self, model: LanguageModel, recorder: Callable[[torch.device], GraphRecorder] = CudaGraphRecorder) -> None:
        assert model.stage.count == 1
        self._model, self._recorder, self._parameters = model, recorder, list(model.parameters())
        self._recorded: _RecordedGraphs | None = None

    def runner(
        self, batches: Sequence[Batch[Tensor]], scale: float | Tensor, schedule: StepSchedule, lanes: LaneStates | None
    ) -> "CudaGraphRunner":
        """A runner for a step's micro-batches, all of one shape; no gradients may exist before it.

        scale: factor of the losses; a tensor [] if the host need not know it.

        The first call records, and so does a call with segments of another shape, with more or fewer of them that a gradient goes
        through, with another observer of the States that pass between ranks, with several backward passes where only steps of one
        were recorded, or after a parameter has moved to other memory.
        """
        found, like = self._recorded, batches[0].segment(0, schedule.segments)
        once = [operation.kind for operation in schedule.operations(0, 1, len(batches))].count("backward") == 1
        if found is None or not self._still_fits(found, like, schedule, lanes, once):
            found = None  # gives its memory back first
            self.release()
            found = self._recorded = self._record(like, schedule, lanes, once)
        # dropped, since the weight has changed
        stale = [(module, copy) for module, copy in found.copies if module._cast_weight_cache is not copy]
        if stale:
            torch._foreach_copy_([copy for _, copy in stale], [module.weight.detach() for module, _ in stale])
        for module, copy in stale:
            module._cast_weight_cache = copy
        _reset_buffers(found)
        found.passes.scale.fill_(scale)  # either kind
        return CudaGraphRunner(self._model, found, batches, schedule)

    def release(self) -> None:
        """Free the recorded passes. Needed before the process groups are destroyed: NCCL waits, without a time limit, until no
        graph has operations of a communicator that it destroys (PyTorch issue 115388), and a graph that is in a reference cycle
        lives until the garbage collector runs."""
        recorded, self._recorded = self._recorded, None
        if recorded is not None:
            recorded.recorder.release()

    def _still_fits(
        self, recorded: _RecordedGraphs, like: Batch[Tensor], schedule: StepSchedule, lanes: LaneStates | None, once: bool
    ) -> bool:
        same_form = recorded.gradient_segments == schedule.gradient_segments and recorded.lanes is lanes
        same_form = same_form and (once or not recorded.once)
        same_shape = recorded.passes.inputs[0].shape == like.tokens.shape
        return same_form and same_shape and recorded.observer is self._observer() and recorded.read == self._addresses()

    def _observer(self) -> StateObserver | None:
        """What observes States on their way between ranks; a rank's own are shown to their observer behind the pass."""
        link = self._model.link
        return None if link is None or link.size == 1 else link.observer

    def _addresses(self) -> tuple[int, ...]:
        return tuple(p.data_ptr() for p in self._parameters)

    def _record(self, like: Batch[Tensor], schedule: StepSchedule, lanes: LaneStates | None, once: bool) -> _RecordedGraphs:
        model, recorder = self._model, self._recorder(like.tokens.device)
        gradients = [(p, torch.zeros_like(p)) for p in model.parameters() if p.requires_grad]
        for p, gradient in gradients:
            p.grad = gradient.detach()
        together = schedule.gradient_segments
        passes = FixedPasses(model, (like.tokens, like.labels, like.pos), schedule, lanes)
        passes.read_lanes(like.lanes)
        # each of a step's operations once, in their order
        operations = StepSchedule(together, together).operations(0, 1, 1)
        runs = {
            (operation.kind, role): partial(getattr(passes, operation.kind), role)
            for operation in operations
            for role in [role_of(operation.segment, schedule)]
        }
        added = {p for p, _ in gradients}

        def replace_gradients(run: Run) -> None:
            with overwriting(p for p, _ in gradients) as outdated:
                run()
                added.intersection_update(outdated)

        if once:
            runs |= {key: partial(replace_gradients, run) for key, run in runs.items() if key[0] == "backward"}

        def each() -> None:
            for run in runs.values():
                run()

        recorder.warm_up(each)
        saved = _Saved(
            None if passes.entering is None else passes.entering.memory.rows(together - 2),
            None if passes.results is None else passes.results.rows(together - 1),
            passes.given_prints.new_zeros(together - 1, len(passes.given_prints)),
        )
        copies = [
            (m, m._cast_weight_cache)
            for m in model.modules()
            if isinstance(m, CastWeightCache) and m._cast_weight_cache is not None
        ]
        replays = {key: recorder.record(run) for key, run in runs.items()}
        read, observer = self._addresses(), self._observer()
        if observer is not None:
            observer.start()  # without the pass that was warming up
        of_sums = [gradient for p, gradient in gradients if p in added]
        return _RecordedGraphs(
            recorder, passes, replays, saved, together, lanes, copies, gradients, of_sums, once, read, observer
        )  # fmt: skip


def _reset_buffers(recorded: _RecordedGraphs) -> None:
    recorded.passes.total.zero_()
    torch._foreach_zero_(list(recorded.added))
    for p, gradient in recorded.gradients:
        p.grad = gradient.detach()  # another tensor over the same memory: an optimizer may give its own other memory


class CudaGraphRunner:
    """Runs a step's operations as MicrobatchRunner does. total: sum of the scaled losses."""

    def __init__(
        self, model: LanguageModel, recorded: _RecordedGraphs, batches: Sequence[Batch[Tensor]], schedule: StepSchedule
    ) -> None:
        self._model, self._recorded, self._passes = model, recorded, recorded.passes
        self._batches, self._schedule, self.total = batches, schedule, recorded.passes.total
        self._comparisons: list[tuple[int, Tensor]] = []

    def run_operation(self, operation: Operation) -> None:
        """Run one operation. Operations must come in the order of the schedule."""
        role, number = role_of(operation.segment, self._schedule), operation.segment % self._schedule.gradient_segments
        if operation.kind == "backward":
            self._backward(role, number)
            return
        batch = self._batches[operation.micro_batch]
        given = batch.segment(operation.segment, self._schedule.segments)
        for into, x in zip(self._passes.inputs, (given.tokens, given.labels, given.pos), strict=True):
            into.copy_(x)
        if operation.kind == "forward_no_grad":
            self._forward_no_grad(batch.lanes, role, number)
        elif role in ("first", "between"):
            self._forward_again(role, number)
            self._comparisons.append((operation.segment, self._passes.equal_prints[role].clone()))
        else:
            self._forward(batch.lanes, role)

    def finish(self) -> None:
        """Nothing is left after the last operation."""

    def states_match(self) -> Tensor:
        """Whether `mismatched_states` is empty, bool [], without waiting for it."""
        return (
            torch.stack([same.all() for _, same in self._comparisons]).all()
            if self._comparisons
            else torch.ones_like(self.total, dtype=torch.bool)
        )

    def mismatched_states(self) -> list[str]:
        """Names of the States whose bits differed between a segment's two forward passes."""
        return mismatched_states(self._model, self._comparisons)

    def _forward_no_grad(self, lanes: Sequence[int], role: Role, number: int) -> None:
        passes, saved = self._passes, self._recorded.saved
        if role == "first":
            passes.read_lanes(lanes)
        elif saved.states is not None and passes.entering is not None:  # the pass overwrites it with what leaves
            saved.states[number - 1].copy_(passes.entering.memory.block)
        self._recorded.replays["forward_no_grad", role]()
        saved.prints[number].copy_(passes.prints[role])
        if saved.results is not None and passes.results is not None:
            saved.results[number].copy_(passes.results.block)

    def _forward_again(self, role: Role, number: int) -> None:
        passes, saved = self._passes, self._recorded.saved
        if role == "between" and saved.states is not None and passes.entering is not None:
            passes.entering.memory.block.copy_(saved.states[number - 1])
        passes.given_prints.copy_(saved.prints[number])
        if saved.results is not None and passes.results is not None:
            passes.results.block.copy_(saved.results[number])
        self._recorded.replays["forward", role]()

    def _forward(self, lanes: Sequence[int], role: Role) -> None:
        """Of a segment that runs once."""
        if role == "alone":
            self._passes.read_lanes(lanes)
        self._recorded.replays["forward", role]()
        if self._recorded.lanes is not None:
            self._recorded.lanes.write(lanes, self._passes.final_states[role])

    def _backward(self, role: Role, number: int) -> None:
        self._recorded.replays["backward", role]()
        link = self._model.link
        if link is not None and link.size == 1 and link.observer is not None:
            self._passes.observe(link.observer, role, number)
