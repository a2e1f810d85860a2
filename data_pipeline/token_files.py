"""Token ids that others have made: Megatron's .bin with its .idx, flat arrays with a separator, lists in Parquet and Arrow tables,
and .npy members of WebDataset tars.

What a file says of itself is checked before anything is written (`split_ids`); every id is checked against the vocabulary when it
is read. The separator that ends a document is dropped: a dataset has none, and batches put the EOD token between documents.
"""

import io
import itertools
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from baton.data_pipeline.archive import read_samples
from baton.data_pipeline.config import IdsConfig
from baton.data_pipeline.errors import InputError, is_transient
from baton.data_pipeline.formats import format_of, open_content
from baton.data_pipeline.input_files import DocumentIds, InputFile, InputPiece, Rejected, document_id

AnyIds = npt.NDArray[np.integer[Any]]
IdsRecord = DocumentIds | Rejected

_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_TYPES: dict[int, str] = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
_CHUNK = 1 << 20
_LOOKS, _LOOK = 64, 1 << 14  # places of a flat file that are looked at beforehand, and ids at each


def split_ids(source: InputFile, piece_bytes: int, ids: IdsConfig) -> list[InputPiece]:
    """Pieces of about `piece_bytes` each where the format allows it: a range of documents (Megatron), of ids (flat), of row groups
    (Parquet), else the whole file. Raises InputError for a file that is not what it says, and for one of another kind."""
    whole = [InputPiece(source, 0, source.size, source.size)]
    if source.name.endswith(".parquet"):
        from baton.data_pipeline.parquet import split_parquet

        return split_parquet(source, piece_bytes, ids.field, ids=True)
    if source.name.endswith(".arrow"):
        from baton.data_pipeline.arrow import check_arrow

        check_arrow(source, ids.field, ids=True)
        return whole
    if ".tar" in source.name or source.name.endswith(".tgz"):
        return whole
    if megatron_index(source) is not None:
        starts, _ = _megatron(source)
        sizes = np.diff(starts)
        cuts = [0, *(np.flatnonzero(np.diff(starts[:-1] // piece_bytes)) + 1).tolist(), len(sizes)]
        return [InputPiece(source, a, b, int(starts[b] - starts[a])) for a, b in itertools.pairwise(cuts) if b > a] or whole
    array = _flat(source, ids)
    _look(source, array, ids)
    step = max(1, piece_bytes // array.itemsize)
    cuts = [*range(0, max(len(array), 1), step), len(array)]
    return [InputPiece(source, a, b, (b - a) * array.itemsize) for a, b in itertools.pairwise(cuts)]


def read_ids(piece: InputPiece, ids: IdsConfig) -> Iterator[IdsRecord]:
    """The documents of a piece, in order. Raises InputError for ids outside the vocabulary and for damaged files."""
    source = piece.source
    for record, found in _arrays(piece, ids):
        if isinstance(found, Rejected):
            yield found
            continue
        if len(found) and not 0 <= int(found.min()) <= int(found.max()) < ids.vocab_size:
            raise _outside(source, record, found, ids)
        if len(found) and found[-1] == ids.separator_id:
            found = found[:-1]
        if not len(found):
            yield Rejected(source.name, record, "empty", "no token")
            continue
        yield DocumentIds(document_id(source.name, record), found.astype(np.int32))


def _arrays(piece: InputPiece, ids: IdsConfig) -> Iterator[tuple[int, AnyIds | Rejected]]:
    """Each document's place in the file, and its ids."""
    source = piece.source
    if source.name.endswith(".parquet"):
        from baton.data_pipeline.parquet import read_id_lists

        yield from read_id_lists(piece, ids.field)
    elif source.name.endswith(".arrow"):
        from baton.data_pipeline.arrow import read_arrow_ids

        yield from read_arrow_ids(source, ids.field)
    elif ".tar" in source.name or source.name.endswith(".tgz"):
        with open(source.path, "rb", buffering=1 << 20) as file:
            compression = format_of(source.name, file).compression
            file.seek(0)
            with open_content(file, compression) as content:
                yield from _members(source, content)
    elif megatron_index(source) is not None:
        starts, array = _megatron(source)
        for number in range(piece.start, piece.stop):
            yield number, array[starts[number] // array.itemsize : starts[number + 1] // array.itemsize]
    else:
        yield from _between_separators(_flat(source, ids), piece.start, piece.stop, ids.separator_id)


def _outside(source: InputFile, record: int, found: AnyIds, ids: IdsConfig) -> InputError:
    wrong = found[(found < 0) | (found >= ids.vocab_size)][0]
    return InputError(
        source.name,
        source.path,
        f"it has the id {wrong} in document {record}, and the tokenizer has 0 <= id < {ids.vocab_size}; name the tokenizer that "
        f"made the ids, and their --ids-dtype",
    )


def megatron_index(source: InputFile) -> Path | None:
    """The .idx beside a .bin; None: there is none."""
    if not source.name.endswith(".bin"):
        return None
    index = Path(source.path).with_suffix(".idx")
    return index if index.exists() else None


def _megatron(source: InputFile) -> tuple[npt.NDArray[np.int64], AnyIds]:
    """First byte of each document and of what is behind the last, and the ids of the .bin. Raises InputError."""
    path = Path(source.path).with_suffix(".idx")

    def refuse(what: str) -> InputError:
        return InputError(source.name, source.path, f"its index {path.name} {what}; make both again with Megatron's preprocessing")

    content = path.read_bytes()
    if not content.startswith(_MEGATRON_MAGIC) or len(content) < _MEGATRON_HEADER.size:
        raise refuse("is no Megatron index (it does not begin with MMIDIDX)")
    _, version, code, sequences, documents = _MEGATRON_HEADER.unpack_from(content)
    if version != 1 or code not in _MEGATRON_TYPES:
        raise refuse(f"has version {version} and type code {code}; version 1 with integer ids can be read")
    expected = _MEGATRON_HEADER.size + 12 * sequences + 8 * documents
    if len(content) == expected + sequences:
        raise refuse("is of a multimodal dataset, which cannot be read")
    if len(content) != expected:
        raise refuse(f"has {len(content):,} bytes, and its header asks for {expected:,}: it is cut off or damaged")
    at = _MEGATRON_HEADER.size
    lengths = np.frombuffer(content, "<i4", sequences, at).astype(np.int64)
    pointers = np.frombuffer(content, "<i8", sequences, at + 4 * sequences)
    ends = np.frombuffer(content, "<i8", documents, at + 12 * sequences)
    dtype = np.dtype(_MEGATRON_TYPES[code])
    places = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]) * dtype.itemsize
    if (lengths < 0).any() or not np.array_equal(pointers, places[:-1]):
        raise refuse("has sequences that do not lie behind each other")
    if not documents or ends[0] != 0 or ends[-1] != sequences or (np.diff(ends) < 0).any():
        raise refuse(f"has documents that do not make up its {sequences:,} sequences")
    if source.size != places[-1]:
        raise refuse(f"does not match it: the index has {places[-1]:,} bytes of {dtype.name} ids, the file {source.size:,}")
    return places[ends], _mapped(source, dtype)


def _mapped(source: InputFile, dtype: np.dtype[Any]) -> AnyIds:
    if not source.size:
        return np.zeros(0, dtype)
    array: AnyIds = np.memmap(source.path, dtype, "r")
    return array


def _flat(source: InputFile, ids: IdsConfig) -> AnyIds:
    """The ids of a .bin or .npy file. Raises InputError."""
    if source.name.endswith(".npy"):
        try:
            array: AnyIds = np.load(source.path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:  # whose text advises to load what is no array as a pickle
            raise InputError(source.name, source.path, "it is no sound .npy array of numbers") from error
        if array.ndim != 1 or array.dtype.kind not in "ui":
            raise InputError(
                source.name, source.path, f"it is an array of shape {array.shape} and type {array.dtype}, not a list of integer ids"
            )
        return array
    if not source.name.endswith(".bin"):
        kinds = ".bin (with .idx, or flat), .npy, .parquet, .arrow and .tar"
        raise InputError(source.name, source.path, f"token ids are read from {kinds}; prepare text without --ids")
    dtype = np.dtype(ids.dtype).newbyteorder("<")
    if source.size % dtype.itemsize:
        raise InputError(
            source.name,
            source.path,
            f"its {source.size:,} bytes are no whole number of {ids.dtype} ids: it is cut off, or of another --ids-dtype",
        )
    return _mapped(source, dtype)


def _look(source: InputFile, array: AnyIds, ids: IdsConfig) -> None:
    """Look at some of a flat file's ids before it is read: raises InputError if they are of another tokenizer or type."""
    zeros = not source.name.endswith(".npy") and array.dtype.itemsize == 2 and len(array) >= 64
    for at, found in _looks(array):
        if len(found) and not 0 <= int(found.min()) <= int(found.max()) < ids.vocab_size:
            wrong = at + int(np.flatnonzero((found < 0) | (found >= ids.vocab_size))[0])
            raise InputError(
                source.name,
                source.path,
                f"its id number {wrong} is {array[wrong]}, and the tokenizer has 0 <= id < {ids.vocab_size}; name the tokenizer "
                f"that made the ids, and their --ids-dtype",
            )
        zeros = zeros and not array[at | 1 : at + _LOOK : 2].any()
    if zeros:
        raise InputError(
            source.name, source.path, f"every second id is 0, as in uint32 read as {ids.dtype}; set --ids-dtype uint32"
        )


def _looks(array: AnyIds) -> Iterator[tuple[int, AnyIds]]:
    """Ids from places all over an array, and where these begin."""
    last = max(0, len(array) - _LOOK)
    for at in sorted({last * i // _LOOKS & ~1 for i in range(_LOOKS)} | {last}):
        yield at, array[at : at + _LOOK]


def without_separators(sources: Sequence[InputFile], ids: IdsConfig) -> tuple[str, ...]:
    """A line about flat files in which no separator was seen in a sample of places: another id may separate their documents."""
    flat = [source for source in sources if source.name.endswith((".bin", ".npy")) and megatron_index(source) is None]
    long = list[InputFile]()
    for source in flat:
        array = _flat(source, ids)
        if len(array) and not any((found == ids.separator_id).any() for _, found in _looks(array)):
            long.append(source)
    if not long:
        return ()
    more = f" and {len(long) - 1} more" if len(long) > 1 else ""
    return (
        f"{long[0].name}{more}: the separator {ids.separator_id} was not seen; if another one ends documents, give --separator-id",
    )


def _between_separators(array: AnyIds, start: int, stop: int, separator_id: int) -> Iterator[tuple[int, AnyIds]]:
    """Documents of a flat array that begin at `start <= id number < stop`, and where. A separator at the array's beginning begins
    the first document."""
    begin = start if start == 0 or array[start - 1] == separator_id else None
    for separator in _separators(array, start, separator_id):
        if begin is not None and (separator or begin):
            yield begin, array[begin:separator]
        begin = separator + 1
        if begin >= stop:
            return
    if begin is not None and begin < min(stop, len(array)):
        yield begin, array[begin:]


def _separators(array: AnyIds, start: int, separator_id: int) -> Iterator[int]:
    for at in range(start, len(array), _CHUNK):
        yield from (at + np.flatnonzero(array[at : at + _CHUNK] == separator_id)).tolist()


def _members(source: InputFile, content: BinaryIO) -> Iterator[tuple[int, AnyIds | Rejected]]:
    """The .npy members of a tar."""
    for key, sample in read_samples(content, ("npy",)):
        if "npy" not in sample:
            has = ", ".join(f".{extension}" for extension in sorted(sample))
            yield 0, Rejected(source.name, min(at for at, _ in sample.values()), "missing field", f"{key!r} has no .npy but {has}")
            continue
        record, payload = sample["npy"]
        try:
            array: AnyIds = np.load(io.BytesIO(payload), allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            if is_transient(error):
                raise
            yield 0, Rejected(source.name, record, "not ids", f"{key}.npy is no sound array ({error})")
            continue
        if array.ndim != 1 or array.dtype.kind not in "ui":
            yield 0, Rejected(source.name, record, "not ids", f"{key}.npy has shape {array.shape} and type {array.dtype}")
            continue
        yield record, array
