"""Where a dataset is: a folder, or anything that the webdataset library opens (http, a pipe, ...), and reading its files.

The one thing to know: shards are read through that library's `gopen`. What it opens may not be able to seek, and is then read up to
where reading begins.
"""

import contextlib
import os
import re
from pathlib import Path
from typing import BinaryIO, Self
from urllib.parse import urlparse
from urllib.request import url2pathname

_SKIP_BYTES = 1 << 22


class Location:
    """A folder, or the URL of one. Of a URL, `{}` is replaced by the file's name; without `{}` the name is appended after a
    slash."""

    def __init__(self, place: str | os.PathLike[str]) -> None:
        self.text = os.fspath(place)
        parsed = urlparse(self.text)
        self.folder: Path | None = None
        if parsed.scheme == "file":
            self.folder = Path(url2pathname(parsed.path))
        elif parsed.scheme != "pipe" and "://" not in self.text:
            self.folder = Path(self.text).absolute()

    def url(self, name: str) -> str:
        """Where the file `name` is: what gopen is given."""
        if self.folder is not None:
            return str(self.folder / name)
        return self.text.replace("{}", name) if "{}" in self.text else f"{self.text.rstrip('/')}/{name}"

    def open(self, name: str) -> BinaryIO:
        """A binary stream of the file `name`. Raises OSError."""
        if self.folder is not None and not name.endswith(".tar"):
            return open(self.folder / name, "rb")  # small files need no library (webdataset imports torch)
        from webdataset.gopen import gopen

        stream: BinaryIO = gopen(self.url(name), "rb")
        return stream

    def read(self, name: str) -> bytes:
        """The whole file `name`. Raises OSError."""
        with self.open(name) as stream:
            return stream.read()


class ShardStream:
    """A file of a dataset that is read from front to back; opened when first read."""

    def __init__(self, location: Location, name: str) -> None:
        self._location, self._name = location, name
        self._stream: BinaryIO | None = None
        self._at = 0

    def read(self, begin: int, count: int) -> bytes:
        """`count` bytes from `begin` on, which is not before the last read's end; fewer where the stream ends early. Raises
        OSError, also when what feeds a pipe has failed."""
        self._stream = stream = self._stream or self._location.open(self._name)
        try:
            stream.seek(begin)
        except (AttributeError, OSError):  # a pipe: read up to there
            while self._at < begin:
                block = stream.read(min(begin - self._at, _SKIP_BYTES))
                if not block:
                    count = 0
                    stream.close()  # of a pipe, this waits for its command and raises when that failed
                    break
                self._at += len(block)
        blocks: list[bytes] = []
        while count:
            block = stream.read(count)  # pipes may give less than asked for
            if not block:
                stream.close()
                break
            blocks.append(block)
            count -= len(block)
        self._at = begin + sum(map(len, blocks))
        return blocks[0] if len(blocks) == 1 else b"".join(blocks)

    def close(self) -> None:
        """Leaving a pipe early makes its command fail; what was read is checked against the index anyway."""
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def reason(error: Exception) -> str:
    """What went wrong, without the whole command line that webdataset puts into its errors."""
    status = re.search(r": exit (\d+) \(read\)", str(error))
    if status:
        return f"its transfer failed with exit status {status[1]}"
    return getattr(error, "strerror", None) or str(error)
