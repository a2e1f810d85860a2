"""Training with sequence parallelism gives the model that one process trains."""

import functools

import pytest
import torch
import torch.distributed as dist
from support.compare import relative_error
from support.grid import model_for
from support.models import micro_batches, model_of, step_batch, training

from baton.data_pipeline.packing import IGNORE_INDEX
from baton.models.lm import LanguageModel
from baton.models.settings import kinds
from baton.parallel.param_layout import gather_parameters, initialize_parameters, named_layouts
from baton.parallel.parameter_groups import parameter_groups
from baton.training.build import build, build_model
from baton.training.evaluation.generation import Sampling, generate
from baton.training.lr_schedule import learning_rates
from baton.training.step.executor import StepExecutor

STEPS = 2
MIXERS = [*(kind for kind in kinds() if kind != "ttt"), "hybrid"]
"""ttt's inner LayerNorm of small outputs costs float32 a digit: tests/models/test_sequence_parallel.py has it in float64."""


def settings(**changes):
    """Steps are small: AdamW makes whole ones of gradients that are little more than rounding."""
    config = training(**changes)
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"lr": 1e-3, "eps": 1e-5})})


@functools.cache
def one_process(mixer):
    """Plain PyTorch: of each step the loss, the norm and all gradients before the clip; and the parameters at the end."""
    config = settings()
    model = LanguageModel(model_for(mixer))
    initialize_parameters(model, config.seed, 0, 1)
    o = config.optimizer
    optimizer = torch.optim.AdamW(parameter_groups(model, o.weight_decay), lr=o.lr, betas=o.betas, eps=o.eps)
    rows, gradients = [], []
    for step in range(STEPS):
        batch = step_batch(step)
        optimizer.zero_grad()
        loss = model.loss(model(batch.tokens, batch.pos)[0], batch.labels) / (batch.labels != IGNORE_INDEX).sum()
        loss.backward()
        gradients.append(in_parts(model, lambda p: p.grad))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rates(step, config)[""]
        optimizer.step()
        rows.append((loss.item(), norm.item()))
    return rows, gradients, in_parts(model, lambda p: p.detach())


def in_parts(model, of):
    """By the names of parts, copied."""
    found = {}
    for name, parameter, layout in named_layouts(model):
        for block in layout.shard_boxes(name, 0, 1):
            found[block.name] = of(parameter)[block.local_row : block.local_row + block.extent[0]].clone()
    return found


def steps(mesh, mixer, recompute="none", compute_dtype="float32"):
    """Loss and norm of each step; whole gradients as they are after the finalise pass, added up over the data ranks; parameters."""
    config = settings(compute_dtype=compute_dtype, recompute=recompute)
    train_state = build(model_for(mixer), config, mesh)
    gradients, update = [], train_state.engine.sum_gradients

    lent = {
        block.name
        for name, _, layout in named_layouts(train_state.model)
        if layout.tied_replica
        for block in layout.shard_boxes(name, 0, 1)
    }

    def summed(parameter):
        # what is lent has none: its owner has it
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        dist.all_reduce(grad, group=mesh.data_group)
        return grad

    def sum_of_engine(*arguments):
        whole = gather_parameters(train_state.model, mesh.tensor_group, of=summed)
        gradients.append({name: grad for name, grad in whole.items() if name not in lent})
        return update(*arguments)

    train_state.engine.sum_gradients = sum_of_engine
    executor, rows = StepExecutor(train_state.model, train_state.engine, mesh), []
    for step in range(STEPS):
        batches = micro_batches(
            step, mesh.data_rank, mesh.layout.data, config.micro_batch_size, mesh.context_rank, mesh.layout.context
        )
        result = executor.step(batches, learning_rates(step, config)[""])
        rows.append((result.loss, result.grad_norm))
    return rows, gradients, gather_parameters(train_state.model, mesh.tensor_group)


