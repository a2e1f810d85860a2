"""Columns of an .npz file, as numpy.savez writes them.

numpy.load would do but for threads: it has Python's parser read an array's header, and CPython counts how deep the parser's tree is
once for all threads. Where another one parses meanwhile, as Triton does when it compiles a kernel, either may end with
"SystemError: AST constructor recursion depth mismatch" (seen with 3.11.7).
"""

import re
import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

_MAGIC = b"\x93NUMPY"
_HEADER = re.compile(rb"\{'descr': '([<>|][biufS]\d+)', 'fortran_order': False, 'shape': \((\d+),\), \}\s*")


def read_columns(file: BinaryIO | Path, names: Iterable[str]) -> dict[str, npt.NDArray[Any]]:
    """Arrays of one dimension of an .npz, by name, with their CRC32 checked.

    Raises OSError for a file that cannot be read, zipfile.BadZipFile, KeyError for an array that is not there, and ValueError for
    one that is damaged or of another kind: of more dimensions, or of Python objects.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            return {name: _column(archive.read(f"{name}.npy"), name) for name in names}
    except zipfile.BadZipFile:
        if isinstance(file, Path):
            file.read_bytes()  # zipfile takes a read that fails for the end of the file: say what it was
        raise


def _column(content: bytes, name: str) -> npt.NDArray[Any]:
    if content[:6] != _MAGIC or len(content) < 12 or content[6] not in (1, 2, 3):
        raise ValueError(f"{name} is no array")
    size_format, start = ("<H", 10) if content[6] == 1 else ("<I", 12)
    size = struct.unpack_from(size_format, content, 8)[0]
    found = _HEADER.fullmatch(content, start, start + size)
    if found is None:
        raise ValueError(f"{name} is no column of numbers or bytes")
    dtype, count = np.dtype(found[1].decode()), int(found[2])
    if len(content) - start - size < count * dtype.itemsize:
        raise ValueError(f"{name} is shorter than its {count} entries")
    return np.frombuffer(content, dtype, count, start + size).copy()
