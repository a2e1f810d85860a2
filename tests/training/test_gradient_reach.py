"""Gradients through segments: a dependency over many segments is learned, unless the gradient is truncated between them.

Each sequence begins with a mark and a symbol; other symbols follow, and at the end that first one is asked for. To keep it, the
model must learn to, and no loss but the last token's tells it so.
"""

import math

import pytest
import torch
from support.long_form import some

from baton.data_pipeline.packing import Batch
from baton.models.config import ModelConfig
from baton.models.settings import kinds
from baton.parallel.pipeline import StepSchedule
from baton.training.bptt.lane_states import LaneStates
from baton.training.build import build
from baton.training.config import TrainingConfig
from baton.training.lr_schedule import learning_rate
from baton.training.step.executor import StepExecutor

SYMBOLS, SEGMENT, SEGMENTS, ROWS = 4, 6, 4, 32
MARK, ASK = SYMBOLS, SYMBOLS + 1
CHANCE = math.log(SYMBOLS)


def examples(generator):
    """ROWS sequences; only the last token has a label."""
    tokens = torch.randint(SYMBOLS, (ROWS, SEGMENT * SEGMENTS), generator=generator)
    tokens[:, 0], tokens[:, -1] = MARK, ASK
    labels = torch.full_like(tokens, -1)
    labels[:, -1] = tokens[:, 1]
    pos = torch.arange(tokens.shape[1], dtype=torch.int32).expand(ROWS, -1).contiguous()
    return Batch(tokens, labels, pos, tuple(range(ROWS)))


def losses(mesh, steps, bptt):
    """Nats per answer of every step, on examples that were never seen before."""
    training = TrainingConfig(
        steps=steps,
        sequence_length=SEGMENT * SEGMENTS,
        global_batch_tokens=ROWS * SEGMENT * SEGMENTS,
        micro_batch_size=ROWS,
        compute_dtype="float32",
        bptt={"segment": SEGMENT, **bptt},
        optimizer={"lr": 4e-2, "weight_decay": 0.0},
        schedule={"kind": "constant", "warmup_steps": 20},
    )
    mixers = {"mamba": kinds()["mamba"].small()}
    config = ModelConfig(d_model=32, n_layers=1, vocab_size=SYMBOLS + 2, pad_vocab_to=2, pattern=["mamba"], mixers=mixers)
    train_state = build(config, training, mesh)
    lanes = LaneStates(train_state.model, training, mesh) if training.carries_lane_states else None
    schedule = StepSchedule(training.segments, training.gradient_segments)
    executor = StepExecutor(train_state.model, train_state.engine, mesh, schedule=schedule, lanes=lanes)
    generator, found = torch.Generator().manual_seed(0), []
    for step in range(steps):
        found.append(executor.step([examples(generator)], learning_rate(step, training)).loss)
        if learned(found):
            break
    return found


def learned(found):
    return len(found) > 10 and sum(found[-5:]) / 5 < 0.1


ENOUGH = pytest.param({"mode": "truncated", "gradient_segments": SEGMENTS}, marks=pytest.mark.long)


@pytest.mark.parametrize("bptt", [{"mode": "exact"}, ENOUGH], ids=str)
def test_what_lies_segments_back_is_learned_by_a_gradient_that_reaches_it(single_mesh, bptt):
    """About half of the steps allowed are needed."""
    assert learned(losses(single_mesh, 160, bptt))


@pytest.mark.parametrize("gradient_segments", some((1, 2), ()))
def test_it_is_not_learned_when_the_gradient_is_cut_before_it(single_mesh, gradient_segments):
    """Although the State is carried on: the loss stays that of guessing. Where gradients are cut, tests/training/test_segments.py
    tests in every run."""
    found = losses(single_mesh, 100, {"mode": "truncated", "gradient_segments": gradient_segments})
    assert sum(found[-20:]) / 20 > 0.97 * CHANCE
