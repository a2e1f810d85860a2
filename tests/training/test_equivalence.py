"""Further properties that do not depend on the layout: initial values, recomputation, learning rates, rejected steps. See also
test_grid."""

from dataclasses import replace

import pytest
import torch
from support.compare import relative_error
from support.models import MODEL, micro_batches, model_of, step_batch, training

from baton.data_pipeline.packing import IGNORE_INDEX, Batch
from baton.data_pipeline.run_source import open_source
from baton.data_pipeline.steps import PhaseSpec, StepPlan
from baton.data_pipeline.task_config import MqarConfig
from baton.models.config import ModelConfig
from baton.models.lm import LanguageModel
from baton.parallel.errors import LayoutError
from baton.parallel.param_layout import gather_parameters, initialize_parameters
from baton.parallel.parameter_groups import parameter_groups
from baton.training import loop
from baton.training.build import build
from baton.training.checkpoint.config import CheckpointConfig
from baton.training.config_checks import with_vocabulary
from baton.training.evaluation.config import EvaluationConfig
from baton.training.lr_schedule import learning_rates
from baton.training.monitoring.metrics import read_metrics
from baton.training.run import RunSettings
from baton.training.step.executor import StepExecutor

STEPS = 3


def settings_of(mixer, **changes):
    """B'MOJO's state space has a learning rate of its own, as in its paper."""
    config = training(**changes)
    if mixer != "bmojo":
        return config
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"lr_overrides": {"*.ssm.*": 9e-3}})})


def oracle(compute_dtype="float32", mixer="mamba"):
    """One process, torch's AdamW and clipping, the whole batch at once: nothing of DeepSpeed, the executor or splitting."""
    config = settings_of(mixer, compute_dtype=compute_dtype)
    model = LanguageModel(model_of(mixer), compute_dtype=getattr(torch, compute_dtype))
    initialize_parameters(model, config.seed, 0, 1)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    o = config.optimizer
    optimizer = torch.optim.AdamW(parameter_groups(model, o.weight_decay, tuple(o.lr_overrides)), lr=o.lr, betas=o.betas, eps=o.eps)
    rows = []
    for step in range(STEPS):
        batch = step_batch(step)
        optimizer.zero_grad()
        loss = model.loss(model(batch.tokens, batch.pos)[0], batch.labels) / (batch.labels != IGNORE_INDEX).sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rates(step, config)[group["lr_override"]]
        optimizer.step()
        for module in model.modules():
            module._cast_weight_cache = None
        rows.append((loss.item(), norm.item()))
    return rows, model, start


def steps_on_a_layout(mesh, compute_dtype="float32", recompute="none", mixer="mamba"):
    config = settings_of(mixer, compute_dtype=compute_dtype, recompute=recompute)
    train_state = build(model_of(mixer), config, mesh)
    initial = gather_parameters(train_state.model, mesh.tensor_group)
    executor = StepExecutor(train_state.model, train_state.engine, mesh)
    rows = []
    for step in range(STEPS):
        batches = micro_batches(
            step, mesh.data_rank, mesh.layout.data, config.micro_batch_size, mesh.context_rank, mesh.layout.context
        )
        result = executor.step(batches, learning_rates(step, config))
        rows.append((result.loss, result.grad_norm, result.labels))
    return rows, initial, gather_parameters(train_state.model, mesh.tensor_group)


def whole(model, values):
    """The oracle's parameters under the names of their parts."""
    found = {}
    for name, p in model.named_parameters():
        for block in p.baton_layout.shard_boxes(name, 0, 1):
            found[block.name] = values[name][block.local_row : block.local_row + block.extent[0]]
    return found


