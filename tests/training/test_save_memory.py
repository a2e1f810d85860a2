"""Host memory of asynchronous saves: it equals the plan from the first save on and does not grow over a hundred saves."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from support.models import model_of, step_batch, training

from baton.data_pipeline.config import ShardsConfig
from baton.data_pipeline.packing import Batch
from baton.launcher.config import RunConfig
from baton.launcher.planner.memory import of_stages
from baton.models.config import ModelConfig
from baton.parallel import mesh as meshes
from baton.parallel.config import LayoutConfig
from baton.parallel.pipeline import StepSchedule
from baton.training.bptt.lane_states import LaneStates
from baton.training.build import build
from baton.training.callbacks.checkpoint import CheckpointCallback
from baton.training.checkpoint.interval import CheckpointSchedule
from baton.training.checkpoint.store import CheckpointStore, published
from baton.training.run import RunProgress, RunSettings
from baton.training.step.executor import StepExecutor

TRUNCATED = {"mode": "truncated", "segment": 8}


def saver_of(train_state, config, mesh, folder):
    """What a run saves with, and where to."""
    lanes = LaneStates(train_state.model, config, mesh) if config.carries_lane_states else None
    store = CheckpointStore(folder / "checkpoints", mesh, 2, async_save=True)
    data = ShardsConfig(path="nowhere", tokenizer="nowhere")
    settings = RunSettings(folder, train_state.model.config, data, config, "")
    schedule = CheckpointSchedule(config.checkpoint, config.steps, mesh, 0)
    return CheckpointCallback(train_state, lanes, store, None, schedule, settings, lambda: {"fingerprints": {}, "data": {}}), store


# ------------------------------------------------------------------------------------------------------------ what a plan counts


def held(mesh, model, config, folder):
    """Bytes of host memory that this rank keeps after two saves."""
    train_state = build(model, config, mesh)
    saver, store = saver_of(train_state, config, mesh, folder)
    for step in (1, 2):
        saver.save(RunProgress(step, 0, {}))
    saver.finish()
    assert len(published(folder / "checkpoints")) == 2
    return store._staging._memory.nbytes


LAYOUTS = [
    {"data": 1},
    {"data": 2, "zero": 0},
    {"data": 4},
    {"tensor": 2, "data": 2},
    {"pipeline": 2, "context": 2},
]


# of the four forms one on each layout, each on another one; all in the long form
FORMS = [
    pytest.param(layout, kind, bptt, marks=() if 2 * (kind == "hybrid") + (bptt is None) == n % 4 else pytest.mark.long)
    for n, layout in enumerate(LAYOUTS)
    for kind in ("mamba", "hybrid")
    for bptt in (None, TRUNCATED)
]


@pytest.mark.parametrize(("layout", "kind", "bptt"), FORMS, ids=str)
def test_a_plan_counts_the_copy_that_a_save_makes(pool, tmp_path, layout, kind, bptt):
    model, config = model_of(kind), training(bptt=bptt)
    ranks = pool.run(held, model, config, tmp_path, **layout)
    run = {"name": "small", "device": "cpu", "model": model.model_dump(), "training": config.model_dump(), "layout": layout}
    stages = of_stages(RunConfig.model_validate(run))
    per_stage = len(ranks) // len(stages)
    for number, one in enumerate(stages):
        # ranks are numbered stage by stage; what several hold one of them saves, and ZeRO's parts are padded to whole numbers
        most = max(ranks[number * per_stage : (number + 1) * per_stage])
        assert one.memory().saved == one.host_bytes == pytest.approx(most, rel=0.01)


def test_a_plan_counts_what_lanes_carried_before_a_step(single_mesh):
    """Segments write a lane several times in a step; it is kept once."""
    config = training(bptt=TRUNCATED)
    train_state = build(model_of("mamba"), config, single_mesh)
    lanes = LaneStates(train_state.model, config, single_mesh)
    executor = StepExecutor(train_state.model, train_state.engine, single_mesh, lanes=lanes, schedule=StepSchedule(3, 1))
    whole = step_batch(0)
    batches = [Batch(whole.tokens[r : r + 2], whole.labels[r : r + 2], whole.pos[r : r + 2], (r, r + 1)) for r in (0, 2, 4, 6)]
    run = {"name": "small", "device": "cpu", "model": model_of("mamba").model_dump(), "training": config.model_dump()}
    run["training"]["bptt"] = {**TRUNCATED, "gradient_segments": 1}
    counted = of_stages(RunConfig.model_validate(run))[0].memory().before
    for _ in range(2):
        executor.step(batches, 1e-3)
        assert lanes.backup_bytes == counted > 0


# ------------------------------------------------------------------------------------------------------------ a hundred saves

WARM_UP = 10
#: Of one checkpoint's copy: what all saves after the warm-up together may leave behind in resident memory.
LEFT = 1 / 3
#: glibc then gives back at once what is freed, and what stays is what somebody holds.
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def resident(folder, saves):
    """Bytes of a checkpoint's copy, and resident bytes of this process after each save of training that saves after every step."""
    torch.set_num_threads(1)
    mesh = meshes.initialize(LayoutConfig(), device=torch.device("cpu"), rank=0, store=torch.distributed.HashStore())
    model = ModelConfig(**{**model_of("mamba").model_dump(), "d_model": 192, "n_layers": 4})
    config = training(steps=saves, checkpoint={"every": 1, "keep_last": 2}, global_batch_tokens=48, micro_batch_size=2)
    train_state = build(model, config, mesh)
    saver, store = saver_of(train_state, config, mesh, folder)
    executor, whole, seen = StepExecutor(train_state.model, train_state.engine, mesh), step_batch(0), []
    progress, process = RunProgress(0, 0, {}), psutil.Process()
    for _ in range(saves):
        result = executor.step([Batch(whole.tokens[:2], whole.labels[:2], whole.pos[:2])], 1e-3)
        progress.advance(48, {})
        saver.after_step(progress, result)
        seen.append(process.memory_info().rss)
    assert [path.name for path in published(folder / "checkpoints")] == [f"step-{n:08d}" for n in (saves - 1, saves)]
    meshes.shutdown()
    return store._staging._memory.nbytes, seen


@pytest.mark.long  # that two saves have the memory of one is tested above
@pytest.mark.parametrize("saves", [20, 100])
def test_resident_memory_is_flat_over_saves(tmp_path, saves):
    """Saves that are written while the run trains on, in a process of their own, whose allocator keeps nothing to itself."""
    environment = {**os.environ, **ALLOCATOR, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-P", __file__, str(tmp_path), str(saves)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    size, seen = json.loads(done.stdout.splitlines()[-1])
    after, some = seen[WARM_UP:], len(seen[WARM_UP:]) // 3
    left = statistics.median(after[-some:]) - statistics.median(after[:some])
    assert left <= LEFT * size, f"{left:,.0f} bytes are left of {len(after)} saves, of {size:,} each: {seen}"


if __name__ == "__main__":
    print(json.dumps(resident(Path(sys.argv[1]), int(sys.argv[2]))))
