"""Checks of kernels against their reference implementations on this machine: all of them on demand, a model's before its first
step."""

from collections.abc import Callable

import torch

from baton.kernels.common.kernel_check import KernelCheckResult, Reference, check, compare, launch, reference
from baton.kernels.compile.aot import META, Compiled, Target, compiling
from baton.kernels.registry import recurrences
from baton.models.mixer import recurrences_of
from baton.parallel.cast_weights import drop_cast_weights
from baton.training.build import DTYPES, TrainState
from baton.training.config import TrainingConfig
from baton.training.errors import KernelCheckError


def compile_checks(wanted: Target, say: Callable[[str], None], processes: int | None = None) -> Compiled:
    """Compile what the checks launch on a GPU, before they run. say: receives lines about progress."""
    with compiling(wanted, processes, say) as compiled:
        for recurrence in recurrences():
            if recurrence.no_kernel is None:  # else PyTorch computes it, and asks for values
                for dtype in DTYPES.values():
                    launch(recurrence, META, dtype)
    return compiled


def references() -> list[Reference]:
    """Results of the reference implementation of every recurrence, in every dtype that runs can have."""
    return [reference(recurrence, dtype) for recurrence in recurrences() for dtype in DTYPES.values()]


def check_result(expected: Reference, device: torch.device) -> KernelCheckResult:
    """Compare what a device computes with what the definition does."""
    return compare(expected, device)


def check_kernels(train_state: TrainState, training: TrainingConfig) -> None:
    """Compare every recurrence that this rank's layers use with its reference implementation, on this rank's device.

    Raises:
        KernelCheckError: a result differs.
    """
    model, mesh = train_state.model, train_state.mesh
    for recurrence in recurrences_of(model, model.config.d_model, model.compute_dtype):
        finding = check(recurrence, mesh.device, DTYPES[training.compute_dtype_on(mesh.device.type)])
        if not finding.passed:
            raise KernelCheckError(
                f"rank {mesh.rank}: on {mesh.device} a kernel does not compute what its definition says: {finding}; see "
                f"`baton doctor`, and try another version of Triton or of the driver"
            )
    drop_cast_weights(model)
