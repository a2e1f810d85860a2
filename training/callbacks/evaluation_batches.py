"""When an evaluation is due, and its batches on every rank that works on the same rows."""

from torch import Tensor

from baton.data_pipeline.packing import Batch, NumpyBatch
from baton.parallel.mesh import Mesh
from baton.training.config import TrainingConfig
from baton.training.monitoring import heartbeat
from baton.training.run import RunProgress
from baton.training.step import batch_distribution


def evaluation_is_due(progress: RunProgress, training: TrainingConfig) -> bool:
    """Whether to evaluate after this step: at multiples of evaluation.every, and after the last step."""
    every, last = training.evaluation.every, progress.step == training.steps
    return bool(every) and (progress.step % every == 0 or last)


def begin_evaluation(progress: RunProgress, *, first: bool) -> None:
    """Write a heartbeat. The first evaluation reads its documents and compiles kernels."""
    heartbeat.own_heartbeat().beat(progress.step, "evaluation", slow=first)


def distribute_batches(batches: list[NumpyBatch], mesh: Mesh, segments: int) -> list[Batch[Tensor]]:
    """This rank's spans of a reading rank's batches, on its device."""
    return [
        batch_distribution.distribute(
            b if batch_distribution.is_reader(mesh) else None, mesh, (b.tokens.shape[0], b.tokens.shape[1]), segments
        )
        for b in batches
    ]
