"""Kernels are compiled in several processes, the slowest first, with progress; a kernel that fails is named and does not affect
others."""

import faulthandler
import os
import re
import signal
import time
from importlib import import_module

import pytest

from baton.kernels.compile import pool
from baton.kernels.compile.pool import OTHER_SECONDS, SECONDS, Job, compile_all, usable_cores


def test_what_fails_is_named_and_all_others_are_compiled(tmp_path):
    def right(name):
        return lambda: (tmp_path / name).touch()

    def wrong():
        raise RuntimeError("no such\ninstruction")

    def killed():
        os.kill(os.getpid(), signal.SIGKILL)

    def crashed():
        faulthandler.disable()
        os.kill(os.getpid(), signal.SIGSEGV)

    def left():
        os._exit(3)

    jobs = [Job("m.wrong", wrong), Job("m.killed", killed), Job("m.crashed", crashed), Job("m.left", left)]
    jobs += [Job(f"m.right{n}", right(str(n))) for n in range(5)]
    lines = []
    outcomes = compile_all(jobs, "sm_90", 2, lines.append)
    assert {outcome.name: outcome.failure for outcome in outcomes if outcome.failure} == {
        "m.wrong": "RuntimeError: no such instruction",
        "m.killed": "its compiler was killed by SIGKILL, maybe for lack of memory",
        "m.crashed": "its compiler was killed by SIGSEGV",
        "m.left": "its compiler ended with status 3",
    }
    assert {outcome.name for outcome in outcomes} == {job.name for job in jobs}
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "2", "3", "4"}
    assert re.fullmatch(r"compiling 9 kernels for sm_90 in 2 processes, which takes about \d+ s", lines[0])
    assert re.fullmatch(r"compiled 9 kernels for sm_90 in \d+ s, 4 of them in vain", lines[-1])


def test_the_dearest_is_begun_first_and_no_more_run_than_may(tmp_path):
    def compile(name):
        def run():
            with open(tmp_path / "log", "a") as log:
                log.write(f"{name} ")
            time.sleep(0.05)
            with open(tmp_path / "log", "a") as log:
                log.write("end ")

        return run

    known = sorted(SECONDS, key=SECONDS.get)[::3]
    jobs = [Job(name if name == "other.one" else f"baton.kernels.{name}", compile(name)) for name in ["other.one", *known]]
    compile_all(jobs, "sm_90", 1)
    words = (tmp_path / "log").read_text().split()
    assert words[1::2] == ["end"] * len(jobs)
    assert set(words[::2]) == {"other.one", *known}
    began = [SECONDS.get(name, OTHER_SECONDS) for name in words[::2]]
    assert began == sorted(began, reverse=True)


def test_kernels_in_the_table_exist():
    for name in SECONDS:
        module, _, function = name.rpartition(".")
        assert hasattr(import_module(f"baton.kernels.{module}"), function), name


def test_progress_is_said_while_a_kernel_takes_long(monkeypatch):
    """The estimate is corrected by the jobs that have ended."""
    monkeypatch.setattr(pool, "SAY_S", 0.02)
    lines = []
    compile_all([Job(f"m.{n}", lambda: time.sleep(0.2)) for n in range(3)], "sm_90, NVIDIA H100", 1, lines.append)
    said = [
        re.fullmatch(r"compiling 3 kernels for sm_90, NVIDIA H100: (\d) done, about (\d+) s left", line) for line in lines[1:-1]
    ]
    assert len(said) > 3
    assert all(said)
    done, left = zip(*((int(line[1]), int(line[2])) for line in said), strict=True)
    assert list(done) == sorted(done)
    assert set(done) >= {0, 2}
    assert left[-1] < left[0]


def test_without_anything_to_compile_no_process_is_started(monkeypatch):
    monkeypatch.setattr(pool, "_start", None)
    lines = []
    assert compile_all([], "sm_90", 2, lines.append) == []
    assert lines == []


@pytest.mark.parametrize(
    ("cores", "expected"), [("1", 1), ("4000", len(os.sched_getaffinity(0))), ("", len(os.sched_getaffinity(0)))]
)
def test_no_more_cores_are_taken_than_a_job_has(monkeypatch, cores, expected):
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", cores)
    assert usable_cores() <= expected
    assert usable_cores() >= 1


def test_little_memory_means_few_processes(monkeypatch):
    monkeypatch.setattr(pool, "_free_bytes", lambda: 2 * pool.PROCESS_BYTES + 1)
    lines = []
    compile_all([Job(f"m.{n}", lambda: None) for n in range(4)], "sm_90", 16, lines.append)
    assert " in 2 processes" in lines[0]
