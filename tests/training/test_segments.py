"""Backpropagation through time in segments: the gradient equals the unsegmented one, or that of a reference that detaches States.

Every mixer, on sequence ranks, pipeline stages and both, with packed documents. The gradients are those that a step is made of,
summed over the ranks; the reference is plain autograd on one process. B'MOJO selects by the reference's scores.
"""

import itertools
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import cache

import pytest
import torch
import torch.distributed as dist
from support.compare import relative_error
from support.grid import model_for
from support.models import training
from support.recurrences import positions, seeded

from baton.data_pipeline.packing import Batch
from baton.models import stages
from baton.models.lm import LanguageModel
from baton.models.mixers.bmojo import BMojo, Innovation
from baton.models.settings import kinds
from baton.parallel import zero
from baton.parallel.context_parallel import ContextLink, add_gather
from baton.parallel.param_layout import initialize_parameters, named_layouts
from baton.parallel.parameter_groups import parameter_groups
from baton.parallel.pipeline import StepSchedule
from baton.parallel.replicated_parameters import finalize_model_grads
from baton.training.bptt.lane_states import LaneStates
from baton.training.build import make_deterministic
from baton.training.errors import RunError
from baton.training.step.executor import StepExecutor
from baton.training.step.microbatch_runner import MicrobatchRunner

MIXERS = (*(kind for kind, settings in kinds().items() if not settings.small().state_grows), "hybrid")
EXACT = (*MIXERS, "full_attention")
SEGMENTS, RANKS, STAGES = (1, 2, 3, 7, 16), (1, 2, 4), (1, 2)
LAYOUTS = tuple(itertools.product(RANKS, STAGES))
# Tokens of the shortest span: the longest tail of the small mixers. In bfloat16 what crosses a border is rounded once more, in the
# tokens that a tail holds; they must not be half of all.
SPAN = {torch.float64: 6, torch.float32: 6, torch.bfloat16: 24}
# of a parameter's gradient. In bfloat16 each segment's part of a weight's gradient is rounded before it is added in fp32.
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 1e-2}
ROWS = 2
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """gradient: segments that a gradient goes back through; None: all, else a step went before, whose States are carried in."""

    mixer: str
    segments: int
    dtype: torch.dtype
    gradient: int | None = None
    recompute: str = "none"
    micro_batch_size: int = ROWS


def batches_of(case):
    """The step before (None: there is none) and the step: rows that begin inside a document and are packed."""
    g, steps = seeded(case.segments), 1 if case.gradient is None else 2
    tokens = steps * case.segments * max(RANKS) * SPAN[case.dtype]
    labels = torch.randint(61, (ROWS, tokens), generator=g)
    labels[torch.rand(labels.shape, generator=g) < 0.1] = -1
    pos = positions(g, ROWS, tokens, 0.05).to(torch.int32)
    if case.gradient is not None:  # a lane begins with a document
        pos = torch.where((pos == 0).cumsum(1) > 0, pos, torch.arange(tokens, dtype=torch.int32))
    whole = Batch(torch.randint(61, (ROWS, tokens), generator=g), labels, pos, tuple(range(ROWS)))
    return None if case.gradient is None else whole.segment(0, 2), whole.segment(steps - 1, steps)


def model_in(mixer, dtype, device=CPU, **place):
    with device:
        model = LanguageModel(model_for(mixer), compute_dtype=dtype, **place)
    initialize_parameters(model, 0, 0, 1)
    return model.to(torch.float64 if dtype == torch.float64 else torch.float32)


def to(batch, device):
    return Batch(batch.tokens.to(device), batch.labels.to(device), batch.pos.to(device), batch.lanes)


