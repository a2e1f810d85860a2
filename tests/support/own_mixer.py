"""The mixer of docs/add-a-recurrence.md in a package of its own, as a user's would be."""

import contextlib
import re
import sys
from pathlib import Path

from baton.models import settings as kinds_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "add-a-recurrence.md"
IMPORTS = ["leaky_package.leaky"]
"""What a run file names."""


def write_package(folder: Path) -> None:
    """leaky_package, in a folder that is to be put on the path."""
    (folder / "leaky_package").mkdir()
    (folder / "leaky_package" / "__init__.py").touch()
    for name, text in re.findall(r"```python\n# (\S+\.py)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        if not name.endswith("__init__.py"):
            text = text.replace("baton.kernels.leaky_average.", "leaky_package.")
            (folder / "leaky_package" / Path(name).name).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def on_the_path(folder: Path, monkeypatch):
    """The package is importable in this process and in those that it starts; forgotten afterwards."""
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(kinds_of, "_KINDS", dict(kinds_of._KINDS))
    yield folder
    for name in [name for name in sys.modules if name.startswith("leaky_package")]:
        del sys.modules[name]
