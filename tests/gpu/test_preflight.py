"""Preflight on a node with GPUs: what it measures, and what it refuses."""

import json
import platform
import subprocess
import sys

import pytest
import torch
import yaml

pytestmark = pytest.mark.gpu


def preflight(folder, **changes):
    """What the process says that a job runs on each node. changes: to the cluster file."""
    gpus = torch.cuda.device_count()
    cluster = {
        "name": "here",
        "gpus_per_node": gpus,
        "memory_gib": 1.0,
        "matmul_tflops": {"bfloat16": 50, "float32": 1},
        "memory_bandwidth_tb_s": 1.0,
        "bandwidth_gb_s": {"in_node": 10, "between_nodes": 1},
        "slurm": {"time": "1:00:00", "gpus": True, "scratch": str(folder / "scratch"), "preflight": {"files_mb_s": 0}},
        **changes,
    }
    attempt = folder / "run" / "attempts" / "0001"
    attempt.mkdir(parents=True)
    (folder / "run" / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    (attempt / "allocated.txt").write_text(platform.node())
    done = subprocess.run(
        [sys.executable, "-P", "-m", "baton.slurm.preflight", str(attempt)], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_node_says_what_its_gpus_reach(tmp_path):
    found = preflight(tmp_path)
    measured, gpus = found["measured"], torch.cuda.device_count()
    print(json.dumps(found))
    if found["problem"] and "in use" in found["problem"]:
        pytest.skip(f"this node's GPUs are shared with other tests: {found['problem']}")
    assert found["problem"] is None
    assert found["seconds"] < 60
    assert measured["gpus"] == gpus
    assert len(measured["matmul_tflops"]) == len(measured["copy_gb_s"]) == gpus
    assert min(measured["matmul_tflops"]) > 50
    assert ("in_node_gb_s" in measured) == (gpus > 1)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"gpus_per_node": 64}, "and gpus_per_node=64"),
        ({"matmul_tflops": {"bfloat16": 100_000, "float32": 1}}, "TFLOP/s in matrix products, and should"),
    ],
    ids=["too few", "too slow"],
)
def test_a_node_that_is_not_what_was_promised_is_refused(tmp_path, changes, problem):
    found = preflight(tmp_path, **changes)
    if "in use" in found["problem"]:
        pytest.skip(f"this node's GPUs are shared with other tests: {found['problem']}")
    assert problem in found["problem"]


def test_a_gpu_that_somebody_uses_is_refused(tmp_path):
    kept = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    assert "MiB in use: another process is still running there" in preflight(tmp_path)["problem"]
    del kept
    torch.cuda.empty_cache()
