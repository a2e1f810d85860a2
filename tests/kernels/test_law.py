"""Split invariance of every recurrence: splitting a sequence anywhere changes neither outputs nor gradients, with and without
packing."""

import itertools

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.compare import relative_error
from support.long_form import alternating, some
from support.recurrences import (
    RECURRENCES,
    fresh,
    given_alone,
    gradients,
    law,
    moving,
    no_starts,
    piece,
    positions,
    results,
    run_in_pieces,
    seeded,
    seeds,
)

from baton.kernels.protocol import LinearRecurrence, Recurrence, SequentialRecurrence, StateFirstRecurrence, check

TOLERANCE = 1e-10
SPANS = {"seed": seeds, "batch": st.integers(1, 3), "length": st.integers(1, 41)}
TOKEN_BY_TOKEN = 20
"""Tokens of the longest sequence that is split into pieces of one token each."""
CUT_SPANS = {
    **SPANS,
    "length": st.integers(2, 37),
    "cuts": st.lists(st.integers(1, 36), max_size=12),
    "start_at_cuts": st.booleans(),
}

every_recurrence = pytest.mark.parametrize("recurrence", RECURRENCES, ids=str)
# what takes long: some, with each operator among them; the long form has all
every_third = pytest.mark.parametrize("recurrence", some(RECURRENCES, RECURRENCES[::3]), ids=str)
every_other = pytest.mark.parametrize("recurrence", some(RECURRENCES, RECURRENCES[1::2]), ids=str)
# of splitting, which takes longest, each meets one of two tests; the long form has both of all
half_at_every_point = pytest.mark.parametrize("recurrence", some(RECURRENCES, RECURRENCES[::2]), ids=str)
half_at_many_points = pytest.mark.parametrize("recurrence", RECURRENCES[1::2], ids=str)
LINEAR = [r for r in RECURRENCES if isinstance(r, LinearRecurrence)]
every_second_linear = pytest.mark.parametrize("recurrence", some(LINEAR, LINEAR[::2]), ids=str)
every_other_linear = pytest.mark.parametrize("recurrence", some(LINEAR, LINEAR[1::2]), ids=str)
every_sequential = pytest.mark.parametrize("recurrence", [r for r in RECURRENCES if isinstance(r, SequentialRecurrence)], ids=str)
every_state_first = pytest.mark.parametrize("recurrence", [r for r in RECURRENCES if isinstance(r, StateFirstRecurrence)], ids=str)
every_optional = pytest.mark.parametrize("recurrence", [r for r in RECURRENCES if not r.needs_pos], ids=str)
every_shortened = pytest.mark.parametrize(
    "recurrence", [r for r in RECURRENCES if type(r).forward_no_state is not Recurrence.forward_no_state], ids=str
)
"""Those with outputs alone of their own; the others' are those of `run`."""
every_exact = pytest.mark.parametrize("recurrence", [r for r in RECURRENCES if r.split_bitwise_exact], ids=str)


ROUNDED_ZERO = 1e-13
"""Norms below are those of zeros that were rounded in float64, beside values of 1: a gate's gradient where no token writes."""


def assert_equal(found, expected, tolerance, context=""):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = relative_error(found[name], torch.zeros_like(value) if value.double().norm() < ROUNDED_ZERO else value)
        assert error <= tolerance, f"{name} {context}: {error:.1e}"


def _positions(recurrence, generator, batch, length, start_probability):
    return positions(generator, batch, length, start_probability) if start_probability else no_starts(recurrence, batch, length)


def test_memory_is_poisoned():
    assert torch.empty(3).isnan().all()
    assert torch.empty_like(torch.ones(3, dtype=torch.float64)).isnan().all()
    assert torch.ones(1).new_empty(3).isnan().all()


@every_recurrence
@given_alone
@example(seed=1, batch=2, length=35, start_probability=0.15)
@given(**SPANS, start_probability=st.sampled_from([0.0, 0.15, 0.6]))
def test_the_fast_form_equals_the_definition(recurrence: Recurrence, seed: int, batch: int, length: int, start_probability: float):
    generator = seeded(seed)
    example = recurrence.example(generator, batch, length, torch.float64, wide=False)
    pos = _positions(recurrence, generator, batch, length, start_probability)
    found = []
    for run in (recurrence.run, recurrence.reference):
        inputs, state = fresh(*example)
        found.append(results(*run(inputs, pos, state), inputs, state, seed + 1))
    assert_equal(*found, TOLERANCE)


