"""A micro-batch's forward and backward passes as two CUDA graphs, each launched at once instead of kernel by kernel.

A graph replays its kernels on the memory with which they were recorded. So everything that changes from pass to pass
(tokens, the loss scale, weights in the compute dtype) is copied to where the kernels read it, and gradients accumulate in
fixed buffers. Python code runs only while the passes are recorded: for all layers and sequences that are not cut in time,
whose passes never synchronize with the host. Collectives of tensor-parallel ranks, the messages between context-parallel
ranks and what observes them are recorded with the rest; all of these ranks record and replay alike.
"""

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from baton.data_pipeline.packing import Batch
from baton.models.lm import LanguageModel
from baton.parallel.cast_weights import CastWeightCache
from baton.parallel.context_parallel import StateObserver
from baton.parallel.pipeline import Operation

Run = Callable[[], None]


class GraphRecorder(Protocol):
    """Interface of what records functions that launch kernels."""

    def warm_up(self, run: Run) -> None:
        """Run the function once where graphs will be recorded, so that one-time work is not part of a graph."""

    def record(self, run: Run) -> Run:
        """Record the function without computing anything; returns its replay. Functions are recorded in the order in which
        they are replayed."""

    def release(self) -> None:
        """Free what was recorded; its replays are not called any more."""


class CudaGraphRecorder:
    """Records CUDA graphs that share one memory pool.

    frees_memory: what can be freed is freed before a function is recorded, which takes long beside a step of generation; False:
    only where memory runs out.
    """

    def __init__(self, device: torch.device, *, frees_memory: bool = True) -> None:
        self._stream, self._frees_memory = torch.cuda.Stream(device), frees_memory
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def warm_up(self, run: Run) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        if self._frees_memory:
            gc.collect()  # what the run kept would stay beside what the graphs keep

    def record(self, run: Run) -> Run:
        torch.cuda.synchronize(self._stream.device)
        if self._frees_memory:
            torch.cuda.empty_cache()
        graph = None
        try:
            graph = self._captured(run)
        except torch.cuda.OutOfMemoryError:
            if self._frees_memory:
                raise
        if graph is None:  # out of the handler, whose error holds what was allocated
            gc.collect()
            torch.cuda.empty_cache()
            graph = self._captured(run)
        self._graphs.append(graph)
        return graph.replay

    def _captured(self, run: Run) -> torch.cuda.CUDAGraph:
        graph, pool = torch.cuda.CUDAGraph(), self._graphs[0].pool() if self._graphs else None
        with torch.cuda.stream(self._stream):
            # other threads may go on using the GPU: one copies a checkpoint to the host, one watches NCCL
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        return graph

    def release(self) -> None:
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()


@dataclass(frozen=True)
class _RecordedGraphs:
    """The two recorded passes and the buffers that they read and write."""

    recorder: GraphRecorder
    forward: Run
    backward: Run
    batch: Batch[Tensor]
    scale: Tensor
    total: Tensor
    copies: Sequence[tuple[CastWeightCache, Tensor]]
    gradients: Sequence[tuple[nn.Parameter, Tensor]]
    read: tuple[int, ...]
    observer: StateObserver | None