@pytest.mark.parametrize(
    ("mixer", "layout"),
    [
        ("mamba", {"tensor": 2, "pipeline": 3}),
        pytest.param("hybrid", {"tensor": 2, "data": 2}, marks=pytest.mark.long),
        pytest.param("mamba", {"tensor": 2, "data": 2}, marks=pytest.mark.long),
        pytest.param("hybrid", {"tensor": 2, "pipeline": 3}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_initial_values_and_labels_do_not_depend_on_the_layout(pool, single_mesh, mixer, layout):
    _, model, start = oracle(mixer=mixer)
    begun, seen = whole(model, start), set()
    for found, initial, _ in pool.run(steps_on_a_layout, mixer=mixer, **layout):
        assert [r[2] for r in found] == [int((step_batch(s).labels != IGNORE_INDEX).sum()) for s in range(STEPS)]
        assert all(torch.equal(value, begun[name]) for name, value in initial.items())
        seen |= initial.keys()
    assert seen == begun.keys()


def test_a_step_without_labels_has_no_loss_and_no_gradient(single_mesh):
    """As where masks leave nothing of its rows to be learned."""
    config = settings_of("mamba")
    train_state = build(model_of("mamba"), config, single_mesh)
    executor = StepExecutor(train_state.model, train_state.engine, single_mesh)
    batches = micro_batches(0, 0, 1, config.micro_batch_size, 0, 1)
    unlabelled = [replace(batch, labels=torch.full_like(batch.labels, IGNORE_INDEX)) for batch in batches]
    for expected, given in ((True, batches), (False, unlabelled), (True, batches)):
        result = executor.step(given, 1e-3)
        found = result.loss, result.grad_norm, result.labels
        assert result.anomaly is None
        assert all(x > 0 for x in found) if expected else found == (0.0, 0.0, 0)
    assert all(bool(p.isfinite().all()) for p in train_state.model.parameters())


@pytest.mark.long
def test_layers_without_skips_and_biases_on_a_layout_equal_plain_pytorch(pool, single_mesh):
    rows, model, _ = oracle(mixer="bare")
    expected = whole(model, {name: p.detach() for name, p in model.named_parameters()})
    found, _, parameters = pool.run(steps_on_a_layout, mixer="bare", tensor=2, context=2)[0]
    for (loss, norm, _), wanted in zip(found, rows, strict=True):
        assert (loss, norm) == pytest.approx(wanted, rel=1e-5)
    assert parameters.keys() == expected.keys()
    assert not any(name.endswith((".D", "beta_bias")) for name in parameters)
    for name, value in expected.items():
        assert relative_error(parameters[name], value) <= 1e-5, name


@pytest.mark.parametrize(
    ("mixer", "ranks"), [("mamba", 2), *(pytest.param(mixer, 4, marks=pytest.mark.long) for mixer in ("mamba", "lattice", "bmojo"))]
)
def test_recomputation_exchanges_nothing(pool, mixer, ranks):
    """Over sequence ranks: as many messages as without, and the same bits."""
    plain = pool.run(messages, mixer=mixer, context=ranks)
    recomputed = pool.run(messages, mixer=mixer, recompute="full", context=ranks)
    for (rows, counted), (rows_again, counted_again) in zip(plain, recomputed):
        assert rows == rows_again
        assert counted == counted_again
        assert sum(counted.values()) > 0


def messages(mesh, mixer, recompute="none"):
    rows, _, _ = steps_on_a_layout(mesh, mixer=mixer, recompute=recompute)
    return rows, dict(mesh.link.sent)


def test_recomputation_and_bfloat16_on_a_layout(pool, single_mesh):
    rows, _, _ = oracle("bfloat16")
    found, _, _ = pool.run(steps_on_a_layout, tensor=2, data=2, compute_dtype="bfloat16", recompute="full")[0]
    for (loss, norm, _), (want_loss, want_norm) in zip(found, rows):
        assert loss == pytest.approx(want_loss, rel=1e-2)
        assert norm == pytest.approx(want_norm, rel=5e-2)


def test_rates_are_of_the_parameters_that_match(single_mesh):
    model = LanguageModel(model_of("bmojo"))
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, 0.1, ("layers.0.*.ssm.*", "*.ssm.*"))
    found = {(group["lr_override"], group["weight_decay"]): {names[p] for p in group["params"]} for group in groups}
    assert sum(len(group) for group in found.values()) == len(names)
    for (rate, decay), group in found.items():
        for name in group:
            assert rate == ("" if ".ssm." not in name else "layers.0.*.ssm.*" if name.startswith("layers.0") else "*.ssm.*")
            assert (decay == 0.1) == (not ("norm" in name or name.endswith(("bias", "A_log", ".D")) or "embedding" in name))
    with pytest.raises(LayoutError, match=r"no parameter's name matches '\*.sms.\*'"):
        parameter_groups(model, 0.1, ("*.sms.*",))


def test_a_run_is_its_steps_made_by_hand(single_mesh, tmp_path):
    """What the loop adds to a step: its rows, its learning rate and the count of tokens. The batch grows after two steps."""
    task, rows_of_steps = MqarConfig(length=12, pairs=2, vocab_size=36), (2, 2, 4, 4, 4)
    config = training(
        sequence_length=12,
        global_batch_tokens=4 * 12,
        batch_size_warmup=[{"steps": 2, "global_batch_tokens": 2 * 12}],
        checkpoint=CheckpointConfig(every=5),
        evaluation=EvaluationConfig(every=0),
    )
    model = ModelConfig(d_model=16, n_layers=1, pad_vocab_to=4, mixers=MODEL.mixers)
    loop.train(RunSettings(tmp_path, model, task, config, "name: test"), single_mesh)
    recorded = [row for row in read_metrics(tmp_path / "metrics.jsonl") if row["kind"] == "train"]

    train_state = build(with_vocabulary(model, task.vocab_size, None), config, single_mesh)
    executor, phases = (
        StepExecutor(train_state.model, train_state.engine, single_mesh),
        (PhaseSpec(0, 12, 2, 2), PhaseSpec(2, 12, 4, 2)),
    )
    plan = StepPlan(lanes=config.lane_count, phases=phases, data_rank=0, data_size=1, start_step=0, prefetch=1)
    found = []
    with open_source(task).stream(plan, seed=config.seed, cursors=None) as stream:
        for step, rows in enumerate(rows_of_steps):
            batches = [
                Batch(*map(torch.from_numpy, (batch.tokens, batch.labels, batch.pos)), batch.lanes)
                for batch in next(stream).micro_batches
            ]
            assert sum(len(batch.tokens) for batch in batches) == rows
            result = executor.step(batches, learning_rates(step, config))
            found.append((result.loss, result.grad_norm, 12 * rows, 12 * sum(rows_of_steps[: step + 1])))
    assert [(row["loss"], row["grad_norm"], row["step_tokens"], row["tokens"]) for row in recorded] == found
