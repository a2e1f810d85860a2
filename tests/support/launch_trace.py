"""Prints as JSON the kernels that the kernel check and a training step of small models launch, and those that `baton compile`
compiles for them.

It needs no GPU. Launches are recorded and do nothing; a record has everything in a kernel's cache key: dtypes, whether addresses
and integers are multiples of 16, constants. With "real" the model is on a CPU that counts as a GPU, with addresses as DeepSpeed
lays them out; with "ahead" it is on the meta device. It runs in a process of its own because it replaces the kernels.

    python launch_trace.py real|ahead MIXER [MIXER ...]
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

import baton.kernels.compile.aot as ahead

GPU = ahead.Target(90)


def kind_of(value: Any) -> str:
    """What Triton tells apart of an argument."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{'' if value.data_ptr() % 16 == 0 else ', not aligned'}"
    if isinstance(value, int) and not isinstance(value, bool):
        return "1" if value == 1 else "a multiple of 16" if value % 16 == 0 else "int"
    return str(value)


@contextmanager
def record_launches() -> Iterator[set[str]]:
    """Within it every launch is noted instead."""
    from triton.runtime.jit import KernelInterface

    found: set[str] = set()

    def launch(kernel: Any, grid: Any) -> Any:
        constants = {p.name for p in kernel.params if p.is_constexpr}
        alike = {p.name for p in kernel.params if p.do_not_specialize}

        def call(*arguments: Any, **options: Any) -> None:
            given = dict(zip((p.name for p in kernel.params), arguments, strict=False)) | options
            fixed = {name: str(x) for name, x in given.items() if name in constants or name not in kernel.arg_names}
            others = {
                name: type(x).__name__ if name in alike else kind_of(x)
                for name, x in given.items()
                if name not in fixed and x is not None
            }
            found.add(f"{kernel.fn.__module__}.{kernel.fn.__name__} {json.dumps(fixed | others, sort_keys=True)}")

        return call

    KernelInterface.__getitem__ = launch
    yield found


def real(model: Any, training: Any) -> None:
    from baton.parallel import mesh as meshes
    from baton.parallel.config import LayoutConfig
    from baton.training.build import build
    from baton.training.errors import KernelCheckError
    from baton.training.kernel_tools.doctor import check_kernels
    from baton.training.step.executor import StepExecutor
    from support.models import micro_batches

    mesh = meshes.initialize(LayoutConfig(), device=torch.device("cpu"), rank=0, store=torch.distributed.HashStore())
    try:
        train_state = build(model, training, mesh)
        with suppress(KernelCheckError):  # nothing is computed
            check_kernels(train_state, training)
        StepExecutor(train_state.model, train_state.engine, mesh).step(micro_batches(0, 0, 1, 2), 1e-3)
    finally:
        meshes.shutdown()


def compiled(model: Any, training: Any) -> None:
    from baton.parallel.config import LayoutConfig
    from baton.training.kernel_tools import aot_compile as ahead_of

    @contextmanager
    def compiling(wanted: ahead.Target, processes: int | None = None, say: Any = None) -> Iterator[ahead.Compiled]:
        ahead._target = wanted
        try:
            yield ahead.Compiled("")
        finally:
            ahead._target = None

    ahead_of.compiling = compiling
    ahead_of.compile_run_kernels(model, training, LayoutConfig(), GPU)


def main() -> None:
    form, *mixers = sys.argv[1:]
    if form == "real":
        # before anything that has it by name is imported
        ahead.on_gpu, ahead._target = lambda x: True, GPU
        # what nothing was written to is the same each time, and a number
        torch.empty, torch.empty_like = torch.zeros, torch.zeros_like
    import baton.kernels.compile.launch_configs as launch_configs
    from support.models import model_of, training

    launch_configs.table_names = lambda device: GPU.names
    results = {}
    with record_launches() as found:
        for mixer in mixers:
            found.clear()
            (real if form == "real" else compiled)(model_of(mixer), training(compute_dtype="bfloat16"))
            results[mixer] = sorted(found)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