LAYOUTS = [
    {"tensor": 2},
    {"tensor": 4},
    {"tensor": 2, "context": 2},
    {"tensor": 2, "pipeline": 2},
    {"tensor": 2, "data": 2},
    {"tensor": 2, "data": 2, "recompute": "full"},
    {"tensor": 2, "pipeline": 2, "context": 2, "recompute": "full"},
]


def steps_of(mesh, mixers, **options):
    return {mixer: steps(mesh, mixer, **options) for mixer in mixers}


# always a selective scan on the one that has everything, and linear attention, a delta rule and softmax attention on two ranks; all
# mixers on both in the long form. tests/models/test_sequence_parallel.py always has a layer of each
OFTEN = ((LAYOUTS[-1], ["mamba"]), (LAYOUTS[0], ["hgrn2", "gated_delta_net", "attention"]))


@pytest.mark.parametrize(("layout", "mixers"), [*OFTEN, *(pytest.param(x, MIXERS, marks=pytest.mark.long) for x in LAYOUTS)])
def test_every_mixer_on_a_shared_residual_stream_equals_one_process(pool, single_mesh, layout, mixers):
    """Losses, norms, gradients after the finalise pass and parameters. Sums of many gradients of either sign lose more digits."""
    seen = {mixer: set() for mixer in mixers}
    for found in pool.run(steps_of, mixers, sequence_parallel=True, timeout_s=280, **layout):
        for mixer in mixers:
            rows, gradients, parameters = found[mixer]
            want_rows, want_gradients, want_parameters = one_process(mixer)
            for (loss, norm), (want_loss, want_norm) in zip(rows, want_rows, strict=True):
                assert loss == pytest.approx(want_loss, rel=1e-5), mixer
                assert norm == pytest.approx(want_norm, rel=1e-5), mixer
            for own, want in zip(gradients, want_gradients, strict=True):
                for name, grad in own.items():
                    assert relative_error(grad, want[name]) <= 3e-5, f"{mixer}: {name}"
            for name, value in parameters.items():
                assert relative_error(value, want_parameters[name]) <= 1e-5, f"{mixer}: {name}"
            seen[mixer] |= gradients[0].keys()
    assert seen == {mixer: one_process(mixer)[2].keys() for mixer in mixers}


def test_bfloat16_on_a_shared_residual_stream(pool, single_mesh):
    want_rows, _, _ = one_process("mamba")
    layout = {"tensor": 2, "data": 2, "recompute": "full", "compute_dtype": "bfloat16"}
    for rows, _, _ in pool.run(steps, "mamba", sequence_parallel=True, **layout):
        for (loss, norm), (want_loss, want_norm) in zip(rows, want_rows, strict=True):
            assert loss == pytest.approx(want_loss, rel=1e-2)
            assert norm == pytest.approx(want_norm, rel=5e-2)


def written(mesh):
    """Ids that follow prompts of odd and even lengths, and the last logits of one; nothing on stages but the last."""
    texts, logits = [], []
    for mixer in ("hybrid", "bmojo", "full_attention"):
        model = build_model(model_of(mixer), training(), mesh.device, mesh)
        initialize_parameters(model, 3, mesh.tensor_rank, mesh.layout.tensor)
        for prompts in ([[0, 5, 9]], [[0, 5, 9, 17]], [[0]], [[0, 5], [0, 7, 9, 3, 11], [0]]):
            texts += generate(model, prompts, tokens=4, vocab_size=61, stop=None, sampling=Sampling(1.0))
        pos = torch.arange(5, dtype=torch.int32)[None]
        hidden, _ = model.through_stages(pos.long(), pos)
        logits.append(None if hidden is None else model.logits(hidden).detach())
    return texts, logits


@pytest.mark.parametrize("pipeline", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_shared_residual_stream_writes_the_same_text(pool, pipeline):
    """A token at a time, which no two ranks can share, and prompts that ranks do not divide."""
    ((texts, logits),) = pool.run(written)
    for own_texts, own_logits in pool.run(written, tensor=2, pipeline=pipeline, sequence_parallel=True):
        assert own_texts == texts
        for own, want in zip(own_logits, logits, strict=True):
            assert own is None or relative_error(own, want) <= 1e-5
