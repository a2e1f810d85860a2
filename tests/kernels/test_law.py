"""The law, for every recurrence: splitting a sequence anywhere changes neither outputs nor gradients, documents packed or not."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import relative_error
from support.recurrences import (
    RECURRENCES,
    WIDE_RECURRENCES,
    Recurrence,
    gradients,
    law,
    positions,
    run_in_pieces,
    seeded,
    seeds,
)

TOLERANCE = 1e-10

every_recurrence = pytest.mark.parametrize("recurrence", RECURRENCES, ids=str)
every_wide_recurrence = pytest.mark.parametrize("recurrence", WIDE_RECURRENCES, ids=str)


def test_memory_is_poisoned():
    assert torch.empty(3).isnan().all()
    assert torch.empty_like(torch.ones(3, dtype=torch.float64)).isnan().all()
    assert torch.ones(1).new_empty(3).isnan().all()


@every_recurrence
@law(max_examples=25)
@given(seed=seeds, batch=st.integers(1, 3), length=st.integers(1, 41), start_probability=st.sampled_from([0.0, 0.15, 0.6]))
def test_the_fast_form_equals_the_definition(recurrence: Recurrence, seed: int, batch: int, length: int, start_probability: float):
    generator = seeded(seed)
    case = recurrence.make(generator, batch, length, torch.float64)
    pos = positions(generator, batch, length, start_probability) if start_probability else None
    results = []
    for run in (recurrence.run, recurrence.reference):
        leaves, n = case.leaves(), len(case.inputs)
        outputs = run(leaves[:n], leaves[n:-1], pos, leaves[-1])
        results.append([*outputs, *gradients(outputs, leaves, seeded(seed + 1))])
    for fast, definition in zip(*results, strict=True):
        assert relative_error(fast, definition) <= TOLERANCE


@every_recurrence
def test_the_definition_has_the_gradient_of_finite_differences(recurrence: Recurrence):
    generator = seeded(3)
    case = recurrence.make(generator, 2, 5, torch.float64)
    n = len(case.inputs)
    recurrence.smooth(case)
    pos = torch.tensor([[3, 4, 0, 1, 2], [1, 0, 0, 1, 2]])
    assert torch.autograd.gradcheck(
        lambda *leaves: recurrence.reference(leaves[:n], leaves[n:-1], pos, leaves[-1]), case.leaves(), atol=1e-7, rtol=1e-5
    )


@every_recurrence
@pytest.mark.parametrize("start_probability", [0.0, 0.35])
def test_splitting_at_every_point_changes_nothing(recurrence: Recurrence, start_probability: float):
    length, seed = 12, 11
    generator = seeded(seed)
    case = recurrence.make(generator, 2, length, torch.float64)
    pos = positions(generator, 2, length, start_probability) if start_probability else None
    _assert_pieces_equal_whole(recurrence, case, pos, [[cut] for cut in range(1, length)])


@every_recurrence
@law(max_examples=20)
@given(
    seed=seeds,
    batch=st.integers(1, 3),
    length=st.integers(2, 37),
    cuts=st.lists(st.integers(1, 36), max_size=12),
    start_at_cuts=st.booleans(),
)
def test_splitting_at_many_points_changes_nothing(
    recurrence: Recurrence, seed: int, batch: int, length: int, cuts: list[int], start_at_cuts: bool
):
    generator = seeded(seed)
    case = recurrence.make(generator, batch, length, torch.float64)
    cuts = [cut for cut in cuts if cut < length]
    pos = positions(generator, batch, length, 0.2)
    if start_at_cuts:
        for cut in sorted(cuts):
            _start_document(pos, cut)
    _assert_pieces_equal_whole(recurrence, case, pos, [cuts, list(range(1, length))])


def _start_document(pos: torch.Tensor, at: int) -> None:
    """A document starts at token `at` of every lane; the tokens up to the next start count from there."""
    for lane in pos:
        lane[at] = 0
        for t in range(at + 1, lane.numel()):
            if lane[t] == 0:
                break
            lane[t] = lane[t - 1] + 1


def _assert_pieces_equal_whole(recurrence, case, pos, many_cuts) -> None:
    n = len(case.inputs)
    leaves = case.leaves()
    whole = recurrence.run(leaves[:n], leaves[n:-1], pos, leaves[-1])
    whole_gradients = gradients(whole, leaves, seeded(5))
    for cuts in many_cuts:
        leaves = case.leaves()
        pieces = run_in_pieces(recurrence, leaves, n, pos, cuts)
        assert torch.equal(pieces[0], whole[0]), f"outputs change when cut at {cuts}"
        assert torch.equal(pieces[1], whole[1]), f"the final state changes when cut at {cuts}"
        for in_pieces, in_one in zip(gradients(pieces, leaves, seeded(5)), whole_gradients, strict=True):
            assert relative_error(in_pieces, in_one) <= TOLERANCE, f"gradients change when cut at {cuts}"


@every_wide_recurrence
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_splitting_keeps_every_bit_of_outputs_and_states(recurrence: Recurrence, dtype: torch.dtype, n_threads: int, threads: None):
    """Odd sizes, so that no length is a whole number of vectors, and buffers beyond what torch gives to one thread."""
    torch.set_num_threads(n_threads)
    generator = seeded(17)
    batch, length = 3, 70
    case = recurrence.make(generator, batch, length, torch.float32)
    inputs = [x.to(dtype) for x in case.inputs]
    state = case.state.to(dtype) if "conv" in recurrence.name else case.state
    leaves = [*inputs, *case.parameters, state]
    pos = positions(generator, batch, length, 0.1)
    with torch.no_grad():
        whole = run_in_pieces(recurrence, leaves, len(inputs), pos, [])
        for cuts in ([1], [31], [32], [69], [7, 8, 40, 41], list(range(1, length))):
            pieces = run_in_pieces(recurrence, leaves, len(inputs), pos, cuts)
            assert torch.equal(pieces[0], whole[0]), f"outputs change when cut at {cuts}"
            assert torch.equal(pieces[1], whole[1]), f"the final state changes when cut at {cuts}"


@every_recurrence
@pytest.mark.parametrize("perturbed", [0, 1, 2, 3])
def test_documents_do_not_leak_into_each_other(recurrence: Recurrence, perturbed: int):
    """Perturb one of four documents (the third is one token long): the others' outputs and gradients keep every bit."""
    lengths = [9, 5, 1, 8]
    length, n_documents = sum(lengths), len(lengths)
    document = torch.repeat_interleave(torch.arange(n_documents), torch.tensor(lengths))
    pos = torch.cat([torch.arange(n) for n in lengths]).expand(2, length)
    case = recurrence.make(seeded(23), 2, length, torch.float32)
    others = document != perturbed
    results = []
    for shift in (0.0, 3.0):
        leaves, n = case.leaves(), len(case.inputs)
        with torch.no_grad():
            for x in leaves[:n]:
                x[:, ~others] += shift
        outputs = recurrence.run(leaves[:n], leaves[n:-1], pos, leaves[-1])
        grads = gradients(outputs, leaves, seeded(29))
        kept = [outputs[0], *grads[:n]]
        results.append([x[:, others] for x in kept] + ([outputs[1][:, -3:]] if perturbed != n_documents - 1 else []))
        assert not grads[-1].any(), "the state that arrives is not seen by a document that starts"
    for before, after in zip(*results, strict=True):
        assert torch.equal(before, after)