class Scores:
    """B'MOJO's by layer: whole rows, as found; or selected by instead of its own, those of the place at work."""

    def __init__(self, wanted=None):
        self.wanted, self.found, self.place = wanted, {}, None

    @contextmanager
    def used(self):
        def run_recurrence(mixer, recurrence, inputs, pos, state, context):
            y, leaving = super(BMojo, mixer).run_recurrence(recurrence, inputs, pos, state, context)
            if isinstance(recurrence, Innovation):
                layer = context.layer + mixer.path
                if self.wanted is None:
                    self.found.setdefault(layer, []).append(y.detach())
                else:
                    rows, v, of = self.place
                    y = self.wanted[layer][rows].chunk(of, dim=1)[v].to(y)
            return y, leaving

        BMojo.run_recurrence = run_recurrence
        try:
            yield self
        finally:
            del BMojo.run_recurrence


@cache
def reference(case, exact=False):
    """Gradients of the step's mean loss, States handed on by hand and detached where the gradient is cut; scores of each step.
    exact: the same in float64, by the same scores."""
    model, (before, batch) = model_in(case.mixer, torch.float64 if exact else case.dtype), batches_of(case)
    states, total, scores = None, 0.0, []
    given = iter(reference(case)[1] if exact else (None, None))
    if before is not None:
        with Scores(next(given)).used() as found, torch.no_grad():
            found.place = slice(None), 0, 1
            _, states = model(before.tokens, before.pos)
        scores.append(found.found)
    pieces = case.segments // (case.gradient or case.segments)
    with Scores(next(given)).used() as found:
        for n in range(pieces):
            found.place = slice(None), n, pieces
            part = batch.segment(n, pieces)
            hidden, states = model(part.tokens, part.pos, states)
            states = {layer: {name: x.detach() for name, x in state.items()} for layer, state in states.items()}
            total = total + model.loss(hidden, part.labels)
    scores.append(found.found)
    (total / batch.count_labels()).backward()
    wanted = [{layer: torch.cat(x, dim=1) for layer, x in step.items()} for step in scores]  # none if exact
    return {name: p.grad for name, p in model.named_parameters()}, wanted


def gradients(mesh, case, scores):
    """Of this stage's parameters, summed over the sequence ranks."""
    stage = stages.partition_layers(model_for(case.mixer), mesh.layout.pipeline, 64)[mesh.pipeline_rank]
    link = mesh.link or ContextLink(0, [mesh.rank], mesh.device)
    if link.size > 1:
        add_gather(link, mesh.layout)
    place = {"link": link, "stage": stage, "pipeline": mesh.pipeline}
    model = model_in(case.mixer, case.dtype, mesh.device, recompute=case.recompute, **place)
    schedule = StepSchedule(case.segments, case.gradient or case.segments)
    steps, lanes = [to(batch, mesh.device) for batch in batches_of(case) if batch is not None], None
    torch.set_default_dtype(next(model.parameters()).dtype)  # of messages between stages
    try:
        if case.gradient is not None:
            lanes = LaneStates(model, training(lanes=ROWS, global_batch_tokens=24 * ROWS), mesh)
        for batch, wanted in zip(steps, scores, strict=True):
            model.zero_grad()
            run_step(mesh, model, batch, schedule, lanes, case.micro_batch_size, wanted)
    finally:
        torch.set_default_dtype(torch.float32)
    finalize_model_grads(model, mesh)
    owned = {name: p.grad for name, p, layout in named_layouts(model) if not layout.tied_replica}
    for grad in owned.values():
        dist.all_reduce(grad, group=mesh.data_group)
    return {name: grad.cpu() for name, grad in owned.items()}


def own_spans(batch, mesh, segments):
    """This rank's span of every segment."""
    size = mesh.layout.context
    parts = [batch.segment(s * size + mesh.context_rank, segments * size) for s in range(segments)]
    return Batch(*(torch.cat([getattr(p, x) for p in parts], dim=1) for x in ("tokens", "labels", "pos")), batch.lanes)


