"""Faults that came from outside of the tests: nodes that vanish where there are no others, jobs that are too short, runs that are
busy, nodes that are drained, shells of another job, a controller that is away. Each run that comes out is the undisturbed one."""

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from support.jobs import CHECKED, LOST_NODE_S, sandbox
from support.runs import BATON, wait_until

from baton.launcher.run_directory import hold
from baton.slurm.exits import Exit

pytestmark = [pytest.mark.long_slurm, pytest.mark.timeout(600)]


SAVES_LONG = """
import os, time

if "BATON_START" in os.environ:
    from baton.training.checkpoint.store import CheckpointStore

    save = CheckpointStore.save

    def slow(store, *words):
        if os.environ["RANK"] not in ("2", "3"):
            return save(store, *words)
        try:
            open(MARK + os.environ["RANK"], "x").close()
        except FileExistsError:
            return save(store, *words)
        time.sleep(1000)

    CheckpointStore.save = slow
"""


def test_a_node_vanishes_during_a_save_where_the_partition_has_no_other(submit, expected, tmp_path, patched):
    """SLURM holds the dead node's step for running, and its other node for busy."""
    subprocess.run(["scontrol", "create", "partition=pair", "nodes=n[1-2]", "state=up"], capture_output=True)
    patched(SAVES_LONG.replace("MARK", repr(str(tmp_path / "saving-"))))
    job = submit("jobs.hang_timeout_s=50", nodes="1-2", partition="pair")
    wait_until(lambda: all((tmp_path / f"saving-{rank}").exists() for rank in (2, 3)), "a save")
    (number,) = job.ids("running")
    assert sandbox("fail", "n2").returncode == 0
    job.wait_for_attempt(2)
    (lost,) = job.rows("end")
    assert (lost["status"], lost["reason"]) == (Exit.NODE_LOST, f"node n2 gave no sign of life for {LOST_NODE_S} s")
    assert job.wait() == Exit.DONE
    expected.check(job, rel=1e-5)
    assert [row["job"] for row in job.rows("attempt")] == [number, number], "on the node that is left, in the same job"
    assert job.rows("attempt")[1]["nodes"] == ["n1"]


STARTS_LONG = """
import os, time

if "BATON_START" in os.environ:
    from baton.parallel import mesh
    from baton.training import preemption

    initialize = mesh.initialize

    def slow(*words, **named):
        while not preemption.stop_requested():
            time.sleep(0.1)
        return initialize(*words, **named)

    mesh.initialize = slow
"""


def test_jobs_too_short_for_a_step_stop_their_chain(submit, patched):
    """The warning before the time limit comes while ranks start, each time."""
    patched(STARTS_LONG)
    job = submit(time="3", warning_s=120, save_timeout_s=100)
    for attempt in (1, 2):
        job.wait_for_attempt(attempt)
        wait_until(lambda: len(job.ranks()) == 4, "the ranks")
        (number,) = job.ids("running")
        subprocess.run(["scancel", "--batch", "--signal=USR1", number], check=True)
        wait_until(lambda attempt=attempt: len(job.rows("end")) == attempt, "the attempt's end")
    assert job.wait() == Exit.NO_PROGRESS
    assert [(row["status"], row["step"]) for row in job.rows("end")] == [(Exit.STOPPED, 0)] * 2
    assert job.rows("stopped")[0]["reason"] == (
        "the run is stopped: 2 attempts in a row made no new step; the last was told to stop before it had made one. A job of "
        "slurm.time=3 must have room for its start and for steps before its last slurm.warning_s=120 s: set slurm.time longer, or "
        "slurm.warning_s and slurm.save_timeout_s shorter"
    )
    wait_until(lambda: not job.ids(), "an empty queue")


def test_a_run_that_another_process_holds_is_waited_for(submit, expected):
    """It is taken while the job is in its checks, as by `baton train`; afterwards the job holds it, and is named."""
    job = submit(preflight=CHECKED)
    wait_until((job.folder / "attempts" / "0001" / "preflight").exists, "the checks' beginning")
    with hold(job.folder):
        wait_until(lambda: job.rows("end"), "the attempt's end")
    (busy,) = job.rows("end")
    assert busy["status"] == Exit.BUSY
    assert f"{job.folder} is being trained by process {os.getpid()} on {os.uname().nodename} since 2" in busy["reason"]
    assert not job.rows("excluded"), "no node is to blame"
    job.wait_for_step(20, attempt=2)
    (number,) = job.ids("running")
    by_hand = job.baton("train", "run.yaml")
    assert (by_hand.returncode, by_hand.stderr.count("\n")) == (75, 1), by_hand.stderr
    assert f" on n1 (job {number}) since 2" in by_hand.stderr
    assert "`baton cancel runs/run` ends" in by_hand.stderr
    assert job.wait() == Exit.DONE
    expected.check(job)


