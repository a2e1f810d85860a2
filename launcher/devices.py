"""Determines the kind of device for a run on this machine, and its memory, without importing torch."""

import ctypes
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

Kind = Literal["cpu", "cuda"]


def kind_here(wanted: Literal["auto", "cpu", "cuda"]) -> Kind:
    """The kind of device of ranks on this machine. auto: a GPU if torch would find one."""
    if wanted != "auto":
        return wanted
    return "cuda" if _torch_uses_cuda() and _gpus() else "cpu"


def _torch_uses_cuda() -> bool:
    """Whether torch was built for CUDA; one built for CPUs finds no GPU."""
    spec = importlib.util.find_spec("torch")
    return spec is not None and spec.origin is not None and (Path(spec.origin).parent / "lib" / "libtorch_cuda.so").exists()


def _gpus() -> int:
    """Number of GPUs that the NVIDIA driver reports and CUDA may use."""
    if not _may_be_seen():
        return 0
    with _nvml() as nvml:
        return 0 if nvml is None else _count(nvml)


def gpu_memory() -> tuple[int, int] | None:
    """Number of GPUs that CUDA may use, and the memory of the smallest in bytes. None: no GPU, or unknown."""
    if not _may_be_seen():
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    with _nvml() as nvml:
        if nvml is None:
            return None
        wanted = [str(n) for n in range(_count(nvml))] if visible is None else [word.strip() for word in visible.split(",")]
        sizes = [_memory(nvml, word) for word in wanted]
    known = [size for size in sizes if size is not None]
    return (len(known), min(known)) if known and len(known) == len(sizes) else None


def _may_be_seen() -> bool:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() not in ("", "-1")


@contextmanager
def _nvml() -> Iterator[Any]:
    """NVIDIA's management library (NVML), which does not initialize GPUs; None if it is not installed."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        nvml = None
    if nvml is None or nvml.nvmlInit_v2() != 0:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _count(nvml: Any) -> int:
    count = ctypes.c_uint(0)
    return 0 if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) else count.value


class _NvmlMemory(ctypes.Structure):
    """nvmlMemory_t, bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _memory(nvml: Any, word: str) -> int | None:
    """Bytes of a GPU, by a word of CUDA_VISIBLE_DEVICES: a number, or a GPU's or a MIG part's identifier."""
    handle, memory = ctypes.c_void_p(), _NvmlMemory()
    if word.isdigit():
        failed = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(word)), ctypes.byref(handle))
    else:
        failed = nvml.nvmlDeviceGetHandleByUUID(word.encode(), ctypes.byref(handle))
    return None if failed or nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) else memory.total
