"""Compiling for a GPU that is not here: within `compiling`, what a program would launch on one is compiled into Triton's cache.

The one thing to know: tensors are on the meta device, which has shapes, types and strides and no memory, and count as being on the
GPU; a launch of a Triton kernel then compiles it and runs nothing. The cache knows a kernel by its source, the types and the
divisibility of its arguments and the compiler's version, so a run with the same installation finds every one of them.
"""

import hashlib
import itertools
import multiprocessing as mp
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from baton.kernels.compile.pool import Job, Outcome, compile_all
from baton.kernels.errors import CompileError

META = torch.device("meta")


@dataclass(frozen=True)
class Target:
    """An NVIDIA GPU. capability: ten times major, and minor: 90; name: as CUDA gives it, for the table of launch configurations;
    "": not known."""

    capability: int
    name: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """As `launch_configs.names_of`."""
        return (f"sm_{self.capability}", self.name) if self.name else (f"sm_{self.capability}",)

    @classmethod
    def here(cls) -> "Target | None":
        """This process's GPU; None: it has none."""
        if not torch.cuda.is_available():
            return None
        major, minor = torch.cuda.get_device_capability()
        return cls(10 * major + minor, torch.cuda.get_device_name())

    @classmethod
    def asked(cls) -> "Target | None":
        """As `here`, asked by a forked process: this one has nothing to do with CUDA then, and may fork others that compile."""
        if torch.cuda.is_initialized():
            return cls.here()
        context = mp.get_context("fork")
        results, sender = context.Pipe(duplex=False)
        process = context.Process(target=lambda: sender.send(cls.here()), daemon=True)
        process.start()
        sender.close()
        try:
            found: Target | None = results.recv()
        except EOFError:  # it failed, and has said why
            found = None
        process.join()
        if found is None and torch.cuda.is_available():
            # this process has asked the driver before, as some packages do when they are imported: a fork cannot ask it again
            found = cls.here()
        return found

    def __str__(self) -> str:
        return ", ".join(reversed(self.names))


@dataclass
class Compiled:
    """What was launched, by name, once for each kind of arguments.

    folder: Triton's cache. new: what had not been in it. files: that are in it for each kernel, relative to the folder.
    outcomes: of what was compiled, also of what could not be.
    """

    folder: str
    kernels: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        """A line for each kernel that could not be compiled."""
        return [f"{outcome.name} could not be compiled ({outcome.failure})" for outcome in self.outcomes if outcome.failure]


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


class _Collected(Executor):
    """Keeps what Triton's asynchronous mode gives it to compile, each kernel once, until all of it is known."""

    def __init__(self) -> None:
        self.name = ""
        """Of the kernel that is being launched: module and function."""
        self._given: list[tuple[str, Callable[[], Any], Future[None]]] = []

    def submit(self, fn: Callable[..., Any], /, *_: Any, **__: Any) -> Future[Any]:
        future: Future[None] = Future()
        self._given.append((self.name, fn, future))
        return future

    def compile(self, found: Compiled, what: str, processes: int | None, say: Callable[[str], None] | None) -> None:
        """What is not in the cache, into it."""
        jobs = []
        for name, fn, future in self._given:
            short = name.rpartition(".")[2]
            folder, file, there = _place(future._key, short)  # type: ignore[attr-defined]
            found.kernels.append(short)
            found.files.append(f"{folder}/{file}")
            if not there:
                found.new.append(short)
                jobs.append(Job(name, partial(_compile_and_link, fn)))
        found.outcomes = compile_all(jobs, what, processes, say)

    def settle(self) -> None:
        """Nobody waits for a kernel: those of a real device are loaded from the cache."""
        for _, _, future in self._given:
            future.set_result(None)


def _compile_and_link(compile: Callable[[], Any]) -> None:
    """Compile a kernel, and build the C extension that launches it, which Triton would build at its first launch (0.4 s each, one
    after the other). Without a driver here there is nothing to link it with, and the first launch builds it."""
    from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

    kernel = compile()
    with suppress(Exception):  # the kernel itself is there
        CudaUtils()
        CudaLauncher(kernel.src, kernel.metadata)


def _place(key: str, name: str) -> tuple[str, str, bool]:
    """Folder and file in Triton's cache that say that a kernel is there, and whether it is."""
    from triton import knobs
    from triton.runtime.cache import _base32, get_cache_manager

    digest, file = hashlib.sha256(key.encode()).hexdigest(), f"{name[:150]}.json"
    group = get_cache_manager(digest).get_group(file)
    there = group is not None and file in group and not knobs.compilation.always_compile
    return _base32(digest), f"__grp__{file}", there


@contextmanager
def compiling(wanted: Target, processes: int | None = None, say: Callable[[str], None] | None = None) -> Iterator[Compiled]:
    """Within it launches on meta tensors are collected; at its end the kernels that are not in Triton's cache are compiled, in
    several processes. Not for two threads.

    processes: that compile (default: the usable cores). say: takes lines about the progress. A kernel that cannot be compiled is in
    the result's `failures`. Raises CompileError where Triton interprets.
    """
    global _target
    from triton import knobs
    from triton.runtime import JITFunction, driver
    from triton.runtime._async_compile import AsyncCompileMode

    if knobs.runtime.interpret:
        raise CompileError("TRITON_INTERPRET is set, so that nothing is compiled: unset it")
    whole_keys()
    found, run, collected = Compiled(knobs.cache.dir), JITFunction.run, _Collected()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        collected.name = f"{self.fn.__module__}.{self.fn.__name__}"
        return run(self, *args, grid=grid, warmup=True, **options)

    before = driver._active
    driver.set_active(_Driver(wanted.capability))
    JITFunction.run, _target = compile_only, wanted
    try:
        with AsyncCompileMode(collected):
            try:
                yield found
                collected.compile(found, wanted.names[0], processes, say)
            finally:
                collected.settle()
    finally:
        JITFunction.run, _target = run, None
        driver._active = before
