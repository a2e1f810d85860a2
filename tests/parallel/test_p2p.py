"""Messages are sent without waiting, and a rank that misses one ends with an error message."""

import re
import signal
import threading
import time
import weakref

import pytest
import torch
from support.forks import NURSERY
from support.gone_rank import FAULTY, RANKS, TIMEOUT_S

from baton.parallel.errors import CommError
from baton.parallel.p2p import Watchdog, make_channels

DEADLINE_S = 240.0
"""Far beyond what anything here takes on a busy machine. That a rank ends in time is tested with a Watch and a clock of its own."""

SENTENCE = re.compile(
    r"baton: rank (\d): (the State|the gradient of the State) of (\S+) in layers\.(\d)\.mamba did not (come from|reach) rank (\d) "
    r"\(waited ([\d.]+) s of at most 20 s\)"
)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Work:
    def __init__(self):
        self.done = False

    def is_completed(self):
        return self.done


def watch():
    ended, clock = [], Clock()
    return Watchdog(ended.append, clock), clock, ended


def say(name):
    return lambda waited: f"{name} after {waited:g} s"


def test_watch_lets_what_comes_in_time_go():
    watching, clock, ended = watch()
    works = [Work(), Work(), Work()]
    for n, work in enumerate(works):
        watching.add(work, say(str(n)), 10.0)
    works[1].done = True  # not the oldest
    clock.now += 9.0
    watching.check()
    assert len(watching) == 2
    works[0].done = works[2].done = True
    clock.now += 100.0  # late to look, but they had come
    watching.check()
    assert not ended
    assert len(watching) == 0


def test_watch_ends_with_what_is_overdue_the_longest():
    watching, clock, ended = watch()
    watching.add(Work(), say("patient"), 100.0)
    watching.add(Work(), say("second"), 10.0)
    clock.now -= 2.0
    watching.add(Work(), say("first"), 10.0)
    clock.now += 11.0
    watching.check()
    assert ended == ["first after 11 s"]


def test_watch_ends_at_a_deadline_and_not_before():
    watching, clock, ended = watch()
    watching.add(Work(), say("a"), 10.0)
    clock.now += 10.0
    watching.check()
    assert not ended
    clock.now += 0.5
    watching.check()
    assert ended == ["a after 10.5 s"]


def sending(mesh):
    """Whether messages are released once they are gone, without anybody waiting; and what is gathered."""
    right, around = make_channels([[0, 1]], 2, mesh.device, 30.0)
    if mesh.rank == 0:
        messages = [torch.full((1000,), n, dtype=torch.uint8) for n in range(5)]
        for message in messages:
            right.send(message, 1, "a message")
        released = [weakref.ref(message) for message in messages]
        del messages, message
        kept = sum(r() is not None for r in released)
        torch.distributed.barrier()
        deadline = time.monotonic() + DEADLINE_S
        while any(r() is not None for r in released) and time.monotonic() < deadline:
            time.sleep(0.01)
        result = kept, [r() is None for r in released]
    else:
        torch.distributed.barrier()
        result = [int(right.irecv(torch.empty(1000, dtype=torch.uint8), 0, "a message").wait()[7]) for _ in range(5)]
    gathered = around.gather(torch.full((3,), 10 + mesh.rank), "numbers").wait()
    right.flush()
    return result, gathered.tolist()


def test_messages_are_released_when_they_have_left(pool):
    ((kept, released), gathered), taken = pool.run(sending, context=2)
    assert kept == 5, "they left before anybody took them: this shows nothing"
    assert all(released)
    assert gathered == [[10, 10, 10], [11, 11, 11]]
    assert taken == ([0, 1, 2, 3, 4], gathered)


class Lingering:
    """A lock whose users stay a while where they have let go of it, unless they are the thread that made it."""

    def __init__(self):
        self._lock, self._maker = threading.Lock(), threading.get_ident()

    def __enter__(self):
        self._lock.acquire()

    def __exit__(self, *error):
        self._lock.release()
        if threading.get_ident() != self._maker:
            time.sleep(0.5)


def flushed(mesh):
    """Whether a message is released when `flush` returns, though the thread that released it has not ended."""
    (channel,) = make_channels([[0, 1]], 1, mesh.device, 30.0)
    if mesh.rank == 1:
        return int(channel.irecv(torch.empty(1000, dtype=torch.uint8), 0, "a message").wait()[7])
    channel._lock = Lingering()
    message = torch.full((1000,), 3, dtype=torch.uint8)
    channel.send(message, 1, "a message")
    released = weakref.ref(message)
    del message
    while channel._drain_thread is not None:
        time.sleep(0.01)
    channel.flush()
    return released() is None


def test_a_message_is_released_before_flush_returns(pool):
    assert pool.run(flushed, context=2) == [True, 3]


def refused(mesh):
    """What is said about a message to a rank that has given up."""
    (channel,) = make_channels([[0, 1]], 1, mesh.device, 1.0)
    if mesh.rank == 0:
        with pytest.raises(CommError) as error:
            channel.irecv(torch.empty(4), 1, "an answer").wait()
        return str(error.value)
    time.sleep(3.0)
    return ""


def test_a_message_that_does_not_come_is_named(pool):
    sentence = pool.run(refused, context=2)[0]
    assert re.match(
        r"rank 0: an answer did not come from rank 1 \(waited \d+\.\d s of at most 1 s\): that rank has died, or", sentence
    )
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("fault", "direction"),
    [
        ("killed", "right"),
        ("hanging", "left"),
        pytest.param("hanging", "right", marks=pytest.mark.long),
        pytest.param("killed", "left", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_is_gone_ends_all_ranks_in_time(tmp_path, fault, direction):
    """In the middle of a layer's exchange, after a step that went well: every other rank ends and says what it missed."""
    said_file, words = tmp_path / "said", ["support.gone_rank", "one_rank"]
    said_file.touch()
    files = {"where": tmp_path, "out": str(said_file), "err": str(said_file)}
    ranks = [NURSERY.fork("call", [*words, rank, tmp_path, fault, direction], **files) for rank in range(RANKS)]
    try:
        deadline = time.monotonic() + DEADLINE_S
        said = lambda rank: (tmp_path / f"said-{rank}").read_text()  # noqa: E731
        while not (tmp_path / "fault").exists():
            assert time.monotonic() < deadline, "the fault never happened"
            assert any(p.poll() is None for p in ranks), "\n".join(map(said, range(RANKS)))
            time.sleep(0.05)
        others = [rank for rank in range(RANKS) if rank != FAULTY]
        for rank in others:
            ranks[rank].wait(DEADLINE_S)
        assert all(ranks[rank].returncode == CommError.exit_status for rank in others), [said(rank) for rank in others]
    finally:
        for p in ranks:
            p.kill()
            p.wait(DEADLINE_S)
    assert ranks[FAULTY].returncode == -signal.SIGKILL
    missed = {}
    for rank in others:
        (line,) = [line for line in said(rank).splitlines() if line.startswith("baton: ")]
        found = SENTENCE.match(line)
        assert found, line
        assert int(found[1]) == rank
        assert fault == "killed" or float(found[7]) >= TIMEOUT_S
        missed[rank] = found
    # whoever waited for the message that was not sent names it
    waiting = missed[FAULTY + 1 if direction == "right" else FAULTY - 1]
    noun = {"right": "the State", "left": "the gradient of the State"}[direction]
    assert waiting.group(2, 4, 5, 6) == (noun, "1", "come from", str(FAULTY))
    print(f"{fault}, {direction}: {waiting[0]}")