def run_step(mesh, model, batch, schedule, lanes, micro_batch_size, wanted):
    own, size = own_spans(batch, mesh, schedule.segments), mesh.layout.context
    rows = torch.arange(ROWS).split(micro_batch_size)
    batches = [Batch(own.tokens[r], own.labels[r], own.pos[r], tuple(r.tolist())) for r in rows]
    runner = MicrobatchRunner(model, batches, 1.0 / float(batch.count_labels()), schedule, lanes, model.forward_context)
    with Scores(wanted).used() as scores:
        for operation in schedule.operations(model.stage.index, model.stage.count, len(batches)):
            v = operation.segment * size + mesh.context_rank
            scores.place = rows[operation.micro_batch], v, schedule.segments * size
            runner.run_operation(operation)
    runner.finish()
    for link in (model.link, mesh.pipeline):
        if link is not None:
            link.wait()
    assert not runner.mismatched_states()


def on_ranks(mesh, jobs):
    if mesh.device.type == "cuda":
        make_deterministic(training())
    return [gradients(mesh, Case(*case), scores) for case, scores in jobs]


def compare(pool, ranks, pipeline, cases, loosened=1):
    """Asserts that every parameter's gradient is the reference's. loosened: for sums in another order, by another device."""
    jobs = [(astuple(case), reference(case)[1]) for case in cases]
    results = pool.run(on_ranks, jobs, context=ranks, pipeline=pipeline, timeout_s=900)
    for n, case in enumerate(cases):
        expected, seen = reference(case)[0], set()
        for name, grad in (item for result in results for item in result[n].items()):
            error = relative_error(grad, expected[name])
            limit = loosened * LIMITS[case.dtype]
            if error > limit and (case.dtype == torch.bfloat16 or (case.gradient is not None and case.dtype == torch.float32)):
                # a decay's gradient is a sum that cancels: fewer digits of it are kept, whoever computes it
                limit = max(limit, relative_error(expected[name], reference(case, exact=True)[0][name]))
            assert error <= limit, (case, ranks, pipeline, name, error, limit)
            seen.add(name)
        assert seen == set(expected)


# every family of recurrences, exact and truncated; each precision twice
EXACT_OFTEN = {
    (1, 1): (("full_attention", 2, torch.float64), ("gated_delta_net", 3, torch.float32)),
    (4, 1): (("lattice", 2, torch.bfloat16), ("longhorn", 7, torch.float64)),
    (2, 2): (("bmojo", 2, torch.float32), ("gsa", 3, torch.bfloat16)),
}
TRUNCATED_OFTEN = {(1, 1): ("delta_net",), (2, 2): ("gla", "hybrid"), (4, 1): ("mamba",)}


@pytest.mark.parametrize(("ranks", "pipeline"), EXACT_OFTEN)
def test_exact_segments_give_the_unsegmented_gradient(pool, single_mesh, ranks, pipeline):
    """Some mixers on each layout; all of them on all layouts and in every precision in the long form."""
    compare(pool, ranks, pipeline, [Case(*case) for case in EXACT_OFTEN[ranks, pipeline]])


@pytest.mark.long
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize(("ranks", "pipeline"), LAYOUTS)
def test_every_mixer_and_number_of_segments_gives_the_unsegmented_gradient(pool, single_mesh, ranks, pipeline, segments, dtype):
    compare(pool, ranks, pipeline, [Case(mixer, segments, dtype) for mixer in EXACT])


@pytest.mark.parametrize(("ranks", "pipeline", "segments", "gradient"), [(1, 1, 4, 2), (2, 2, 3, 1), (4, 1, 2, 2)])
def test_truncated_segments_give_the_gradient_that_is_cut_there(pool, single_mesh, ranks, pipeline, segments, gradient):
    """With the States of the step before carried in; gradients through one segment, some and all of a step's. Some
    mixers; all of them on all layouts in the long form."""
    own = TRUNCATED_OFTEN[ranks, pipeline]
    compare(pool, ranks, pipeline, [Case(mixer, segments, torch.float64, gradient) for mixer in own])


