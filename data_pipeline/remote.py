"""Files behind http(s), transfers that fail, and a local cache of whole shards.

The one thing to know: nothing here decides what a byte is: what was transferred is compared with the shard's index like any other
bytes, so a retry or a cached file can only be right or be noticed.
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
"""How often a transfer is begun before its failure is the run's."""
FIRST_WAIT_S = 0.25
"""Before the second try, and twice as long before each further one, with a random part so that ranks do not come back together."""
TIMEOUT_S = 60.0
"""For a server to say anything at all."""

_AGAIN = {408, 425, 429}  # of the answers that blame the asker, those that mean "later"
_BLOCK = 1 << 22


class RefusedError(OSError):
    """A server's answer that asking again does not change, such as 404."""


def with_retries(work: Callable[[], T]) -> T:
    """What `work` returns; an OSError of it is met by trying again, a little later each time. Raises the last one, and RefusedError
    at once."""
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
    """A file behind http(s), read from any byte on: by a range request where the server takes those, else by reading up to there.

    Raises OSError: the server cannot be reached, or stopped half-way; RefusedError: it will not answer otherwise.
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
        """Go on from byte `begin`."""
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
    """Whole files from elsewhere in a local folder, at most `size` bytes together (and one that is being fetched); those that were
    not used for the longest make room. Several processes may share it: files appear whole, and one that is open stays readable when
    it is deleted."""

    def __init__(self, folder: str | os.PathLike[str], size: int) -> None:
        self.folder, self.size = Path(folder), size

    def open(self, url: str, fetch: Callable[[], BinaryIO]) -> BinaryIO:
        """The file at `url`, from here if it is here. Raises OSError."""
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
