"""All recurrences: those in RECURRENCES of every folder that has a `recurrence.py`.

The split-invariance tests run over `recurrences()`, so a new folder is tested without being listed anywhere.
"""

from functools import cache
from importlib import import_module
from pathlib import Path

from baton.kernels.protocol import Recurrence


@cache
def recurrences() -> tuple[Recurrence, ...]:
    """The instances in RECURRENCES of every folder's recurrence.py, in alphabetical order of the folders."""
    folders = sorted(path.parent.name for path in Path(__file__).parent.glob("*/recurrence.py"))
    return tuple(item for folder in folders for item in import_module(f"baton.kernels.{folder}.recurrence").RECURRENCES)
