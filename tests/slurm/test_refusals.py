"""Errors of `baton submit`: one line and exit status 2, before anything is submitted or written."""

import subprocess
from pathlib import Path

import pytest
import yaml
from support.jobs import CHECKED_APART, RUN, not_shared, sandbox
from support.runs import wait_until

from baton.launcher.cli import main
from baton.launcher.cluster import load_cluster
from baton.slurm.submit import file_system


@pytest.fixture
def submit_it(tmp_path, monkeypatch, capsys):
    """A function: `baton submit` of the small run; status, stdout, stderr. Nothing may have been written or submitted."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN | {"name": "refused"}))

    def run(*words, values=None, **changes):
        values = values or load_cluster("sandbox").model_dump(mode="json")
        values["slurm"] = values["slurm"] and values["slurm"] | changes
        Path("cluster.yaml").write_text(yaml.safe_dump(values))
        status = main(["submit", "run.yaml", "--cluster", "cluster.yaml", *words])
        out, err = capsys.readouterr()
        assert not Path("runs").exists(), "nothing is written"
        return status, out, err

    return run


def refused(found) -> str:
    status, _, err = found
    assert (status, err.count("\n")) == (2, 1), err
    return err


def test_what_needs_no_slurm_is_refused_without_one(submit_it, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "no SLURM on this machine (sbatch, squeue, scontrol, sinfo, scancel not found): submit from a login node" in refused(
        submit_it()
    )
    assert "unknown key slurm.partiton; did you mean slurm.partition?" in refused(submit_it(partiton="x"))
    assert "slurm.time='1 hour': a time limit as SLURM takes it" in refused(submit_it(time="1 hour"))
    assert "slurm.save_timeout_s=60 must be less than slurm.warning_s=60" in refused(submit_it(save_timeout_s=60))
    assert "--nodes 3-1: expected a number of nodes, or a range as 1-4" in refused(submit_it("--nodes", "3-1"))
    assert "unknown key jobs.max_failure; did you mean jobs.max_failures?" in refused(submit_it("jobs.max_failure=1"))
    assert "the layout has 3 ranks, which do not fill nodes of 2" in refused(
        submit_it("layout.data=3", "training.global_batch_tokens=192")
    )
    assert "which SLURM reads in its own way" in refused(submit_it("directory=runs/50%"))
    container = {"image": "/images/baton.sqsh"}
    assert "slurm.container is set, and slurm.python is not: name the Python in /images/baton.sqsh" in refused(
        submit_it(container=container)
    )
    assert "slurm.container.runtime='docker': Input should be 'pyxis' or 'apptainer'" in refused(
        submit_it(container=container | {"runtime": "docker"})
    )
    values = load_cluster("sandbox").model_dump(mode="json") | {"slurm": None}
    assert "the cluster sandbox has no section slurm: it is only planned for" in refused(submit_it(values=values))
    values = load_cluster("sandbox").model_dump(mode="json") | {"memory_gib": 0.5001}
    status, out, _ = submit_it(values=values)
    assert (status, "does not fit" in out) == (2, True)


def test_a_dry_run_prints_plan_and_script_and_needs_no_slurm(submit_it, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    status, out, err = submit_it("--dry-run")
    assert (status, err) == (0, "")
    assert "fits: " in out
    assert "#SBATCH --job-name=baton-refused\n#SBATCH --nodes=2\n" in out


def test_what_this_slurm_has_not_is_refused(slurm, submit_it):
    assert "slurm.partition=gpu: no such partition; this cluster has main, urgent" in refused(submit_it(partition="gpu"))
    assert "16 nodes are wanted, and the partition main has 4" in refused(
        submit_it("layout.data=32", "training.global_batch_tokens=2048")
    )
    assert "sbatch failed: " in refused(submit_it(options=["--gres=gpu:9"]))
    assert "is on a file system of type ext4, which other nodes do not see" in refused(submit_it(local_files=False)).replace(
        f"type {file_system(Path.cwd())}", "type ext4"
    )
    assert "/dev/shm/runs/x is on a file system of type tmpfs, which other nodes do not see; use a shared one" in refused(
        submit_it("directory=/dev/shm/runs/x", local_files=False)
    )
    assert not Path("/dev/shm/runs").exists()
    assert not subprocess.run(["squeue", "-h"], capture_output=True, text=True, check=True).stdout


def test_types_of_file_systems_are_told_apart():
    assert file_system(Path("/dev/shm/not/there/yet")) == "tmpfs"
    assert file_system(Path("/proc/self")) == "proc"


def test_an_account_that_does_not_exist_is_refused(tmp_path, slurm, submit_it, monkeypatch):
    """Accounts are only known where SLURM keeps a database; its command is asked, and says whose the accounts are."""
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "sacctmgr"
    command.write_text("#!/bin/sh\necho lm\necho vision\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin:/usr/sbin:/sbin")
    assert "slurm.account=bio: root has no such account; yours: lm, vision" in refused(submit_it(account="bio"))


@pytest.mark.long_slurm
def test_accounts_of_a_real_database(slurm_with_accounts, submit_it):
    for words in (["account", "lm", "Description=lm", "Organization=lm"], ["user", "root", "account=lm"]):
        subprocess.run(["sacctmgr", "-i", "add", *words], check=True, capture_output=True)
    assert "slurm.account=bio: root has no such account; yours: lm" in refused(submit_it(account="bio"))
    # one that is there is no reason to refuse: what is named is what comes after it
    assert "sbatch failed: " in refused(submit_it(account="lm", options=["--gres=gpu:9"]))


def test_a_run_directory_that_is_not_shared_is_found_before_any_rank_starts(submit):
    """On one node another file system lies over the place where the run directory is on the others."""
    hooks = submit.where / "hooks"
    with not_shared("n2", submit.where):
        job = submit('jobs.hooks.failure=echo "$BATON_EVENT $BATON_TEXT" >> hooks', preflight=CHECKED_APART)
        # the next attempt, on other nodes, is that of test_jobs.py
        wait_until(lambda: job.rows("excluded") and job.rows("end") and hooks.exists(), "the end of the checks", every_s=0.1)
        job.end()
    first = job.rows("end")[0]
    assert "n2: does not see " in first["reason"]
    assert "not on a file system that all nodes share" in first["reason"]
    assert not list((job.folder / "attempts" / "0001").glob("rank-*.log"))
    assert "n2" in job.rows("excluded")[0]["node"]
    assert hooks.read_text().startswith("failure n2: does not see ")
    assert sandbox("status").returncode == 0
