"""Launches that fit the GPU's shared memory: where a configuration needs more than a program can have, smaller ones are tried.

Triton refuses such a launch before anything runs, whenever it is asked for, and a compiled kernel says how much it needs. What is
launched is therefore a function of the kernel, its arguments' types and the GPU: the same on all ranks of a run and in every start,
and the same as what is compiled ahead of time. Nothing is remembered but what has been said. A row of the table of launch
configurations spares the attempts, which take some microseconds of each launch.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from baton.kernels.errors import KernelError

TRITONS_STAGES = 3
"""Pipeline stages of a launch that names none."""

MOST_PROGRAMS = 65535
"""Along the second and the third axis of a grid; along the first there can be 2^31 - 1 (CUDA C++ Programming Guide, "Compute
Capabilities")."""

Sizes = Mapping[str, int]
"""What an attempt changes, by the name that the kernel or Triton has for it."""
Result = TypeVar("Result")

_exact = False
_ahead = False
_instead: Callable[[], None] | None = None
_said: set[tuple[str, str]] = set()


@contextmanager
def exactly() -> Iterator[None]:
    """Context in which a launch that does not fit raises Triton's OutOfResources: a search compares configurations as they are."""
    global _exact
    before, _exact = _exact, True
    try:
        yield
    finally:
        _exact = before


@contextmanager
def ahead() -> Iterator[None]:
    """Context in which launches compile kernels and launch none, so that what fits is known later: `instead`."""
    global _ahead
    before, _ahead = _ahead, True
    try:
        yield
    finally:
        _ahead = before


def instead() -> Callable[[], None] | None:
    """Inside `ahead`: makes the launch that follows where the one that is being made does not fit; None: none follows any."""
    return _instead


def first_that_fits(launch: Callable[[Sizes], Result], first: Sizes, others: Callable[[], Iterable[Sizes]], what: str) -> Result:
    """What `launch` returns for the first attempt that fits.

    Args:
        launch: launches one kernel, and does nothing twice that must be done once. A first attempt comes before `others`.
        what: the kernel, for the line that says what was launched instead.

    Raises Triton's OutOfResources if none fits.
    """
    if _ahead:
        return _launch_ahead(launch, first, iter(() if _exact else others()))
    try:
        return launch(first)
    except Exception as error:
        if _exact or not _does_not_fit(error):
            raise
        refused = error
    for attempt in others():
        try:
            result = launch(attempt)
        except Exception as error:
            if not _does_not_fit(error):
                raise
        else:
            _say(what, attempt, refused)
            return result
    raise refused


def _launch_ahead(launch: Callable[[Sizes], Result], first: Sizes, others: Iterator[Sizes]) -> Result:
    """Launches the first attempt. `instead` then makes the next of the others, and after the last what follows a launch around this
    one."""
    global _instead
    around = _instead

    def follow() -> None:
        global _instead
        _instead = around
        try:
            for attempt in others:
                _launch_ahead(launch, attempt, others)
                return
            if around is not None:
                around()
        finally:
            _instead = None

    _instead = follow
    try:
        return launch(first)
    finally:
        _instead = around


class FittingKernel:
    """A Triton kernel, launched with fewer pipeline stages where it does not fit: they move loads and change no number."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        if max(grid[1:], default=0) > MOST_PROGRAMS:
            raise KernelError(
                f"{self._kernel.__name__}: a grid of {' x '.join(map(str, grid))} programs, and CUDA has at most {MOST_PROGRAMS} "
                "along all axes but the first: give it fewer sequences or shorter ones at once"
            )
        return partial(self._launch, grid)

    def _launch(self, grid: Any, *args: Any, **options: Any) -> Any:
        if not _ahead:  # nearly always it fits, and a launch is to cost little more
            try:
                return self._kernel[grid](*args, **options)
            except Exception as error:
                if _exact or not _does_not_fit(error):
                    raise

        def launch(stages: Sizes) -> Any:
            return self._kernel[grid](*args, **{**options, **stages})

        def fewer() -> Iterator[Sizes]:
            return ({"num_stages": n} for n in range(options.get("num_stages", TRITONS_STAGES) - 1, 0, -1))

        return first_that_fits(launch, {}, fewer, self._kernel.__name__)


def launch_blocks(launch: Callable[[Sizes], Result], what: str, **sizes: int) -> Result:
    """`first_that_fits` for block sizes, powers of two: the largest, the last of several, is halved until the kernel fits."""
    return first_that_fits(launch, sizes, partial(_halved, sizes), what)


def _halved(sizes: Sizes, least: int = 16) -> Iterator[Sizes]:
    left = dict(sizes)
    while max(left.values()) > least:
        largest = max(reversed(left), key=lambda name: left[name])
        left[largest] //= 2
        yield dict(left)


def _does_not_fit(error: Exception) -> bool:
    from triton.runtime.errors import OutOfResources

    return isinstance(error, OutOfResources)


def _say(what: str, attempt: Sizes, refused: Any) -> None:
    """Once, and of a run's ranks the first: the others launch the same."""
    instead = ", ".join(f"{name} {size}" for name, size in attempt.items())
    if (what, instead) in _said or os.environ.get("RANK", "0") != "0":
        return
    _said.add((what, instead))
    needs = f"needs {refused.required} of {refused.name}, of which this GPU has {refused.limit}"
    print(f"baton: {what} {needs}: launched with {instead}; `baton tune` may find faster sizes", file=sys.stderr, flush=True)
