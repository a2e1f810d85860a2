"""The examples in README.md and docs/."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> Iterator[object]:
    """The blocks of a language, as parameters of tests."""
    for page in PAGES:
        for number, match in enumerate(_BLOCK.finditer(page.read_text(encoding="utf-8"))):
            if match[1] == language:
                yield pytest.param(match[2], id=f"{page.name}-{number}")


def needs_a_run(code: str) -> bool:
    """Whether an example opens the run runs/my-run, or the folder my-model that was exported from it."""
    return "my-run" in code or "my-model" in code
