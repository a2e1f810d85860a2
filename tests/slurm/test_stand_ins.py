"""The script and `baton submit` beside stand-ins for SLURM's commands, which keep what they are given: what reaches a job and srun,
and what is done about answers that a SLURM in good health never gives."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml
from support.jobs import RUN
from support.own_mixer import IMPORTS, on_the_path, write_package
from support.runs import DEADLINE_S

from baton.launcher.cli import main
from baton.launcher.cluster import load_cluster
from baton.slurm.command import SlurmAwayError, SlurmError, ask
from baton.training.monitoring import time_ledger
from baton.training.monitoring.metrics import read_metrics

SINFO = """case "$*" in
    *%P*) cat partitions 2>/dev/null || echo 'cpu* 4';;
    *%T*) cat states 2>/dev/null || printf 'n1 allocated\\nn2 allocated\\n';;
esac"""

SBATCH = """case "$*" in *--test-only*) exit 0;; esac
env >> sbatch.env; printf '%s\\n' "$@" >> sbatch.words
[ ! -e sbatch.fails ] || { cat sbatch.fails >&2; exit 1; }
echo "123;cluster"
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A function: make or change a command. The folder has the run and its cluster; SLURM's commands are found there first."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for name in list(os.environ):
        if name.startswith(("SLURM_", "SBATCH_")):
            monkeypatch.delenv(name)

    def command(name, text):
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/bash\ncd {tmp_path}\n{text}\n")
        path.chmod(0o755)

    for name in ("squeue", "scancel", "sacctmgr", "sleep"):
        command(name, "exit 0")
    command("sinfo", SINFO)
    command("sbatch", SBATCH)
    command("scontrol", '[ "$2" = hostnames ] && printf "n1\\nn2\\n"; [ "$1" = requeue ] && touch requeued && kill $PPID; exit 0')
    command("srun", 'echo "$*" >> srun.words; env >> srun.env; exit 1')
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN | {"name": "run"}))
    return command


@pytest.fixture
def submit(site, capsys):
    """A function: `baton submit` with changes of the cluster file's section; status, stdout, stderr."""

    def run(*words, **changes):
        values = load_cluster("sandbox").model_dump(mode="json")
        values["slurm"] |= changes
        Path("cluster.yaml").write_text(yaml.safe_dump(values))
        status = main(["submit", "run.yaml", "--cluster", "cluster.yaml", *words])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def variables(path):
    return dict(line.split("=", 1) for line in Path(path).read_text().splitlines() if "=" in line)


def start_job(**more):
    """The script, as SLURM would start it, to its end."""
    environment = os.environ | {"SLURM_JOB_ID": "123", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_MEM_PER_NODE": "0", **more}
    return subprocess.run(["bash", "runs/run/job.sbatch"], env=environment, capture_output=True, text=True, timeout=DEADLINE_S)


OUTER = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "login7", "SLURM_MEM_PER_CPU": "4096", "SLURM_CPU_BIND": "mask_cpu:0x3",
         "SLURM_JOB_NODELIST_HET_GROUP_0": "x1", "SLURM_HET_SIZE": "2", "SRUN_DEBUG": "3", "SBATCH_TIMELIMIT": "10",
         "SBATCH_ACCOUNT": "lm", "SBATCH_QOS": "long", "SINFO_PARTITION": "none", "SQUEUE_PARTITION": "none",
         "SCANCEL_INTERACTIVE": "1", "SLURM_CONF": "/etc/elsewhere.conf", "SLURM_CLUSTERS": "big"}  # fmt: skip


def test_what_describes_another_job_or_is_an_option_of_a_command_is_not_handed_on(submit, monkeypatch):
    for name, value in OUTER.items():
        monkeypatch.setenv(name, value)
    status, out, err = submit(qos="short")
    assert (status, err) == (0, "")
    handed = variables("sbatch.env")
    assert {name: handed.get(name) for name in OUTER} == dict.fromkeys(OUTER) | {
        "SLURM_CONF": "/etc/elsewhere.conf",
        "SLURM_CLUSTERS": "big",
        "SBATCH_ACCOUNT": "lm",  # the cluster file names none
    }
    assert "not handed on to the job, whose options are the cluster file's: SBATCH_QOS=long, SBATCH_TIMELIMIT=10\n" in out


