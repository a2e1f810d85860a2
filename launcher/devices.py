"""Which kind of device a run on this machine gets, found without importing torch."""

import ctypes
import importlib.util
import os
from pathlib import Path
from typing import Literal

Kind = Literal["cpu", "cuda"]


def kind_here(wanted: Literal["auto", "cpu", "cuda"]) -> Kind:
    """The kind of device that ranks started here have. auto: a GPU where torch would find one."""
    if wanted != "auto":
        return wanted
    return "cuda" if _torch_uses_cuda() and _gpus() else "cpu"


def _torch_uses_cuda() -> bool:
    """Whether torch was built for CUDA; one built for CPUs finds no GPU."""
    spec = importlib.util.find_spec("torch")
    return spec is not None and spec.origin is not None and (Path(spec.origin).parent / "lib" / "libtorch_cuda.so").exists()


def _gpus() -> int:
    """GPUs that NVIDIA's driver has, and CUDA may use."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return 0
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_uint(0)
    if nvml.nvmlInit_v2() != 0:
        return 0
    failed = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    nvml.nvmlShutdown()
    return 0 if failed else count.value
