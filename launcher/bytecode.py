"""Python's bytecode of installed packages, kept in a folder of its own where it is not kept beside their sources.

Container images often hold PyTorch without its `__pycache__` folders and set PYTHONDONTWRITEBYTECODE, so each process compiles
thousands of modules when it imports them: 7 s of processor time on an H100's host, in every start. PYTHONPYCACHEPREFIX makes Python
write the bytecode to, and read it from, another folder.
"""

import hashlib
import importlib.util
import os
import sys
from pathlib import Path


def keep() -> None:
    """Have this process, and all that it starts, keep bytecode in `folder` where PyTorch's has none beside it.

    Changes nothing where PYTHONPYCACHEPREFIX is set. A folder that cannot be written to costs nothing: Python goes on without.
    """
    if sys.pycache_prefix is not None:
        return
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None or os.path.exists(importlib.util.cache_from_source(torch.origin)):
        return
    prefix = str(folder(Path(torch.origin).parent.parent))
    sys.pycache_prefix, sys.dont_write_bytecode = prefix, False
    os.environ |= {"PYTHONPYCACHEPREFIX": prefix, "PYTHONDONTWRITEBYTECODE": ""}


def folder(packages: Path) -> Path:
    """The folder for the bytecode of an installation: another set of versions has another one.

    Python takes bytecode for that of a source with the same path, time and size, which files of two container images can have.
    """
    installed = sorted(name for name in os.listdir(packages) if name.endswith(".dist-info"))
    digest = hashlib.sha256("\n".join([sys.version, str(packages), *installed]).encode()).hexdigest()
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "baton" / f"bytecode-{digest[:16]}"
