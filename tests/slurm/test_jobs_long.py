"""The long forms, with `make test-slurm`: everything that happens to jobs, and the run that comes out is always the same one."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support.jobs import CHECKED, CHECKED_APART, not_shared, sandbox
from support.runs import BATON, wait_until

from baton.launcher.run_directory import last_step
from baton.slurm.exits import Exit
from baton.training.monitoring.goodput import compute_goodput
from baton.training.monitoring.metrics import read_metrics

pytestmark = [pytest.mark.long_slurm, pytest.mark.timeout(600)]


SLOW = """
import os, time

if "BATON_START" in os.environ:
    from baton.training.monitoring.step_timer import StepTimer

    start = StepTimer.start

    def slow(clock):
        if os.environ["RANK"] == "0":
            time.sleep(SECONDS)
        start(clock)

    StepTimer.start = slow
"""


def adds_up(job) -> None:
    """The ledger accounts for every second between its first and its last row."""
    rows = [row["time"] for kind in ("submitted", "stopped") for row in job.rows(kind)]
    found = compute_goodput(job.folder)
    assert sum(found.seconds.values()) == pytest.approx(max(rows) - min(rows), rel=0.01)


def test_a_real_time_limit(submit, expected, patched):
    """SLURM looks at limits every half minute, and may warn a minute early: nothing is said of when."""
    patched(SLOW.replace("SECONDS", "0.8"))
    job = submit("jobs.max_failures_without_progress=1000", time="2", warning_s=60, save_timeout_s=40)
    while not job.rows("stopped"):  # on a busy machine a start takes most of a job's time
        seen = len(job.rows("end"))
        wait_until(lambda seen=seen: len(job.rows("end")) > seen or job.rows("stopped"), f"the end of attempt {seen + 1}")
    assert job.wait() == Exit.DONE
    assert job.rows("end")[0]["status"] == Exit.STOPPED
    expected.check(job)
    starts, ends = job.rows("start"), job.rows("end")
    assert [row["step"] for row in starts[1:]] == [row["step"] for row in ends[:-1]], "no step is done twice"
    adds_up(job)


def test_preemption_by_a_higher_partition(submit, expected, tmp_path):
    job = submit()
    job.wait_for_step(30)
    urgent = tmp_path / "urgent.sbatch"
    urgent.write_text(
        "#!/bin/bash\n#SBATCH --partition=urgent --nodes=4 --exclusive --job-name=urgent --output=/dev/null\nsleep 5\n"
    )
    subprocess.run(["sbatch", urgent], check=True)
    job.wait_for_attempt(2)
    assert job.wait() == Exit.DONE
    expected.check(job)
    assert job.rows("end")[0]["status"] in (Exit.STOPPED, Exit.FAILED), "it had SLURM's KillWait to save in"
    adds_up(job)


def test_slurmctld_restarted_under_a_running_job(submit, expected, slurm):
    job = submit()
    job.wait_for_step(20)
    daemon = Path(slurm["SLURM_SANDBOX_DIR"]) / "run" / "slurmctld.pid"
    subprocess.run(["kill", "-9", daemon.read_text().strip()], check=True)
    time.sleep(3)
    subprocess.run([Path(__file__).parents[1] / "tools" / "slurm-sandbox", "up"], check=True, capture_output=True)
    assert job.wait() == Exit.DONE
    expected.check(job)
    assert len(job.rows("attempt")) == 1, "the job never noticed"


BROKEN = """
import os, sys

if "BATON_START" in os.environ:
    from baton.training.step.executor import StepExecutor

    step, done = StepExecutor.step, []

    def broken(executor, *words):
        done.append(0)
        if os.environ["RANK"] == "2" and len(done) > 7:
            raise ValueError("a bug that comes back")
        return step(executor, *words)

    StepExecutor.step = broken
