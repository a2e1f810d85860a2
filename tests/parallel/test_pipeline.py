"""Pipeline stages: the order of operations, memory, tied embeddings, and passes without gradients."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import MODEL, micro_batches, model_of, training

from baton.models import stages
from baton.parallel.pipeline import Operation, StepSchedule
from baton.training.build import build, build_model
from baton.training.evaluation.evaluate import evaluate, evaluate_task
from baton.training.evaluation.generation import generate
from baton.training.lr_schedule import learning_rates
from baton.training.step.executor import StepExecutor
from baton.training.step.microbatch_runner import MicrobatchRunner


@settings(derandomize=True)
@given(st.integers(1, 9), st.integers(1, 17))
def test_a_schedule_runs_every_pass_once_in_order_and_keeps_few(count, micro_batches):
    """The stages do not deadlock: each operation's inputs are computed before an operation waits for them."""
    orders = [StepSchedule().operations(stage, count, micro_batches) for stage in range(count)]
    for stage, order in enumerate(orders):
        for kind in ("forward", "backward"):
            assert [o.micro_batch for o in order if o.kind == kind] == list(range(micro_batches))
        held, most = 0, 0
        for operation in order:
            held += 1 if operation.kind == "forward" else -1
            assert held >= 0, "a backward before its forward"
            most = max(most, held)
        assert most == min(count - stage, micro_batches)
    assert_finishes(orders)