@every_other
@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.long)], ids=["in a direction", "of each number"])
def test_the_definition_has_the_gradient_of_finite_differences(recurrence: Recurrence, fast: bool):
    inputs, state = recurrence.example(seeded(3), 2, 5, torch.float64, wide=False)
    inputs, state = fresh(recurrence.smooth(inputs), state)
    pos = torch.tensor([[3, 4, 0, 1, 2], [1, 0, 0, 1, 2]])

    def definition(*leaves):
        entering = {**state, **dict(zip(moving(state), leaves[len(inputs) :]))}
        y, leaving = recurrence.reference(leaves[: len(inputs)], pos, entering)
        return y, *(x for x in leaving.values() if x.requires_grad)

    leaves = (*inputs, *moving(state).values())
    assert torch.autograd.gradcheck(definition, leaves, atol=1e-7, rtol=1e-5, fast_mode=fast)


@half_at_every_point
@pytest.mark.parametrize("start_probability", some((0.0, 0.35), (0.35,)))
def test_splitting_at_every_point_changes_nothing(recurrence: Recurrence, start_probability: float):
    length = 7
    generator = seeded(11)
    example = recurrence.example(generator, 2, length, torch.float64, wide=False)
    pos = _positions(recurrence, generator, 2, length, start_probability)
    _assert_pieces_equal_whole(recurrence, example, pos, [*([cut] for cut in range(1, length)), list(range(1, length))])


@half_at_many_points
@given_alone
@example(seed=1, batch=2, length=35, cuts=[4, 5, 20], start_at_cuts=False)
@example(seed=2, batch=1, length=9, cuts=[6], start_at_cuts=True)
@given(**CUT_SPANS)
def test_splitting_at_many_points_changes_nothing(
    recurrence: Recurrence, seed: int, batch: int, length: int, cuts: list[int], start_at_cuts: bool
):
    generator = seeded(seed)
    example = recurrence.example(generator, batch, length, torch.float64, wide=False)
    cuts = [cut for cut in cuts if cut < length]
    pos = positions(generator, batch, length, 0.2)
    if start_at_cuts:
        for cut in sorted(cuts):
            _start_document(pos, cut)
    # token by token for short sequences alone: that takes longest
    _assert_pieces_equal_whole(recurrence, example, pos, [cuts, *([list(range(1, length))] if length <= TOKEN_BY_TOKEN else [])])


def _start_document(pos: torch.Tensor, at: int) -> None:
    """A document starts at token `at` of every lane; the tokens up to the next start count from there."""
    for lane in pos:
        lane[at] = 0
        for t in range(at + 1, lane.numel()):
            if lane[t] == 0:
                break
            lane[t] = lane[t - 1] + 1


def _assert_pieces_equal_whole(recurrence, example, pos, many_cuts) -> None:
    inputs, state = fresh(*example)
    whole = results(*recurrence.run(inputs, pos, state), inputs, state, 5)
    for cuts in many_cuts:
        inputs, state = fresh(*example)
        pieces = results(*run_in_pieces(recurrence, inputs, pos, state, cuts), inputs, state, 5)
        assert_equal(pieces, whole, TOLERANCE, f"cut at {cuts}")
        if recurrence.split_bitwise_exact:
            assert all(torch.equal(pieces[name], x) for name, x in whole.items() if not name.startswith("d "))