def test_a_job_hands_nothing_of_its_own_to_the_next_and_says_that_srun_did_not_start(submit):
    assert submit(options=["--no-requeue", "-x n[8-9]"], restart="chain")[0] == 0
    Path("sbatch.env").unlink()
    Path("sbatch.words").unlink()
    done = start_job(SLURM_CPU_BIND="x", SRUN_DEBUG="1", SLURM_CONF="/etc/ours.conf", SBATCH_ACCOUNT="lm")
    assert done.returncode == 0, done.stderr
    handed = variables("sbatch.env")
    assert {name for name in handed if name.startswith(("SLURM_", "SRUN_", "SBATCH_"))} == {"SLURM_CONF", "SBATCH_ACCOUNT"}
    assert "--exclude=n[8-9]" in Path("sbatch.words").read_text().splitlines(), "an empty one would take its place"
    (asked,) = Path("srun.words").read_text().splitlines()
    assert "--nodelist=n1,n2" in asked
    assert "--overlap --immediate=60" in asked
    (end,) = (row for row in time_ledger.read_rows(Path("runs/run")) if row["kind"] == "end")
    assert (end["status"], end["reason"].startswith("the checks did not start on any node: ")) == (84, True)


@pytest.mark.long_slurm
def test_a_job_trains_a_mixer_of_the_users_own(submit, site, tmp_path, monkeypatch):
    """Whose package the job finds where the submission did: the script, the agent of a node and its ranks."""
    write_package(tmp_path)
    values = RUN | {"name": "run", "imports": IMPORTS, "model": {"d_model": 16, "n_layers": 1, "pattern": ["leaky"]}}
    values |= {"layout": {}, "training": RUN["training"] | {"steps": 2, "schedule": {"kind": "constant"}}}
    Path("run.yaml").write_text(yaml.safe_dump(values))
    # the address that ranks meet at is a node's name
    site("scontrol", '[ "$2" = hostnames ] && echo localhost; exit 0')
    Path("states").write_text("localhost allocated\n")
    site("srun", 'while [[ $1 == -* ]]; do shift; done; SLURMD_NODENAME=localhost exec "$@"')
    with on_the_path(tmp_path, monkeypatch):
        assert submit("--nodes", "1", preflight={"enabled": False})[0] == 0
        done = start_job()
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in read_metrics(Path("runs/run/metrics.jsonl")) if row["kind"] == "train"] == [1, 2]
    (end,) = (row for row in time_ledger.read_rows(Path("runs/run")) if row["kind"] == "end")
    assert end["status"] == 0


def test_a_job_whose_srun_never_starts_is_not_repeated_without_end(submit):
    assert submit()[0] == 0
    codes = [start_job().returncode for _ in range(2)]
    assert Path("requeued").exists()
    assert codes[1] == 80, "NO_PROGRESS"
    assert not any(row["kind"] == "excluded" for row in time_ledger.read_rows(Path("runs/run")))


def test_a_successor_that_is_not_needed_is_cancelled_by_its_number(submit, site):
    assert submit(restart="chain", preflight={"enabled": False})[0] == 0
    (Path("runs/run") / "stop").touch()
    site("scancel", 'echo "$*" >> scancel.words')
    assert start_job().returncode == 75
    assert Path("scancel.words").read_text() == "123\n"


def test_a_drained_node_is_left_out_and_sinfo_is_asked_for_no_state_that_it_may_not_know(submit, site):
    assert submit("--nodes", "1-2", preflight={"enabled": False})[0] == 0
    site("sinfo", f'echo "$*" >> sinfo.words\n{SINFO}')
    Path("states").write_text("n1 allocated\nn1 allocated\nn2 draining\n")
    start_job()
    assert "--nodelist=n1 " in Path("srun.words").read_text()
    asked = Path("sinfo.words").read_text()
    assert "--nodes=n[1-2] -o %N %T" in asked
    assert " -t " not in asked


def test_while_the_controller_is_away_nothing_begins_and_nothing_is_handed_in(submit, site):
    assert submit()[0] == 0
    site("scontrol", '[ "$2" = hostnames ] && printf "n1\\nn2\\n" && exit; [ "$1" = show ] && [ ! -e back ] && exit 1; kill $PPID')
    site("sleep", "echo >> slept; [ $(wc -l < slept) -lt 3 ] || touch back")
    start_job()
    assert len(Path("slept").read_text()) == 3
    assert Path("srun.words").exists(), "then it begins"


