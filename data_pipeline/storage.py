"""The location of a dataset (a folder, a server, or anything else that the webdataset library opens, such as a pipe), and reading
its files.

Files in a folder are opened, http(s) URLs by remote.py, all others by webdataset's `gopen`. A stream that cannot seek is read up to
the place where reading begins. A failed transfer is retried a few times.
"""

import contextlib
import os
import re
from pathlib import Path
from typing import BinaryIO, Self, cast
from urllib.parse import urlparse
from urllib.request import url2pathname

from baton.data_pipeline.errors import is_transient
from baton.data_pipeline.file_io import retry_transient
from baton.data_pipeline.remote import Cache, HttpStream, with_retries

_SKIP_BYTES = 1 << 22


class Location:
    """A folder, or the URL of one. In a URL, `{}` is replaced by the file's name; without `{}` the name is appended after a
    slash."""

    def __init__(self, place: str | os.PathLike[str], cache: Cache | None = None) -> None:
        """cache: where shards from elsewhere are kept; None: nowhere."""
        self.text = os.fspath(place)
        self.cache = cache
        parsed = urlparse(self.text)
        self.folder: Path | None = None
        if parsed.scheme == "file":
            self.folder = Path(url2pathname(parsed.path))
        elif parsed.scheme != "pipe" and "://" not in self.text:
            self.folder = Path(self.text).absolute()

    def url(self, name: str) -> str:
        """The path or URL of the file `name`, as given to gopen."""
        if self.folder is not None:
            return str(self.folder / name)
        return self.text.replace("{}", name) if "{}" in self.text else f"{self.text.rstrip('/')}/{name}"

    def open(self, name: str) -> BinaryIO:
        """A binary stream of the file `name`. Raises OSError."""
        if self.folder is not None:
            return open(self.folder / name, "rb")
        if self.cache is not None and name.endswith(".tar"):
            return self.cache.open(self.url(name), lambda: self._transfer(name))
        return self._transfer(name)

    def _transfer(self, name: str) -> BinaryIO:
        url = self.url(name)
        if urlparse(url).scheme in ("http", "https"):
            return cast(BinaryIO, HttpStream(url))
        from webdataset.gopen import gopen

        stream: BinaryIO = gopen(url, "rb")
        return stream

    def read(self, name: str) -> bytes:
        """The whole file `name`. Raises OSError."""

        def whole() -> bytes:
            with self.open(name) as stream:
                return stream.read()

        return retry_transient(whole) if self.folder is not None else with_retries(whole)


class ShardStream:
    """A file of a dataset that is read from front to back; opened at the first read."""

    def __init__(self, location: Location, name: str) -> None:
        self._location, self._name = location, name
        self._stream: BinaryIO | None = None
        self._at = 0

    def read(self, begin: int, count: int) -> bytes:
        """`count` bytes from `begin` on, which is not before the end of the last read; fewer where the stream ends early. Raises
        OSError, also when the command that feeds a pipe has failed."""

        def again() -> bytes:
            try:
                return self._read(begin, count)
            except OSError:
                self.close()
                self._stream, self._at = None, 0
                raise

        return retry_transient(again) if self._location.folder is not None else with_retries(again)

    def _read(self, begin: int, count: int) -> bytes:
        self._stream = stream = self._stream or self._location.open(self._name)
        if not self._sought(begin):  # a pipe: read up to there
            while self._at < begin:
                block = stream.read(min(begin - self._at, _SKIP_BYTES))
                if not block:
                    count = 0
                    stream.close()  # waits for a pipe's command and raises if it failed
                    break
                self._at += len(block)
        blocks: list[bytes] = []
        while count:
            block = stream.read(count)  # pipes may return less
            if not block:
                stream.close()
                break
            blocks.append(block)
            count -= len(block)
        self._at = begin + sum(map(len, blocks))
        return blocks[0] if len(blocks) == 1 else b"".join(blocks)

    def _sought(self, begin: int) -> bool:
        """Whether the stream continues at byte `begin`."""
        if isinstance(self._stream, HttpStream):
            self._stream.seek(begin)  # its failures are a transfer's
            return True
        try:
            assert self._stream is not None
            self._stream.seek(begin)
        except (AttributeError, OSError) as error:
            if self._location.folder is not None and is_transient(error):
                raise  # seeking in a file cannot fail otherwise: its file system has failed
            return False
        return True

    def close(self) -> None:
        """Close the stream. Leaving a pipe early makes its command fail, which is ignored: what was read is checked against the
        index."""
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def reason(error: Exception) -> str:
    """The error's message without the command line that webdataset includes."""
    status = re.search(r": exit (\d+) \(read\)", str(error))
    if status:
        return f"its transfer failed with exit status {status[1]}"
    return getattr(error, "strerror", None) or str(error)
