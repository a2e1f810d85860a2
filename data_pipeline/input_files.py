"""The input files of a preparation: which they are, what is left out and why, and the records that they are read as.

Links are followed where nothing is read twice by that. A linked folder is walked after all real ones, once, and not if it contains
the folder that the link is in. All else that a pattern matches and that is not read is returned beside the files.
"""

import fnmatch
import glob
import hashlib
import json
import os
import re
import shlex
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.data_pipeline.compressed import SUFFIXES
from baton.data_pipeline.errors import DataError, is_transient, unreadable


@dataclass(frozen=True)
class InputFile:
    """One input file. `name` is how ids and reports call it: the input's own name and the path below it, with slashes. named: it
    was given as an input itself, not found in a folder."""

    name: str
    path: str
    size: int
    mtime_ns: int
    named: bool = False


@dataclass(frozen=True)
class InputPiece:
    """The part `start <= position < stop` of a source: bytes of JSON lines, row groups of a Parquet table, bytes of anything else
    (all of them).

    size: input bytes this piece stands for (of Parquet: uncompressed bytes of the text column); only used to balance and to show
    progress.
    """

    source: InputFile
    start: int
    stop: int
    size: int


@dataclass(frozen=True)
class Document:
    """One accepted record: its id (32 hex digits) and its text as UTF-8."""

    id: str
    text: bytes


@dataclass(frozen=True)
class DocumentIds:
    """One accepted document of token ids, int32[n] without the separator, and its id (32 hex digits)."""

    id: str
    ids: npt.NDArray[np.int32]


@dataclass(frozen=True)
class Rejected:
    """One record that is no document, or an input that is not read. record: byte of the line or value (JSON, before compression),
    row (Parquet), byte of the member (tar), byte of the file (stray bytes) or 0 (the whole file)."""

    source: str
    record: int
    reason: str
    detail: str


@dataclass(frozen=True)
class InputFiles:
    """What inputs consist of. sources: the files to read, sorted by name. left: what matches and is not read, sorted. followed:
    links to folders that were searched. others: files in folders that match no include pattern, by the end of their names."""

    sources: list[InputFile]
    left: list[Rejected]
    followed: list[str]
    others: Counter[str]

    def remarks(self) -> tuple[str, ...]:
        """Lines about what a reader of the report may not expect."""
        lines = []
        if self.followed:
            more = f" and {len(self.followed) - 4} more" if len(self.followed) > 4 else ""
            lines.append(f"linked folders, followed: {', '.join(self.followed[:4])}{more}")
        if self.others:
            lines.append(f"not matched by --include: {described_others(self.others)}")
        return tuple(line.encode("utf-8", "backslashreplace").decode() for line in lines)  # file names need not be Unicode