@pytest.mark.long
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize(("segments", "gradient"), [(1, 1), (4, 1), (4, 2), (6, 3), (3, 3)])
@pytest.mark.parametrize(("ranks", "pipeline"), LAYOUTS)
def test_every_mixer_truncated_gives_the_gradient_that_is_cut(pool, single_mesh, ranks, pipeline, segments, gradient, dtype):
    compare(pool, ranks, pipeline, [Case(mixer, segments, dtype, gradient) for mixer in MIXERS])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)  # megatron-core's loss is fp32, also of float64
@pytest.mark.parametrize(("ranks", "pipeline"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_segments_on_gpus_give_the_gradient_of_the_cpu(gpu_pool, single_mesh, ranks, pipeline, dtype):
    """A quarter of the mixers on each layout, exact, and truncated with the States of the step before; every second run of a
    segment has the bits of the first."""
    if ranks * pipeline > gpu_pool.size:
        pytest.skip(f"needs {ranks * pipeline} GPUs, there are {gpu_pool.size}")
    own = MIXERS[2 * ranks + pipeline - 3 :: 4]
    cases = [Case(mixer, *cut) for mixer in own for cut in ((3, dtype), (4, dtype, 2))] + [Case("full_attention", 3, dtype)]
    compare(gpu_pool, ranks, pipeline, cases, loosened=10)


MANY = ("mamba", "bmojo", "lattice", "hybrid")


@pytest.mark.parametrize(
    ("ranks", "pipeline", "exact", "truncated"),
    [
        (1, 1, ("full_attention",), ("mamba",)),
        pytest.param(2, 2, ("full_attention",), ("mamba",), marks=pytest.mark.long),
        pytest.param(1, 1, ("full_attention",), (), marks=pytest.mark.long),
        *(pytest.param(n, n, MANY, MANY, marks=pytest.mark.long) for n in (1, 2)),
    ],
)
def test_recomputed_activations_and_micro_batches_change_nothing(pool, single_mesh, ranks, pipeline, exact, truncated):
    cases = [Case(mixer, 3, torch.float64, None, recompute="full", micro_batch_size=1) for mixer in exact]
    cases += [Case(mixer, 4, torch.float64, 2, recompute="full", micro_batch_size=1) for mixer in truncated]
    compare(pool, ranks, pipeline, cases)


@pytest.mark.parametrize("mixers", [MIXERS[::4], pytest.param(MIXERS, marks=pytest.mark.long)], ids=len)
def test_without_what_is_carried_the_gradient_is_another(mixers, single_mesh):
    """What the comparisons are worth: the reference's gradient depends on the cut and on the step before."""
    for mixer in (mixer for mixer in mixers if mixer != "swiglu"):
        exact, cut = (reference(Case(mixer, 4, torch.float64, k))[0] for k in (4, 1))
        assert max(relative_error(cut[name], grad) for name, grad in exact.items()) > 1e-4, mixer


def test_a_segment_that_does_not_repeat_itself_stops_the_step(single_mesh):
    """A kernel whose second run has other bits: a named error before the update."""
    case = Case("mamba", 3, torch.float32)
    link = ContextLink(0, [0], torch.device("cpu"))
    model = model_in(case.mixer, case.dtype, link=link)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1, ()), lr=1e-3)
    engine = zero.build_engine(model, optimizer, single_mesh, 1.0)
    executor = StepExecutor(model, engine, single_mesh, schedule=StepSchedule(3, 3))
    batch, before = batches_of(case)[1], [p.detach().clone() for p in model.parameters()]
    executor.step([batch], 1e-3)
    block, calls = model.layers["1"]["mamba"], []

    def unsteady(module, arguments, output):
        calls.append(output)
        state = {name: x + 1e-6 * len(calls) for name, x in output[1].items()}
        return output[0], state

    before = [p.detach().clone() for p in model.parameters()]
    hook = block.register_forward_hook(unsteady)
    with pytest.raises(
        RunError, match=r"rank 0: a segment that was computed twice left another State .* of layer 1, segment 1; 4 in"
    ):
        executor.step([batch], 1e-3)
    hook.remove()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