"""


def test_a_run_that_makes_no_progress_stops_its_own_chain(submit, expected, tmp_path, patched):
    patched(BROKEN)
    job = submit("training.checkpoint.every=1000", 'jobs.hooks.finish=echo "$BATON_EVENT $BATON_TEXT" >> hooks')
    assert job.wait() == Exit.NO_PROGRESS
    sentence = job.rows("stopped")[0]["reason"]
    assert sentence.startswith("the run is stopped: 2 attempts in a row made no new step; the last: rank 2 failed with")
    assert [row["step"] for row in job.rows("end")] == [7, 7, 7]
    expected.check(job, steps=7)
    assert (tmp_path / "hooks").read_text() == f"finish {sentence}\n"
    wait_until(lambda: not job.ids(), "an empty queue")
    (number,) = {row["job"] for row in job.rows("attempt")}
    states = subprocess.run(
        ["squeue", "-h", "-t", "all", "-n", job.name, "-o", "%A %T"], capture_output=True, text=True, check=True
    )
    since = [line for line in states.stdout.splitlines() if int(line.split()[0]) >= int(number)]
    assert since == [f"{number} FAILED"], "and nothing came after it"
    assert "the run is stopped: " in job.baton("status", job.folder).stdout.splitlines()[0]


@pytest.mark.parametrize("restart", ["chain", "array"])
def test_requeue_forbidden(submit, expected, restart):
    """A successor waits, or the next task of an array; when the run is done nothing waits any more."""
    job = submit(restart=restart, array_size=6)
    job.wait_for_step(30)
    if restart == "chain":
        assert len(job.ids()) == 2, "it waits from the start"
    # as the time limit does; scancel of SLURM 22 does not signal the batch shell of one task of an array
    shells = [p for p in psutil.process_iter(["name"]) if p.info["name"] == "slurm_script"]
    (shell,) = [p for p in shells if p.cwd() == str(job.where)]
    shell.send_signal(signal.SIGUSR1)
    job.wait_for_attempt(2)
    assert job.wait() == Exit.DONE
    expected.check(job)
    wait_until(lambda: not job.ids(), "an empty queue")
    jobs = [row["job"] for row in job.rows("attempt")]
    assert jobs[0] != jobs[1]


def test_requeue_refused_by_slurm_falls_back_to_a_chain(submit, expected):
    job = submit(options=["--no-requeue"])
    job.wait_for_step(30)
    (number,) = job.ids("running")
    subprocess.run(["scancel", "--batch", "--signal=USR1", number], check=True)
    assert job.wait() == Exit.DONE
    expected.check(job)
    assert len({row["job"] for row in job.rows("attempt")}) == 2


def test_each_checkpoint_is_evaluated_in_a_job_of_its_own(submit, expected, corpus):
    """On its validation set, and as another line of options says."""
    lines = f"['', '--data {corpus.data['path']} --tokens 640 --by-position']"
    job = submit("jobs.evaluate=true", f"jobs.evaluations={lines}", "training.checkpoint.every=50")
    assert job.wait() == Exit.DONE
    expected.check(job)
    sheet = job.folder / "evaluations.jsonl"
    wait_until(lambda: sheet.exists() and len(sheet.read_text().splitlines()) == 6, "six evaluations")
    rows = list(map(json.loads, sheet.read_text().splitlines()))
    found = {row["step"]: row for row in rows if "data" not in row}
    assert {row["step"] for row in rows if "by_position" in row} == set(found)
    own = {row["step"]: row for row in read_metrics(job.folder / "metrics.jsonl") if row["kind"] == "evaluation"}
    assert set(found) == {50, 100, 150} == set(own)
    for step, row in own.items():
        assert found[step]["loss"] == pytest.approx(row["loss"], rel=1e-5), "one rank's sum in another order than four ranks'"
        assert found[step]["bits_per_byte"] == pytest.approx(row["bits_per_byte"], rel=1e-5)
    subprocess.run(["scancel", "-n", f"{job.name}-evaluate"], check=True)


def test_fewer_and_more_nodes_on_restart(submit, expected):
    """Two nodes, then one, then four: the layout follows, the global batch stays, and so does what is learned."""
    job = submit(nodes="1-4")
    layouts = []
    for attempt, nodes in enumerate((["n3", "n4"], ["n2", "n3", "n4"], []), start=2):
        job.wait_for_step(30 * (attempt - 1), attempt - 1)
        layouts.append(job.rows("attempt")[-1]["layout"]["data"])
        (number,) = job.ids("running")
        if attempt == 4:
            break
        for node in ("n1", "n2", "n3", "n4"):
            drain = ["state=drain", "reason=test"] if node in nodes else ["state=resume"]
            subprocess.run(["scontrol", "update", f"nodename={node}", *drain], capture_output=True)
        subprocess.run(["scancel", "--batch", "--signal=USR1", number], check=True)
        job.wait_for_attempt(attempt)
    for node in ("n2", "n3", "n4"):
        subprocess.run(["scontrol", "update", f"nodename={node}", "state=resume"], capture_output=True)
    assert job.wait() == Exit.DONE
    assert layouts == [8, 4, 2]
    expected.check(job, rel=1e-5)  # each change of the layout changes the order of sums


def test_a_bad_node_is_replaced_by_a_spare_one(submit, expected):
    """A node that does not see the run directory; the job has one more than it needs, and trains at once without it."""
    with not_shared("n2", submit.where):
        job = submit(spare_nodes=1, preflight=CHECKED_APART)
        assert job.wait() == Exit.DONE
    (attempt,) = job.rows("attempt")
    assert attempt["nodes"] == ["n1", "n2"], "before the checks"
    assert (job.folder / "attempts" / "0001" / "nodes.txt").read_text() == "n1,n3"
    (checked,) = job.rows("preflight")
    assert list(checked["bad"]) == ["n2"]
    expected.check(job)


def test_a_job_that_is_ended_during_its_checks_blames_no_node(submit, expected):
    job = submit(preflight=CHECKED)
    wait_until((job.folder / "attempts" / "0001" / "preflight").exists, "the checks' beginning")
    (number,) = job.ids("running")
    subprocess.run(["scontrol", "requeue", number], check=True)
    assert job.wait() == Exit.DONE
    expected.check(job)
    assert not job.rows("excluded")
    assert len(job.rows("preflight")) == 1, "the second attempt's"
    assert job.rows("end")[0]["reason"] == "no rank was started"


APPTAINER = r"""#!/bin/bash
# as `apptainer exec [OPTIONS] IMAGE COMMAND...` does, but for the image: in it there are none of SLURM's commands
[ "$1" = exec ] || exit 64
shift
while [[ $1 == --* ]]; do
    [ "$1" = --bind ] && shift
    shift
