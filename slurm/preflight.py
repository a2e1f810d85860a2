"""Preflight checks: `python -m baton.slurm.preflight ATTEMPT` runs once on each node of a job before ranks start.

Each node prints its `Result` as one line of JSON on stdout, which srun passes on to the job script, because a node that does not
see the run directory could not report that in a file. A node whose checks hang is rejected after slurm.preflight.timeout_s.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from baton.launcher.cluster import Cluster
from baton.slurm.errors import UnfitNode
from baton.slurm.run_files import cluster_of, node_name, nodes_of

WRITTEN = 16 << 20
"""Size of the test file in the run directory, in bytes."""

BUSY_MIB = 1024
"""Memory use of a GPU, in MiB, above which it is not idle."""


@dataclass
class Result:
    """Result of one node's checks.

    problem: why the node must not be used; None: it passed.
    seconds: duration of the checks.
    measured: measurements by name; names end in their unit.
    """

    node: str
    problem: str | None = None
    seconds: float = 0.0
    measured: dict[str, Any] = field(default_factory=dict)


def results(attempt: Path, allocated: list[str]) -> list[Result]:
    """The result of each node of the job, including the checks that compare nodes with each other."""
    found: dict[str, Result] = {}
    path = attempt / "preflight.jsonl"
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            result = Result(**json.loads(line))
        except (ValueError, TypeError):
            continue
        found[result.node] = result
    for node in allocated:
        found.setdefault(node, Result(node, "did not answer"))
    of_job = [found[node] for node in allocated]
    _compare(of_job, cluster_of(attempt.parent.parent))
    return of_job


def _compare(found: list[Result], cluster: Cluster) -> None:
    """Rejects nodes whose versions differ from most nodes', or whose clock differs from the median."""
    assert cluster.slurm is not None
    answered = [result for result in found if result.problem is None]
    versions = [json.dumps(result.measured.get("versions"), sort_keys=True) for result in answered]
    offsets = [result.measured["clock_s"] for result in answered if "clock_s" in result.measured]
    for result, own in zip(answered, versions):
        usual = statistics.mode(versions)
        if own != usual:
            ours, theirs = json.loads(own) or {}, json.loads(usual) or {}
            names = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
            result.problem = "other versions than most nodes: " + ", ".join(
                f"{name} {ours.get(name)} instead of {theirs.get(name)}" for name in names
            )
        elif offsets and "clock_s" in result.measured:
            off = result.measured["clock_s"] - statistics.median(offsets)
            if abs(off) > cluster.slurm.preflight.skew_s:
                result.problem = f"its clock is {off:+.1f} s off most nodes'"


def check_node(attempt: Path) -> Result:
    """Runs all checks on this node."""
    began, result = time.monotonic(), Result(node_name())
    try:
        _checks(attempt, result)
    except UnfitNode as unfit:
        result.problem = str(unfit)
    except Exception as error:
        result.problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    result.seconds = time.monotonic() - began
    return result


def _checks(attempt: Path, result: Result) -> None:
    if not (attempt / "allocated.txt").exists():
        raise UnfitNode(f"does not see {attempt}: the run directory is not on a file system that all nodes share")
    cluster = cluster_of(attempt.parent.parent)
    slurm, nodes = cluster.slurm, nodes_of(attempt, "allocated.txt")
    assert slurm is not None
    limits, measured = slurm.preflight, result.measured
    measured["versions"] = _versions()
    measured["files_mb_s"] = speed = _write_speed(attempt / "preflight" / result.node)
    if speed < limits.files_mb_s:
        raise UnfitNode(f"writes {speed:.1f} MB/s into the run directory, and slurm.preflight.files_mb_s={limits.files_mb_s:g}")
    scratch = Path(os.path.expandvars(slurm.scratch))
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        (scratch / ".written").write_text("")
    except OSError as error:
        raise UnfitNode(f"cannot write to slurm.scratch={scratch} ({error.strerror})") from None
    if slurm.gpus:
        _check_driver(cluster, measured)
    from baton.slurm import bandwidth_checks  # imports torch

    bandwidth_checks.of_node(cluster, measured)
    # a collective needs all of its members, so nodes that passed the checks above first agree on who they are
    met = bandwidth_checks.Meeting(attempt, nodes, result.node, limits.timeout_s / 3)
    bandwidth_checks.between_nodes(cluster, met, measured)


