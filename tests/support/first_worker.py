"""The first of several workers compiles tests that have no bytecode yet, and the others wait until it has collected them.

They all begin at the same moment, and each would compile all files for itself. A lock of this file, which the first worker takes
before it imports anything else, is what they wait for; it ends with the process.
"""

import fcntl
import os
import sys
from pathlib import Path

_LAST = "training/__pycache__/test_wandb.*.pyc"
"""Bytecode of the file that is collected last."""
_WORKER = os.environ.get("PYTEST_XDIST_WORKER")
_COMPILES = _WORKER is not None and not sys.dont_write_bytecode and not any(Path(__file__).parents[1].glob(_LAST))
_FILE = open(__file__) if _COMPILES else None  # noqa: SIM115 (until this process ends)
if _FILE and _WORKER == "gw0":
    fcntl.flock(_FILE, fcntl.LOCK_EX)


def wait() -> None:
    """Before a worker collects."""
    if _FILE and _WORKER != "gw0":
        fcntl.flock(_FILE, fcntl.LOCK_SH)


def done() -> None:
    """When it has."""
    if _FILE:
        fcntl.flock(_FILE, fcntl.LOCK_UN)
