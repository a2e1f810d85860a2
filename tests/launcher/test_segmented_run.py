"""Whole runs in segments: killed in the middle of a step and of a document, and resumed on the same or on another layout."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from support import checkpoints
from support.compare import relative_error
from support.runs import SAME_PLACES

from baton.training.monitoring.metrics import read_metrics

COMMON = ("training.steps=8", "training.checkpoint.every=3", "training.evaluation.every=0", "training.replica_check_every=2")
TRUNCATED = (
    *COMMON,
    "training.bptt={mode: truncated, segment: 8, gradient_segments: 2}",
    "training.lanes=8",
    "training.sequence_length_warmup=[{steps: 2, sequence_length: 16}]",
)
EXACT = (*COMMON, "training.bptt={mode: exact, segment: 8}")
OTHER_RANKS = ("layout.data=1", "layout.context=2", "layout.pipeline=2")

FATE = """
import os, signal, sys

if "BATON_START" in os.environ:
    from baton.training.step.RUNNER as Runner

    done, run_operation = [], Runner.run_operation

    def fateful(runner, operation):
        run_operation(runner, operation)
        done.append(operation)
        if os.environ["RANK"] == "1" and len(done) == AFTER:
            os.kill(os.getpid(), signal.SIGKILL)

    Runner.run_operation = fateful
"""
"""A sitecustomize that kills rank 1 after so many operations."""
RECORDED = """
import os

if "BATON_START" in os.environ:
    from baton.training.step import executor
    from baton.training.step.cuda_graphs import CudaGraphs

    class Again:
        def __init__(self, device):
            pass

        def warm_up(self, run):
            run()

        def record(self, run):
            return run

        def release(self):
            pass

    def recorded(made, model, *others, **options):
        plain(made, model, *others, **options | {"cuda_graphs": CudaGraphs(model, Again)})

    plain, executor.StepExecutor.__init__ = executor.StepExecutor.__init__, recorded
    executor.MicrobatchRunner = None
"""
"""One with which no passes can be run but recorded ones, where replaying runs them again."""
RUNNERS = {"": "microbatch_runner import MicrobatchRunner", RECORDED: "cuda_graphs import CudaGraphRunner"}


def killed(launch, inputs, folder, words, operations, tmp_path, monkeypatch, form=""):
    """A run whose rank 1 dies after so many operations; the checkpoint it resumes from. form: RECORDED, or of plain passes."""
    (tmp_path / "sitecustomize.py").write_text(form + FATE.replace("AFTER", str(operations)).replace("RUNNER", RUNNERS[form]))
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        ended = launch(folder, str(inputs.run), *SAME_PLACES, *words, where=inputs.run.parent).end()
    assert ended.status == 1
    assert "rank 1 was killed by SIGKILL" in ended.err
    return ended


def complete(launch, inputs, folder, words):
    ended = launch(folder, str(inputs.run), *SAME_PLACES, *words, where=inputs.run.parent).end()
    assert (ended.status, ended.err) == (0, "")
    return ended


def learned(folder):
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"]
    assert [row["step"] for row in rows] == list(range(1, 9)), "no step is missing or there twice"
    return [(row["loss"], row["grad_norm"], row["tokens"]) for row in rows]


def checkpoint(folder: Path, step: int = 8) -> tuple[dict[str, torch.Tensor], dict]:
    """Every tensor of a checkpoint, whole, and its manifest."""
    path = folder / "checkpoints" / f"step-{step:08d}"
    return checkpoints.tensors(path), json.loads((path / "manifest.json").read_text())["manifest"]


def assert_same_bits(ours, theirs):
    assert learned(ours) == learned(theirs)
    (tensors, manifest), (others, other) = checkpoint(ours), checkpoint(theirs)
    assert tensors.keys() == others.keys()
    for key, x in tensors.items():
        assert x.numpy().tobytes() == others[key].numpy().tobytes(), key
    assert manifest["cursors"] == other["cursors"]
    return tensors, manifest


@pytest.mark.parametrize("form", [RECORDED, pytest.param("", marks=pytest.mark.long)], ids=["recorded", "plain"])
def test_a_truncated_run_killed_in_mid_step_and_mid_document_goes_on_bit_for_bit(inputs, launch, tmp_path, monkeypatch, form):
    """The first steps have shorter sequences. With recorded passes the bits are those of the whole run's plain ones. With plain
    passes the run goes on on other ranks, too: a lane moves whole, with its cursor and its States. tests/launcher/test_fork.py
    always tests that with a fork."""
    whole, broken, moved = (tmp_path / name for name in ("whole", "broken", "moved"))
    complete(launch, inputs, whole, TRUNCATED)
    # A group surveys one segment and runs two forwards and backwards. A step has two micro-batches of two groups; in the first two
    # steps, whose sequences are half as long and twice as many, of one.
    # Saved at once: one that is written beside the next steps is published whenever the disk has it.
    words = (*TRUNCATED, "training.checkpoint.async_save=false")
    ended = killed(launch, inputs, broken, words, 2 * 10 + 2 * 20 + 9, tmp_path, monkeypatch, form)
    assert ended.rows[-1]["step"] == 4
    assert ended.checkpoints == [3]
    _, manifest = checkpoint(broken, 3)
    assert all(cursor["offset"] > 0 for lane, cursor in manifest["cursors"].items() if int(lane) < 4), "in the middle of documents"
    shutil.copytree(broken, moved)
    with monkeypatch.context() as patch:
        (tmp_path / "sitecustomize.py").write_text(form)
        patch.setenv("PYTHONPATH", str(tmp_path))
        complete(launch, inputs, broken, TRUNCATED)
    tensors, manifest = assert_same_bits(broken, whole)
    carried = {key: x for key, x in tensors.items() if key.startswith("carried.")}
    assert set(carried) == {f"carried.layers.{n}.mamba.{leaf}" for n in range(2) for leaf in ("conv", "h")}
    for key, x in carried.items():
        assert len(x) == 8
        assert all(float(lane.abs().max()) > 0 for lane in x), key
    if form:
        return

    said = complete(launch, inputs, moved, (*TRUNCATED, *OTHER_RANKS)).out
    assert "resuming from step-00000003 " in said
    for ours, theirs in zip(learned(moved), learned(whole), strict=True):
        assert ours[2] == theirs[2]
        assert ours[:2] == pytest.approx(theirs[:2], rel=1e-4)
    others, other = checkpoint(moved)
    assert other["cursors"] == manifest["cursors"], "no token lost or read twice"
    for key, x in carried.items():
        assert relative_error(others[key], x) < 1e-3, key


@pytest.mark.long
@pytest.mark.parametrize("layout", [(), OTHER_RANKS, ("layout.data=1", "layout.tensor=2", "training.recompute=full")], ids=str)
def test_an_exact_run_killed_in_mid_step_goes_on_bit_for_bit(inputs, launch, undisturbed, tmp_path, monkeypatch, layout):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    complete(launch, inputs, whole, (*EXACT, *layout))
    killed(launch, inputs, broken, (*EXACT, *layout), 100, tmp_path, monkeypatch)
    complete(launch, inputs, broken, (*EXACT, *layout))
    assert_same_bits(broken, whole)
    unsegmented = next(row for row in read_metrics(undisturbed / "metrics.jsonl") if row["kind"] == "train")
    assert learned(whole)[0][:2] == pytest.approx((unsegmented["loss"], unsegmented["grad_norm"]), rel=1e-5)