def test_a_run_that_is_submitted_twice_is_trained_once(submit, expected):
    """What two `baton submit` at the same time leave: two jobs of one run. The second one finds it done."""
    job = submit()
    twice = subprocess.run(["sbatch", "--parsable", job.folder / "job.sbatch"], cwd=job.where, capture_output=True, text=True)
    job.wait_for_step(20)
    assert job.ids("running") != [twice.stdout.strip()]
    assert job.ids("pending") == [twice.stdout.strip()], "it has nodes, but waits for the first"
    wait_until(lambda: len(job.rows("stopped")) == 2, "the end of both")
    assert [row["status"] for row in job.rows("stopped")] == [Exit.DONE] * 2
    expected.check(job)


def test_a_node_that_is_drained_is_left_out_of_the_next_attempt_and_not_excluded(submit, expected):
    job = submit(nodes="1-2")
    job.wait_for_step(20)
    subprocess.run(["scontrol", "update", "nodename=n2", "state=drain", "reason=test"], check=True)
    (victim,) = [rank for rank in job.ranks() if rank.name() == "rank-1"]
    victim.send_signal(signal.SIGKILL)
    job.wait_for_attempt(2)
    assert job.wait() == Exit.DONE
    expected.check(job, rel=1e-5)
    assert [row["nodes"] for row in job.rows("attempt")] == [["n1", "n2"], ["n1"]]
    assert not job.rows("excluded")
    (output,) = job.folder.glob("attempts/slurm-*.out")
    assert "sinfo: error" not in output.read_text()


def test_submitted_from_inside_another_allocation(submit, expected, tmp_path, cluster_file, monkeypatch):
    """The shell has that allocation's memory and cores, and the user's own options for sbatch."""
    first = submit("training.steps=1")  # writes the files that the second submission takes
    assert first.wait() == Exit.DONE
    monkeypatch.setenv("SBATCH_TIMELIMIT", "1")
    monkeypatch.setenv("SBATCH_NODELIST", "n9")
    shell = ["srun", "--nodes=1", "--ntasks=1", "--mem-per-cpu=64", "--cpu-bind=verbose", "--hint=nomultithread"]
    done = subprocess.run(
        [*shell, *BATON, "submit", "run.yaml", "name=inside", "--cluster", "cluster.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "not handed on to the job, whose options are the cluster file's: SBATCH_NODELIST=n9, SBATCH_TIMELIMIT=1" in done.stdout
    job = type(first)(tmp_path / "runs" / "inside", tmp_path)
    try:
        assert job.wait() == Exit.DONE
        expected.check(job)
        assert len(job.rows("attempt")) == 1
    finally:
        job.end()


def test_a_controller_that_is_away_when_a_job_hands_on(submit, expected, slurm):
    job = submit()
    job.wait_for_step(20)
    (number,) = job.ids("running")
    daemon = Path(slurm["SLURM_SANDBOX_DIR"]) / "run" / "slurmctld.pid"
    shells = [p for p in psutil.process_iter(["name"]) if p.info["name"] == "slurm_script"]
    (shell,) = [p for p in shells if p.cwd() == str(job.where)]
    subprocess.run(["kill", "-9", daemon.read_text().strip()], check=True)
    shell.send_signal(signal.SIGUSR1)
    (output,) = job.folder.glob("attempts/slurm-*.out")
    wait_until(lambda: "Unable to contact slurm controller" in output.read_text(), "a question that has no answer")
    assert sandbox("up").returncode == 0
    assert job.wait() == Exit.DONE
    expected.check(job)
    assert [row["job"] for row in job.rows("attempt")] == [number, number]


def test_a_job_that_is_cancelled_in_its_checks_goes_on_when_it_is_submitted_again(submit, expected):
    job = submit(preflight=CHECKED)
    wait_until((job.folder / "attempts" / "0001" / "preflight").exists, "the checks' beginning")
    subprocess.run(["scancel", *job.ids("running")], check=True)
    wait_until(lambda: not job.ids(), "the job's end")
    job.submit(job.where / "run.yaml", job.where / "cluster.yaml")
    assert job.wait() == Exit.DONE
    expected.check(job)
    assert not job.rows("excluded")


def test_a_job_that_waits_for_somebody_says_for_whom(submit):
    job = submit(options=["--hold", "--exclude=n[3-4]"])
    (number,) = job.ids()
    assert f"(JobHeldUser), start N/A: it waits until `scontrol release {number}`" in job.baton("status", job.folder).stdout
    job.end()
    subprocess.run(["scancel", number], check=True)
    job.submit(job.where / "run.yaml", job.where / "cluster.yaml")
    assert job.baton("cancel", job.folder).returncode == 0
    wait_until(lambda: not job.ids(), "the job's end")
