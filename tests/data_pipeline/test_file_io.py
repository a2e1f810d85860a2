"""Disks that fail for a while: what is read again, what is said of it, and lines that are whole or alone."""

import errno
import json
import os
import shutil

import pytest

from baton.data_pipeline import file_io
from baton.data_pipeline.dataset import Dataset
from baton.data_pipeline.errors import DataError, StorageError, is_transient
from baton.data_pipeline.file_io import append_line, read_text, retry_transient
from baton.data_pipeline.input_files import find_input_files
from baton.data_pipeline.prepare import prepare
from baton.data_pipeline.tokenizer import load_tokenizer

FAILING = "/proc/self/mem"
"""A file whose first byte cannot be read: the system answers EIO, as a disk or a file server does."""


@pytest.fixture
def pauses(monkeypatch):
    """The pauses between tries, which take no time here; what is put into `meanwhile` is done in the first."""
    made, meanwhile = [], []

    def pause(seconds):
        made.append(seconds)
        while meanwhile:
            meanwhile.pop()()

    monkeypatch.setattr(file_io.time, "sleep", pause)
    return made, meanwhile


def failing(path):
    """Put a file that cannot be read into the place of `path`; returns what restores it."""
    kept = path.rename(path.with_name(f"{path.name}.kept"))
    path.symlink_to(FAILING)
    return lambda: kept.replace(path)


def test_a_read_error_that_passes_is_not_seen(tmp_path, pauses):
    made, meanwhile = pauses
    path = tmp_path / "file"
    path.write_text("sound")
    meanwhile.append(failing(path))
    assert read_text(path) == "sound"
    assert made == [file_io.PAUSES_S[0]]


def test_a_read_error_that_stays_says_nothing_about_the_file(tmp_path, pauses):
    path = tmp_path / "file"
    path.write_text("sound")
    failing(path)
    with pytest.raises(StorageError, match=r"cannot be read at present \(Input/output error\); the file may be sound") as raised:
        read_text(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert raised.value.exit_status == 74
    assert pauses[0] == list(file_io.PAUSES_S)


def test_what_only_a_person_can_mend_is_not_tried_again(tmp_path, pauses):
    for path in (tmp_path / "missing", tmp_path, tmp_path / "missing" / "file"):
        with pytest.raises(OSError, match=r"No such|Is a directory") as raised:
            retry_transient(path.read_bytes)
        assert not is_transient(raised.value)
    assert pauses[0] == []


@pytest.fixture(scope="module")
def dataset(corpus, quiet, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dataset") / "text"
    prepare([corpus], folder, shard_bytes=8000, workers=1, progress=quiet)
    return folder


def read_all(folder):
    opened = Dataset.open(folder, check_sizes=False)
    shards = opened.require("train")
    return [*(opened.text_bytes(shard).tolist() for shard in shards), *opened.samples("train")]


@pytest.mark.parametrize("name", ["dataset.json", "train-*.index.npz", "train-*.tar"])
def test_a_dataset_that_cannot_be_read_at_present_is_not_bad_input(dataset, tmp_path, pauses, name):
    folder = shutil.copytree(dataset, tmp_path / "copy")
    expected = read_all(folder)
    victim = sorted(folder.glob(name))[0]
    pauses[1].append(failing(victim))
    assert read_all(folder) == expected, "read again"
    failing(victim)
    with pytest.raises(StorageError) as raised:
        read_all(folder)
    assert str(victim) in str(raised.value)
    assert "prepare" not in str(raised.value), "no advice to make anew what may be sound"
    victim.unlink()
    with pytest.raises(DataError):
        read_all(folder)


def test_a_tokenizer_that_cannot_be_read_at_present_is_not_bad_input(tokenizer, tmp_path, pauses):
    path = shutil.copy(tokenizer.path, tmp_path / "t.model")
    failing(tmp_path / "t.model")
    with pytest.raises(StorageError, match=r"t\.model: cannot be read at present"):
        load_tokenizer(path)


def test_a_line_is_whole_or_alone(small_disk):
    """The disk fills in the middle of a line; whatever is written of it, the lines before and after are whole."""
    path, ballast = small_disk / "lines", small_disk / "ballast"
    lines = [json.dumps({"line": number, "text": "x" * 700}) for number in range(40)]
    for line in lines[:3]:
        append_line(path, line)
    with pytest.raises(OSError, match="No space"):
        ballast.write_bytes(b"x" * shutil.disk_usage(small_disk).total)
    written, failure = 3, None
    while failure is None:  # up to the end of the block that the file has
        try:
            append_line(path, lines[written], sync=True)
            written += 1
        except OSError as error:
            failure = error
    assert (failure.errno, failure.filename) == (errno.ENOSPC, str(path))
    cut = path.read_text()
    assert not cut.endswith("\n"), "the disk was full between two lines, and this test shows nothing"
    ballast.unlink()
    for line in lines[written:]:
        append_line(path, line)
    found = path.read_text().splitlines()
    assert [line for line in found if line in set(lines)] == lines
    assert len(found) == len(lines) + 1


def test_a_line_that_a_kill_cut_short_stays_alone(tmp_path):
    path = tmp_path / "lines"
    path.write_text('{"a": 1}\n{"b": ')
    append_line(path, '{"c": 3}')
    append_line(path, '{"d": 4}')
    assert path.read_text() == '{"a": 1}\n{"b": \n{"c": 3}\n{"d": 4}\n'
    assert os.stat(path).st_mode & 0o777 == 0o644


def test_a_file_that_cannot_be_looked_at_is_not_left_out_as_a_dangling_link(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("a")
    (tmp_path / "in" / "b.txt").symlink_to(tmp_path / "in" / "a.txt")
    real = os.stat

    def fail(path, *words, **named):
        if str(path).endswith("b.txt") and named.get("follow_symlinks", True):
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return real(path, *words, **named)

    monkeypatch.setattr(os, "stat", fail)
    with pytest.raises(StorageError, match=r"b\.txt: cannot be read at present \(Stale file handle\)"):
        find_input_files([tmp_path / "in"], ["*.txt"], [])
