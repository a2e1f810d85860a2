"""The shapes that a run's kernels have on a rank, and the table of tiles that is quickest for them on the GPU at hand."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from baton.kernels import tiles as table
from baton.kernels.tiles import PATH
from baton.kernels.tune import Tuned, tune
from baton.models.config import ModelConfig
from baton.parallel import mesh as meshes
from baton.parallel.config import LayoutConfig
from baton.parallel.layout import initialize_parameters
from baton.training.build import DTYPES, build_model
from baton.training.config import TrainingConfig

__all__ = ["PATH", "requests_of", "tune_for"]


def requests_of(model: ModelConfig, training: TrainingConfig, layout: LayoutConfig, device: torch.device) -> list[table.Request]:
    """What a rank's forward pass over a micro-batch asks the table for, found by doing one of each kind of layer.

    Tensor parallelism divides channels; sequence parallelism and segments divide tokens.
    """
    layers = model.model_copy(update={"n_layers": min(model.n_layers, len(model.period))})
    shape = training.micro_batch, training.segment // layout.sequence
    tokens = torch.zeros(shape, dtype=torch.int64, device=device)
    pos = torch.arange(shape[1], dtype=torch.int32, device=device).expand(shape)
    # a world of this process alone, for a model's layers are those of a rank
    meshes.initialize(LayoutConfig(), device=device, rank=0, store=torch.distributed.HashStore())
    try:
        whole = build_model(layers, training, device)
        initialize_parameters(whole, training.seed, 0, 1)
        with torch.no_grad(), table.requests() as found:
            whole(tokens, pos)
    finally:
        meshes.shutdown()
    return [_of_rank(request, layout.tensor) for request in found]


def _of_rank(request: table.Request, tensor: int) -> table.Request:
    sizes = {**request.sizes, "channels": request.sizes["channels"] // tensor}
    shape = dict(request.shape)
    if "warps" in shape:
        shape["warps"] = table.power_of_two(sizes["batch"] * -(-sizes["channels"] // 32))
    return replace(request, shape=shape, sizes=sizes)


def tune_for(
    model: ModelConfig, training: TrainingConfig, layout: LayoutConfig, device: torch.device, path: Path
) -> Iterator[Tuned]:
    """The quickest tiles of everything that the run asks for, one after the other; each is in the table at `path` when it comes.

    Raises:
        TilesError: the table cannot be read or written, before anything is timed.
    """
    table.write(table.read(path), path)
    dtype = DTYPES[training.precision]
    for tuned in tune(requests_of(model, training, layout, device), device, dtype):
        table.write(_with_row(table.read(path), tuned.entry(device, dtype)), path)
        yield tuned


def _with_row(entries: tuple[table.Entry, ...], row: table.Entry) -> tuple[table.Entry, ...]:
    """A table with a row in place of the one of its kernel, device and shape. One without tiles stays: it says that the defaults
    are the quickest."""
    key = row.kernel, row.device, row.shape
    return (*(entry for entry in entries if (entry.kernel, entry.device, entry.shape) != key), row)