@settings(derandomize=True)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.integers(1, 5))
def test_a_schedule_of_segments_surveys_what_runs_twice_and_keeps_one(count, micro_batches, groups, together):
    """From the last segment of those that a gradient goes through to the first; and the stages together finish."""
    segments = groups * together
    orders = [StepSchedule(segments, together).operations(stage, count, micro_batches) for stage in range(count)]
    every = [(n, s) for n in range(micro_batches) for s in range(segments)]
    for stage, order in enumerate(orders):
        of = {
            kind: [(o.micro_batch, o.segment) for o in order if o.kind == kind]
            for kind in ("forward_no_grad", "forward", "backward")
        }
        assert of["forward_no_grad"] == [(n, s) for n, s in every if (s + 1) % together]
        assert of["forward"] == of["backward"] == sorted(every, key=lambda at: (at[0], at[1] // together, -at[1]))
        held = list(itertools.accumulate({"forward_no_grad": 0, "forward": 1, "backward": -1}[o.kind] for o in order))
        assert max(held) == (1 if together > 1 else min(count - stage, len(every)))
        assert min(held) == 0
    assert_finishes(orders)


def assert_finishes(orders):
    """No stage waits for ever for what others have not done."""
    count = len(orders)
    done, places = set(), [0] * count
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        ready = []
        for stage, (place, order) in enumerate(zip(places, orders, strict=True)):
            if place < len(order) and needs(stage, count, order[place], orders) <= done:
                ready.append((stage, order[place]))
        assert ready, "every stage waits for another"
        for stage, operation in ready:
            done.add((stage, operation))
            places[stage] += 1


def needs(stage, count, operation, orders):
    """What must have been done before: hidden vectors are sent when a segment runs for the first time."""
    at = operation.micro_batch, operation.segment
    if operation.kind == "backward":
        found = {(stage, Operation("forward", *at))}
        return found | ({(stage + 1, operation)} if stage < count - 1 else set())
    first = operation.kind == "forward_no_grad" or Operation("forward_no_grad", *at) not in orders[stage]
    return {(stage - 1, operation)} if stage and first else set()


def held_at_once(mesh):
    """The most micro-batches that this stage keeps in a step."""
    config = training(micro_batch_size=1)
    train_state, most = build(MODEL, config, mesh), 0
    model = train_state.model
    runner = MicrobatchRunner(model, micro_batches(0, 0, 1, 1), 1.0, StepSchedule(), None, model.forward_context)
    for operation in StepSchedule().operations(model.stage.index, model.stage.count, 8):
        runner.run_operation(operation)
        most = max(most, len(runner._activations))
    mesh.pipeline.wait()
    return most


def test_a_stage_keeps_no_more_micro_batches_than_stages_follow(pool):
    assert pool.run(held_at_once, pipeline=3) == [3, 2, 1]


def embeddings(mesh, mixer):
    """The tied embedding's bits after each of some steps; None where there is none."""
    config = training()
    train_state, found = build(model_of(mixer), config, mesh), []
    executor = StepExecutor(train_state.model, train_state.engine, mesh)
    for step in range(3):
        executor.step(micro_batches(step, mesh.data_rank, mesh.layout.data, 2), learning_rates(step, config))
        weight = train_state.model.embedding.weight if hasattr(train_state.model, "embedding") else None
        found.append(None if weight is None else weight.detach().clone())
    owned = {id(p) for group in train_state.engine.param_groups for p in group["params"]}
    return (
        found,
        hasattr(train_state.model, "embedding") and id(train_state.model.embedding.weight) in owned,
        hasattr(train_state.model, "head"),
    )


def test_a_tied_embedding_is_lent_bit_for_bit_and_updated_by_its_owner_alone(pool):
    found = pool.run(embeddings, "mamba", pipeline=3, data=2)
    first, middle, last = found[:2], found[2:4], found[4:]
    assert all(values == [None] * 3 for values, *_ in middle)
    for step in range(3):
        values = [rank[0][step] for rank in (*first, *last)]
        assert all(torch.equal(values[0], other) for other in values[1:])
    assert not torch.equal(first[0][0][0], first[0][0][2])
    if pool.run(owners, pipeline=2) != [(True, 0), (False, 1)]:
        pytest.fail("the last stage must not update what it is lent")


def owners(mesh):
    """Whether the optimizer has the embedding, and the stage."""
    train_state = build(MODEL, training(), mesh)
    held = {f.parameter for f in train_state.engine.fragments()}
    return train_state.model.embedding.weight in held, train_state.model.stage.index


def test_an_untied_head_needs_no_embedding_on_the_last_stage(pool):
    *_, (values, _, head) = pool.run(embeddings, "hybrid", pipeline=2)
    assert values == [None] * 3
    assert head


def without_gradients(mesh):
    """Loss, accuracy and text of a model that was not trained."""
    model = build_model(MODEL, training(), mesh.device, mesh)
    from baton.parallel.param_layout import initialize_parameters

    initialize_parameters(model, 3, mesh.tensor_rank, mesh.layout.tensor)
    spans = (mesh.context_rank, mesh.layout.context)
    batches = micro_batches(0, mesh.data_rank, mesh.layout.data, 2, *spans)
    found = evaluate(model, batches, 1000, 180, mesh)
    scored = evaluate_task(model, batches, 180, mesh)
    text = generate(model, [[1, 5, 7], [1]], tokens=6, vocab_size=61, stop=None, seeds=[2, 3])
    return found.loss, scored.loss, scored.accuracy, text


def test_evaluation_and_writing_do_not_depend_on_the_stages(pool):
    expected = pool.run(without_gradients, data=1)[0]
    layouts = ({"pipeline": 3}, {"pipeline": 2, "tensor": 2, "data": 2}, {"pipeline": 2, "context": 2})
    for layout in layouts:
        for loss, other, accuracy, text in pool.run(without_gradients, **layout):
            assert (loss, other) == pytest.approx(expected[:2], rel=1e-6)
            assert accuracy == expected[2]
            assert text == expected[3], layout


def test_the_parts_of_a_model_are_the_model(single_mesh):
    from baton.models.lm import LanguageModel

    whole = {name: p.shape for name, p in LanguageModel(MODEL).named_parameters()}
    for count in (1, 2, 3):
        parts = [LanguageModel(MODEL, stage=stage) for stage in stages.partition_layers(MODEL, count, 24)]
        names = [name for part in parts for name, p in part.named_parameters() if not p.baton_layout.tied_replica]
        assert sorted(names) == sorted(whole)
