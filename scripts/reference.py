"""Writes docs/settings.md and docs/commands.md from the classes that check a run file and from the commands' parsers."""

from pathlib import Path

from baton.launcher import cli, settings_reference
from baton.launcher.cli import reference

DOCS = Path(__file__).resolve().parent.parent / "docs"


def pages() -> dict[Path, str]:
    """Path to text."""
    return {DOCS / "settings.md": settings_reference.markdown(), DOCS / "commands.md": reference.markdown(cli.parser())}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
