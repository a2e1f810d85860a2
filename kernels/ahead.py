"""Compiling for a GPU that is not here: within `compiling`, what a program would launch on one is compiled into Triton's cache.

The one thing to know: tensors are on the meta device, which has shapes, types and strides and no memory, and count as being on the
GPU; a launch of a Triton kernel then compiles it and runs nothing. The cache knows a kernel by its source, the types and the
divisibility of its arguments and the compiler's version, so a run with the same installation finds every one of them.
"""

import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from baton.kernels.errors import CompileError

META = torch.device("meta")


@dataclass(frozen=True)
class Target:
    """An NVIDIA GPU. capability: ten times major, and minor: 90; name: as CUDA gives it, for the table of tiles; "": not known."""

    capability: int
    name: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """As `tiles.names_of`."""
        return (f"sm_{self.capability}", self.name) if self.name else (f"sm_{self.capability}",)

    @classmethod
    def here(cls) -> "Target | None":
        """This process's GPU; None: it has none."""
        if not torch.cuda.is_available():
            return None
        major, minor = torch.cuda.get_device_capability()
        return cls(10 * major + minor, torch.cuda.get_device_name())

    def __str__(self) -> str:
        return ", ".join(reversed(self.names))


@dataclass
class Compiled:
    """What was launched, by name, once for each kind of arguments. folder: Triton's cache; new: what had not been in it."""

    folder: str
    kernels: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)


_target: Target | None = None
_times = itertools.count()


def target() -> Target | None:
    """What is being compiled for; None: nothing, as in any run."""
    return _target


def on_gpu(x: Tensor) -> bool:
    """Whether kernels for a GPU compute what is asked of x."""
    found = x.is_cuda or (x.is_meta and _target is not None)
    if found:
        whole_keys()  # before any kernel is launched
    return found


@cache
def whole_keys() -> None:
    """Have Triton call a kernel in its cache by the same name whatever was launched before.

    Triton 3.6 makes the name from a kernel's source, that of the functions it calls, and the constants they all use, but looks at a
    function's constants before it has found them: they are only in the name where another kernel has called the function first. So
    what one process compiled ahead another one, which launches in another order, would compile again.
    """
    from triton.runtime.jit import DependenciesFinder

    update = DependenciesFinder._update_hash

    def whole(self: Any, function: Any) -> None:
        _ = function.cache_key  # finds its constants
        update(self, function)

    DependenciesFinder._update_hash = whole


class _Driver:
    """What Triton asks of a GPU before it compiles."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)
        self._name = f"sm_{capability}, time {next(_times)}"

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> str:
        # kernels that a real device has in this process are kept apart, and those of an earlier time
        return self._name

    def get_current_stream(self, device: Any) -> int:
        return 0


@contextmanager
def launching_nothing(wanted: Target) -> Iterator[None]:
    """Within it a launch on meta tensors does nothing: to see what a program asks of kernels. Not for two threads."""
    global _target
    from triton.runtime.jit import KernelInterface

    get = KernelInterface.__getitem__
    KernelInterface.__getitem__, _target = lambda self, grid: lambda *args, **options: None, wanted
    try:
        yield
    finally:
        KernelInterface.__getitem__, _target = get, None


@contextmanager
def compiling(wanted: Target, threads: int | None = None) -> Iterator[Compiled]:
    """Within it launches on meta tensors compile, all at once; what was compiled is complete behind it. Not for two threads.

    threads: that compile (default: the usable cores). Raises CompileError where Triton interprets, and what its compiler raises.
    """
    global _target
    from triton import knobs
    from triton.runtime import JITFunction, driver
    from triton.runtime._async_compile import AsyncCompileMode

    if knobs.runtime.interpret:
        raise CompileError("TRITON_INTERPRET is set, so that nothing is compiled: unset it")
    whole_keys()
    found, run, listener = Compiled(knobs.cache.dir), JITFunction.run, knobs.compilation.listener

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **options)

    def record(*, src: Any, metadata: dict[str, Any], cache_hit: bool, **_: Any) -> None:
        found.kernels.append(src.name)
        found.new += [] if cache_hit else [src.name]

    before = driver._active
    driver.set_active(_Driver(wanted.capability))
    JITFunction.run, knobs.compilation.listener, _target = compile_only, record, wanted
    try:
        with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as pool, AsyncCompileMode(pool):
            yield found
    finally:
        JITFunction.run, knobs.compilation.listener, _target = run, listener, None
        driver._active = before
