"""Runs on a real SLURM: what happens to jobs and nodes happens here, and what is learned is the same to the last bit,
from the same documents."""

import json
import os
import re
import signal
import subprocess

from support.jobs import CHECKED, LOST_NODE_S, SHORT_STEPS, sandbox

from baton.slurm.exits import Exit

FEWER = f"training.steps={SHORT_STEPS}"


def test_a_warned_run_saves_requeues_and_finishes_with_the_same_bits(submit, expected_of_fewer):
    job = submit(FEWER, preflight=CHECKED)
    job.wait_for_step(25)
    (number,) = job.ids("running")
    subprocess.run(["scancel", "--batch", "--signal=USR1", number], check=True)
    job.wait_for_attempt(2)
    first, *_ = job.rows("end")
    assert (first["status"], first["step"] in job.checkpoints()) == (Exit.STOPPED, True), "what was done is saved"
    assert job.wait() == Exit.DONE
    expected_of_fewer.check(job, steps=SHORT_STEPS)
    assert [row["job"] for row in job.rows("attempt")] == [number, number], "the same job, requeued"
    assert job.rows("start")[1]["step"] == first["step"], "no step is done twice"
    assert [row["bad"] for row in job.rows("preflight")] == [{}, {}]


def test_a_dead_node_and_a_hung_rank_are_found_named_and_survived(submit, expected_of_fewer):
    job = submit(FEWER, "jobs.max_node_failures=1")
    job.wait_for_step(25)
    (number,) = job.ids("running")
    assert sandbox("fail", "n2").returncode == 0
    job.wait_for_attempt(2)
    (lost,) = job.rows("end")
    assert (lost["status"], lost["reason"]) == (Exit.NODE_LOST, f"node n2 gave no sign of life for {LOST_NODE_S} s")
    assert [row["node"] for row in job.rows("excluded")] == ["n2"]
    second = job.rows("attempt")[1]
    assert second["job"] != number
    assert "n2" not in second["nodes"]

    job.wait_for_step(lost["step"] + 10, attempt=2)
    (victim,) = [rank for rank in job.ranks() if rank.name() == "rank-3"]
    node = victim.environ()["SLURMD_NODENAME"]
    victim.send_signal(signal.SIGSTOP)
    job.wait_for_attempt(3)
    hung = job.rows("end")[1]
    assert hung["status"] == Exit.HUNG
    assert hung["reason"].startswith(f"rank 3 (stopped by a signal) on {node} gave no sign of life for ")
    stacks = job.folder / "attempts" / "0002" / "stacks"
    assert "stopped by a signal" in (stacks / "rank-3").read_text()
    for rank in range(3):  # of the training thread; in which line it is then depends on the machine
        text = (stacks / f"rank-{rank}").read_text()
        assert re.search(r'training/loop\.py", line \d+ in train\n', text), text
    assert [row["node"] for row in job.rows("excluded")] == ["n2", node]
    assert not {"n2", node} & set(job.rows("attempt")[2]["nodes"])
    assert job.wait() == Exit.DONE
    expected_of_fewer.check(job, steps=SHORT_STEPS)
    assert SHORT_STEPS in job.checkpoints()
    assert json.loads((job.folder / "attempts" / "0002" / "ending").read_text())["suspects"] == [node]
    assert os.path.realpath(job.folder / "attempts" / "latest").endswith("0003")
