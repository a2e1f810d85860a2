"""Which version of Baton wrote a file, beside which packages, and what is said of a file in a format that this one does not read.

What every format keeps to, so that versions can read each other's files: a key that does not change what the others mean may be
added at any time, and is ignored by versions that do not know it. Whatever changes a meaning has another number of the format; this
number stays where it is, and so does the version that wrote the file.
"""

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from importlib.metadata import PackageNotFoundError, distributions, version
from typing import Any

PACKAGE = "baton-lm"


@cache
def own_version() -> str:
    """This one's, as its package says it."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:  # run from its source, without being installed
        return "unknown"


def installed_packages() -> dict[str, str]:
    """The version of every installed distribution, by name; of several of one name the first on the path, which is imported. Only
    the header of its metadata is read: importlib parses all of it, once for the name and once for the version."""
    found: dict[str, str] = {}
    for one in distributions():
        # "": distutils wrote a file where others have a folder
        text = next(filter(None, map(one.read_text, ("METADATA", "PKG-INFO", ""))), "")
        pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
        values = {name.lower(): value.strip() for name, _, value in pairs}
        if "name" in values and "version" in values:  # what is half removed has neither
            found.setdefault(values["name"], values["version"])
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def writer(by: object) -> str:
    """As a sentence names it. by: the version that a file says; anything else: it says none."""
    return f"Baton {by}" if isinstance(by, str) and by else "another version of Baton"


def other_format(where: object, found: object, read: object, by: object) -> str:
    """Of a file: where it is, its format, the one that this version reads, and the version that wrote it."""
    return (
        f"{where}: format {found}, which {writer(by)} wrote; this is Baton {own_version()}, which reads format {read}; use the "
        f"version that wrote it"
    )


def by_another(by: object) -> str:
    """The end of a sentence about a file that cannot be read. by: the version that it says; "" where that is this one, or none."""
    if not isinstance(by, str) or by in ("", own_version()):
        return ""
    return f"; {writer(by)} wrote it, and this is Baton {own_version()}: use the version that wrote it"


def known_fields(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are fields of a dataclass: others are a later version's."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in values.items() if name in names}