class CudaGraphs:
    """The recorded passes of one model. Gradient buffers live on from step to step; the graphs' pool holds all activations."""

    def __init__(self, model: LanguageModel, recorder: Callable[[torch.device], GraphRecorder] = CudaGraphRecorder) -> None:
        assert model.stage.count == 1
        self._model, self._recorder = model, recorder
        self._recorded: _RecordedGraphs | None = None

    def runner(self, batches: Sequence[Batch[Tensor]], scale: float) -> "CudaGraphRunner":
        """A runner for a step's micro-batches, all of one shape; no gradients may exist before it.

        The first call records, and so does a call with another shape, with another observer of the States that pass between
        ranks, or after a parameter has moved to other memory.
        """
        found = self._recorded
        if found is None or not self._still_fits(found, batches[0]):
            found = None  # gives its memory back first
            self.release()
            found = self._recorded = self._record(batches[0])
        for module, copy in found.copies:
            if module._cast_weight_cache is not copy:  # dropped, since the weight has changed
                copy.copy_(module.weight.detach())
                module._cast_weight_cache = copy
        _reset_buffers(found)
        found.scale.fill_(scale)
        return CudaGraphRunner(found, batches)

    def release(self) -> None:
        """Free the recorded passes. Needed before the process groups are destroyed: NCCL waits, without a time limit, until no
        graph has operations of a communicator that it destroys (PyTorch issue 115388), and a graph that is in a reference cycle
        lives until the garbage collector runs."""
        recorded, self._recorded = self._recorded, None
        if recorded is not None:
            recorded.recorder.release()

    def _still_fits(self, recorded: _RecordedGraphs, batch: Batch[Tensor]) -> bool:
        same_shape = recorded.batch.tokens.shape == batch.tokens.shape
        return same_shape and recorded.observer is self._observer() and recorded.read == self._addresses()

    def _observer(self) -> StateObserver | None:
        return None if self._model.link is None else self._model.link.observer

    def _addresses(self) -> tuple[int, ...]:
        return tuple(p.data_ptr() for p in self._model.parameters())

    def _record(self, like: Batch[Tensor]) -> _RecordedGraphs:
        model, recorder = self._model, self._recorder(like.tokens.device)
        batch = Batch(like.tokens.clone(), like.labels.clone(), like.pos.clone())
        scale, total = torch.ones((), device=like.tokens.device), torch.zeros((), device=like.tokens.device)
        gradients = [(p, torch.zeros_like(p)) for p in model.parameters() if p.requires_grad]
        losses: list[Tensor] = []
        forward_context = replace(model.forward_context, need_final_state=False)
        link = forward_context.link
        whole_pass = nullcontext if link is None else link.recordable_pass

        def forward() -> None:
            with whole_pass():
                hidden, _ = model(batch.tokens, batch.pos, None, forward_context)
                loss = model.loss(hidden, batch.labels) * scale
                total.add_(loss.detach())
                losses.append(loss)

        def backward() -> None:
            with whole_pass():
                losses.pop().backward()

        def both() -> None:
            forward()
            backward()

        for p, gradient in gradients:
            p.grad = gradient.detach()
        recorder.warm_up(both)
        copies = [
            (m, m._cast_weight_cache)
            for m in model.modules()
            if isinstance(m, CastWeightCache) and m._cast_weight_cache is not None
        ]
        passes = recorder.record(forward), recorder.record(backward)
        read, observer = self._addresses(), self._observer()
        if observer is not None:
            observer.start()  # without the pass that was warming up
        return _RecordedGraphs(recorder, *passes, batch, scale, total, copies, gradients, read, observer)


def _reset_buffers(recorded: _RecordedGraphs) -> None:
    recorded.total.zero_()
    torch._foreach_zero_([gradient for _, gradient in recorded.gradients])
    for p, gradient in recorded.gradients:
        p.grad = gradient.detach()  # another tensor over the same memory: an optimizer may give its own other memory


class CudaGraphRunner:
    """Runs a step's operations as MicrobatchRunner does, for sequences not cut in time. total: sum of the scaled losses."""

    def __init__(self, recorded: _RecordedGraphs, batches: Sequence[Batch[Tensor]]) -> None:
        self._recorded, self._batches, self.total = recorded, batches, recorded.total

    def run_operation(self, operation: Operation) -> None:
        if operation.kind == "backward":
            self._recorded.backward()
            return
        own, given = self._recorded.batch, self._batches[operation.micro_batch]
        for into, x in ((own.tokens, given.tokens), (own.labels, given.labels), (own.pos, given.pos)):
            into.copy_(x)
        self._recorded.forward()

    def finish(self) -> None:
        """Nothing is left after the last operation."""

    def mismatched_states(self) -> list[str]:
        """Always empty: no segment runs twice."""
        return []
