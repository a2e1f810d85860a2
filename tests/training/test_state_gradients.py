"""State gradients at boundaries and gradient reach: the recorded values equal plain autograd's, and they are plotted."""

from functools import cache

import pytest
import torch
from support.compare import relative_error
from support.grid import model_for
from support.long_rows import ROWS, SEGMENT, SEGMENTS, TOKENS, Float64, joined, model_on, own_spans, plain, rows_of, whole_batch
from support.recurrences import seeded

from baton.data_pipeline.packing import Batch
from baton.models.config import ModelConfig
from baton.parallel.context_parallel import ContextLink
from baton.parallel.pipeline import StepSchedule
from baton.training.monitoring.long_context_plots import render_row
from baton.training.monitoring.state_gradients import StateGradientMonitor, StateGradients, gradient_reach
from baton.training.step.microbatch_runner import MicrobatchRunner

# recurrence -> the leaves that its messages hold
LANE_STATE_PREFIX = {
    "mamba": {"mamba short_conv-silu": ["conv"], "mamba selective_scan-euler-gated": ["h"]},
    "gsa": {"gsa gated_slot_attention-softmax-projected": ["k", "v"]},
    "lattice": {"lattice lattice-dec-project": ["S"]},
    "mamba2": {"mamba2 short_conv-silu": ["conv_x", "conv_bc"], "mamba2 gated_linear_attention-scalar": ["S"]},
    "attention": {"attention window_attention-4": ["k", "v"]},
}


def watched(mesh, mixers, last_only):
    """Of each mixer what a step's passes, or the credit of the last span alone, are seen to send left."""
    found = []
    for mixer in mixers:
        link = mesh.link or ContextLink(0, [mesh.rank], mesh.device)
        model = model_on(mesh, model_for(mixer), link)
        whole = whole_batch()
        rows = torch.arange(mesh.data_rank, ROWS - 1, mesh.layout.data)
        batches = [joined(own_spans(rows_of(whole, part), mesh, SEGMENTS)) for part in rows.split(1)]
        span = SEGMENT // mesh.layout.context
        with Float64():
            if last_only:
                marks = {name: torch.full_like(p, 3.0) for name, p in model.named_parameters()}
                for name, p in model.named_parameters():
                    p.grad = marks[name].clone()
                seen = gradient_reach(model, joined(own_spans(rows_of(whole, rows), mesh, SEGMENTS)), SEGMENTS, span, mesh)
                for name, p in model.named_parameters():
                    assert p.requires_grad
                    assert torch.equal(p.grad, marks[name])
            else:
                watch = StateGradientMonitor(model, link, mesh)
                scale = 1.0 / float(rows_of(whole, torch.arange(ROWS - 1)).count_labels())
                with watch.recording():
                    schedule = StepSchedule(SEGMENTS, SEGMENTS)
                    runner = MicrobatchRunner(model, batches, scale, schedule, None, model.forward_context)
                    for operation in schedule.operations(model.stage.index, model.stage.count, len(batches)):
                        runner.run_operation(operation)
                seen = watch.read(span)
            for sent in (link, mesh.pipeline):
                if sent is not None:
                    sent.wait()
        found.append((seen.span, seen.boundaries, seen.norms))
    return found


@cache
def by_autograd(mixer, spans, last_only):
    """Norms of the gradients of States that are handed on by hand, by recurrence, layer and border."""
    model = plain(model_for(mixer))
    batch = rows_of(whole_batch(), torch.arange(ROWS - 1))
    states, total, kept, labels = None, 0.0, [], 0
    for n in range(spans):
        part = batch.segment(n, spans)
        hidden, states = model(part.tokens, part.pos, states)
        if not last_only or n == spans - 1:
            total, labels = total + model.loss(hidden, part.labels), labels + int(part.count_labels())
        for state in states.values():
            for x in state.values():
                if x.requires_grad:
                    x.retain_grad()
        kept.append(states)
    (total / labels).backward()
    norms = {}
    for name, leaves in LANE_STATE_PREFIX[mixer].items():
        for layer in model.layers:
            found = [[state[layer][f"{mixer}.{leaf}"].grad for leaf in leaves] for state in kept[:-1]]
            squares = [sum(float(g.square().sum()) for g in grads if g is not None) for grads in found]
            norms.setdefault(name, {})[layer] = [x**0.5 for x in squares]
    return norms


STAGES = {"pipeline": 2, "context": 2}


