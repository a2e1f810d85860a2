"""Works around megatron-core's and DeepSpeed's assumptions about the machine.

megatron-core asks torch.cuda for the current device in its collectives, and DeepSpeed 0.19.8 compiles a C++ extension
at start-up that only inference uses. Without a CUDA device the first fails and the second needs a compiler. With one, DeepSpeed
imports Inductor for a compiler of its own that training does not use.
"""

import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_CUDA_FUNCTIONS = {name: getattr(torch.cuda, name) for name in ("current_device", "synchronize")}


def install(device: torch.device) -> None:
    """Prepare this process, before either library builds anything. Idempotent.

    device: where the model lives; one that is no GPU replaces the two torch.cuda functions that megatron-core calls, until the
    process groups are destroyed: Triton's driver asks one of them too.
    """
    os.environ["LOCAL_RANK"] = str(device.index or 0)  # DeepSpeed insists on it and takes it for the CUDA device
    # a hardware queue per stream: see context_link, which refuses a single one
    os.environ.setdefault(QUEUES, "32")
    if device.type != "cuda":
        torch.cuda.current_device = lambda: device  # type: ignore[assignment, return-value]
        torch.cuda.synchronize = lambda device=None: None


def import_deepspeed(device_type: str) -> ModuleType:
    """DeepSpeed, as this package uses it, which only training does. Touches no GPU.

    device_type: where models live, of torch.device. DeepSpeed reads it once, when it is first imported.
    """
    # without it a warning and a guess, which asks CUDA for its devices
    os.environ["DS_ACCELERATOR"] = "cuda" if device_type == "cuda" else "cpu"
    import deepspeed
    import deepspeed.ops

    # A C++ extension for inference_all_reduce, compiled (28 s) or fatal at every fresh engine; training never calls it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # On a GPU every engine registers the passes of DeepSpeed's compiler, which imports Inductor (9 s). Training never uses them.
    deepspeed.runtime.engine.is_deepcompile_supported = lambda: False
    deepspeed.utils.logger.setLevel("WARNING")
    deepspeed.utils.logger.addFilter(_not_of_the_optimizer)
    module: ModuleType = deepspeed
    return module


def _not_of_the_optimizer(record: logging.LogRecord) -> bool:
    """Leaves out DeepSpeed's warning of an optimizer that is not one of torch's classes: training.adamw computes as torch does."""
    return "untested optimizer" not in record.getMessage()


@contextmanager
def lazy_compile() -> Iterator[None]:
    """Within it torch.compile, as a decorator, compiles at the first call of the function.

    torch.compile imports TorchDynamo and Inductor when it decorates (1.3 s of processor time and 130 MiB in every process), and
    both libraries decorate functions that nothing here calls.
    """
    compile = torch.compile
    torch.compile = _lazy_compile
    try:
        yield
    finally:
        torch.compile = compile


def _lazy_compile(model: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    if model is None:
        return functools.partial(_lazy_compile, **options)
    compiled: list[Callable[..., Any]] = []

    @functools.wraps(model)
    def call(*words: Any, **named: Any) -> Any:
        if not compiled:
            compiled.append(torch.compile(model, **options))
        return compiled[0](*words, **named)

    return call


def restore_cuda_functions() -> None:
    """Put back torch.cuda's functions as they were when this module was imported."""
    for name, function in _CUDA_FUNCTIONS.items():
        setattr(torch.cuda, name, function)
