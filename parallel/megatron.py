"""The parts of megatron-core that are used here, imported without the rest of it.

`import megatron.core` runs an `__init__` that imports its distributed optimizers, which import DTensor and SymPy, and TensorBoard
for timers. Its modules also decorate functions with torch.compile, which imports TorchDynamo and Inductor at once, though none of
these functions is called here. Together that is 4 s of processor time in every process. So the `__init__` runs when somebody asks
for a name that only it defines, and torch.compile when a function that it decorates is first called: both do what they would have
done before. The optional import of DTensor fails, as in a PyTorch without it: nothing here makes a DTensor. benchmarks/startup.py
measures the imports that remain.

A process that has imported megatron.core before keeps it as it is.
"""

import functools
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from baton.parallel import compat

__all__ = ["ModelParallelConfig", "parallel_state", "tensor_parallel"]

_CORE = "megatron.core"
_OPTIONAL = ("torch.distributed._tensor", "torch.utils.tensorboard")
"""Modules that megatron-core imports where there are any, and that nothing here makes use of."""


@contextmanager
def _parts_alone() -> Iterator[None]:
    """Within it, importing a module of megatron-core imports what that module needs."""
    if _CORE in sys.modules:
        yield
        return
    package = _package()
    absent = [name for name in _OPTIONAL if name not in sys.modules]
    sys.modules |= dict.fromkeys(absent)  # type: ignore[arg-type]  # None: an import of it raises ImportError
    try:
        with compat.lazy_compile():
            yield
    except BaseException:
        sys.modules.pop(_CORE, None)
        raise
    finally:
        for name in absent:
            del sys.modules[name]
    package.__getattr__ = functools.partial(_whole, package)  # type: ignore[method-assign]


def _package() -> ModuleType:
    """megatron.core, whose `__init__` has not run."""
    spec = importlib.util.find_spec(_CORE)
    if spec is None:
        raise ModuleNotFoundError("No module named 'megatron.core': baton needs megatron-core", name=_CORE)
    package = sys.modules[_CORE] = importlib.util.module_from_spec(spec)
    sys.modules["megatron"].core = package  # type: ignore[attr-defined]
    return package


def _whole(package: ModuleType, name: str) -> Any:
    """A name that the package does not have yet: its `__init__` runs, once."""
    if name.startswith("__") and name != "__version__":
        raise AttributeError(f"module {_CORE!r} has no attribute {name!r}")
    del package.__getattr__
    spec = package.__spec__
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(package)
    return getattr(package, name)


with _parts_alone():
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.model_parallel_config import ModelParallelConfig