@pytest.mark.parametrize("last_only", [False, True], ids=["step", "gradient_reach"])
@pytest.mark.parametrize(
    "layout",
    [
        *(pytest.param(x, marks=pytest.mark.long) for x in ({"data": 2}, {"context": 2}, {"tensor": 2})),
        STAGES,
    ],
    ids=str,
)
def test_cotangents_at_borders_are_those_of_retained_states(pool, single_mesh, layout, last_only):
    mixers = ["mamba", "gsa", "lattice", "attention", *(["mamba2"] if layout != STAGES else [])]
    spans = SEGMENTS * layout.get("context", 1)
    for result in pool.run(watched, mixers, last_only, timeout_s=300, **layout):
        for mixer, (span, places, norms) in zip(mixers, result, strict=True):
            expected = by_autograd(mixer, spans, last_only)
            assert (span, places) == (TOKENS // spans, list(range(1, spans)))
            for name, of_layer in expected.items():
                assert set(norms[name]) == set(of_layer)
                for layer, values in of_layer.items():
                    assert any(values), "a comparison of zeros shows nothing"
                    error = relative_error(torch.tensor(norms[name][layer]), torch.tensor(values))
                    # a loss is summed in float32
                    assert error <= 1e-5, (mixer, name, layer, error, norms[name][layer], values)


def lattice(**settings):
    config = model_for("lattice").model_dump()
    config["mixers"] = {"lattice": config["mixers"]["lattice"] | settings}
    return ModelConfig(**config)


def test_credit_vanishes_where_lattice_turns_far_and_not_where_it_hardly_turns(single_mesh):
    """A document with a loss on its last 8 tokens alone, and what comes back over 40 times as many; in float32, as in a run."""
    g, segments, span, slots = seeded(5), 40, 8, "lattice lattice-sim-project"
    tokens = torch.randint(61, (2, segments * span), generator=g)
    pos = torch.arange(segments * span, dtype=torch.int32).repeat(2, 1)
    batch = Batch(tokens, torch.randint(61, tokens.shape, generator=g), pos)

    def travelled(**settings):
        model = plain(lattice(variant="sim", **settings), torch.float32)
        found = gradient_reach(model, batch, segments, span, single_mesh)
        assert model.link is None
        row = {"kind": "gradient_reach", "step": 1, "tokens": 1, **found.to_json()}
        return found.reach()[slots]["0"], found.norms[slots]["0"], black(render_row(row))

    reach, norms, pixels = travelled(step_bias=-9.0)
    assert reach == (segments - 2) * span, "all that was looked at"
    assert norms[0] > 0.3 * norms[-1]
    assert pixels < 100
    reach, norms, pixels = travelled(step_max=40.0, step_bias=4.0)
    assert 0 < reach <= 32, "tens of tokens"
    assert norms[0] == 0.0, "float32 ends at 1e-45"
    assert pixels > 500, "and the picture shows it"


def black(pixels):
    return int((pixels.max(axis=-1) == 0).sum())


def test_what_has_vanished_is_black_and_what_was_not_measured_is_not():
    norms = {"0": [1e-30, 1e-3, 1.0], "1": [1e-20, 1e-3, 1.0]}
    row = {"kind": "state_gradients", "span": 4, "boundaries": [1, 2, 3], "norms": {"mamba selective_scan-euler-gated": norms}}
    nothing = black(render_row(row))
    assert black(render_row(row | {"norms": {"mamba selective_scan-euler-gated": {**norms, "1": [None, None, 1.0]}}})) <= nothing
    one, two = (black(render_row(row | {"norms": {"x": {**norms, "1": ([0.0] * n + [1.0] * 3)[:3]}}})) for n in (1, 2))
    assert nothing + 500 < one
    assert two - one == pytest.approx(one - nothing, rel=0.2)
    assert black(render_row(row | {"norms": {"x": {"0": [0.0, 0.0, 0.0]}}})) > two, "nothing but zeros"


def test_reach_is_where_credit_has_faded():
    norms = {"0": [1e-9, 2e-4, 0.5, 1.0, 0.1], "1": [None, None, 0.0, 0.0, 0.0], "2": [0.0, 0.0, 0.0, 0.0, 2.0]}
    found = StateGradients(16, [1, 2, 3, 4, 5], {"x": norms})
    assert found.reach() == {"x": {"0": 48, "1": 0, "2": 0}}
