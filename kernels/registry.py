"""Every recurrence there is: a folder with a `recurrence.py` is in, without being listed anywhere.

The one thing to know: the tests of the law run over `recurrences()`, so a new folder is tested by being there.
"""

from functools import cache
from importlib import import_module
from pathlib import Path

from baton.kernels.protocol import Recurrence


@cache
def recurrences() -> tuple[Recurrence, ...]:
    """The instances in RECURRENCES of every folder's recurrence.py, by folder name."""
    folders = sorted(path.parent.name for path in Path(__file__).parent.glob("*/recurrence.py"))
    return tuple(item for folder in folders for item in import_module(f"baton.kernels.{folder}.recurrence").RECURRENCES)
