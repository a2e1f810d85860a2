"""Columns are read as numpy.load reads them, without Python's parser."""

import io
import zipfile

import numpy as np
import pytest

from baton.data_pipeline.npz import read_columns

COLUMNS = {
    "numbers": np.array([3, -1, 2**62], "<i8"),
    "none": np.zeros(0, "<u4"),
    "ids": np.array([b"a", b"bcd"], "S32"),
    "halves": np.array([0.5], "<f4"),
    "swapped": np.array([1, 2], ">i4"),
    "flags": np.array([True, False]),
}


def npz(**columns):
    buffer = io.BytesIO()
    np.savez(buffer, **columns)
    return buffer


def test_columns_are_numpys(tmp_path):
    file = npz(**COLUMNS)
    (tmp_path / "x.npz").write_bytes(file.getvalue())
    for place in (file, tmp_path / "x.npz"):
        found = read_columns(place, COLUMNS)
        assert list(found) == list(COLUMNS)
        for name, column in COLUMNS.items():
            assert found[name].dtype == column.dtype
            assert np.array_equal(found[name], column)
            assert found[name].flags.writeable


def test_pythons_parser_has_no_part_in_it(monkeypatch):
    """CPython counts its depth for all threads together."""
    monkeypatch.setattr("ast.parse", lambda *_, **__: pytest.fail("parsed"))
    read_columns(npz(**COLUMNS), COLUMNS)


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros((2, 3)), "no column"),
        (np.array(5), "no column"),
        (np.array([object()]), "no column"),
        (np.array([(1, 2.0)], "i4,f8"), "no column"),
    ],
    ids=["of two dimensions", "a number", "objects", "records"],
)
def test_what_is_no_column_is_refused(array, said):
    with pytest.raises(ValueError, match=said):
        read_columns(npz(x=array), ["x"])


def test_what_is_damaged_is_refused():
    buffer = io.BytesIO()
    np.save(buffer, np.arange(9))
    for content in (b"", b"\x93NUMPY", buffer.getvalue()[:-1], buffer.getvalue()[:40], b"x" + buffer.getvalue()):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("x.npy", content)
        with pytest.raises(ValueError, match=r"no array|no column|shorter"):
            read_columns(file, ["x"])
    with pytest.raises(KeyError):
        read_columns(npz(x=np.arange(3)), ["y"])
    spoiled = bytearray(npz(x=np.arange(3)).getvalue())
    spoiled[150] ^= 1
    with pytest.raises(zipfile.BadZipFile):
        read_columns(io.BytesIO(bytes(spoiled)), ["x"])
