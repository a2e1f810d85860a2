"""Kernels are compiled while ranks start: which process compiles, which wait, and what happens if compilation fails."""

import os
import signal
import threading
import time

import pytest
import torch
import yaml
from support.hangs import RUN

from baton.launcher import ahead
from baton.launcher.config import load


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(RUN))
    return load(path, [])


def test_a_nodes_ranks_wait_for_its_first_rank_and_it_for_the_process(tmp_path):
    """Ranks 2 and 3 of a second node: two threads, since what they share is a store."""
    store, lines, order = torch.distributed.HashStore(), [], []

    def compile(say):
        say("half")
        time.sleep(0.5)
        (tmp_path / "compiled").touch()
        say("all")

    def wait(one, rank, local_rank):
        ahead.await_node(one, store, rank, local_rank, lines.append)
        order.append((rank, (tmp_path / "compiled").exists()))

    other = threading.Thread(target=wait, args=(None, 3, 1))
    other.start()
    time.sleep(0.2)
    assert order == [], "nobody has compiled anything"
    wait(ahead.Ahead(compile), 2, 0)
    other.join(timeout=30)
    assert sorted(order) == [(2, True), (3, True)]
    assert lines == ["half", "all"]
    wait(None, 4, 0)
    wait(None, 5, 1)
    assert [rank for rank, _ in order[-2:]] == [4, 5], "where all is in the cache nobody waits"


def test_a_process_that_fails_or_is_killed_is_said_and_the_run_goes_on():
    def fail(say):
        raise OSError(28, "No space left on device")

    lines = []
    ahead.Ahead(fail).wait(lines.append)
    ahead.Ahead(lambda say: os.kill(os.getpid(), signal.SIGKILL)).wait(lines.append)
    assert lines == [
        f"kernels cannot be compiled ahead ([Errno 28] No space left on device): {ahead.LATER}",
        f"the process that compiles kernels ahead ended with status -9: {ahead.LATER}",
    ]


def test_nothing_is_compiled_without_a_gpu_or_where_triton_interprets(config, monkeypatch):
    """Nor where the run's kernels are listed and there, which costs no process."""
    began = []
    monkeypatch.setattr(ahead, "Ahead", lambda compile: began.append(compile) or "begun")
    monkeypatch.setattr("baton.launcher.devices._torch_uses_cuda", lambda: True)
    monkeypatch.setattr("baton.launcher.devices._gpus", lambda: 1)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert ahead.start(config) is None
    monkeypatch.delenv("TRITON_INTERPRET")
    assert ahead.start(config.model_copy(update={"device": "cpu"})) is None
    assert ahead.start(config) == "begun"
    ahead._write(ahead.listing(config), ["KERNEL/__grp__scan_kernel.json"])
    assert ahead.start(config) == "begun", "a kernel that is listed is not there"
    kernel = ahead.listing(config).parent / "KERNEL" / "__grp__scan_kernel.json"
    kernel.parent.mkdir()
    kernel.touch()
    assert ahead.start(config) is None
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")
    assert ahead.start(config) == "begun", "Triton calls the kernels by other names"
    monkeypatch.delenv("TRITON_DISABLE_LINE_INFO")
    ahead.listing(config).write_text("not a list")
    assert ahead.start(config) == "begun"
    monkeypatch.setattr("baton.launcher.devices._gpus", lambda: 0)
    assert ahead.start(config) is None
    assert len(began) == 4
