"""Ahead-of-time compilation of Triton kernels, also for a GPU that this machine does not have, into Triton's cache.

Inside `compiling`, tensors on the meta device, which have shapes, dtypes and strides but no memory, count as GPU tensors.
Launching a Triton kernel on them compiles it and runs nothing. Triton's cache keys a kernel by its source, the types and
divisibility of its arguments and the compiler's version, so a run with the same installation finds all kernels compiled.
"""

import hashlib
import itertools
import json
import multiprocessing as mp
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.kernels.compile import fitting
from baton.kernels.compile.pool import Job, Outcome, compile_all
from baton.kernels.errors import CompileError

META = torch.device("meta")

SHARED_KIB = {70: 96, 75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 101: 227, 103: 227, 110: 227, 120: 99, 121: 99}
"""Shared memory that a program can have, in KiB, by compute capability (CUDA C++ Programming Guide, "Compute Capabilities")."""
TENSOR_MEMORY = 512
"""Columns of a Blackwell's tensor memory that a program can have, as Triton counts them."""


@dataclass(frozen=True)
class Target:
    """An NVIDIA GPU.

    capability: compute capability as 10 * major + minor, for example 90.
    name: CUDA's name of the device, for the table of launch configurations; "": not known.
    """

    capability: int
    name: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The device's names in the table of launch configurations, the most specific last."""
        found = (f"{self.shared_kib} KiB", f"sm_{self.capability}")
        return (*found, self.name) if self.name else found

    @property
    def shared_kib(self) -> int:
        """Shared memory that a program can have, in KiB. Of an unknown GPU: what all have that compute in bfloat16."""
        return SHARED_KIB.get(self.capability, 99)

    @classmethod
    def here(cls) -> "Target | None":
        """This process's GPU; None: it has none."""
        if not torch.cuda.is_available():
            return None
        major, minor = torch.cuda.get_device_capability()
        return cls(10 * major + minor, torch.cuda.get_device_name())

    @classmethod
    def asked(cls) -> "Target | None":
        """As `here`, but queried in a forked process. A process that has initialized CUDA itself could not fork compiler
        processes."""
        if torch.cuda.is_initialized():
            return cls.here()
        context = mp.get_context("fork")
        results, sender = context.Pipe(duplex=False)
        process = context.Process(target=lambda: sender.send(cls.here()), daemon=True)
        process.start()
        sender.close()
        try:
            found: Target | None = results.recv()
        except EOFError:  # it failed and has printed why
            found = None
        process.join()
        if found is None and torch.cuda.is_available():
            # this process has initialized CUDA before, as some packages do on import, so a fork cannot initialize it
            found = cls.here()
        return found

    def __str__(self) -> str:
        return ", ".join(reversed(self.names[1:]))


@dataclass
class Compiled:
    """Result of `compiling`: the kernels that were launched, by name, one for each set of argument types.

    folder: Triton's cache.
    new: kernels that were not in the cache before.
    files: files of each kernel, relative to the folder.
    outcomes: the outcome of each compilation, failures included.
    """

    folder: str
    kernels: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        """One line for each kernel that could not be compiled."""
        return [f"{outcome.name} could not be compiled ({outcome.failure})" for outcome in self.outcomes if outcome.failure]


_target: Target | None = None
_times = itertools.count()


def target() -> Target | None:
    """The GPU that kernels are being compiled for; None outside `compiling`."""
    return _target


def on_gpu(x: Tensor) -> bool:
    """Whether operators on x use GPU kernels: x is on a GPU, or on the meta device inside `compiling`."""
    return x.is_cuda or (x.is_meta and _target is not None)