@every_recurrence
def test_no_state_means_a_state_of_zeros(recurrence: Recurrence):
    case = recurrence.make(seeded(31), 2, 9, torch.float64)
    nothing = recurrence.run(case.inputs, case.parameters, None, None)
    zeros = recurrence.run(case.inputs, case.parameters, None, torch.zeros_like(case.state))
    assert torch.equal(nothing[0], zeros[0])
    assert torch.equal(nothing[1], zeros[1])


@every_recurrence
def test_no_positions_means_the_middle_of_one_document(recurrence: Recurrence):
    case = recurrence.make(seeded(37), 2, 9, torch.float64)
    pos = torch.arange(100, 109, dtype=torch.int32).expand(2, 9)
    without = recurrence.run(case.inputs, case.parameters, None, case.state)
    with_pos = recurrence.run(case.inputs, case.parameters, pos, case.state)
    assert torch.equal(without[0], with_pos[0])
    assert torch.equal(without[1], with_pos[1])


@every_recurrence
def test_gradients_reach_the_arriving_state_alone(recurrence: Recurrence):
    """Frozen parameters and inputs, and a loss on the final state only."""
    case = recurrence.make(seeded(41), 2, 2, torch.float64)
    state = case.state.clone().requires_grad_()
    _, final = recurrence.run(case.inputs, case.parameters, None, state)
    cotangent = torch.randn_like(final)
    expected_state = case.state.clone().requires_grad_()
    _, expected_final = recurrence.reference(case.inputs, case.parameters, None, expected_state)
    (grad,) = torch.autograd.grad(final, state, cotangent)
    (expected,) = torch.autograd.grad(expected_final, expected_state, cotangent)
    assert relative_error(grad, expected) <= TOLERANCE