def document_id(source: str, record: int) -> str:
    """32 hex digits, without dots (webdataset splits a sample's key at the first one)."""
    return hashlib.blake2b(f"{source}\n{record}".encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def held_out(text: bytes, fraction: float) -> bool:
    """Whether a document of this UTF-8 text is for validation: a function of the text alone, so equal documents stay together."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"baton held out").digest()) < fraction * 2.0**64


def exclusion(source: str) -> str:
    """Words for a shell that exclude exactly this source. What a terminal cannot show in a name is any character."""
    pattern = "/" + re.sub(r"[\x00-\x1f\x7f\ud800-\udfff]", "?", glob.escape(source))
    return f"--exclude {shlex.quote(pattern)}"


def find_input_files(
    inputs: Sequence[str | os.PathLike[str]], include: Sequence[str], exclude: Sequence[str], leave: Path | None = None
) -> InputFiles:
    """The input files. A file named as an input is taken unless it is excluded; a folder is searched, without the folder `leave`
    (the output, which may be below an input).

    Raises DataError: a missing input, none that matches, or two files that would have the same name; StorageError: a folder or a
    file that cannot be looked at at present.
    """
    found: dict[str, tuple[InputFile, str]] = {}  # name -> the file, and the path of it without links
    search = _Search(include, exclude, None if leave is None else os.path.realpath(leave))
    for given in inputs:
        top = Path(os.path.abspath(given))
        if top.is_dir():
            files = search.folder(top)
        elif os.path.lexists(top):
            files = search.file(top, given)
        else:
            raise DataError(f"the input {given} does not exist; correct the path (inputs are files or folders on this machine)")
        for source, real in files:
            if source.name in found and found[source.name][0].path != source.path:
                raise DataError(
                    f"the inputs {found[source.name][0].path} and {source.path} would both be called {source.name}; rename one of "
                    f"their folders"
                )
            found[source.name] = source, real
    sources: dict[str, InputFile] = {}  # path without links -> the file that it is read as; a real name is taken before a link
    for source, real in sorted(found.values(), key=lambda each: (os.path.islink(each[0].path), each[0].name)):
        if real in sources:
            search.left.append(Rejected(source.name, 0, "same file", f"it is {sources[real].name}, which is read"))
        else:
            sources[real] = source
    if not sources:
        example = f" ({search.left[0].source}: {search.left[0].detail})" if search.left else ""
        others = f"; there are {described_others(search.others)}" if search.others else ""
        patterns = ", ".join(include[:5]) + (", …" if len(include) > 5 else "")
        named = ", ".join(map(str, inputs)) or "an empty list of inputs"
        raise DataError(f"no file in {named} matches {patterns}{example}{others}; see --include")
    left = sorted(search.left, key=lambda each: each.source)
    return InputFiles(sorted(sources.values(), key=lambda each: each.name), left, search.followed, search.others)


def described_others(others: Counter[str]) -> str:
    """How many files of which names, the most common first."""
    parts = [f"{count:,} {ending}" for ending, count in sorted(others.items(), key=lambda item: (-item[1], item[0]))]
    return ", ".join(parts[:6]) + (", …" if len(parts) > 6 else "")


class _Search:
    """Files of inputs, and what `Found` says besides."""

    def __init__(self, include: Sequence[str], exclude: Sequence[str], leave: str | None) -> None:
        self._include, self._exclude, self._leave = include, exclude, leave
        self.left: list[Rejected] = []
        self.followed: list[str] = []
        self.others: Counter[str] = Counter()

    def file(self, path: Path, given: str | os.PathLike[str]) -> Iterator[tuple[InputFile, str]]:
        """An input that is a file, and its path without links. Raises DataError when it is anything else."""
        if _matches(path.name, path.name, path.name, self._exclude):
            return
        status = _status(path)
        kind = "a link to nothing" if status is None else _special(status.st_mode)
        if status is None or kind is not None:
            raise DataError(f"the input {given} is {kind}; inputs are files or folders on this machine")
        yield InputFile(path.name, str(path), status.st_size, status.st_mtime_ns, named=True), os.path.realpath(path)

    def folder(self, top: Path) -> Iterator[tuple[InputFile, str]]:
        """The files in a folder, with their paths without links."""
        walked: set[str] = set()
        links: list[tuple[Path, str]] = []  # to folders, and where to
        yield from self._walk(top, top, os.path.realpath(top), walked, links)
        while links:
            links.sort()
            path, real = links.pop(0)
            name = path.relative_to(top.parent).as_posix()
            if real in walked:
                self.left.append(Rejected(name, 0, "linked folder", f"it is a link to {real}, which is read already"))
            elif any(Path(os.path.realpath(inner)).is_relative_to(real) for inner in (top, path.parent)):
                self.left.append(Rejected(name, 0, "linked folder", f"it is a link to {real}, which it is in itself"))
            else:
                self.followed.append(f"{name} -> {real}")
                yield from self._walk(top, path, real, walked, links)

    def _walk(
        self, top: Path, folder: Path, real: str, walked: set[str], links: list[tuple[Path, str]]
    ) -> Iterator[tuple[InputFile, str]]:
        """Files below a folder whose path without links is `real`. Adds the folders that were read, and the links to folders."""
        folders = [(folder, real)]
        while folders:
            folder, real = folders.pop()
            if real == self._leave or real in walked:
                continue
            walked.add(real)
            try:
                with os.scandir(folder) as entries:
                    found = sorted(entries, key=lambda entry: entry.name)
            except OSError as error:
                if is_transient(error):
                    raise unreadable(folder, error) from error
                raise DataError(f"cannot read the folder {folder}: {error.strerror}; make it readable or exclude it") from error
            names = {entry.name for entry in found}
            saved = _saved_files(folder, names) if "state.json" in names else None
            if "dataset_dict.json" in names:
                self._refuse_splits(folder, top)
            for entry in found:
                path = folder / entry.name
                if saved is not None and entry.name.endswith(".arrow") and entry.name not in saved:
                    what = "it is not one of the files that state.json names"
                    self.left.append(Rejected(path.relative_to(top.parent).as_posix(), 0, "not data", what))
                    continue
                below, name = path.relative_to(top).as_posix(), path.relative_to(top.parent).as_posix()
                if _matches(below, entry.name, name, self._exclude):
                    continue
                if entry.is_symlink():
                    target = os.path.realpath(path)
                    if os.path.isdir(target):
                        links.append((path, target))
                        continue
                elif entry.is_dir():
                    folders.append((path, f"{real.rstrip('/')}/{entry.name}"))
                    continue
                else:
                    target = f"{real.rstrip('/')}/{entry.name}"
                yield from self._found(path, below, name, target)

    def _refuse_splits(self, folder: Path, top: Path) -> None:
        """Raises DataError for a folder of several splits of `datasets`, unless all but one are excluded: that for tests would be
        trained on."""
        try:
            splits = [str(name) for name in _saved_object(folder / "dataset_dict.json")["splits"]]
        except (ValueError, LookupError, TypeError):
            return
        taken = []
        for split in splits:
            places = (folder / split, folder / split / "data-00000-of-00001.arrow")
            words = [(path.relative_to(top).as_posix(), path.name, path.relative_to(top.parent).as_posix()) for path in places]
            if not any(_matches(*word, self._exclude) for word in words):
                taken.append(split)
        if len(taken) > 1:
            raise DataError(
                f"{folder} has the splits {', '.join(splits)}; name the folders of those to take, such as {folder / taken[0]}, or "
                f"exclude the others"
            )

    def _found(self, path: Path, below: str, name: str, real: str) -> Iterator[tuple[InputFile, str]]:
        status = _status(path)
        if status is None:  # a link may have been to a folder, so patterns say nothing about it
            self.left.append(Rejected(name, 0, "dangling link", f"it is a link to {os.readlink(path)}, which is not there"))
        elif not _matches(below, path.name, name, self._include):
            self.others[_ending(path.name)] += 1
        elif (kind := _special(status.st_mode)) is not None:
            self.left.append(Rejected(name, 0, "not a file", f"it is {kind}"))
        else:
            yield InputFile(name, str(path), status.st_size, status.st_mtime_ns), real


def _saved_files(folder: Path, names: set[str]) -> set[str] | None:
    """The .arrow files of a dataset that Hugging Face's `datasets` saved to a folder; None: it is something else. Others in it are
    caches. names: all in it. Raises DataError: one is missing, or the list of them is damaged."""
    try:
        named = {str(entry["filename"]) for entry in _saved_object(folder / "state.json")["_data_files"]}
    except (ValueError, LookupError, TypeError):
        if "dataset_info.json" not in names:
            return None
        raise DataError(f"{folder / 'state.json'} does not say which files the saved dataset has; restore it") from None
    missing = sorted(name for name in named if not (folder / name).exists())
    if missing:
        raise DataError(f"{folder} lacks {missing[0]}, one of the {len(named)} files that its state.json names; restore it")
    return named


def _saved_object(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        if is_transient(error):
            raise unreadable(path, error) from error
        raise DataError(f"{path}: cannot be read ({error.strerror}); make it readable") from error


def _ending(name: str) -> str:
    """The suffix of a name, with the one before it where the last is a compression's; the name where it has none."""
    suffixes = Path(name.lower()).suffixes[-2:]
    return "".join(suffixes if suffixes and suffixes[-1] in SUFFIXES else suffixes[-1:]) or name


def _status(path: Path) -> os.stat_result | None:
    """Of what a path leads to; None: a link that leads to nothing, or round."""
    try:
        return path.stat()
    except OSError as error:
        if is_transient(error):  # also of a link: what it leads to may be there
            raise unreadable(path, error) from error
        if os.path.islink(path):
            return None
        raise DataError(f"cannot read the input {path}: {error.strerror}; make it readable or exclude it") from error


def _special(mode: int) -> str | None:
    """What a path of this mode is, where it is not a file."""
    kinds = ((stat.S_ISREG, None), (stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"))
    return next((kind for test, kind in kinds if test(mode)), "a device")


def _matches(below: str, name: str, whole: str, patterns: Sequence[str]) -> bool:
    """below: the path below the folder; whole: that behind the input's own name, which patterns that begin with / are for."""

    def subject(pattern: str) -> str:
        return f"/{whole}" if pattern.startswith("/") else below if "/" in pattern else name

    return any(fnmatch.fnmatchcase(subject(pattern), pattern) for pattern in patterns)
