"""Backpropagation through time in segments: the gradient is the unsegmented one, or a reference's that detaches where it is cut.

Every mixer, on sequence ranks, pipeline stages and both, with packed documents. The gradients are those that a step is made of,
summed over the ranks; the reference is plain autograd on one process. B'MOJO selects by the reference's scores.
"""

import itertools
from contextlib import contextmanager
from functools import cache

import pytest
import torch
import torch.distributed as dist
from support.compare import relative_error
from support.grid import model_for
from support.recurrences import positions, seeded

from baton.models import stages
from baton.models.lm import LanguageModel
from baton.models.mixers.bmojo import INNOVATION, BMojo
from baton.models.settings import kinds
from baton.parallel import zero
from baton.parallel.layout import initialize_parameters, named_layouts
from baton.parallel.pipeline import schedule
from baton.parallel.sequence import SequenceLink
from baton.training.passes import Passes, Segments, TokenBatch

MIXERS = (*(kind for kind, settings in kinds().items() if not settings.small().state_grows), "hybrid")
SEGMENTS, RANKS, STAGES = (1, 2, 3, 7, 16), (1, 2, 4), (1, 2)
SPAN = 6  # tokens of the shortest span: the longest tail of the small mixers
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-5}
ROWS = 2


def batch_of(segments):
    """Two rows that begin inside a document, each as long as the shortest spans on most ranks make it."""
    g, tokens = seeded(segments), segments * max(RANKS) * SPAN
    labels = torch.randint(61, (ROWS, tokens), generator=g)
    labels[torch.rand(labels.shape, generator=g) < 0.1] = -1
    pos = positions(g, ROWS, tokens, 0.05).to(torch.int32)
    return TokenBatch(torch.randint(61, (ROWS, tokens), generator=g), labels, pos)


def model_in(mixer, dtype, **place):
    config = model_for(mixer)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    model = LanguageModel(config, compute_dtype=dtype, **place)
    initialize_parameters(model, 0, 0, 1)
    return model.to(wide)


@contextmanager
def scores_of(wanted):
    """B'MOJO's scores by layer, whole rows; wanted: what is selected by instead, whatever part of the rows is scored."""
    found = {}

    def carry(self, recurrence, inputs, pos, state):
        y, leaving = super(BMojo, self).carry(recurrence, inputs, pos, state)
        if recurrence is INNOVATION:
            if wanted is None:
                found.setdefault(self.where, []).append(y.detach())
            else:
                place = self.link.place
                v = place.segment * place.size + place.rank
                y = wanted[self.where].chunk(place.segments * place.size, dim=1)[v].to(y.dtype)
        return y, leaving

    BMojo.carry = carry
    try:
        yield found
    finally:
        del BMojo.carry


@cache
def reference(mixer, segments, dtype, gradient):
    """Gradients of the mean loss by plain autograd, States handed on by hand, detached after every `gradient` segments; scores."""
    model, batch = model_in(mixer, dtype), batch_of(segments)
    labels = batch.count_labels()
    states, total = None, 0.0
    with scores_of(None) as scores:
        for n in range(segments // gradient):
            part = batch.segment(n, segments // gradient)
            hidden, states = model(part.tokens, part.pos, states)
            states = {layer: {name: x.detach() for name, x in state.items()} for layer, state in states.items()}
            total = total + model.loss(hidden, part.labels)
    (total / labels).backward()
    return {name: p.grad for name, p in model.named_parameters()}, {layer: torch.cat(x, dim=1) for layer, x in scores.items()}


def gradients(mesh, mixer, segments, dtype, gradient, scores, recompute=False, micro_batch=ROWS):
    """This stage's, summed over the sequence ranks."""
    try:
        stage = stages.cut(model_for(mixer), mesh.layout.pipeline, 64)[mesh.pipeline_rank]
        link = mesh.link or SequenceLink(0, [mesh.rank], mesh.device)
        model = model_in(mixer, dtype, link=link, stage=stage, pipeline=mesh.pipeline, recompute=recompute)
        whole = batch_of(segments)
        torch.set_default_dtype(next(model.parameters()).dtype)  # of messages between stages; random numbers would be others
        size, rank = mesh.layout.sequence, mesh.sequence_rank
        parts = [whole.segment(s * size + rank, segments * size) for s in range(segments)]
        own = TokenBatch(*(torch.cat([getattr(p, x) for p in parts], dim=1) for x in ("tokens", "labels", "pos")))
        batches = [TokenBatch(own.tokens[r], own.labels[r], own.pos[r]) for r in torch.arange(ROWS).split(micro_batch)]
        passes = Passes(model, batches, 1.0 / float(whole.count_labels()), Segments(segments, gradient), None)
        with scores_of(scores) if scores else contextmanager(lambda: (yield))():
            for operation in schedule(stage.index, stage.count, len(batches), segments, gradient):
                passes.do(operation)
        passes.finish()
        for sent in (link, mesh.pipeline):
            if sent is not None:
                sent.wait()
        assert not passes.differing()
        zero.finalise_gradients(model, mesh)
        owned = {name: p.grad for name, p, layout in named_layouts(model) if not layout.lent}
        for grad in owned.values():
            dist.all_reduce(grad, group=mesh.data_group)
        return owned
    finally:
        torch.set_default_dtype(torch.float32)


def on_ranks(mesh, cases):
    return [gradients(mesh, *case) for case in cases]


def compare(pool, ranks, pipeline, cases, **options):
    """cases: (mixer, segments, dtype). Asserts that every parameter's gradient is the unsegmented one."""
    jobs = [(m, s, dtype, s, reference(m, s, dtype, s)[1], *options.values()) for m, s, dtype in cases]
    results = pool.run(on_ranks, jobs, sequence=ranks, pipeline=pipeline, timeout_s=600)
    for n, (mixer, segments, dtype) in enumerate(cases):
        expected = reference(mixer, segments, dtype, segments)[0]
        seen = set()
        for result in results:
            for name, grad in result[n].items():
                error = relative_error(grad, expected[name])
                assert error <= LIMITS[dtype], (mixer, segments, ranks, pipeline, dtype, name, error)
                seen.add(name)
        assert seen == set(expected)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("pipeline", STAGES)
def test_exact_segments_give_the_unsegmented_gradient(pool, single_mesh, ranks, pipeline):
    """Every mixer in float64; each of them with one number of segments here, and with all of them in the long form."""
    numbers = itertools.cycle(SEGMENTS[1:4])
    compare(pool, ranks, pipeline, [(mixer, next(numbers), torch.float64) for mixer in MIXERS])