@pytest.mark.parametrize(
    ("partition", "there"),
    [
        ("gpu,cpu", "cpu* 4\ngpu 4"),
        ("gpu, cpu", "cpu* 4\ngpu 4"),
        ("cpu*", "cpu* 4"),
        ("cpu", "CLUSTER: big\ncpu* 4"),
        (None, "gpu 4\ncpu 4"),  # no default: the account, or a plugin of the site, decides
        ("small,cpu", "small 1\ncpu 4"),  # two nodes are wanted: the other one has them
    ],
)
def test_partitions_as_slurm_writes_them(submit, partition, there):
    Path("partitions").write_text(f"{there}\n")
    status, _, err = submit(partition=partition)
    assert (status, err) == (0, "")
    script = Path("runs/run/job.sbatch").read_text()
    wanted = partition and partition.replace(" ", "").replace("*", "")
    assert f"#SBATCH --partition={wanted}\n" in script if wanted else "--partition" not in script


def test_partitions_that_are_not_there_are_named(submit):
    Path("partitions").write_text("cpu* 4\nsmall 1\n")
    assert "slurm.partition=gpu,tpu: no such partition; this cluster has cpu, small" in submit(partition="gpu,cpu,tpu")[2]
    assert "2 nodes are wanted, and the partition small has 1" in submit(partition="small")[2]
    assert "slurm.partition=" in submit(partition="gpu cpu")[2]
    assert not Path("runs").exists()


def test_settings_that_no_job_could_go_on_with_are_refused(submit):
    status, _, err = submit(time="1:00", warning_s=60)
    assert (status, "slurm.time=1:00 (60 s) leaves nothing before slurm.warning_s=60" in err) == (2, True)
    assert submit(time="0-0:01", warning_s=60)[0] == 2
    status, _, err = submit(options=["--clusters=big"])
    assert (status, "set SLURM_CLUSTERS in the environment" in err) == (2, True)
    assert submit(time="0", warning_s=60)[0] == 0, "no limit"


def test_a_controller_that_does_not_answer_is_no_bad_input(site, submit):
    site("sinfo", "echo 'slurm_load_partitions: Unable to contact slurm controller (connect failure)' >&2; exit 1")
    with pytest.raises(SlurmAwayError, match="sinfo: SLURM's controller does not answer"):
        ask("sinfo", tries=1)
    site("sinfo", SINFO)
    Path("sbatch.fails").write_text("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n")
    status, _, err = submit()
    assert (status, "try again later" in err) == (75, True)
    site("squeue", "[ -e sbatch.words ] && echo '124|PENDING|(Priority)|2|1:00|N/A'; exit 0")
    Path("sbatch.words").unlink()
    status, out, _ = submit()
    assert (status, "submitted job 124 on 2 nodes" in out) == (0, True), "the answer was lost, and not the job"


def test_status_does_not_take_a_controller_that_is_away_for_an_empty_queue(submit, site, capsys):
    assert submit()[0] == 0
    time_ledger.append_row(Path("runs/run"), "attempt", attempt=1, job="123", nodes=["n1"], layout={})
    site("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1")
    assert main(["status", "runs/run"]) == 0
    assert "runs/run: not known, because SLURM's controller does not answer\n" in capsys.readouterr().out


def test_memory_by_the_core_takes_the_place_of_memory_by_the_node(submit):
    assert submit(options=["--mem-per-cpu=3968"])[0] == 0
    script = Path("runs/run/job.sbatch").read_text()
    assert ("#SBATCH --mem-per-cpu=3968\n" in script, "--mem=" in script) == (True, False)


def test_a_machine_without_munge_is_named(site):
    said = 'sinfo: error: Munge encode failed: Failed to access "/run/munge": No such file (Did you start munged?)'
    site("sinfo", f"echo '{said}' >&2; exit 1")
    with pytest.raises(
        SlurmError, match="munged, which SLURM's commands need, does not run here; submit from a login node"
    ) as found:
        ask("sinfo")
    assert found.value.exit_status == 2


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("JobHeldUser", "it waits until `scontrol release 124`"),
        ("launch failed requeued held", "`scontrol release 124` tries again"),
        ("DependencyNeverSatisfied", "it never starts; `baton cancel` ends it"),
    ],
)
def test_status_says_what_to_do_about_a_job_that_waits_for_somebody(submit, site, capsys, reason, advice):
    assert submit()[0] == 0
    site("squeue", f"echo '124|PENDING|({reason})|2|1:00|N/A'")
    assert main(["status", "runs/run"]) == 0
    assert advice in capsys.readouterr().out
