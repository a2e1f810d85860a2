"""The start of an attempt: the nodes that it uses, a run directory that is busy, and messages of a failed srun."""

import json
import os
import subprocess
import sys

import psutil
import pytest
import yaml
from support.jobs import RUN

from baton.data_pipeline import file_io
from baton.launcher.cluster import load_cluster
from baton.launcher.config import load
from baton.launcher.run_directory import hold, open_run
from baton.slurm import job
from baton.slurm.agent import Agent
from baton.slurm.exits import Exit
from baton.slurm.script import NEXT_JOB, OTHER_NODES
from baton.training.monitoring import time_ledger


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A submitted run of one or two nodes, in the environment of its job 7 on n1 and n2."""
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN | {"name": "run"}))
    config = load(tmp_path / "run.yaml", [f"directory={tmp_path / 'run'}"])
    open_run(config)
    values = load_cluster("sandbox").model_dump(mode="json")
    values["slurm"]["options"] = ["--exclude=n[8-9]"]
    (config.folder / "cluster.yaml").write_text(yaml.safe_dump(values))
    (config.folder / "job.sbatch").write_text("")
    time_ledger.append_row(config.folder, "submitted", by="user", nodes=[1, 2])
    for name, value in {"SLURM_JOB_ID": "7", "BATON_NODES": "n1,n2", "BATON_STATES": "n1 allocated,n2 allocated"}.items():
        monkeypatch.setenv(name, value)
    return config.folder


def rows(run, kind):
    return [row for row in time_ledger.read_rows(run) if row["kind"] == kind]


@pytest.mark.parametrize("state", ["drained", "draining", "draining@", "drained$"])
def test_a_drained_node_is_left_out_and_not_excluded(run, monkeypatch, state, capsys):
    monkeypatch.setenv("BATON_STATES", f"n1 allocated,n2 {state}")
    assert job.begin(run) == 0
    assert rows(run, "attempt")[0]["nodes"] == ["n1"]
    assert not rows(run, "excluded"), "it may be back tomorrow, and SLURM gives it to nobody until then"
    assert "n2 is being drained" in capsys.readouterr().err


@pytest.mark.parametrize("state", ["down", "down*", "DOWN*", "failing", "fail", "idle*", "error"])
def test_a_node_that_is_down_or_silent_is_excluded(run, monkeypatch, state):
    monkeypatch.setenv("BATON_STATES", f"n1 {state},n2 mixed")
    assert job.begin(run) == 0
    assert rows(run, "attempt")[0]["nodes"] == ["n2"]
    assert [row["node"] for row in rows(run, "excluded")] == ["n1"]
    assert (run / "excluded.txt").read_text() == "n[8-9],n1", "with the nodes that the cluster file excludes"


@pytest.mark.parametrize(
    "states", ["", "n1 allocated", "n1 mixed-,n2 allocated+", "n1 completing,n2 planned", "n1 reserved,n2 maint"]
)
def test_other_states_and_none_at_all_leave_no_node_out(run, monkeypatch, states):
    monkeypatch.setenv("BATON_STATES", states)
    assert job.begin(run) == 0
    assert rows(run, "attempt")[0]["nodes"] == ["n1", "n2"]


def test_too_few_nodes_are_other_nodes(run, monkeypatch):
    monkeypatch.setenv("BATON_STATES", "n1 drained,n2 down")
    assert job.begin(run) == OTHER_NODES
    assert not rows(run, "attempt")


HOLDER = """
import sys
from pathlib import Path
from baton.launcher.run_directory import hold
with hold(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def held_by(run, monkeypatch):
    """A function: another process holds the run, of this SLURM job or of none; its process id."""
    monkeypatch.setattr(job, "LOCK_S", 0.0)
    started = []

    def start(number):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        environment |= {"SLURM_JOB_ID": number} if number else {}
        words = [sys.executable, "-P", "-c", HOLDER, run]
        started.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment))
        assert started[-1].stdout.readline() == "held\n"
        return started[-1].pid

    yield start
    for process in started:
        process.communicate()


@pytest.mark.parametrize(
    ("holder", "known", "code"),
    [
        (None, "6", NEXT_JOB),  # `baton train` by hand
        ("5", "6", NEXT_JOB),  # by hand in an interactive job
        ("7", "7", NEXT_JOB),  # a lock that this very job left on a node that died
        ("6", "6", Exit.SUPERSEDED),
    ],
)
def test_a_job_comes_again_unless_another_job_of_the_run_trains_it(run, held_by, capsys, holder, known, code):
    time_ledger.append_row(run, "attempt", attempt=1, job=known, nodes=["n1"], layout={})
    pid = held_by(holder)
    assert job.begin(run) == code
    said = capsys.readouterr().err
    assert f"{run} is being trained by process {pid} on {os.uname().nodename}" in said
    assert (f"(job {holder})" in said) == (holder is not None)


