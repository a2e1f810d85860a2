"""The parts of megatron-core that are used here, imported without the rest of it.

Exports: ModelParallelConfig, parallel_state, tensor_parallel.

`import megatron.core` imports its distributed optimizers, its checkpoints and its inference layers, which import DTensor, SymPy and
TensorBoard. Its modules also decorate functions with torch.compile, which imports TorchDynamo and Inductor at once. Nothing here
calls any of that, and together it takes 4 s of processor time in every process. Therefore:

- A package's `__init__` does not run. A name that it would import is imported, alone, at its first use; for any other name that it
  would define, `__init__` runs.
- torch.compile compiles when a function that it decorates is first called.
- The optional import of DTensor fails, as in a PyTorch without it: nothing here makes a DTensor.

benchmarks/startup.py measures the imports that remain. A process that has imported megatron.core before keeps it as it is.
"""

import ast
import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from baton.parallel import compat

__all__ = ["ModelParallelConfig", "parallel_state", "tensor_parallel"]

_LATER = ("megatron.core", "megatron.core.dist_checkpointing", "megatron.core.tensor_parallel", "megatron.core.transformer")
"""Packages whose `__init__` runs when it is needed, a package before those in it."""

_OPTIONAL = ("torch.distributed._tensor", "torch.utils.tensorboard")
"""Modules that megatron-core imports where there are any, and that nothing here makes use of."""

_EXTENSIONS = "torch.utils.cpp_extension"
"""megatron-core 0.19 takes load_inline from it and does not call it here. Importing it imports setuptools and, where there is an
nvcc, asks CUDA for its devices, after which no process can be forked that uses them."""


@contextmanager
def _parts_alone() -> Iterator[None]:
    """Within it, importing a module of megatron-core imports what that module needs."""
    if _LATER[0] in sys.modules:
        yield
        return
    packages = [_package(name) for name in _LATER]
    absent = [name for name in _OPTIONAL if name not in sys.modules]
    sys.modules |= dict.fromkeys(absent)  # type: ignore[arg-type]  # None: an import of it raises ImportError
    if _EXTENSIONS not in sys.modules:
        absent.append(_EXTENSIONS)
        sys.modules[_EXTENSIONS] = stand_in = ModuleType(_EXTENSIONS)
        stand_in.load_inline = _load_inline  # type: ignore[attr-defined]
    try:
        with compat.lazy_compile():
            yield
    except BaseException:
        for package in packages:
            sys.modules.pop(package.__name__, None)
        raise
    finally:
        for name in absent:
            del sys.modules[name]


def _package(name: str) -> ModuleType:
    """A package whose `__init__` has not run."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name!r}: baton needs megatron-core", name=name)
    package = sys.modules[name] = importlib.util.module_from_spec(spec)
    parent, _, last = name.rpartition(".")
    setattr(sys.modules[parent], last, package)
    package.__getattr__ = functools.partial(_resolve, package, _origins(package))  # type: ignore[method-assign]
    return package


def _resolve(package: ModuleType, origins: dict[str, str], name: str) -> Any:
    """A name that the package does not have yet.

    origins: names that `__init__` imports, with the module that it takes each from. For a name that is neither among them nor a
    module of the package, `__init__` runs, once.
    """
    if name.startswith("__") and name not in origins:
        raise AttributeError(f"module {package.__name__!r} has no attribute {name!r}")
    if (origin := origins.get(name, package.__name__)) != package.__name__:
        value = getattr(importlib.import_module(origin), name)
    elif importlib.util.find_spec(f"{package.__name__}.{name}") is not None:
        value = importlib.import_module(f"{package.__name__}.{name}")
    else:
        del package.__getattr__
        package.__spec__.loader.exec_module(package)  # type: ignore[union-attr]
        value = getattr(package, name)
    setattr(package, name, value)
    return value


def _load_inline(*words: Any, **named: Any) -> Any:
    """torch.utils.cpp_extension.load_inline, imported when it is called."""
    return importlib.import_module(_EXTENSIONS).load_inline(*words, **named)


def _origins(package: ModuleType) -> dict[str, str]:
    """The names that the package's `__init__` imports from modules, with the names of these modules."""
    source = importlib.util.decode_source(Path(package.__file__).read_bytes())  # type: ignore[arg-type]
    return {
        alias.asname or alias.name: importlib.util.resolve_name("." * line.level + (line.module or ""), package.__name__)
        for line in ast.parse(source).body
        if isinstance(line, ast.ImportFrom)
        for alias in line.names
        if alias.asname in (None, alias.name)
    }


with _parts_alone():
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import layers, mappings  # noqa: F401  # what is used here, before a process is forked
