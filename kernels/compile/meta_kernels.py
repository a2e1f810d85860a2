"""PyTorch's C++ shape functions of operators on meta tensors, in place of those in Python.

`import torch` covers the C++ functions of some 600 operators with functions in Python, which also know symbolic sizes. Those take a
millisecond or two of the host for each operator; without them a step on meta tensors takes less than half the time.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.library import Library

_Kernels = list[tuple[Any, Callable[..., Any]]]
"""Operators, each with its function in Python."""

_native: _Kernels | None = None
"""Those that C++ has a function of; None: not separated yet."""
_covers: Library | None = None
"""Registers the functions in Python of those; None: C++'s are called."""
_alone: Library | None = None
"""Registers the functions in Python of the others."""


@contextmanager
def native_meta_kernels() -> Iterator[None]:
    """Context in which an operator on meta tensors calls its shape function in C++, where it has one. Sizes must be numbers. Not
    thread-safe."""
    global _covers
    if _native is None:
        _separate()
    elif _covers is not None:
        _covers._destroy()
        _covers = None
    else:  # within another
        yield
        return
    try:
        yield
    finally:
        _covers = _registered(_native or ())


def _separate() -> None:
    """Unregister the functions in Python, and register those again of operators without another. A Library ends as a whole only."""
    global _native, _alone
    _native = []
    library = getattr(torch._meta_registrations, "_meta_lib_dont_use_me_use_register_meta", None)
    if library is None or library.m is None:  # a version of PyTorch that does without
        return
    kernels = [_kernel_of(*key.split("/")) for key in library._op_impls]
    library._destroy()
    others: _Kernels = []
    for kernel in kernels:
        has_other = torch._C._dispatch_has_kernel_for_dispatch_key(kernel[0].name(), "Meta")
        (_native if has_other else others).append(kernel)
    _alone = _registered(others)


def _kernel_of(namespace: str, name: str, key: str) -> tuple[Any, Callable[..., Any]]:
    """An operator by its name, which names its overload where it has several, and its function in Python."""
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    return operator, operator.py_kernels[torch._C.DispatchKey.Meta]


def _registered(kernels: Iterable[tuple[Any, Callable[..., Any]]]) -> Library:
    library = Library("aten", "IMPL", "Meta")
    for operator, kernel in kernels:
        library.impl(operator, kernel)
    return library
