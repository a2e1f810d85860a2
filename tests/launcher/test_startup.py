"""The modules that each process imports, as lists, because imports dominate start-up (benchmarks/startup.py measures them)."""

import json
import os
import signal
import subprocess
import sys

import pytest
import yaml

COMPILERS = {"torch._dynamo", "torch._inductor", "sympy", "torch.distributed.tensor", "torch.distributed.fsdp"}
NEVER = {"matplotlib", "transformers", "torch.distributed.checkpoint", "torch.utils.cpp_extension"}
TRAINING = {"deepspeed", "tensorboard", "torch.utils.tensorboard"}
ALL = COMPILERS | NEVER | TRAINING | {"torch", "megatron", "triton"}

RUN = {
    "name": "start",
    "device": "cpu",
    "model": {"d_model": 16, "n_layers": 1, "pattern": ["mamba"], "mixers": {"mamba": {"d_state": 4}}, "pad_vocab_to": 8},
    "data": {"kind": "mqar", "length": 16, "pairs": 2, "vocab_size": 36},
    "training": {
        "steps": 2,
        "sequence_length": 32,
        "global_batch_tokens": 64,
        "log_every": 1,
        "optimizer": {"lr": 1e-2},
        "evaluation": {"every": 2, "tokens": 64},
    },
}

RANK = """
import json, os, socket, sys
from pathlib import Path
from baton.launcher import worker
from baton.launcher.config import load
from baton.launcher.run_directory import open_attempt

worker.import_for("cpu")
found = {"imported": sorted(sys.modules), "tasks": len(os.listdir("/proc/self/task"))}
import torch

reading, writing = os.pipe()
if os.fork() == 0:
    # as many threads as are asked for, which work in a forked process
    big = torch.ones(1 << 22)
    total, tasks = float((big + big).sum()), len(os.listdir("/proc/self/task"))
    os.write(writing, json.dumps([torch.get_num_threads(), total, tasks]).encode())
    os._exit(0)
found["forked"] = json.loads(os.read(reading, 1000))
with open_attempt(load(sys.argv[1])) as attempt, socket.create_server(("127.0.0.1", 0)) as server:
    world = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    world |= {"MASTER_PORT": server.getsockname()[1], "BATON_LISTEN_FD": os.dup(server.fileno())}
    os.environ |= {name: str(value) for name, value in world.items()}
    worker._run(attempt / "config.yaml")
found["trained"] = sorted(sys.modules)
print("FOUND", json.dumps(found))
"""

COMMAND = """
import json, sys
from baton.launcher.cli import main

status = main(sys.argv[1:])
print("FOUND", json.dumps({"status": status, "imported": sorted(sys.modules)}))
"""


def found_by(code, *words, **environment):
    """What a process says that runs the code."""
    command = [sys.executable, "-P", "-c", code, *words]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.rpartition("FOUND ")[2])


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(RUN | {"directory": str(folder / "run")}))
    return path


@pytest.fixture(scope="module")
def rank(run_file):
    return found_by(RANK, str(run_file), OMP_NUM_THREADS="2", OPENBLAS_NUM_THREADS="1")


def test_commands_that_start_others_import_no_library_of_training(run_file):
    found = found_by(f"import baton.slurm.agent, baton.slurm.submit, baton.launcher.processes\n{COMMAND}", "plan", str(run_file))
    assert not ALL & set(found["imported"])


def test_training_imports_no_compiler_and_nothing_that_draws(rank):
    assert not (COMPILERS | NEVER) & set(rank["trained"]), "by torch, megatron-core or DeepSpeed"
    assert set(rank["trained"]) >= TRAINING


def test_the_process_that_forks_ranks_has_one_thread_and_no_tensorboard(rank):
    """A thread is not forked, and what it has locked stays locked. NumPy's OpenBLAS may have threads, which it ends before a fork;
    here it is told to have none. Only the main rank writes for TensorBoard."""
    assert rank["tasks"] == 1
    assert "deepspeed" in rank["imported"]
    assert not (COMPILERS | NEVER | TRAINING - {"deepspeed"}) & set(rank["imported"])


def test_a_forked_rank_has_the_threads_that_are_asked_for(rank):
    threads, total, tasks = rank["forked"]
    assert (threads, total) == (2, 2.0 * (1 << 22))
    assert tasks == 2


def test_evaluating_a_checkpoint_imports_nothing_of_training(run_file, rank):
    assert "deepspeed" in rank["trained"], "the run is there"
    found = found_by(COMMAND, "eval", str(run_file.with_name("run")), "--device", "cpu")
    assert not (COMPILERS | NEVER | TRAINING) & set(found["imported"])


AFRESH = """
import os

if "BATON_START" in os.environ:
    import torch.cuda

    torch.cuda._is_in_bad_fork = lambda: True
"""
"""A sitecustomize: an import has touched the GPU, so that no fork can use it."""


@pytest.mark.long
def test_ranks_that_a_fork_would_leave_without_a_gpu_start_afresh(run_file, launch, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(AFRESH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    running = launch(tmp_path / "run", str(run_file), "layout.data=2", "training.steps=3000", where=tmp_path)
    ranks = running.wait_for_steps(1, 2)
    assert [rank.environ()["RANK"] for rank in ranks] == ["0", "1"], "a fork's variables are not those of its start"
    assert [rank.ppid() for rank in ranks] == [running.process.pid] * 2
    running.process.terminate()
    assert running.end().status == 128 + signal.SIGTERM
    assert running.checkpoints(), "what was done is saved"


@pytest.mark.long
def test_the_rest_of_megatron_core_is_there_for_who_asks():
    code = """
import json, sys
from baton.parallel.megatron import parallel_state
before = sorted(sys.modules)
import megatron.core
core = megatron.core
whole = core.DistributedDataParallel.__name__, core.parallel_state is parallel_state, bool(core.__version__)
print("FOUND", json.dumps({"before": before, "whole": whole}))
"""
    found = found_by(code)
    assert "megatron.core.distributed" not in found["before"]
    assert found["whole"] == ["DistributedDataParallel", True, True]