def _versions() -> dict[str, str]:
    names = ("baton-lm", "torch", "deepspeed", "megatron-core")
    return {**{name: version(name) for name in names}, "python": ".".join(map(str, sys.version_info[:3]))}


def _write_speed(path: Path) -> float:
    """Rate of a synced write to a temporary file, in MB/s."""
    path.parent.mkdir(exist_ok=True)
    data, began = os.urandom(WRITTEN), time.monotonic()
    try:
        with path.open("wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        seconds = time.monotonic() - began
        if path.read_bytes() != data:
            raise UnfitNode("reads other bytes from the run directory than it wrote")
    except OSError as error:
        raise UnfitNode(f"cannot write to the run directory ({error.strerror})") from None
    finally:
        path.unlink(missing_ok=True)
    return WRITTEN / 1e6 / seconds


_ASKED = ("memory.used", "temperature.gpu", "ecc.errors.uncorrected.volatile.total", "driver_version")


def _check_driver(cluster: Cluster, measured: dict[str, Any]) -> None:
    """Checks the number of GPUs, and that they are idle and without errors, with nvidia-smi and the kernel log."""
    if shutil.which("nvidia-smi") is None:
        raise UnfitNode("has no nvidia-smi: no NVIDIA driver")
    asked = ["nvidia-smi", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise UnfitNode(f"nvidia-smi fails: {' '.join((done.stderr or done.stdout).split())[:200]}")
    gpus = [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    measured["gpus"], measured["driver"] = len(gpus), gpus[0][3] if gpus else None
    if len(gpus) < cluster.gpus_per_node:
        raise UnfitNode(f"has {len(gpus)} GPUs, and gpus_per_node={cluster.gpus_per_node}")
    measured["hottest_c"] = max((int(gpu[1]) for gpu in gpus if gpu[1].isdigit()), default=None)
    for number, (used, _, uncorrected, _) in enumerate(gpus):
        if used.isdigit() and int(used) > BUSY_MIB:
            raise UnfitNode(f"GPU {number} has {used} MiB in use: another process is still running there")
        if uncorrected.isdigit() and int(uncorrected):
            raise UnfitNode(f"GPU {number} has {uncorrected} uncorrected memory errors")
    measured["xid"] = xid = _kernel_complaint()
    if xid:
        raise UnfitNode(f"the kernel reports {xid}")


_FATAL_XID = (48, 62, 63, 64, 74, 79, 94, 95, 119, 120)
"""Xid codes of memory, NVLink, bus and firmware errors, after which NVIDIA's guide says to drain or reset the node. Other codes are
errors of programs."""


def _kernel_complaint() -> str | None:
    """The last line with a fatal Xid in the kernel log; None if there is none, or if the log cannot be read."""
    done = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=30, errors="replace")
    lines = [line for line in done.stdout.splitlines() if "NVRM: Xid" in line]
    fatal = [line for line in lines if any(f"): {number}," in line for number in _FATAL_XID)]
    return fatal[-1][-160:] if fatal else None


def main() -> int:
    attempt = Path(sys.argv[1])
    said = threading.Lock()

    def say(result: Result) -> None:
        with said:  # the checks and the timer race: only the first of them may print
            print(json.dumps(asdict(result)), flush=True)
            os._exit(0)

    try:
        slurm = cluster_of(attempt.parent.parent).slurm
        limit = slurm.preflight.timeout_s if slurm is not None else 120.0
    except Exception:
        limit = 120.0  # the checks report the error
    late = Result(node_name(), f"was not done with its checks after {limit:.0f} s", limit)
    timer = threading.Timer(limit, say, [late])
    timer.daemon = True
    timer.start()
    say(check_node(attempt))
    return 0


if __name__ == "__main__":
    sys.exit(main())
