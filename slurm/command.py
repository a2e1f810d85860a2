"""Calls of SLURM's commands, with output formats that old and new versions support. All have timeouts and few retries."""

import os
import re
import shutil
import subprocess
import time

from baton.launcher.errors import ConfigError
from baton.launcher.jobs_config import SlurmConfig

PATIENCE_S = 30.0
"""Timeout of one command in seconds; slurmctld may be busy or restarting."""

_TRIES = 3


KEPT = frozenset({"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT"})
"""Variables by which SLURM's commands find their cluster. All others describe a job, or are options of a command."""

_OPTIONS = re.compile(r"(SLURM|SBATCH|SRUN|SALLOC|SQUEUE|SINFO|SCANCEL|SCONTROL|SACCT|SACCTMGR)_")

_LEFT_OPEN = {"SBATCH_PARTITION": "partition", "SBATCH_ACCOUNT": "account", "SBATCH_QOS": "qos"}
"""Defaults of a user or a site, with the setting of the cluster file that overrides each."""

_AWAY = ("Unable to contact", "imed out", "Connection refused", "not responding", "emporarily unavailable")
"""Parts of error messages that mean that slurmctld does not respond."""


class SlurmError(ConfigError):
    """A command of SLURM failed; the message includes its output."""


class SlurmAwayError(SlurmError):
    """SLURM's controller does not respond. This is temporary, so exit_status is 75 (sysexits' EX_TEMPFAIL)."""

    exit_status = 75


def environment(slurm: SlurmConfig | None = None) -> dict[str, str]:
    """The environment for SLURM's commands: this process's, without variables that set options of SLURM's commands or describe the
    current allocation. They would override the options of the job script.

    slurm: settings of the cluster file. For partition, account and qos that are not set there, the SBATCH_* variables are kept.
    """
    kept = {*KEPT, *(name for name, field in _LEFT_OPEN.items() if slurm is not None and getattr(slurm, field) is None)}
    return {name: value for name, value in os.environ.items() if name in kept or not _OPTIONS.match(name)}


def dropped(slurm: SlurmConfig) -> list[str]:
    """SBATCH_* variables that `environment` leaves out, as NAME=value, for a note to the user."""
    kept = environment(slurm)
    return [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("SBATCH_") and name not in kept]


def require() -> None:
    """Raises SlurmError on a machine without SLURM's commands."""
    missing = [name for name in ("sbatch", "squeue", "scontrol", "sinfo", "scancel") if shutil.which(name) is None]
    if missing:
        raise SlurmError(
            f"no SLURM on this machine ({', '.join(missing)} not found): submit from a login node, or use `baton train` here"
        )


def ask(*words: str, tries: int = _TRIES, slurm: SlurmConfig | None = None) -> str:
    """Runs a command and returns its output.

    slurm: settings of the cluster file, for sbatch (see `environment`). Raises SlurmError with the command's error message, and
    SlurmAwayError if slurmctld does not respond in `tries` tries.
    """
    away = True
    for number in range(tries):
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, env=environment(slurm))
        except FileNotFoundError:
            raise SlurmError(f"{words[0]}: not found; is this a machine of the cluster?") from None
        except subprocess.TimeoutExpired:
            said = f"no answer in {PATIENCE_S:.0f} s"
        else:
            if done.returncode == 0:
                return done.stdout
            said = " ".join((done.stderr or done.stdout).split())
            away = any(words_of in said for words_of in _AWAY)
            if not away:
                break
        if number + 1 < tries:
            time.sleep(2.0 * (number + 1))
    if away:
        raise SlurmAwayError(f"{words[0]}: SLURM's controller does not answer ({said}); try again later")
    if "munge" in said.lower():
        raise SlurmError(f"{words[0]}: munged, which SLURM's commands need, does not run here; submit from a login node ({said})")
    raise SlurmError(f"{words[0]} failed: {said}")


def jobs(name: str, tries: int = _TRIES) -> list[dict[str, str]]:
    """The user's pending and running jobs of this name: {id, state, reason, nodes, left, start}. Raises as `ask`."""
    fields = {"id": "%i", "state": "%T", "reason": "%R", "nodes": "%D", "left": "%L", "start": "%S"}
    out = ask("squeue", "-h", "--me", "--name", name, "-o", "|".join(fields.values()), tries=tries)
    return [dict(zip(fields, line.split("|"), strict=True)) for line in out.splitlines() if "|" in line]