@every_other_linear
@given_alone
@example(seed=1, batch=2, length=19, start_probability=0.1)
@given(**{**SPANS, "length": st.integers(1, 23)}, start_probability=st.sampled_from([0.0, 0.1]))
def test_begin_advance_finish_is_the_run_and_so_is_its_mirror(
    recurrence: LinearRecurrence, seed: int, batch: int, length: int, start_probability: float
):
    generator = seeded(seed)
    inputs, state = fresh(*recurrence.example(generator, batch, length, torch.float64, wide=False))
    pos = _positions(recurrence, generator, batch, length, start_probability)
    y, leaving = recurrence.run(inputs, pos, state)
    dy = torch.randn(y.shape, generator=generator, dtype=y.dtype)
    dleaving = {name: torch.randn(x.shape, generator=generator, dtype=x.dtype) for name, x in leaving.items()}
    grads = torch.autograd.grad([y, *leaving.values()], [*inputs, *state.values()], [dy, *dleaving.values()])

    transition, effect = recurrence.begin(inputs, pos)
    sent = effect.apply(state)
    effect_back = recurrence.begin_backward(inputs, pos, transition, state, dy)
    found = [recurrence.finish(inputs, pos, state), *sent.values()]
    found += [*recurrence.finish_backward(inputs, pos, state, dy, dleaving), *effect_back.apply(dleaving).values()]
    for one, other in zip(found, [y, *leaving.values(), *grads], strict=True):
        assert relative_error(one, other) <= TOLERANCE


@every_second_linear
@given_alone
@example(seed=1, cuts=[3, 9], start_probability=0.05)
@given(seed=seeds, cuts=st.lists(st.integers(1, 20), max_size=3), start_probability=st.sampled_from([0.0, 0.05]))
def test_composed_effects_are_the_effect_of_the_joined_span(
    recurrence: LinearRecurrence, seed: int, cuts: list[int], start_probability: float
):
    length = 21
    generator = seeded(seed)
    inputs, state = recurrence.example(generator, 2, length, torch.float64, wide=False)
    pos = positions(generator, 2, length, start_probability)
    edges = [0, *sorted(set(cuts)), length]
    effects = [recurrence.begin(piece(recurrence, inputs, a, b), pos[:, a:b])[1] for a, b in itertools.pairwise(edges)]
    composed = effects[0]
    for effect in effects[1:]:
        composed = composed.compose(effect)
    joined = recurrence.begin(inputs, pos)[1]
    assert_equal(composed.apply(state), joined.apply(state), TOLERANCE)
    nothing = {name: torch.zeros_like(x) for name, x in state.items()}
    assert_equal(composed.apply(nothing), joined.apply(nothing), TOLERANCE)


@pytest.mark.parametrize(("recurrence", "length"), alternating(RECURRENCES, [1, 3, 40], 3), ids=str)
def test_what_leaves_early_is_what_leaves(recurrence: Recurrence, length: int):
    inputs, state = recurrence.example(seeded(10), 2, length, torch.float64, wide=False)
    for pos in (no_starts(recurrence, 2, length), positions(seeded(11), 2, length, 0.1)):
        early = recurrence.tail_state(inputs, pos)
        if early is not None:
            check(early, recurrence.state_specs(inputs), 2)
            assert_equal(early, recurrence.run(inputs, pos, state)[1], 0.0)


@every_sequential
def test_prepare_and_run_is_the_run(recurrence: SequentialRecurrence):
    inputs, state = recurrence.example(seeded(7), 2, 19, torch.float64, wide=False)
    pos = positions(seeded(8), 2, 19, 0.1)
    y, leaving = recurrence.run(inputs, pos, state)
    found, sent = recurrence.run_prepared(recurrence.prepare(inputs, pos), state)
    assert_equal({"y": found, **sent}, {"y": y, **leaving}, TOLERANCE)


@every_state_first
@given_alone
@example(seed=1, batch=2, length=35, start_probability=0.05)
@given(**SPANS, start_probability=st.sampled_from([0.0, 0.05, 0.3]))
def test_leave_and_outputs_are_the_run_and_so_are_their_gradients(
    recurrence: StateFirstRecurrence, seed: int, batch: int, length: int, start_probability: float
):
    """Outputs and State are bitwise equal. Gradients of outputs and of the final State are computed separately, as when the latter
    arrives later."""
    generator = seeded(seed)
    example = recurrence.example(generator, batch, length, torch.float64, wide=False)
    pos = _positions(recurrence, generator, batch, length, start_probability)
    for given_state in (example[1], None):
        inputs, entering = fresh(example[0], recurrence.initial(example[0]) if given_state is None else given_state)
        y, leaving = recurrence.run(inputs, pos, None if given_state is None else entering)
        assert torch.equal(recurrence.forward_no_state(inputs, pos, entering), y)
        left = recurrence.final_state(inputs, pos, entering)
        check(left, recurrence.state_specs(inputs), batch)
        assert left.keys() == leaving.keys()
        for name, x in leaving.items():
            assert torch.equal(left[name], x), name
    inputs, entering = fresh(*example)
    expected = results(*recurrence.run(inputs, pos, entering), inputs, entering, seed + 1)
    y, left = recurrence.forward_no_state(inputs, pos, entering), recurrence.final_state(inputs, pos, entering)
    assert_equal(results(y, left, inputs, entering, seed + 1), expected, TOLERANCE)


