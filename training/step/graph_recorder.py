"""Records functions that launch kernels as CUDA graphs, each launched at once from then on instead of kernel by kernel."""

import gc
from collections.abc import Callable
from typing import Protocol

import torch

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
