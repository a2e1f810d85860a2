"""Documents in a tar: samples as WebDataset has them, and members that are JSON lines.

Members with the same name up to the first dot of its last part are a sample. Its text is the member .txt, else the text field of
the JSON object .json. Every line of a member .jsonl is a record of its own. Other members (pictures, classes) are left alone.
"""

import io
import tarfile
from collections.abc import Iterator, Sequence
from typing import IO, BinaryIO, Literal, cast

from baton.data_pipeline.compressed import DamagedError
from baton.data_pipeline.input_files import Rejected
from baton.data_pipeline.records import Record, accept, parse, read_lines

_TEXT, _LINES = ("txt", "text"), ("jsonl", "ndjson")
_READ = (*_TEXT, "json", *_LINES)


class _Member(tarfile.TarInfo):
    """A header; one that is damaged or cut off is an error, where the library takes it for the archive's end."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> "_Member":
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # the archive's end mark
            raise
        except tarfile.HeaderError as error:
            where = f"at byte {archive.offset:,}"
            cut_off = isinstance(error, (tarfile.EmptyHeaderError, tarfile.TruncatedHeaderError))  # type: ignore[attr-defined]
            if cut_off:
                raise DamagedError(f"the tar ends {where} without its end mark: it is cut off") from error
            raise DamagedError(f"no tar header {where} ({error})") from error


def open_tar(content: BinaryIO, mode: Literal["r|", "r:"]) -> tarfile.TarFile:
    """A tar for reading, whose damage is an error (see `_Member`). Raises tarfile.TarError."""
    return tarfile.open(fileobj=content, mode=mode, tarinfo=_Member)


def read_tar(source: str, content: BinaryIO, text_field: str) -> Iterator[Record]:
    """The records of a tar, read from front to back. A record's number is the byte of its member's header (of its line, in a
    member of JSON lines), in the archive before compression. Raises DamagedError."""
    try:
        with open_tar(content, "r|") as archive:
            yield from _records(source, archive, text_field)
    except tarfile.TarError as error:
        raise DamagedError(f"not a sound tar ({error})") from error


def read_samples(content: BinaryIO, read: Sequence[str]) -> Iterator[tuple[str, dict[str, tuple[int, bytes]]]]:
    """The samples of a tar, read from front to back: the name that their members share, and of each extension the byte of the
    member's header and its content (b"" unless the extension is in `read`). Raises DamagedError."""
    key, sample = "", cast(dict[str, tuple[int, bytes]], {})
    try:
        with open_tar(content, "r|") as archive:
            for name, extension, member, reader in _members(archive):
                if sample and name != key:
                    yield key, sample
                    sample = {}
                key = name
                sample[extension] = member.offset, reader.read() if extension in read else b""
    except tarfile.TarError as error:
        raise DamagedError(f"not a sound tar ({error})") from error
    if sample:
        yield key, sample


def _members(archive: tarfile.TarFile) -> Iterator[tuple[str, str, tarfile.TarInfo, IO[bytes]]]:
    """The files of a tar in order: the name of their sample, the extension, the header and the content."""
    for member in archive:
        archive.members = []  # type: ignore[attr-defined]  # it would keep every header of a long archive
        if not member.isfile():
            continue
        folder, slash, name = member.name.rpartition("/")
        stem, _, extension = name.partition(".")
        reader = archive.extractfile(member)
        assert reader is not None
        yield folder + slash + stem, extension.lower(), member, reader


def _records(source: str, archive: tarfile.TarFile, text_field: str) -> Iterator[Record]:
    key: str | None = None
    sample: dict[str, tuple[int, bytes]] = {}  # extension -> the header's byte, and the content of those that are read
    for name, extension, member, reader in _members(archive):
        if name != key:
            yield from _sample(source, key, sample, text_field)
            key, sample = name, {}
        if extension in _LINES:
            yield from read_lines(source, cast(io.BufferedReader, reader), text_field, offset=member.offset_data)
        sample[extension] = (member.offset, reader.read() if extension in (*_TEXT, "json") else b"")
    yield from _sample(source, key, sample, text_field)


def _sample(source: str, key: str | None, sample: dict[str, tuple[int, bytes]], text_field: str) -> Iterator[Record]:
    text = next((sample[extension] for extension in _TEXT if extension in sample), None)
    if text is not None:
        record, content = text
        nul = content.find(b"\0")
        yield Rejected(source, record, "not text", f"NUL byte at byte {nul} of the text") if nul >= 0 else accept(source, *text)
    elif "json" in sample:
        yield parse(source, *sample["json"], text_field)
    elif sample and not any(extension in _READ for extension in sample):
        first = min(record for record, _ in sample.values())
        has = ", ".join(f".{extension}" for extension in sorted(sample))
        yield Rejected(source, first, "missing field", f"the sample {key!r} has no .txt, .json or .jsonl but {has}")