@every_shortened
@given_alone
@example(seed=1, batch=2, length=35, start_probability=0.05)
@given(**SPANS, start_probability=st.sampled_from([0.0, 0.05, 0.3]))
def test_outputs_alone_are_the_runs_and_so_are_their_gradients(
    recurrence: Recurrence, seed: int, batch: int, length: int, start_probability: float
):
    """Bitwise equal, with and without an entering State."""
    generator = seeded(seed)
    example = recurrence.example(generator, batch, length, torch.float64, wide=False)
    pos = _positions(recurrence, generator, batch, length, start_probability)
    for entered in (True, False):
        inputs, entering = fresh(*example)
        given_state = entering if entered else None
        kept, alone = recurrence.run(inputs, pos, given_state)[0], recurrence.forward_no_state(inputs, pos, given_state)
        assert torch.equal(alone, kept)
        wanted = [*inputs, *(moving(entering).values() if entered else ())]
        for found, expected in zip(*(gradients([y], wanted, seeded(seed + 1)) for y in (alone, kept)), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.long
@every_recurrence
@pytest.mark.parametrize(("test", "drawn"), [
    (test_the_fast_form_equals_the_definition, {**SPANS, "start_probability": st.sampled_from([0.0, 0.15, 0.6])}),
    (test_splitting_at_many_points_changes_nothing, CUT_SPANS),
    (test_begin_advance_finish_is_the_run_and_so_is_its_mirror,
     {**SPANS, "length": st.integers(1, 23), "start_probability": st.sampled_from([0.0, 0.1])}),
    (test_composed_effects_are_the_effect_of_the_joined_span,
     {"seed": seeds, "cuts": st.lists(st.integers(1, 20), max_size=3), "start_probability": st.sampled_from([0.0, 0.05])}),
    (test_leave_and_outputs_are_the_run_and_so_are_their_gradients,
     {**SPANS, "start_probability": st.sampled_from([0.0, 0.05, 0.3])}),
    (test_outputs_alone_are_the_runs_and_so_are_their_gradients, {**SPANS, "start_probability": st.sampled_from([0.0, 0.05, 0.3])}),
], ids=["fast form", "many points", "in phases", "composed", "state first", "outputs alone"])  # fmt: skip
def test_many_examples(recurrence: Recurrence, test, drawn):
    """Inputs for the tests above that have one or two, and every recurrence that they hold for."""
    if not isinstance(recurrence, NEEDED.get(test, Recurrence)):
        pytest.skip("it has no such form")

    def holds(**example):
        test.hypothesis.inner_test(recurrence, **example)

    law(max_examples=60)(given(**drawn)(holds))()


NEEDED = {
    test_begin_advance_finish_is_the_run_and_so_is_its_mirror: LinearRecurrence,
    test_composed_effects_are_the_effect_of_the_joined_span: LinearRecurrence,
    test_leave_and_outputs_are_the_run_and_so_are_their_gradients: StateFirstRecurrence,
}


@every_recurrence
def test_leaves_describe_the_state(recurrence: Recurrence):
    for dtype in (torch.float64, torch.float32):
        inputs, state = recurrence.example(seeded(9), 2, 5, dtype, wide=False)
        assert len(recurrence.input_names) == len(inputs)
        check(state, recurrence.state_specs(inputs), 2)
        for entering in (state, None):
            check(recurrence.run(inputs, no_starts(recurrence, 2, 5), entering)[1], recurrence.state_specs(inputs), 2)


@every_exact
@pytest.mark.parametrize(("n_threads", "dtype"), some(
    list(itertools.product((1, 2, 3), (torch.float32, torch.bfloat16))),
    [(1, torch.bfloat16), (2, torch.float32), (3, torch.bfloat16)],
), ids=str)  # fmt: skip
def test_splitting_keeps_every_bit_of_outputs_and_states(recurrence: Recurrence, n_threads, dtype, threads: None):
    """Odd sizes, so that no length is a whole number of vectors, and buffers beyond what torch gives to one thread."""
    torch.set_num_threads(n_threads)
    batch, length = 3, 70
    inputs, state = _lowered(recurrence, recurrence.example(seeded(17), batch, length, torch.float32, wide=True), dtype)
    pos = positions(seeded(18), batch, length, 0.1)
    with torch.no_grad():
        y, leaving = recurrence.run(inputs, pos, state)
        for cuts in ([1], [31], [32], [69], [7, 8, 40, 41], list(range(1, length))):
            pieces, carried = run_in_pieces(recurrence, inputs, pos, state, cuts)
            assert torch.equal(pieces, y), f"outputs change when cut at {cuts}"
            assert all(torch.equal(carried[name], x) for name, x in leaving.items()), f"the state changes when cut at {cuts}"


def _doubled(inputs, state):
    return tuple(x.double() for x in inputs), {name: x.double() if x.is_floating_point() else x for name, x in state.items()}


def _lowered(recurrence, example, dtype):
    """Time inputs in a lower precision, and the State in the dtype that follows from it."""
    inputs, state = example
    inputs = (*(x.to(dtype) for x in inputs[: recurrence.num_time_inputs]), *inputs[recurrence.num_time_inputs :])
    return inputs, {leaf.name: state[leaf.name].to(leaf.dtype) for leaf in recurrence.state_specs(inputs)}


@every_third
def test_equal_runs_give_equal_bits(recurrence: Recurrence):
    """Every third one; of the others, the test of documents compares the bits of two runs, on fewer tokens."""
    example = recurrence.example(seeded(19), 2, 70, torch.float32, wide=True)
    pos = positions(seeded(20), 2, 70, 0.1)
    found = []
    for _ in range(2):
        inputs, state = fresh(*example)
        found.append(results(*recurrence.run(inputs, pos, state), inputs, state, 21))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize(("recurrence", "perturbed"), alternating(RECURRENCES, [0, 1, 2, 3], 4), ids=str)
def test_documents_do_not_leak_into_each_other(recurrence: Recurrence, perturbed: int):
    """Perturb one of four documents (the third is one token long): the others' outputs and gradients keep every bit."""
    lengths = [9, 5, 1, 8]
    length, n_documents = sum(lengths), len(lengths)
    document = torch.repeat_interleave(torch.arange(n_documents), torch.tensor(lengths))
    pos = torch.cat([torch.arange(n) for n in lengths]).expand(2, length)
    example = recurrence.example(seeded(23), 2, length, torch.float32, wide=False)
    others = document != perturbed
    along = recurrence.num_time_inputs
    kept = []
    for factor in (1.0, 0.5):
        inputs, state = fresh(*example)
        with torch.no_grad():
            for x in inputs[:along]:
                x[:, ~others] *= factor
        y, leaving = recurrence.run(inputs, pos, state)
        found = results(y, leaving, inputs, state, 29)
        kept.append([y[:, others], *(found[f"d input {n}"][:, others] for n in range(along))])
        assert all(not found[f"d entering {name}"].any() for name in moving(state)), "an arriving state is not seen behind a start"
        assert not torch.equal(y[:, ~others], torch.zeros_like(y[:, ~others]))
    for before, after in zip(*kept, strict=True):
        assert torch.equal(before, after)


@every_recurrence
def test_a_document_in_a_pack_is_the_document_alone(recurrence: Recurrence):
    lengths = [3, 1, 17, 6]
    pos = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)
    inputs, state = recurrence.example(seeded(24), 2, sum(lengths), torch.float64, wide=False)
    y, leaving = recurrence.run(inputs, pos, state)
    begin = 0
    for n in lengths:
        alone, last = recurrence.run(piece(recurrence, inputs, begin, begin + n), torch.arange(n).expand(2, -1), None)
        assert relative_error(alone, y[:, begin : begin + n]) <= TOLERANCE
        begin += n
    if "conv" not in leaving:  # a convolution's tail holds tokens of earlier documents, which positions hide
        for leaf in recurrence.state_specs(inputs):
            if leaf.grows:
                leaving[leaf.name] = leaving[leaf.name][:, -n:]
        assert_equal(last, leaving, TOLERANCE)


