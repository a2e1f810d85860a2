"""Shapes of a run's kernels on a rank, and the fastest launch configurations for them on the present GPU."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch

from baton.kernels.compile import launch_configs
from baton.kernels.compile.aot import META, Target, launching_nothing
from baton.kernels.compile.autotune import Tuned, tune
from baton.kernels.compile.launch_configs import PATH
from baton.kernels.errors import LaunchConfigError
from baton.models.config import ModelConfig
from baton.parallel import mesh as meshes
from baton.parallel.config import LayoutConfig
from baton.training.build import DTYPES, build_model
from baton.training.config import TrainingConfig

__all__ = ["PATH", "launch_requests", "select_requests", "tune_run_kernels"]


def launch_requests(
    model: ModelConfig, training: TrainingConfig, layout: LayoutConfig, wanted: Target
) -> list[launch_configs.Request]:
    """What a rank's forward pass over a micro-batch asks the table for, found with one of each kind of layer on the meta device.

    Tensor parallelism divides channels and heads; sequence parallelism and segments divide tokens.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    layers = model.model_copy(update={"n_layers": min(model.n_layers, len(model.period))})
    ids, pos = (
        torch.empty(training.micro_batch_size, training.segment // layout.context, dtype=dtype, device=META)
        for dtype in (torch.int64, torch.int32)
    )
    own = LayoutConfig(tensor=layout.tensor, sequence_parallel=layout.sequence_parallel)
    with launching_nothing(wanted):
        mesh = meshes.initialize(own, device=META, rank=0, store=FakeStore())
        try:
            one = build_model(layers, training, META, mesh)
            with torch.no_grad(), launch_configs.record_requests() as found:
                one(ids, pos)
        finally:
            meshes.shutdown()
    return found


def select_requests(requests: Sequence[launch_configs.Request], kernels: Collection[str]) -> list[launch_configs.Request]:
    """Those of the kernels of these names; of all if there are none. Raises LaunchConfigError for a kernel that no request is
    of."""
    known = sorted({request.kernel for request in requests})
    if unknown := set(kernels) - set(known):
        raise LaunchConfigError(f"the run has no kernel called {min(unknown)!r}; it has {', '.join(known)}")
    return [request for request in requests if not kernels or request.kernel in kernels]


def tune_run_kernels(
    model: ModelConfig,
    training: TrainingConfig,
    layout: LayoutConfig,
    device: torch.device,
    path: Path,
    kernels: Collection[str] = (),
) -> Iterator[Tuned]:
    """Tune the launch configurations of everything that the run launches; each is written to the table at `path` before it is
    yielded.

    Args:
        kernels: names of those to tune; none: all.

    Raises:
        LaunchConfigError: the table cannot be read or written, or the run has none of the kernels; before anything is
            timed.
    """
    launch_configs.write(launch_configs.read(path), path)
    dtype, here = DTYPES[training.compute_dtype_on(device.type)], Target.here()
    assert here is not None
    for tuned in tune(select_requests(launch_requests(model, training, layout, here), kernels), device, dtype):
        launch_configs.write(_with_row(launch_configs.read(path), tuned.entry(device, dtype)), path)
        yield tuned


def _with_row(entries: tuple[launch_configs.Entry, ...], row: launch_configs.Entry) -> tuple[launch_configs.Entry, ...]:
    """A table with a row in place of the one of its kernel, device and shape. One without a configuration stays: it says that the
    defaults are the quickest."""
    key = row.kernel, row.device, row.shape
    return (*(entry for entry in entries if (entry.kernel, entry.device, entry.shape) != key), row)
