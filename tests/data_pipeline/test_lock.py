"""One process at a time holds a lock, whichever kind the file system has, and a killed one leaves nothing that stays locked."""

import errno
import fcntl
import json
import os
import platform
import resource
import signal
import subprocess
import sys
import textwrap

import pytest

from baton.data_pipeline.errors import DataError
from baton.data_pipeline.lock import LockHeldError, exclusive
from baton.data_pipeline.prepare import prepare

KINDS = {"flock": (), "lockf": ("flock",), "file": ("flock", "lockf")}  # kind -> the calls that the file system does not have

PREAMBLE = """
import errno, fcntl, os, signal, sys
from pathlib import Path

def missing(*_):
    raise OSError(errno.ENOSYS, "Function not implemented")

for name in sys.argv[2:]:
    setattr(fcntl, name, missing)

from baton.data_pipeline.lock import LockHeldError, exclusive

path = Path(sys.argv[1])
"""


@pytest.fixture
def lacking(monkeypatch):
    """Take calls away from this process, as a file system without them does: none can be mounted here."""

    def take(calls, number=errno.ENOSYS):
        def missing(*_):
            raise OSError(number, os.strerror(number))

        for call in calls:
            monkeypatch.setattr(fcntl, call, missing)

    return take


def started(code, path, calls):
    """A Python process, with its output in a pipe."""
    words = [sys.executable, "-P", "-c", PREAMBLE + textwrap.dedent(code), str(path), *calls]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("calls", KINDS.values(), ids=KINDS)
def test_a_lock_is_refused_with_who_holds_it_and_is_free_after_a_kill(tmp_path, lacking, calls):
    lacking(calls)
    path = tmp_path / "lock"
    holder = started("with exclusive(path):\n    print('held', flush=True)\n    signal.pause()", path, calls)
    assert holder.stdout.readline() == "held\n"
    for _ in range(2):
        with pytest.raises(LockHeldError) as caught, exclusive(path):
            pass
        assert caught.value.holder == f"process {holder.pid} on {platform.node()}"
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    for _ in range(2):
        with exclusive(path):
            with pytest.raises(LockHeldError, match=f"process {os.getpid()} on"), exclusive(path):
                pass
            other = started("try:\n    exclusive(path).__enter__()\nexcept LockHeldError as e:\n    print(e)", path, calls)
            assert f"process {os.getpid()} on {platform.node()}" in other.communicate()[0]


@pytest.mark.parametrize("calls", KINDS.values(), ids=KINDS)
def test_processes_that_take_turns_never_meet(tmp_path, calls):
    code = """
        import time
        for _ in range(40):
            while True:
                try:
                    with exclusive(path):
                        count = path.with_name("count")
                        value = int(count.read_text())
                        time.sleep(0.0005)
                        count.write_text(str(value + 1))
                    break
                except LockHeldError:
                    time.sleep(0.001)
    """
    (tmp_path / "count").write_text("0")
    workers = [started(code, tmp_path / "lock", calls) for _ in range(3)]
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    for worker in workers:
        worker.stdout.close()
    assert (tmp_path / "count").read_text() == "120"


def test_a_lock_file_of_another_machine_stays_and_is_named(tmp_path, lacking):
    lacking(KINDS["file"])
    path = tmp_path / "lock.held"
    for other in ({"host": "node17"}, {"boot": "another"}, {"pids": "pid:[1]"}):
        path.unlink(missing_ok=True)
        with exclusive(tmp_path / "lock"):
            record = json.loads(path.read_bytes())
        ended = subprocess.Popen(["true"])
        ended.wait()
        content = json.dumps(record | {"pid": ended.pid, "job": "12"} | other).encode()
        path.write_bytes(content)
        with pytest.raises(LockHeldError) as caught, exclusive(tmp_path / "lock"):
            pass
        assert str(caught.value).endswith(f"(job 12); if that process has ended, delete {path}")
        assert path.read_bytes() == content
    path.write_bytes(json.dumps(record | {"pid": ended.pid}).encode())  # one of this machine is known to have ended
    with exclusive(tmp_path / "lock"):
        pass
    path.write_bytes(json.dumps(record | {"pid": 1, "began": "7"}).encode())  # and so is one whose number another process has
    with exclusive(tmp_path / "lock"):
        pass
    assert not path.exists()


def test_a_lock_file_without_content_is_not_taken_over(tmp_path, lacking):
    """A process may have been killed, or be, between making and writing it."""
    lacking(KINDS["file"])
    (tmp_path / "lock.held").write_bytes(b"")
    with pytest.raises(LockHeldError, match=r"another process; if that process has ended, delete .*lock\.held"):
        exclusive(tmp_path / "lock").__enter__()


def test_a_lock_file_that_finds_no_room_is_not_left_behind(tmp_path, lacking):
    """Without a content it would name nobody, and never be taken over."""
    lacking(KINDS["file"])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (0, 9):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            with pytest.raises(OSError, match=r"File too large|No space left"):
                exclusive(tmp_path / "lock").__enter__()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert not (tmp_path / "lock.held").exists()
        with exclusive(tmp_path / "lock"):
            pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
@pytest.mark.parametrize("calls", [KINDS["lockf"], KINDS["file"]], ids=["lockf", "file"])
def test_datasets_are_made_where_there_is_no_flock(tmp_path, lacking, quiet, calls, number):
    lacking(calls, number)
    (tmp_path / "a.txt").write_text("a page")

    def progress(_done, _total):
        with pytest.raises(DataError, match=f"is being prepared by process {os.getpid()} on"):
            prepare([tmp_path / "a.txt"], tmp_path / "out", workers=1, progress=quiet, validation_fraction=0.0)

    prepare([tmp_path / "a.txt"], tmp_path / "out", workers=1, progress=progress, validation_fraction=0.0)
    assert not (tmp_path / "out" / ".parts").exists()
