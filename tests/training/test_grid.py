"""The equality grid: every mixer with tensor, pipeline, context and data parallelism and ZeRO 0, 1 and 2 equals one process.

Here models of every family of recurrences are trained on layouts in which every two values of the factors meet. In the long form
each of them meets every value, every layout, so every combination, meets a model, and every mixer is in one. `make grid` runs every
mixer on every layout and writes docs/equality-grid.md.
"""

import itertools

import pytest
import torch
from support import grid

SHORT = grid.one_each(grid.IN_SHORT, grid.with_every_pair())
ALWAYS = grid.one_each(grid.ALWAYS, grid.with_every_pair())
ALL = grid.selection(grid.IN_SHORT)


def compared(pool, layout, mixers, precision="float32"):
    """{mixer: errors} of cells on a layout."""
    found = pool.run(grid.cells, grid.tasks(mixers, precision), timeout_s=600, **layout)
    return {m: grid.errors(grid.one_process(m, precision), [share[n] for share in found]) for n, m in enumerate(mixers)}


@pytest.mark.parametrize(
    ("layout", "mixers"),
    [
        *((layout, (model,)) for layout, model in ALWAYS.items() if SHORT[layout] != model),
        *(pytest.param(x, (model,), marks=() if ALWAYS[x] == model else pytest.mark.long) for x, model in SHORT.items()),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ALL.items()),
    ],
    ids=str,
)
def test_every_layout_equals_one_process(pool, single_mesh, layout, mixers):
    for mixer, found in compared(pool, layout.keywords, mixers).items():
        assert not grid.beyond(mixer, "float32", found), (mixer, found)


OTHER_SIZES = (({"tensor": 4}, ("retnet",)), ({"pipeline": 3, "data": 2}, ("hybrid",)), ({"data": 4}, ("mamba",)))
OPTIONAL = {"tensor": 2, "context": 2}
IN_LONG = ("qwen", "falcon", "added", "groups", "ablated", "rwkv", "finch", "baselines")
"""Models with optional parts, and of mixers whose family has another in IN_SHORT."""


@pytest.mark.parametrize(
    ("layout", "mixers"),
    [
        *OTHER_SIZES,
        (OPTIONAL, ("qwen",)),
        pytest.param(OPTIONAL, IN_LONG, marks=pytest.mark.long),
        *(
            pytest.param(layout, ("mamba", "hybrid", "retnet"), marks=pytest.mark.long)
            for layout in (*(layout for layout, _ in OTHER_SIZES), OPTIONAL)
        ),
    ],
    ids=str,
)
def test_other_sizes_equal_one_process(pool, single_mesh, layout, mixers):
    """Four tensor ranks, stages in the middle of a pipeline, more data ranks than two."""
    for mixer, found in compared(pool, layout, mixers).items():
        assert not grid.beyond(mixer, "float32", found), (mixer, found)


STAGES, SPANS = grid.Layout(2, 2, 2, 1), grid.Layout(1, 1, 4, 2)


@pytest.mark.parametrize(
    ("layout", "mixer"),
    [
        (STAGES, "gsa"),
        pytest.param(SPANS, "lattice", marks=pytest.mark.long),
        *(pytest.param(STAGES, mixer, marks=pytest.mark.long) for mixer in ("mamba", "longhorn", "lattice", "bmojo")),
        *(pytest.param(SPANS, mixer, marks=pytest.mark.long) for mixer in ("mamba", "longhorn", "gsa", "bmojo")),
    ],
    ids=str,
)
def test_bfloat16_is_as_near_as_rounding_allows(pool, single_mesh, layout, mixer):
    found = compared(pool, layout.keywords, [mixer], "bfloat16")[mixer]
    assert not grid.beyond(mixer, "bfloat16", found), (found, grid.rounding(mixer, "bfloat16"))


@pytest.mark.parametrize("mixer", ["gsa", *(pytest.param(mixer, marks=pytest.mark.long) for mixer in ("mamba", "lattice"))])
def test_so_is_a_residual_stream_in_bfloat16(pool, single_mesh, mixer):
    """Which stages hand on in that type."""
    precision = "bfloat16 residual"
    found = compared(pool, grid.Layout(2, 2, 2, 1).keywords, [mixer], precision)[mixer]
    assert not grid.beyond(mixer, precision, found), (found, grid.rounding(mixer, precision))
    rows = [grid.one_process(mixer, name).rows for name in (precision, "bfloat16")]
    assert rows[0] != rows[1], "the setting changes what is computed"


def test_every_two_values_meet_in_the_short_run_and_every_value_meets_every_mixer_in_the_long_one():
    for model in grid.IN_SHORT:
        chosen = [layout for layout, models in ALL.items() if model in models]
        assert set().union(*map(grid.values, chosen)) == set().union(*map(grid.values, grid.LAYOUTS))
    assert set(SHORT.values()) == set(grid.IN_SHORT)
    assert set(ALWAYS.values()) == set(grid.ALWAYS)
    assert set(ALWAYS) == set(SHORT)
    assert mixers_of(grid.IN_SHORT) == mixers_of(grid.IN_BFLOAT16)
    others = mixers_of(grid.MIXERS) - mixers_of(grid.IN_SHORT)
    assert others - mixers_of(IN_LONG) == {"ttt"}
    assert all(ALL.values())
    assert set(ALL) == set(grid.LAYOUTS)
    assert set().union(*map(grid.pairs, SHORT)) == set().union(*map(grid.pairs, grid.LAYOUTS))
    combinations = itertools.product((1, 2), (1, 2), (1, 2, 4), (0, 1, 2))
    refused = [c for c in combinations if grid.Layout(*c) not in grid.LAYOUTS]
    assert all((pipeline == 2 and zero == 2) or tensor * pipeline * sequence > 8 for tensor, pipeline, sequence, zero in refused)


def mixers_of(models):
    """Kinds of mixers that have a layer in one of the models."""
    return {mixer.kind for model in models for mixer in grid.model_for(model).mixers.values()}


def test_clipping_is_active_and_documents_straddle_shards(single_mesh):
    """What the grid is worth: without these a wrong scale or a leak would pass."""
    for mixer in grid.IN_SHORT:
        assert min(norm for _, norm in grid.one_process(mixer, "float32").rows) > 0.25, mixer
    pos = grid.step_batch(0).pos
    for sequence in (2, 4):
        starts = pos[:, :: grid.SEQUENCE_LENGTH // sequence][:, 1:]
        assert (starts > 0).any()
    assert len({int(n) for n in torch.diff((pos == 0).nonzero()[:, 1]) if n > 0}) > 3, "documents have unequal lengths"


def test_a_wrong_scale_is_seen(pool, single_mesh, monkeypatch):
    """The comparison can fail: the same cell against an oracle whose gradients were half as large."""
    layout = grid.Layout(1, 2, 2, 1)
    found = [share[0] for share in pool.run(grid.cells, grid.tasks(["longhorn"], "float32"), **layout.keywords)]
    expected = grid.one_process("longhorn", "float32")
    wrong = grid.Trained(
        [(loss, norm / 2) for loss, norm in expected.rows],
        {key: values / 2 if key.startswith("exp_avg.") else values for key, values in expected.tensors.items()},
        {},
    )
    errors = grid.errors(wrong, found)
    assert errors["loss"] <= 1e-5
    assert min(errors["norm"], errors["exp_avg"]) > 0.9
