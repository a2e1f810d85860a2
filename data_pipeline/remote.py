"""Files over http(s), retries of failed transfers, and a local cache of whole shards.

Transferred bytes are compared with the shard's index like any others, so a retry or a cached file is either right or noticed.
"""

import contextlib
import hashlib
import os
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

T = TypeVar("T")

TRIES = 4
"""Number of tries of a transfer before its error is raised."""
FIRST_WAIT_S = 0.25
"""Pause before the second try, doubled before each further one, with a random part so that ranks do not retry together."""
TIMEOUT_S = 60.0
"""Seconds a server may take to answer."""

_AGAIN = {408, 425, 429}  # client errors that mean "try later"
_BLOCK = 1 << 22


class RefusedError(OSError):
    """An answer that a retry does not change, such as 404."""


def with_retries(work: Callable[[], T]) -> T:
    """The result of `work`, tried again after an OSError with growing pauses. Raises the last OSError, and RefusedError at once."""
    for attempt in range(TRIES):
        try:
            return work()
        except RefusedError:
            raise
        except OSError:
            if attempt + 1 == TRIES:
                raise
            time.sleep(FIRST_WAIT_S * 2**attempt * random.uniform(0.5, 1.5))
    raise AssertionError("a try either returns or raises")


class HttpStream:
    """A file over http(s), read from any byte: by a range request where the server supports it, else by reading up to there.

    Raises OSError: the server cannot be reached, or stopped half-way; RefusedError: a retry would not help.
    """

    def __init__(self, url: str) -> None:
        self._url, self._response, self._at, self._end = url, cast(Any, None), 0, -1
        self._opened = False

    def _open(self, begin: int) -> None:
        self.close()
        self._opened = True
        request = urllib.request.Request(self._url, headers={"Range": f"bytes={begin}-"} if begin else {})
        try:
            self._response = urllib.request.urlopen(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 416:  # the file ends before
                self._response, self._at, self._end = None, begin, begin
                return
            kind = OSError if error.code >= 500 or error.code in _AGAIN else RefusedError
            raise kind(f"the server answers {error.code} {error.reason}") from None
        except urllib.error.URLError as error:
            raise OSError(f"the server cannot be reached ({error.reason})") from None
        self._at = begin if self._response.status == 206 else 0
        length = self._response.headers.get("Content-Length")
        self._end = -1 if length is None else self._at + int(length)
        while self._at < begin:
            if not self._take(min(begin - self._at, _BLOCK)):
                break

    def seek(self, begin: int) -> None:
        """Continue at byte `begin`."""
        near = self._opened and 0 < begin - self._at <= _BLOCK
        while near and self._at < begin and self._take(begin - self._at):
            pass
        if begin != self._at or not self._opened:
            self._open(begin)

    def read(self, count: int = -1) -> bytes:
        """At most `count` bytes (-1: all that follow); b"" at the file's end."""
        if count >= 0:
            return self._take(count)
        return b"".join(iter(lambda: self._take(_BLOCK), b""))

    def _take(self, count: int) -> bytes:
        if not self._opened:
            self._open(0)
        if self._response is None:
            return b""
        try:
            block: bytes = self._response.read(count)
        except HTTPException as error:
            raise OSError(f"the server stopped half-way ({error!r})") from None
        self._at += len(block)
        if not block and count and self._at < self._end:
            raise OSError(f"the server stopped half-way, after {self._at:,} of {self._end:,} bytes")
        return block

    def close(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None

    def __enter__(self) -> "HttpStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Cache:
    """Whole files from elsewhere in a local folder, at most `size` bytes in total (and one that is being fetched); the least
    recently used files are deleted for new ones. Several processes may share it: files appear whole, and an open file stays
    readable when it is deleted."""

    def __init__(self, folder: str | os.PathLike[str], size: int) -> None:
        self.folder, self.size = Path(folder), size

    def open(self, url: str, fetch: Callable[[], BinaryIO]) -> BinaryIO:
        """The file at `url`, from the cache if it is there. Raises OSError."""
        path = self.folder / (hashlib.sha256(url.encode()).hexdigest()[:32] + "-" + os.path.basename(url.rstrip("/"))[-80:])
        with contextlib.suppress(OSError):
            stream = open(path, "rb")  # noqa: SIM115 (whoever asked closes it)
            with contextlib.suppress(OSError):
                os.utime(path)
            return stream
        self.folder.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{os.getpid()}-{random.getrandbits(32):08x}-{path.name}")

        def transfer() -> None:
            with fetch() as source, open(aside, "wb") as target:
                while block := source.read(_BLOCK):
                    try:
                        target.write(block)
                    except OSError as error:  # of the local disk, not of the server
                        raise OSError(error.errno, f"{error.strerror} in the cache {self.folder}") from None

        try:
            with_retries(transfer)
            self._make_room(aside.stat().st_size)
            stream = open(aside, "rb")  # noqa: SIM115
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)
        return stream

    def _make_room(self, size: int) -> None:
        used = []
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):
                if not path.name.startswith("."):
                    used.append((path.stat().st_mtime, path.stat().st_size, path))
        total = sum(n for _, n, _ in used)
        for _, n, path in sorted(used):
            if total + size <= self.size:
                break
            path.unlink(missing_ok=True)
            total -= n
