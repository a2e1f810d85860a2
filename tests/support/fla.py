"""Reference implementations of recurrences in plain PyTorch from flash-linear-attention (distribution fla-core).

Importing the package imports triton, which a machine without a GPU need not have. A file is therefore loaded by its path, without
the packages around it. fla-core is in the extra `oracles`; without it, tests fail. The functions compute in float32 for all dtypes.
"""

import importlib.util
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType

_DISTRIBUTION = "fla-core"


@cache
def naive(operation: str, file: str = "naive") -> ModuleType:
    """The module fla/ops/OPERATION/FILE.py, for example naive("gla").naive_recurrent_gla.

    Raises:
        RuntimeError: the distribution is not installed or has no such file.
    """
    wanted = f"fla/ops/{operation}/{file}.py"
    try:
        files = distribution(_DISTRIBUTION).files or []
    except PackageNotFoundError:
        raise RuntimeError(f"{_DISTRIBUTION} is not installed: pip install -c constraints.txt '.[oracles]'") from None
    found = [Path(str(file.locate())) for file in files if file.as_posix() == wanted]
    if not found:
        raise RuntimeError(f"{_DISTRIBUTION} {distribution(_DISTRIBUTION).version} has no file {wanted}")
    spec = importlib.util.spec_from_file_location(f"fla_naive_{operation.replace('/', '_')}", found[0])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
