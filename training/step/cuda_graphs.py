"""A micro-batch's forward and backward pass as two CUDA graphs, launched at once instead of kernel by kernel.

The one thing to know: a graph repeats its kernels with the memory that they had, so all that changes from pass to pass (tokens, the
losses' scale, the weights in the compute type) is copied to where they read it, and gradients add up where they did before. Python
runs once, when the passes are recorded: for all layers and whole sequences, whose passes ask nothing of the host. What tensor ranks
exchange is recorded with the rest; they record and repeat alike.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from baton.models.lm import LanguageModel
from baton.parallel.pipeline import Operation
from baton.parallel.tensor import CastWeightCache
from baton.training.step.microbatch_runner import TokenBatch

Run = Callable[[], None]


class GraphRecorder(Protocol):
    """What makes graphs of functions that launch kernels."""

    def warm_up(self, run: Run) -> None:
        """Run it, where graphs will be recorded: what is done only the first time must not be part of any."""

    def record(self, run: Run) -> Run:
        """What repeats it. Nothing has been computed when this returns. Recorded in the order in which they will be repeated."""


class CudaGraphRecorder:
    """CUDA graphs that share their memory."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._first: torch.cuda.CUDAGraph | None = None

    def warm_up(self, run: Run) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        gc.collect()  # what the run kept would stay beside what the graphs keep

    def record(self, run: Run) -> Run:
        graph = torch.cuda.CUDAGraph()
        pool = None if self._first is None else self._first.pool()
        # other threads may go on using the GPU: one copies a checkpoint to the host, one watches NCCL
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            run()
        self._first = self._first or graph
        return graph.replay


@dataclass(frozen=True)
class _RecordedGraphs:
    """The two passes, and the memory that they read and write."""

    forward: Run
    backward: Run
    batch: TokenBatch
    scale: Tensor
    total: Tensor
    copies: Sequence[tuple[CastWeightCache, Tensor]]
    gradients: Sequence[tuple[nn.Parameter, Tensor]]
    read: tuple[int, ...]


class CudaGraphs:
    """The passes of one model. Gradients keep their memory from step to step; the graphs have that of all activations."""

    def __init__(self, model: LanguageModel, recorder: Callable[[torch.device], GraphRecorder] = CudaGraphRecorder) -> None:
        assert model.stage.count == 1
        self._model, self._recorder = model, recorder
        self._recorded: _RecordedGraphs | None = None

    def runner(self, batches: Sequence[TokenBatch], scale: float) -> "CudaGraphRunner":
        """Of a step's micro-batches, all of one shape, before which there are no gradients. The first call, and one with another
        shape, record; no parameter may have moved to other memory since, or they are recorded again."""
        found = self._recorded
        if found is None or found.batch.tokens.shape != batches[0].tokens.shape or found.read != self._addresses():
            found = self._recorded = None  # gives its memory back first
            found = self._recorded = self._record(batches[0])
        for module, copy in found.copies:
            if module._cast_weight_cache is not copy:  # dropped, since the weight has changed
                copy.copy_(module.weight.detach())
                module._cast_weight_cache = copy
        _reset_buffers(found)
        found.scale.fill_(scale)
        return CudaGraphRunner(found, batches)

    def _addresses(self) -> tuple[int, ...]:
        return tuple(p.data_ptr() for p in self._model.parameters())

    def _record(self, like: TokenBatch) -> _RecordedGraphs:
        model, recorder = self._model, self._recorder(like.tokens.device)
        batch = TokenBatch(like.tokens.clone(), like.labels.clone(), like.pos.clone())
        scale, total = torch.ones((), device=like.tokens.device), torch.zeros((), device=like.tokens.device)
        gradients = [(p, torch.zeros_like(p)) for p in model.parameters() if p.requires_grad]
        losses: list[Tensor] = []

        def forward() -> None:
            loss = model.loss(model(batch.tokens, batch.pos, state_wanted=False)[0], batch.labels) * scale
            total.add_(loss.detach())
            losses.append(loss)

        def backward() -> None:
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
        return _RecordedGraphs(*passes, batch, scale, total, copies, gradients, self._addresses())


def _reset_buffers(recorded: _RecordedGraphs) -> None:
    recorded.total.zero_()
    torch._foreach_zero_([gradient for _, gradient in recorded.gradients])
    for p, gradient in recorded.gradients:
        p.grad = gradient.detach()  # another tensor over the same memory: an optimizer may give its own other memory


class CudaGraphRunner:
    """Carries out a step's operations as MicrobatchRunner does, those of whole sequences. total: sum of the losses, scaled."""

    def __init__(self, recorded: _RecordedGraphs, batches: Sequence[TokenBatch]) -> None:
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
        """After the last operation."""

    def mismatched_states(self) -> list[str]:
        """No segment is computed twice."""
        return []