done
[ "$1" = "/images/baton 1.sif" ] || exit 65
shift
# shellcheck disable=SC2016
exec unshare --mount bash -c '
    for name in sbatch srun scontrol squeue sinfo scancel; do mount --bind /dev/null "$(command -v "$name")"; done
    exec "$@"' - "$@"
"""


def test_in_a_container_that_does_not_know_slurm(submit, expected, tmp_path):
    """What stands for apptainer here hides SLURM's commands, as a container does; the rest is real."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "apptainer").write_text(APPTAINER)
    (tmp_path / "bin" / "apptainer").chmod(0o755)
    job = submit(
        "jobs.evaluate=true",
        "training.checkpoint.every=50",
        container={"runtime": "apptainer", "image": "/images/baton 1.sif", "mounts": ["/tmp"]},
        python=sys.executable,
        setup=[f"export PATH={tmp_path}/bin:$PATH"],
        preflight=CHECKED,
    )
    job.wait_for_step(25)
    (number,) = job.ids("running")
    assert sandbox("fail", "n2").returncode == 0
    job.wait_for_attempt(2)
    assert job.rows("end")[0]["status"] == Exit.NODE_LOST
    assert job.wait() == Exit.DONE
    expected.check(job)
    assert [row["job"] == number for row in job.rows("attempt")] == [True, False], "the script knows SLURM"
    sheet = job.folder / "evaluations.jsonl"
    wait_until(lambda: sheet.exists() and len(sheet.read_text().splitlines()) == 3, "three evaluations")


