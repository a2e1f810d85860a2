"""The mixers learn tasks that need recall from the context, on one core in seconds.

Two layers of width 32, AdamW without decay, examples that never repeat, by the parts that `baton train` is made of. Each run ends
as soon as accuracy on held-out examples is 99 %; the steps allowed are about twice what it took with several seeds.
"""

import pytest

from baton.data_pipeline.steps import StepPlan
from baton.data_pipeline.synthetic_stream import SyntheticStream, synthetic_evaluation_set
from baton.data_pipeline.task_config import InductionConfig, MqarConfig
from baton.models.config import ModelConfig
from baton.models.settings import kinds
from baton.training.build import build
from baton.training.config import TrainingConfig
from baton.training.evaluation.evaluate import evaluate_task
from baton.training.lr_schedule import learning_rate
from baton.training.step import batch_distribution
from baton.training.step.executor import StepExecutor

ROWS, HELD_OUT, LOOK_EVERY = 64, 256, 25


def induction(length, vocab_size):
    return InductionConfig(length=length, vocab_size=vocab_size)


def recall(length, pairs, vocab_size, **settings):
    return MqarConfig(length=length, pairs=pairs, vocab_size=vocab_size, filler="zero", **settings)


def learn(mesh, pattern, mixers, task, *, steps, enough=0.99, seed=0):
    """Accuracy on held-out examples after training for `steps` steps, or as soon as it is `enough`."""
    training = TrainingConfig(
        steps=steps,
        sequence_length=task.length,
        global_batch_tokens=ROWS * task.length,
        micro_batch_size=ROWS,
        compute_dtype="float32",
        seed=seed,
        optimizer={"lr": 1e-2, "weight_decay": 0.0},
        schedule={"kind": "constant", "warmup_steps": 10},
    )
    named = {name: {"kind": name, **settings} for name, settings in mixers.items()}
    train_state = build(
        ModelConfig(d_model=32, n_layers=2, pattern=pattern, mixers=named, vocab_size=task.vocab_size), training, mesh
    )
    executor = StepExecutor(train_state.model, train_state.engine, mesh)
    one_rank = {"sequence_length": task.length, "micro_batch_size": ROWS, "data_rank": 0, "data_size": 1}
    held_out = synthetic_evaluation_set(task, tokens=HELD_OUT * task.length, **one_rank)
    batches = [batch_distribution.distribute(batch, mesh, batch.tokens.shape) for batch in held_out.batches]
    plan = StepPlan.constant(**one_rank, lanes=ROWS, lanes_per_step=ROWS, start_step=0, prefetch=2)
    accuracy = 0.0
    with SyntheticStream(task, plan, seed=seed) as stream:
        for step, data in zip(range(steps), batch_distribution.StepReader(stream, mesh, training)):
            executor.step(data.batches, learning_rate(step, training))
            if (step + 1) % LOOK_EVERY == 0 or step + 1 == steps:
                accuracy = evaluate_task(train_state.model, batches, held_out.labels, mesh).accuracy
                if accuracy >= enough:
                    break
    return accuracy


# mixer: (its settings, what it learns). Those without a convolution must first find out which token came before: an easier task
LEARNERS = {
    "mamba": ({}, induction(32, 16)),
    "longhorn": ({}, induction(64, 16)),
    "mamba2": ({"head_dim": 16, "d_state": 16}, induction(32, 16)),
    "mamba3": ({"head_dim": 16, "d_state": 16}, induction(16, 8)),
    "delta_net": ({"heads": 2, "d_key": 16, "d_value": 16}, induction(32, 16)),
    "gated_delta_net": ({"heads": 2, "d_key": 16, "d_value": 32}, recall(16, 3, 16)),
    "kda": ({"heads": 2, "d_key": 16, "d_value": 32}, recall(16, 3, 16)),
    "lattice": ({"heads": 2, "head_dim": 16, "slots": 8}, recall(16, 3, 16)),
    "gsa": ({"heads": 2, "head_dim": 16, "slots": 8}, induction(16, 8)),
    "gla": ({"heads": 2}, induction(16, 8)),
    "hgrn2": ({"heads": 2, "d_key": 16}, induction(16, 8)),
    "mlstm": ({"heads": 2}, induction(16, 8)),
    "retnet": ({"d_key": 16}, induction(16, 8)),
    "rwkv6": ({"d_key": 16, "d_value": 16}, induction(16, 8)),
    "rwkv7": ({"d_key": 16, "d_value": 16}, induction(16, 8)),
    "ttt": ({"heads": 2, "head_dim": 16}, induction(32, 16)),
    "rg_lru": ({"blocks": 4}, induction(32, 16)),
}
SHORT = ("mamba",)


@pytest.mark.long  # tests/training/test_gradient_reach.py always has a model that learns to recall
@pytest.mark.parametrize("mixer", SHORT)
def test_it_learns_to_recall(single_mesh, mixer):
    settings, task = LEARNERS[mixer]
    assert learn(single_mesh, (mixer,), {mixer: settings}, task, steps=400) >= 0.95


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("mixer", LEARNERS)
def test_every_mixer_learns_to_recall(single_mesh, mixer, seed):
    settings, task = LEARNERS[mixer]
    assert learn(single_mesh, (mixer,), {mixer: settings}, task, steps=400, seed=seed) >= 0.95


def test_learners_are_mixers():
    assert set(LEARNERS) <= set(kinds())


BMOJO = {"heads": 2, "head_dim": 16, "window": 6, "eidetic": 16, "fading_tokens": 2, "ssm": {"d_state": 8}}
OUTSIDE = recall(36, 3, 16, power=1.0)
"""Three pairs in the first 6 tokens, questions anywhere in the 30 after them: most see no pair in a window of 6."""


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1])
def test_bmojo_recalls_pairs_outside_its_window_and_the_window_alone_does_not(single_mesh, seed):
    """Same layers, same window, same steps; only the memories differ."""

    def accuracy(**changes):
        mixers = {"bmojo": {**BMOJO, **changes}}
        return learn(single_mesh, ("mamba", "bmojo"), mixers, OUTSIDE, steps=200, seed=seed)

    assert accuracy() >= 0.95
    assert accuracy(eidetic=0, fading_tokens=0) <= 0.5


@pytest.mark.long
def test_a_stack_of_bmojo_alone_learns_to_recall(single_mesh):
    """Without convolutions of keys and values it has learned less than half of it by then; see the test below."""
    assert learn(single_mesh, ("bmojo",), {"bmojo": BMOJO}, OUTSIDE, steps=250) >= 0.95


@pytest.mark.long
def test_a_stack_of_bmojo_as_printed_learns_slowly(single_mesh):
    mixers = {"bmojo": {**BMOJO, "d_conv": None}}
    assert learn(single_mesh, ("bmojo",), mixers, OUTSIDE, steps=250) <= 0.7
