"""SLURM's own commands, asked in formats that old and new versions share. Nothing here waits for long or retries for ever."""

import shutil
import subprocess
import time

from baton.launcher.errors import ConfigError

PATIENCE_S = 30.0
"""For one command; slurmctld may be busy or restarting."""

_TRIES = 3


class SlurmError(ConfigError):
    """A command of SLURM's that failed; the message holds what it said."""


def require() -> None:
    """Refuse a machine without SLURM's commands. Raises SlurmError."""
    missing = [name for name in ("sbatch", "squeue", "scontrol", "sinfo", "scancel") if shutil.which(name) is None]
    if missing:
        raise SlurmError(
            f"no SLURM on this machine ({', '.join(missing)} not found): submit from a login node, or use `baton train` here"
        )


def ask(*words: str, tries: int = _TRIES) -> str:
    """A command's output. Raises SlurmError with what it said, after a few tries where slurmctld does not answer."""
    for number in range(tries):
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
        except FileNotFoundError:
            raise SlurmError(f"{words[0]}: not found; is this a machine of the cluster?") from None
        except subprocess.TimeoutExpired:
            said = f"no answer in {PATIENCE_S:.0f} s"
        else:
            if done.returncode == 0:
                return done.stdout
            said = " ".join((done.stderr or done.stdout).split())
            if "Unable to contact" not in said and "Socket timed out" not in said and "Connection refused" not in said:
                break
        if number + 1 < tries:
            time.sleep(2.0 * (number + 1))
    raise SlurmError(f"{words[0]} failed: {said}")


def jobs(name: str) -> list[dict[str, str]]:
    """The user's jobs of this name that wait or run: {id, state, reason, nodes, left, start}."""
    fields = {"id": "%i", "state": "%T", "reason": "%R", "nodes": "%D", "left": "%L", "start": "%S"}
    out = ask("squeue", "-h", "--me", "--name", name, "-o", "|".join(fields.values()))
    return [dict(zip(fields, line.split("|"), strict=True)) for line in out.splitlines()]