def test_saving_that_hangs_ends_in_time(submit, expected, tmp_path, patched):
    """Ranks are killed after save_timeout_s, and the run goes on from the checkpoint before."""
    patched(HANGS.replace("MARK", repr(str(tmp_path / "hung"))))
    job = submit("jobs.hang_timeout_s=50", warning_s=30, save_timeout_s=4)
    job.wait_for_step(25)
    (number,) = job.ids("running")
    subprocess.run(["scancel", "--batch", "--signal=USR1", number], check=True)
    job.wait_for_attempt(2)
    first = job.rows("end")[0]
    assert (first["status"], first["reason"]) == (Exit.SAVE_TOO_LONG, "not done with saving 4 s after it was told to stop")
    assert job.wait() == Exit.DONE
    expected.check(job)


HANGS = """
import os, time

if "BATON_START" in os.environ and not os.path.exists(MARK):
    from baton.training import preemption
    from baton.training.checkpoint.store import CheckpointStore

    save = CheckpointStore.save

    def hangs(store, *words):
        if preemption.stop_requested():  # of one rank at least; others may know from it that a stop is wanted
            open(MARK, "w").close()
            time.sleep(1000)
        return save(store, *words)

    CheckpointStore.save = hangs
"""


def test_status_logs_and_cancel(submit, request):
    job = submit("training.steps=3000")
    job.wait_for_step(30)
    followed = subprocess.Popen(
        [*BATON, "logs", job.folder, "--follow"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    request.addfinalizer(followed.kill)
    found = json.loads(job.baton("status", job.folder, "--json").stdout)
    assert (found["state"], found["steps"], len(found["jobs"]), len(found["attempts"])) == ("running", 3000, 1, 1)
    assert 30 <= found["step"] <= last_step(job.folder)
    assert found["saved"] in job.checkpoints() or found["saved"] < last_step(job.folder)
    for key in ("loss", "tokens_per_s", "mfu", "goodput", "eta_s"):
        assert found[key] > 0, key
    assert re.search(r"step [0-9,]+ of 3,000 .*loss \d", job.baton("status", job.folder).stdout)
    assert "has a job already" in job.baton("submit", "run.yaml", "training.steps=3000", "--cluster", "cluster.yaml").stderr
    done = job.baton("cancel", job.folder)
    assert "saves after its present step and ends" in done.stdout
    assert job.wait() == Exit.STOPPED
    assert job.rows("end")[-1]["step"] in job.checkpoints()
    out = followed.communicate(timeout=60)[0]
    assert "== attempt 1" in out
    assert f"stopped after step {job.rows('end')[-1]['step']} of 3000" in out
    assert job.baton("cancel", job.folder).stderr == f"baton: {job.folder} has no job that waits or runs\n"


def test_scancel_in_the_middle_loses_no_more_than_since_the_last_save(submit, expected):
    job = submit()
    job.wait_for_step(35)
    (number,) = job.ids("running")
    subprocess.run(["scancel", number], check=True)
    wait_until(lambda: not job.ids() and not job.ranks(), "the job's end")
    before = max(job.checkpoints())
    assert before >= 30
    job.submit(job.where / "run.yaml", job.where / "cluster.yaml")
    assert job.wait() == Exit.DONE
    expected.check(job)
    assert job.rows("start")[1]["step"] >= 30


def test_a_rank_that_is_killed_and_a_segmentation_fault(submit, expected):
    job = submit()
    for attempt, number in enumerate((signal.SIGKILL, signal.SIGSEGV), start=1):
        job.wait_for_step(40 * attempt, attempt)
        (victim,) = [rank for rank in job.ranks() if rank.name() == "rank-1"]
        victim.send_signal(number)
        job.wait_for_attempt(attempt + 1)
        assert f"rank 1 was killed by {number.name}" in job.rows("end")[-1]["reason"]
    assert job.wait() == Exit.DONE
    expected.check(job)
    assert len({row["job"] for row in job.rows("attempt")}) == 2, "the first time in the same job, then without the node"
