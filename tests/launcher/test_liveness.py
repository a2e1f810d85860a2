"""Detection of the hanging rank from heartbeats and process states: every decision, with a simulated clock and real stopped
processes."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.runs import wait_until

from baton.launcher import processes
from baton.launcher.liveness import Culprit, Watch, account, is_blocked, is_stopped
from baton.launcher.processes import HUNG, end_ranks, log_of, rank_environment, run_ranks, start_of
from baton.slurm.exits import Exit
from baton.training.monitoring.heartbeat import SIZE, Beat, Heartbeat, heartbeat_path, read_beat

LIMIT_S, STARTUP_S = 10, 100


class Ranks:
    """Ranks with signs that the test gives; all are this process, which runs. now: seconds that have gone by."""

    def __init__(self, count):
        self.watch = Watch(range(count), LIMIT_S, STARTUP_S)
        self.signs = [Heartbeat(heartbeat_path(self.watch.folder, rank)) for rank in range(count)]
        self.running = dict.fromkeys(range(count), os.getpid())
        self.now = 0.0
        self.watch.look(self.now, self.running)
        for signs in self.signs:
            signs.set_warm()
            signs.beat(1, "after forward")

    def pass_by(self, seconds, *, signs_of=()):
        """Time goes by, a second from look to look; some ranks give signs."""
        self.watch.look(self.now, self.running)  # what was said before
        for _ in range(seconds):
            self.now += 1.0
            for rank in signs_of:
                self.signs[rank].set_location("in layers.0")
            self.watch.look(self.now, self.running)
        return self.watch.hung()


@pytest.fixture
def ranks():
    made = []

    def make(count):
        made.append(Ranks(count))
        return made[-1]

    yield make
    for one in made:
        one.watch.close()


@pytest.fixture
def stopped():
    """A process that is stopped by a signal."""
    process = subprocess.Popen(["sleep", "1000"])
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: is_stopped(process.pid), "the process to stop")
    yield process
    process.kill()
    process.wait()


def test_a_sign_is_read_as_it_was_given(tmp_path):
    heartbeat_path(tmp_path, 3).write_bytes(bytes(SIZE))
    assert read_beat(tmp_path, 3) is None
    signs = Heartbeat(heartbeat_path(tmp_path, 3))
    signs.beat(7, "after forward")
    first = read_beat(tmp_path, 3)
    assert (first.step, first.doing, first.count, first.pulse, first.slow) == (7, "after forward", 1, 1, True), (
        "no step is done yet"
    )
    signs.set_warm()
    signs.set_location("in layers.1.mamba")
    signs.set_waiting("all_reduce over ranks 0, 1")
    found = read_beat(tmp_path, 3)
    assert (found.doing, found.waiting) == ("after forward, in layers.1.mamba", "all_reduce over ranks 0, 1")
    assert (found.count, found.pulse, found.slow) == (1, 3, False)
    signs.set_waiting("")
    assert read_beat(tmp_path, 3).waiting == ""
    signs.beat(8, "ö" * 500)
    signs.set_waiting("x" * 5000)
    assert set(read_beat(tmp_path, 3).waiting) == {"x"}, "long texts are cut"
    Heartbeat(None).beat(1, "nobody reads it")


def test_a_rank_that_only_waits_for_one_that_goes_on_is_left_alone(ranks):
    world = ranks(2)
    world.signs[0].set_waiting("all_reduce over ranks 0, 1")
    assert world.pass_by(1000, signs_of=[1]) == {}


def test_a_silent_rank_that_nobody_waits_for_is_left_alone(ranks):
    assert ranks(2).pass_by(1000) == {}
    assert ranks(1).pass_by(1000) == {}


def test_a_silent_rank_that_another_waits_for_is_named(ranks):
    world = ranks(3)
    for rank in (0, 2):
        world.signs[rank].set_waiting("all_reduce over ranks 0, 1, 2")
    assert world.pass_by(LIMIT_S) == {}
    late = world.pass_by(1)
    assert late == {1: LIMIT_S + 1}
    culprit = world.watch.culprit(late)
    assert account(culprit, late, world.watch.beats()) == (
        "rank 1 (in step 1, after forward, waiting for no rank) gave no sign of life for 11 s; "
        "ranks 0, 2 wait (in step 1, after forward) for all_reduce over ranks 0, 1, 2"
    )


def test_a_phase_that_compiles_has_as_much_time_as_a_start(ranks):
    world = ranks(2)
    world.signs[0].set_waiting("all_reduce over ranks 0, 1")
    world.signs[1].beat(10, "evaluation", slow=True)
    assert world.pass_by(STARTUP_S) == {}
    assert world.pass_by(1) == {1: STARTUP_S + 1}


def test_before_the_first_step_all_is_slow(ranks):
    world = ranks(2)
    world.signs[1].set_warm(False)
    world.signs[1].beat(0, "imports")
    world.signs[0].set_waiting("all_reduce over ranks 0, 1")
    assert world.pass_by(STARTUP_S) == {}
    assert list(world.pass_by(2)) == [1]


def test_ranks_that_all_wait_for_one_another_hang(ranks):
    world = ranks(2)
    world.signs[0].set_waiting("all_reduce over ranks 0, 1")
    world.signs[1].set_waiting("broadcast over ranks 0, 1")
    late = world.pass_by(LIMIT_S + 2)
    assert set(late) == {0, 1}
    sentence = account(world.watch.culprit(late), late, world.watch.beats())
    assert "rank 0 waits (in step 1, after forward) for all_reduce" in sentence
    assert "rank 1 waits (in step 1, after forward) for broadcast" in sentence


def test_on_gpus_silence_of_all_is_a_hang_and_the_one_behind_is_named(ranks):
    world = ranks(2)
    for signs in world.signs:
        signs.gpu = True
        signs.beat(2, "after data")
    world.signs[0].beat(2, "after forward")
    late = world.pass_by(LIMIT_S + 2)
    assert set(late) == {0, 1}
    assert world.watch.culprit(late) == Culprit(1, "in step 2, after data, behind all others")


def test_a_stopped_rank_is_late_whatever_it_was_doing(ranks, stopped):
    world = ranks(2)
    world.signs[1].beat(0, "compile", slow=True)
    world.running[1] = stopped.pid
    assert world.pass_by(LIMIT_S) == {}
    late = world.pass_by(2)
    assert list(late) == [1]
    assert world.watch.culprit(late) == Culprit(1, "stopped by a signal")


def test_a_moment_in_a_debugger_is_no_hang(ranks, stopped):
    world = ranks(2)
    world.signs[1].beat(10, "evaluation", slow=True)
    world.pass_by(STARTUP_S - LIMIT_S)
    world.running[1] = stopped.pid
    assert world.pass_by(LIMIT_S - 2) == {}
    world.running[1] = os.getpid()
    assert world.pass_by(1) == {}


def test_a_run_whose_ranks_are_all_stopped_is_paused(ranks, stopped):
    world = ranks(2)
    world.running = dict.fromkeys(range(2), stopped.pid)
    assert world.pass_by(1000) == {}


def test_a_rank_that_the_kernel_keeps_is_named_as_such(ranks):
    """The parent of a child of vfork is in the state of one that waits for a disk."""
    code = "import ctypes; libc = ctypes.PyDLL(None)\nif libc.vfork() == 0:\n    libc.prctl(1, 9)\n    libc.sleep(10_000)"
    process = subprocess.Popen([sys.executable, "-P", "-c", code])
    try:
        # with a child: while it starts it may wait for a disk
        wait_until(lambda: psutil.Process(process.pid).children() and is_blocked(process.pid), "the process to block")
        world = ranks(2)
        world.running[1] = process.pid
        late = world.pass_by(LIMIT_S + 5)
        assert list(late) == [1], "though nobody waits in a collective"
        assert world.watch.culprit(late) == Culprit(1, "blocked inside the kernel, by a disk or a driver")
    finally:
        process.kill()
        process.wait()


def test_a_rank_that_is_left_when_all_others_have_ended_is_waited_for(ranks):
    world = ranks(2)
    del world.running[0]
    assert list(world.pass_by(LIMIT_S + 2)) == [1]


def test_time_in_which_the_watcher_did_not_run_is_no_silence(ranks):
    world = ranks(2)
    world.signs[0].set_waiting("all_reduce over ranks 0, 1")
    world.pass_by(3)
    world.now += 10_000
    assert world.pass_by(2) == {}


def test_a_job_is_late_by_silence_alone(ranks):
    """An agent sees one node's ranks: whether others wait for them it cannot know."""
    world = ranks(2)
    world.signs[1].beat(10, "evaluation", slow=True)
    world.pass_by(LIMIT_S + 1)
    assert list(world.watch.late()) == [0]