@every_recurrence
def test_a_recurrence_that_needs_positions_says_so(recurrence: Recurrence):
    inputs, state = recurrence.example(seeded(36), 2, 9, torch.float64, wide=False)
    if recurrence.needs_pos:
        with pytest.raises(ValueError, match="pos is a NoneType, expected a tensor"):
            recurrence.run(inputs, None, state)
    else:
        recurrence.run(inputs, None, state)


@every_optional
def test_no_positions_means_the_middle_of_one_document(recurrence: Recurrence):
    inputs, state = recurrence.example(seeded(37), 2, 9, torch.float64, wide=False)
    pos = torch.arange(100, 109, dtype=torch.int32).expand(2, 9)
    without, leaving = recurrence.run(inputs, None, state)
    with_pos, also_leaving = recurrence.run(inputs, pos, state)
    assert torch.equal(without, with_pos)
    assert all(torch.equal(leaving[name], also_leaving[name]) for name in leaving)


@every_recurrence
def test_gradients_reach_the_arriving_state_alone(recurrence: Recurrence):
    """Frozen parameters and inputs, and a loss on the final state only."""
    inputs, state = recurrence.example(seeded(41), 2, 2, torch.float64, wide=False)
    grads = []
    for run in (recurrence.run, recurrence.reference):
        _, entering = fresh((), state)
        _, leaving = run(inputs, no_starts(recurrence, 2, 2), entering)
        grads.append(dict(zip(moving(state), gradients([*moving(leaving).values()], [*moving(entering).values()], seeded(42)))))
    assert_equal(*grads, TOLERANCE)


