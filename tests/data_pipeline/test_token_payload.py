"""The header of a list of token ids is read as numpy reads it, whatever wrote it."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.data_pipeline.shards import token_layout, token_payload, tokens_of


@given(st.lists(st.integers(0, 60_000), max_size=300), st.sampled_from([1 << 16, 1 << 20]))
def test_ids_come_back_as_numpy_reads_them(ids, vocabulary):
    payload = token_payload(np.array(ids, np.int64), vocabulary)
    theirs = np.load(io.BytesIO(payload))
    assert tokens_of(payload).tolist() == theirs.tolist() == ids
    dtype, count, begin = token_layout(payload, len(payload))
    assert (dtype, count, len(payload) - begin) == (theirs.dtype, len(ids), theirs.nbytes)


def test_a_header_that_is_spelt_otherwise_is_read_too():
    """As another program might write it: other order, no blanks."""
    text = b"{'shape':(3,),'fortran_order':False,'descr':'<u2'}".ljust(53) + b"\n"
    payload = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + np.array([5, 6, 7], np.uint16).tobytes()
    assert np.load(io.BytesIO(payload)).tolist() == tokens_of(payload).tolist() == [5, 6, 7]


@pytest.mark.parametrize(
    "array", [np.zeros((2, 3), np.uint16), np.zeros(3, np.int64), np.zeros((), np.uint16), np.zeros(3, ">u2")], ids=str
)
def test_other_arrays_are_refused(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    with pytest.raises(ValueError, match="token ids of shape"):
        tokens_of(buffer.getvalue())


@pytest.mark.parametrize(
    "change", [lambda p: p[:-1], lambda p: p + b"\0", lambda p: p[:40], lambda p: b"", lambda p: p[:6] + b"\x02" + p[7:]]
)
def test_damaged_ones_are_refused(change):
    payload = change(token_payload(np.arange(9), 1 << 16))
    with pytest.raises(ValueError):  # noqa: PT011 (numpy's words)
        tokens_of(payload)