def test_an_agent_that_finds_the_run_busy_blames_nobody_and_is_tried_again(run, held_by, monkeypatch, capfd):
    monkeypatch.setattr("baton.slurm.agent.BUSY_S", 0.0)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # this process is pytest's
    assert job.begin(run) == 0
    attempt = run / "attempts" / "0001"
    pid = held_by(None)
    for node in ("n1", "n2"):
        monkeypatch.setenv("SLURMD_NODENAME", node)
        assert Agent(attempt).work() == Exit.BUSY, "the second one, which waits for the first, too"
    assert job.after(attempt, int(Exit.BUSY), False) == NEXT_JOB
    (end,) = rows(run, "end")
    assert (end["status"], end["suspects"]) == (Exit.BUSY, [])
    assert f"trained by process {pid} on" in end["reason"]
    assert not rows(run, "excluded")
    assert "the configuration or the data cannot be used" not in capfd.readouterr().err


def test_a_lock_is_waited_for(run, held_by, monkeypatch):
    """The holder ends while the other one waits: its first wait is the holder's end."""
    holder = psutil.Process(held_by(None))
    monkeypatch.setattr("baton.launcher.run_directory.time.sleep", lambda seconds: (holder.kill(), holder.wait()))
    with hold(run, wait_s=600.0):
        assert not holder.is_running()


def test_checks_that_did_not_start_exclude_no_node_and_srun_is_quoted(run, capsys):
    assert job.begin(run) == 0
    attempt = run / "attempts" / "0001"
    (attempt / "preflight.jsonl").write_text("")
    output = run / "attempts" / "slurm-7.out"
    complaint = "srun: fatal: SLURM_MEM_PER_CPU, SLURM_MEM_PER_GPU, and SLURM_MEM_PER_NODE are mutually exclusive."
    output.write_text(f"srun: error: of an attempt before\nattempt 1 begins on n1,n2\n{complaint}\nsrun: error: more\n")
    assert job.judge(attempt) == Exit.NOT_STARTED
    assert job.after(attempt, int(Exit.NOT_STARTED), False) == NEXT_JOB
    (end,) = rows(run, "end")
    assert (end["status"], end["reason"]) == (Exit.NOT_STARTED, f"the checks did not start on any node: {complaint}")
    assert not rows(run, "excluded")
    assert not rows(run, "preflight")


def test_a_node_that_says_nothing_beside_one_that_does_is_bad(run):
    assert job.begin(run) == 0
    attempt = run / "attempts" / "0001"
    result = {"node": "n1", "problem": None, "seconds": 1.0, "measured": {}}
    (attempt / "preflight.jsonl").write_text(f"{json.dumps(result)}\n")
    assert job.judge(attempt) == 0
    assert [(row["bad"], row["passed"]) for row in rows(run, "preflight")] == [({"n2": "did not answer"}, 1)]
    assert [row["node"] for row in rows(run, "excluded")] == ["n2"]


def test_files_that_do_not_answer_for_a_while_do_not_end_the_run(run, monkeypatch, capsys):
    """A job tries to begin for half an hour; an end that could not be written is written by the next job."""
    monkeypatch.setattr(file_io, "PAUSES_S", ())
    rows_of_run, aside = run / "ledger.jsonl", run / "aside"
    slept = []

    def fail():
        rows_of_run.rename(aside)
        rows_of_run.symlink_to("/proc/self/mem")  # reading its first byte fails with EIO

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 3:
            aside.replace(rows_of_run)

    monkeypatch.setattr(job.time, "sleep", sleep)
    fail()
    assert job.main(["begin", str(run)]) == 0
    assert slept == [job.FILES_PAUSE_S] * 3
    attempt = run / "attempts" / "0001"
    assert capsys.readouterr().out == f"{attempt}\n"
    fail()
    assert job.main(["after", str(attempt), "1", "0"]) == NEXT_JOB
    aside.replace(rows_of_run)
    assert job.main(["begin", str(run)]) == 0
    (end,) = rows(run, "end")
    assert (end["attempt"], end["seen"]) == (1, False)
    slept.clear()
    fail()
    monkeypatch.setattr(job.time, "sleep", slept.append)
    assert job.main(["begin", str(run)]) == Exit.STORAGE
    assert len(slept) == job.FILES_TRIES - 1