@every_third
def test_memory_layout_of_the_arguments_does_not_matter(recurrence: Recurrence):
    example = recurrence.example(seeded(43), 3, 11, torch.float32, wide=False)
    pos = positions(seeded(44), 3, 11, 0.3)
    found = []
    for strided in (False, True):
        inputs, state = fresh(*example)
        turn = (lambda x: x.transpose(0, -1).contiguous().transpose(0, -1)) if strided else (lambda x: x)
        y, leaving = recurrence.run(
            tuple(turn(x) for x in inputs), pos.t().contiguous().t() if strided else pos, {n: turn(x) for n, x in state.items()}
        )
        assert y.is_contiguous()
        assert all(x.is_contiguous() for x in leaving.values())
        found.append(results(y, leaving, inputs, state, 45))
    assert_equal(found[1], found[0], 0.0 if recurrence.split_bitwise_exact else 1e-5)


@every_other
def test_autocast_changes_nothing(recurrence: Recurrence):
    example = recurrence.example(seeded(47), 2, 9, torch.float32, wide=False)
    found = []
    for enabled in (False, True):
        inputs, state = fresh(*example)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            found.append(results(*recurrence.run(inputs, no_starts(recurrence, 2, 9), state), inputs, state, 48))
    assert_equal(*found, 0.0)