def test_the_one_who_stayed_behind_is_to_blame():
    def beats(**counts):
        return {int(rank[1:]): Beat(7, "forward", count, 0.0) for rank, count in counts.items()}

    assert Culprit.among(beats(r0=9, r1=8, r2=9), []).rank == 1
    assert Culprit.among(beats(r0=9, r1=8, r2=8), []) is None, "nobody can say"
    assert Culprit.among(beats(r0=9, r1=8, r2=9), [2]).rank == 2, "a rank that is stopped by a signal is known to be"
    assert Culprit.among(beats(r0=9), []) is None


def test_a_folder_without_room_is_left_as_it_was(monkeypatch, small_disk):
    monkeypatch.setattr("tempfile.tempdir", str(small_disk))
    with contextlib.suppress(OSError), open(small_disk / "full", "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 12))
    with pytest.raises(OSError, match="No space"):
        Watch(range(2), LIMIT_S, STARTUP_S)
    assert [path.name for path in small_disk.iterdir()] == ["full"]


def test_jobs_and_runs_of_one_machine_say_a_hang_with_the_same_status():
    assert HUNG == Exit.HUNG


def test_signals_that_a_rank_cannot_take_yet_wait_from_its_first_moment_on(tmp_path):
    """Until a rank has imported what takes them, they would end it, and a run that was told to stop would count as failed. This one
    comes to no import."""
    (tmp_path / "sitecustomize.py").write_text("import time\n\ntime.sleep(600)\n")
    (rank,) = start_of(tmp_path, range(1), rank_environment("127.0.0.1", 0, 1, 1) | {"PYTHONPATH": str(tmp_path)})
    (mask,) = [line.split()[1] for line in Path(f"/proc/{rank.pid}/status").read_text().splitlines() if line.startswith("SigBlk")]
    end_ranks([rank])
    assert all(int(mask, 16) >> (number - 1) & 1 for number in (signal.SIGUSR1, signal.SIGTERM))
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set(), "and here nothing is blocked"


def test_ranks_whose_imports_are_killed_end_with_them_and_signals_wait_for_the_fork(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import time\n\ntime.sleep(600)\n")
    ranks = start_of(tmp_path, range(4, 6), rank_environment("127.0.0.1", 0, 8, 2) | {"PYTHONPATH": str(tmp_path)})
    assert ranks[0].pid == ranks[1].pid, "of the process that imports"
    ranks[1].send_signal(signal.SIGTERM)
    assert [rank.poll() for rank in ranks] == [None, None]
    ranks[0].send_signal(signal.SIGKILL)
    assert [rank.wait(60) for rank in ranks] == [-signal.SIGKILL] * 2
    assert [path.name for path in sorted(tmp_path.glob("*.log"))] == ["rank-4.log", "rank-5.log"]


def test_a_killed_rank_that_ends_after_the_one_that_misses_it_is_the_cause(tmp_path, monkeypatch, capsys):
    """The kernel closes a process's connections before the last of its threads has ended."""
    missing = "baton: rank 0: the State of x in layers.0 did not come from rank 1"
    scripts = (f"import sys; sys.exit({missing!r})", "import os, time; time.sleep(1); os.kill(os.getpid(), 9)")

    def start(attempt, numbers, environment, listener):
        logs = [log_of(attempt, n).open("w") for n in numbers]
        return [subprocess.Popen([sys.executable, "-P", "-c", scripts[n]], stderr=logs[n], env=environment) for n in numbers]

    monkeypatch.setattr(processes, "start_of", start)
    monkeypatch.setattr(processes, "LAST_WORDS_S", 60.0)
    assert run_ranks(2, tmp_path, limit_s=60, startup_timeout_s=60) == 1
    assert f"rank 1 was killed by SIGKILL ({missing.removeprefix('baton: ')})" in capsys.readouterr().err


def test_ranks_share_their_machines_cores(monkeypatch):
    """Tests themselves say how many threads there are; who says nothing has as many as cores, and not as many in every rank."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert rank_environment("127.0.0.1", 0, 4, 4)["OMP_NUM_THREADS"] == "5"
    monkeypatch.delenv("OMP_NUM_THREADS")
    threads = {ranks: rank_environment("127.0.0.1", 0, 2 * ranks, ranks)["OMP_NUM_THREADS"] for ranks in (1, 3, 16)}
    assert threads == {1: "8", 3: "2", 16: "1"}