@every_recurrence
def test_memory_layout_of_the_arguments_does_not_matter(recurrence: Recurrence):
    case = recurrence.make(seeded(43), 3, 11, torch.float32)
    pos = positions(seeded(44), 3, 11, 0.3)
    n = len(case.inputs)
    results = []
    for strided in (False, True):
        leaves = case.leaves()
        arguments = [x.transpose(0, -1).contiguous().transpose(0, -1) if strided else x for x in leaves]
        pos_argument = pos.t().contiguous().t() if strided else pos
        outputs = recurrence.run(arguments[:n], arguments[n:-1], pos_argument, arguments[-1])
        assert all(x.is_contiguous() for x in outputs)
        results.append([*outputs, *gradients(outputs, leaves, seeded(45))])
    for plain, strided_result in zip(*results, strict=True):
        assert torch.equal(plain, strided_result)


@every_recurrence
def test_autocast_changes_nothing(recurrence: Recurrence):
    case = recurrence.make(seeded(47), 2, 9, torch.float32)
    n = len(case.inputs)
    results = []
    for enabled in (False, True):
        leaves = case.leaves()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            outputs = recurrence.run(leaves[:n], leaves[n:-1], None, leaves[-1])
            results.append([*outputs, *gradients(outputs, leaves, seeded(48))])
    for without, within in zip(*results, strict=True):
        assert torch.equal(without, within)


@every_recurrence
def test_differentiating_twice_is_refused(recurrence: Recurrence):
    case = recurrence.make(seeded(53), 1, 3, torch.float64)
    leaves, n = case.leaves(), len(case.inputs)
    y, _ = recurrence.run(leaves[:n], leaves[n:-1], None, leaves[-1])
    (grad,) = torch.autograd.grad(y.square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@every_wide_recurrence
def test_bfloat16_is_as_good_as_its_inputs(recurrence: Recurrence):
    """Against float64 on the same rounded inputs: what is left is the rounding of the results themselves."""
    generator = seeded(59)
    case = recurrence.make(generator, 2, 64, torch.float32)
    pos = positions(generator, 2, 64, 0.05)
    n = len(case.inputs)
    is_conv = "conv" in recurrence.name
    low = [x.to(torch.bfloat16).requires_grad_() for x in case.inputs]
    params = [x.clone().requires_grad_() for x in case.parameters]
    state = case.state.to(torch.bfloat16 if is_conv else torch.float32).requires_grad_()
    outputs = recurrence.run(low, params, pos, state)
    assert outputs[0].dtype == torch.bfloat16
    assert outputs[1].dtype == state.dtype
    leaves = [*low, *params, state]
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    exact = recurrence.reference(exact_leaves[:n], exact_leaves[n:-1], pos, exact_leaves[-1])
    cotangents = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in outputs]
    grads = torch.autograd.grad(outputs, leaves, cotangents)
    exact_grads = torch.autograd.grad(exact, exact_leaves, [x.double() for x in cotangents])
    for leaf, grad in zip(leaves, grads, strict=True):
        assert grad.dtype == leaf.dtype
    for low_precision, high_precision in zip((*outputs, *grads), (*exact, *exact_grads), strict=True):
        assert relative_error(low_precision, high_precision) <= 5e-3