@every_recurrence
def test_differentiating_twice_is_refused(recurrence: Recurrence):
    inputs, state = fresh(*recurrence.example(seeded(53), 1, 3, torch.float64, wide=False))
    y, _ = recurrence.run(inputs, no_starts(recurrence, 1, 3), state)
    (grad,) = torch.autograd.grad(y.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@every_third
def test_bfloat16_is_as_good_as_its_inputs(recurrence: Recurrence):
    """Against float64 on the same rounded inputs: what is left is the rounding of the results themselves."""
    generator = seeded(59)
    pos = positions(generator, 2, 64, 0.05)
    example = _lowered(recurrence, recurrence.example(generator, 2, 64, torch.float32, wide=True), torch.bfloat16)
    inputs, state = fresh(*example)
    y, leaving = recurrence.run(inputs, pos, state)
    exact_inputs, exact_state = fresh(*_doubled(*example))
    exact_y, exact_leaving = recurrence.reference(exact_inputs, pos, exact_state)
    assert y.dtype == torch.bfloat16
    outputs, exact_outputs = [y, *moving(leaving).values()], [exact_y, *moving(exact_leaving).values()]
    leaves, exact_leaves = [*inputs, *moving(state).values()], [*exact_inputs, *moving(exact_state).values()]
    # cotangents that the lower precision can hold
    pairs = [(low, high) for low, high in zip(outputs, exact_outputs, strict=True) if high.requires_grad]
    cotangents = [torch.randn(low.shape, generator=generator).to(low.dtype) for low, _ in pairs]
    options = {"allow_unused": True, "materialize_grads": True}
    grads = torch.autograd.grad([low for low, _ in pairs], leaves, cotangents, **options)
    exact_grads = torch.autograd.grad([high for _, high in pairs], exact_leaves, [x.double() for x in cotangents], **options)
    for leaf, grad in zip(leaves, grads, strict=True):
        assert grad.dtype == leaf.dtype
    for low, high in zip((*outputs, *grads), (*exact_outputs, *exact_grads), strict=True):
        assert relative_error(low, high) <= 5e-3


@every_other
def test_a_nan_stays_in_its_lane_and_is_not_swallowed(recurrence: Recurrence):
    """No error is raised: an exception on one rank would leave the others waiting. The step's finite check stops all ranks."""
    inputs, state = recurrence.example(seeded(57), 2, 9, torch.float32, wide=False)
    pos = no_starts(recurrence, 2, 9)
    y, leaving = recurrence.run(inputs, pos, state)
    weighted = results(*recurrence.run(*(own := fresh(inputs, state))[:1], pos, own[1]), *own, 58)
    for n in range(recurrence.num_time_inputs):
        if not weighted[f"d input {n}"].any():
            continue  # a score chooses and is not computed with
        broken = inputs[n].clone()
        broken[0, :5] = torch.nan
        found, carried = recurrence.run((*inputs[:n], broken, *inputs[n + 1 :]), pos, state)
        assert torch.equal(found[1], y[1])
        assert all(torch.equal(carried[name][1], x[1]) for name, x in leaving.items())
        assert found[0].isnan().any()


@every_recurrence
def test_every_input_of_another_shape_kind_or_place_is_refused_by_name(recurrence: Recurrence):
    inputs, state = recurrence.example(seeded(61), 2, 5, torch.float32, wide=False)

    def refused(changed, match, entering=state):
        with pytest.raises(ValueError, match=match):
            recurrence.run(changed, no_starts(recurrence, 2, 5), entering)

    for n, name in enumerate(recurrence.input_names):

        def swap(x, n=n):
            return (*inputs[:n], x, *inputs[n + 1 :])

        refused(swap(inputs[n][None]), rf"{name} has shape .*expected")
        refused(swap(inputs[n].to(torch.int64)), f"{name} has dtype int64, expected")
        refused(swap(inputs[n].double()), "float64")
        refused(swap(inputs[n].to("meta")), "is on .*expected")
        refused(swap([1.0]), f"{name} is a list, expected a tensor of shape")
        if 0 < n < recurrence.num_time_inputs:
            refused(swap(inputs[n][:1]), rf"{name} has shape .*expected")
            refused(swap(inputs[n][:, :1]), rf"{name} has shape .*expected")
    refused(piece(recurrence, inputs, 0, 0), "at least 1")
    for name, x in state.items():
        refused(inputs, "has shape .*expected", {**state, name: x[:1]})
        refused(inputs, "has dtype .*expected", {**state, name: x.half()})
    for pos, message in (
        (torch.full((2, 5), -3), "pos holds -3"),
        (torch.zeros(2, 4, dtype=torch.int64), "pos has shape"),
        (torch.zeros(2, 5), "pos has dtype float32"),
    ):
        with pytest.raises(ValueError, match=message):
            recurrence.run(inputs, pos, state)