class _Driver:
    """A Triton driver that answers the compiler's queries for a GPU that is not in this machine."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)
        self._name = f"sm_{capability}, time {next(_times)}"

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> str:
        # a separate cache in this process: not that of a real device, and not that of an earlier call
        return self._name

    def get_current_stream(self, device: Any) -> int:
        return 0


@contextmanager
def launching_nothing(wanted: Target) -> Iterator[None]:
    """Context in which launches on meta tensors do nothing, to record which kernels a program requests. Not thread-safe."""
    global _target
    from triton.runtime.jit import KernelInterface

    get = KernelInterface.__getitem__
    KernelInterface.__getitem__, _target = lambda self, grid: lambda *args, **options: None, wanted
    try:
        yield
    finally:
        KernelInterface.__getitem__, _target = get, None


class _Collected(Executor):
    """Collects the kernels that Triton's asynchronous mode submits for compilation, each once, until all are known."""

    def __init__(self) -> None:
        self.name = ""
        """Module and function of the kernel that is being launched."""
        self._given: list[_Launched] = []

    def submit(self, fn: Callable[..., Any], /, *_: Any, **__: Any) -> Future[Any]:
        future: Future[None] = Future()
        self._given.append(_Launched(self.name, fn, future, fitting.instead()))
        return future

    def compile(self, found: Compiled, wanted: Target, processes: int | None, say: Callable[[str], None] | None) -> None:
        """Compiles the kernels that are not in the cache, then what is launched instead of those that do not fit, until all fit."""
        done = 0
        while done < len(self._given):
            batch, jobs, done = self._given[done:], [], len(self._given)
            for one in batch:
                folder, file, there = _place(one.key, one.short)
                found.kernels.append(one.short)
                found.files.append(f"{folder}/{file}")
                if not there:
                    found.new.append(one.short)
                    jobs.append(Job(one.name, partial(_compile_and_link, one.compile)))
            found.outcomes += compile_all(jobs, f"sm_{wanted.capability}", processes, say)
            for one in batch:
                if one.instead is not None and not _fits(one, wanted):
                    one.instead()

    def settle(self) -> None:
        """A future that is never waited for; kernels for a real device are loaded from the cache later."""
        for one in self._given:
            one.future.set_result(None)


@dataclass
class _Launched:
    """A kernel that a launch asked for. name: its module and function. compile: as Triton has submitted it. instead: makes the
    launch that follows where this one does not fit; None: there is none."""

    name: str
    compile: Callable[[], Any]
    future: Future[None]
    instead: Callable[[], None] | None

    @property
    def short(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def key(self) -> str:
        key: str = self.future._key  # type: ignore[attr-defined]
        return key


def _compile_and_link(compile: Callable[[], Any]) -> None:
    """Compiles a kernel and builds the C extension that launches it, which Triton would otherwise build at the first launch (0.4 s
    each, sequentially). Without a driver on this machine there is nothing to link against, and the first launch builds it."""
    from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

    kernel = compile()
    with suppress(Exception):  # the kernel itself is compiled
        CudaUtils()
        CudaLauncher(kernel.src, kernel.metadata)


def _place(key: str, name: str) -> tuple[str, str, bool]:
    """Folder and file in Triton's cache that exist for a compiled kernel, and whether they do."""
    from triton import knobs
    from triton.runtime.cache import _base32, get_cache_manager

    digest, file = hashlib.sha256(key.encode()).hexdigest(), f"{name[:150]}.json"
    group = get_cache_manager(digest).get_group(file)
    there = group is not None and file in group and not knobs.compilation.always_compile
    return _base32(digest), f"__grp__{file}", there


def _fits(one: _Launched, wanted: Target) -> bool:
    """Whether a program has the memory of a compiled kernel; of one that could not be compiled: yes, nothing is known."""
    from triton.runtime.cache import get_cache_manager

    file = f"{one.short[:150]}.json"
    group = get_cache_manager(hashlib.sha256(one.key.encode()).hexdigest()).get_group(file)
    if group is None or file not in group:
        return True
    known = json.loads(Path(group[file]).read_text(encoding="utf-8"))
    return known["shared"] <= 1024 * wanted.shared_kib and (known.get("tmem_size") or 0) <= TENSOR_MEMORY


@contextmanager
def compiling(wanted: Target, processes: int | None = None, say: Callable[[str], None] | None = None) -> Iterator[Compiled]:
    """Context that collects launches on meta tensors and, at its end, compiles the kernels that are not in Triton's cache, in
    several processes. Not thread-safe.

    processes: number of compiler processes (default: the usable cores). say: called with lines about the progress. A kernel that
    cannot be compiled is in the result's `failures`. Raises CompileError in Triton's interpreter mode.
    """
    global _target
    from triton import knobs
    from triton.runtime import JITFunction, driver
    from triton.runtime._async_compile import AsyncCompileMode

    if knobs.runtime.interpret:
        raise CompileError("TRITON_INTERPRET is set, so that nothing is compiled: unset it")
    found, run, collected = Compiled(knobs.cache.dir), JITFunction.run, _Collected()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        collected.name = f"{self.fn.__module__}.{self.fn.__name__}"
        return run(self, *args, grid=grid, warmup=True, **options)

    before = driver._active
    driver.set_active(_Driver(wanted.capability))
    JITFunction.run, _target = compile_only, wanted
    try:
        with fitting.ahead(), AsyncCompileMode(collected):
            try:
                yield found
                collected.compile(found, wanted, processes, say)
            finally:
                collected.settle()
    finally:
        JITFunction.run, _target = run, None
        driver._active = before
