"""Which ptxas makes machine code of Triton's kernels for Hopper and what came before it.

Triton 3.6 brings ptxas 12.8, which makes wrong code for Hopper of some kernels with several matrix products: registers are used
again before an asynchronous product (wgmma) has read them, and descriptors of operands are lost. Gradients of heads with few values
were wrong by any factor, or a launch ended in an illegal address. CUDA 13.3 has the correction (its release notes,
https://docs.nvidia.com/cuda/archive/13.3.0/cuda-toolkit-release-notes; found by users of Triton, too: pull request 11781). NVIDIA's
package nvidia-cuda-nvcc, on which this one depends, brings a newer one, which is used here.
"""

import os
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch

SOUND = (13, 3)
"""Version of CUDA from which ptxas makes right code for Hopper."""
PACKAGE = "nvidia-cuda-nvcc"
SETTING = "TRITON_PTXAS_PATH"
"""Triton's environment variable; a user's choice is kept."""
_HOPPER = 9


@cache
def use_sound_assembler() -> None:
    """Makes Triton take the installed package's ptxas, unless its own is as new, the user has named one, or the driver is too old
    to load what a newer one makes. Where a Hopper GPU is left without, stderr says so in one line."""
    from triton import knobs

    if knobs.runtime.interpret:
        return
    if SETTING not in os.environ and version_of(knobs.nvidia.ptxas.version) < SOUND:
        path = installed(driver_version())
        if path is not None:
            knobs.nvidia.ptxas = str(path)
    found = version_of(knobs.nvidia.ptxas.version)
    if found < SOUND and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == _HOPPER and _first():
        print(
            f"baton: ptxas {'.'.join(map(str, found))} makes wrong kernels for this GPU where heads have few values: install "
            f"{PACKAGE}>={'.'.join(map(str, SOUND))} and a driver of CUDA 13 (580 or newer), or name a newer ptxas in {SETTING}",
            file=sys.stderr,
            flush=True,
        )


def installed(driver: tuple[int, int] | None) -> Path | None:
    """The installed package's ptxas; None if there is none, it is not new enough, or the driver is of an older major version of
    CUDA. driver: the newest CUDA that it knows; None: there is none, and kernels are compiled for another machine."""
    try:
        package = distribution(PACKAGE)
    except PackageNotFoundError:
        return None
    version = version_of(package.version)
    path = Path(str(package.locate_file(f"nvidia/cu{version[0]}/bin/ptxas")))
    newer = driver is not None and driver[0] < version[0]
    return path if version >= SOUND and not newer and os.access(path, os.X_OK) else None


def driver_version() -> tuple[int, int] | None:
    """The newest version of CUDA that the driver knows; None without a driver."""
    ask = getattr(torch._C, "_cuda_getDriverVersion", None)
    known = 0 if ask is None else int(ask())
    return (known // 1000, known % 1000 // 10) if known else None


def version_of(text: str) -> tuple[int, int]:
    """Major and minor of a version such as 13.5.37."""
    major, minor, *_ = text.split(".")
    return int(major), int(minor)


def _first() -> bool:
    return os.environ.get("RANK", "0") == "0"
