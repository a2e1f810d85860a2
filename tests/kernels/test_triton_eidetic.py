"""B'MOJO's attention in Triton against the reference in float64; in Triton's interpreter where there is no GPU."""

import itertools
from dataclasses import replace

import pytest
import torch
from support.compare import relative_error
from support.long_form import some
from support.recurrences import positions, seeded

from baton.kernels.common.kernel_check import gradients, moving
from baton.kernels.eidetic_attention import innovation
from baton.kernels.eidetic_attention.chunked import Options, final_state
from baton.kernels.eidetic_attention.joint_attention_launch import MemorySources, _JointAttentionLaunch
from baton.kernels.eidetic_attention.launch_config import LaunchConfig
from baton.kernels.eidetic_attention.recurrence import RECURRENCES, EideticAttention
from baton.kernels.eidetic_attention.topk_memory_launch import select_memories
from baton.kernels.eidetic_attention.triton_launch import eidetic_attention_triton, innovation_triton
from baton.parallel.linear import _side_by_side

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = LaunchConfig(queries=16, keys=16, queries_backward=16, keys_backward=16, memory=16)
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def compare(
    recurrence: EideticAttention, length: int, config: LaunchConfig, *, wide: bool, dtype=torch.float32, starts=0.15, score=None
):
    """Output, final State and every gradient, and the same bits twice. The initial State is one that an earlier document has left;
    documents start within. score: instead of the example's.
    """
    inputs, state = recurrence.example(seeded(0), 2, length, torch.float32, wide=wide)
    inputs = inputs if score is None else (*inputs[:5], score)
    pos = positions(seeded(1), 2, length, starts)
    # the first lane goes on with the document that the State is of
    pos[0] = torch.arange(length) + 2 * recurrence.window + 3
    # scores are compared in float32 whatever the others are in
    inputs = (*(x.to(dtype) for x in inputs[:5]), inputs[5].float())
    state = {leaf.name: state[leaf.name].to(leaf.dtype) for leaf in recurrence.state_specs(inputs)}
    scale = inputs[0].shape[-1] ** -0.5
    options = Options(recurrence.window, recurrence.n_fading, recurrence.n_eidetic, recurrence.sliding, scale)

    def run(defined: bool):
        place, cast = ("cpu", torch.float64) if defined else (DEVICE, None)
        own = [x.to(place, cast or x.dtype).requires_grad_() for x in inputs]
        entering = {
            name: x.to(place, cast or x.dtype).requires_grad_() if x.is_floating_point() else x.to(place)
            for name, x in state.items()
        }
        # scores have no gradient
        own[5] = own[5].detach()
        if defined:
            y, leaving = recurrence.reference(tuple(own), pos, entering)
        else:
            y, leaving = eidetic_attention_triton(tuple(own), options, pos=pos.to(place), state=entering, config=config)
        leaves = [*own[:5], *(x for name, x in moving(entering).items() if name != "score")]
        outputs = [y, *(x for name, x in moving(leaving).items() if name != "score")]
        grads = gradients(outputs, leaves, seeded(2))
        return [y, *leaving.values(), *grads], [str(n) for n in range(1 + len(leaving) + len(grads))]

    (expected, names), (found, _), (again, _) = run(True), run(False), run(False)
    for name, want, have, repeated in zip(names, expected, found, again, strict=True):
        assert relative_error(have.double().cpu(), want.double()) <= LIMITS[dtype], name
        assert torch.equal(have, repeated), name


@pytest.mark.parametrize("recurrence", some(RECURRENCES, RECURRENCES[::2]), ids=str)
def test_outputs_and_gradients_are_the_definitions(recurrence):
    compare(recurrence, 21, replace(SMALL, rows_first=int(recurrence.n_fading == 2)), wide=recurrence.n_fading == 2)


@pytest.mark.parametrize("sliding", some((False, True), (False,)))
def test_bfloat16(sliding):
    compare(EideticAttention(6, 0 if sliding else 2, 5, sliding), 29, SMALL, wide=False, dtype=torch.bfloat16)


def test_longer_than_a_tile():
    """A window of several tiles, memories longer than a tile, many publications of a document."""
    compare(EideticAttention(20, 3, 18), 95, SMALL, wide=False, starts=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.long)], ids=str)
def test_tokens_that_stay_are_evicted_and_are_in_the_window_too(dtype):
    """One token is in every memory after it was read; an entry is too until it is evicted; one is selected and evicted; and one is
    selected while it is in the windows of the tokens that see the memory.
    """
    recurrence, length, stays, goes, near = EideticAttention(8, 0, 3), 61, 2, 4, 12
    score = torch.rand(2, length, generator=seeded(3)) * 0.1
    # lane 0 is at 19 of a document: it publishes at 5, 13, 21, ...
    for token, value in ((stays, 9.0), (goes, 0.6), (near, 8.0), (27, 5.0), (40, 7.0)):
        score[:, token] = value
    _, state = recurrence.example(seeded(0), 2, length, torch.float32, wide=False)
    state["score"] = torch.tensor([[0.5, 4.0, 0.4]]).repeat(2, 1)
    pos = torch.stack((torch.arange(length) + 19, torch.arange(length)))
    given = {"pos": pos.to(DEVICE), "state": {name: x.to(DEVICE) for name, x in state.items()}}
    seen, _ = select_memories(score.to(DEVICE), Options(8, 0, 3, sliding=False, scale=1.0), **given)
    held = [{int(r) - 3 for r in rows if r >= 0} for rows in seen.row[0].cpu()][1:]
    assert held[:5] == [{-2, stays, goes}, {-2, stays, near}, {-2, stays, near}, {stays, near, 27}, {stays, near, 27}]
    assert all(rows == {stays, near, 40} for rows in held[5:7])
    assert int(seen.begin[0, 2]) - near < recurrence.window
    compare(recurrence, length, SMALL, wide=False, dtype=dtype, starts=0.0, score=score)


@pytest.mark.parametrize("entered", [pytest.param(False, marks=pytest.mark.long), True])
def test_gradients_of_copies_are_added_in_the_order_of_publications_and_rounded_once(entered):
    """Bitwise, in bfloat16: of tokens, of fading tokens and of their rows in a State. Each row's chain ends."""
    batch, length, dim, eidetic, fading = 2, 150, 5, 18, 3
    recurrence = EideticAttention(20, fading, eidetic)
    (q, k, v, fading_k, fading_v, score), state = recurrence.example(seeded(0), batch, length, torch.bfloat16, wide=True)
    q, k, v, fading_k, fading_v = (x.to(DEVICE)[..., :dim].contiguous() for x in (q, k, v, fading_k, fading_v))
    pos = torch.stack((torch.arange(length) + 43, (torch.arange(length) - 65) % 150)).to(DEVICE)
    state = {name: x.to(DEVICE)[..., :dim].contiguous() if x.dim() == 4 else x.to(DEVICE) for name, x in state.items()}
    options = Options(20, fading, eidetic, sliding=False, scale=1.0)
    seen, _ = select_memories(score.float().to(DEVICE), options, pos=pos, state=state if entered else None)
    names = {"best_k": "best_k", "best_v": "best_v", "tail_k": "fading_k", "tail_v": "fading_v"}
    names |= {name: name for name in ("frozen_k", "frozen_v")}
    of_state = {name: state[leaf] for name, leaf in names.items()} if entered else {}
    if entered:
        k, v = (torch.cat((state[name], x), dim=1) for name, x in (("k", k), ("v", v)))
    run = _JointAttentionLaunch([q, k, v, None, None], seen, 20, 1.0, None, SMALL)
    sources = MemorySources(fading_k, fading_v, **of_state)
    memory_k, memory_v, _ = run.copy_memories(sources, fading)
    dmemory = tuple(torch.randn(memory_k.shape, generator=seeded(n)).to(DEVICE) for n in (5, 6))
    of_tokens = run.backward_copies(seen.first, run.entries, length, *dmemory)
    found = dict(zip(MemorySources._fields, run.backward_sources(dmemory), strict=True)) | dict(
        zip(("k", "v"), of_tokens, strict=True)
    )

    for kind, memory, dcopies in (("k", memory_k, dmemory[0]), ("v", memory_v, dmemory[1])):
        rows = {"": (k if kind == "k" else v)[:, -length:], "fading_": (fading_k, fading_v)[kind == "v"]}
        if entered:
            rows |= {
                f"{name}_": state[f"{leaf}_{kind}"] for name, leaf in (("best", "best"), ("tail", "fading"), ("frozen", "frozen"))
            }
        sums = {name: torch.zeros(x.shape, device=DEVICE) for name, x in rows.items()}
        copies = {name: torch.zeros(x.shape[:2], dtype=torch.int64) for name, x in rows.items()}
        for b, s, m in itertools.product(*(range(n) for n in seen.row.shape)):
            r, before = int(seen.row[b, s, m]), ("best_", eidetic) if m < eidetic else ("tail_", fading)
            name, known = ("" if m < eidetic else "fading_"), before[1] * entered
            if entered and s == 0:
                name = "frozen_"
            elif r < known:
                name = before[0]
            else:
                r -= known
            if seen.row[b, s, m] < 0:
                assert not memory[b, s, m].any()
                continue
            assert torch.equal(memory[b, s, m], rows[name][b, r])
            sums[name][b, r] += dcopies[b, s, m]
            copies[name][b, r] += 1
        assert copies[""].max() >= 5
        for name, total in sums.items():
            expected = total.bfloat16()
            if name == "frozen_":  # where it holds no row its gradient is of nothing
                expected = dcopies[:, 0].bfloat16()
            assert torch.equal(found[f"{name}{kind}"], expected), name


@pytest.mark.parametrize("sliding", some((False, True), (True,)))
def test_gradients_of_what_lies_side_by_side_do_too(sliding):
    """Bitwise equal to those of separate tensors. The projection that made keys and values then reads their gradients as one
    tensor.
    """
    recurrence = EideticAttention(20, 0 if sliding else 3, 18, sliding)
    (q, *keyed, score), _ = recurrence.example(seeded(0), 2, 31, torch.float32, wide=True)
    score, pos, groups = score.to(DEVICE), positions(seeded(1), 2, 31, 0.02).to(DEVICE), keyed[0].shape[2]
    options = Options(20, recurrence.n_fading, 18, sliding, 0.4)
    both = [torch.cat(keyed[n : n + 2], dim=2).to(DEVICE) for n in (0, 2)]
    found = []
    for inputs in ([q.to(DEVICE), *(x for kv in both for x in kv.split(groups, dim=2))], [x.to(DEVICE) for x in (q, *keyed)]):
        leaves = [x.detach().requires_grad_() for x in inputs]
        y, _ = eidetic_attention_triton(
            (*leaves, score), options, pos=pos, state={}, fresh=True, config=SMALL, need_final_state=False
        )
        found.append(gradients([y], leaves, seeded(2)))
    for beside, alone in zip(*found, strict=True):
        assert torch.equal(beside, alone)
    _, dk, dv, *_ = (x.flatten(2).flatten(0, 1) for x in found[0])
    assert _side_by_side(dk, dv)


@pytest.mark.parametrize("sliding", some((False, True), (True,)))
def test_rows_that_nothing_was_read_into_need_not_be_there(sliding):
    """Bitwise: outputs, final State and gradients."""
    recurrence = EideticAttention(20, 0 if sliding else 3, 18, sliding)
    (*inputs, score), _ = recurrence.example(seeded(0), 2, 31, torch.float32, wide=False)
    inputs = [x.to(DEVICE).requires_grad_() for x in inputs]
    score, pos = score.to(DEVICE), positions(seeded(1), 2, 31, 0.02).to(DEVICE)
    options = Options(20, recurrence.n_fading, 18, sliding, 0.4)
    state = recurrence.initial((*inputs, score))

    def run(fresh):
        y, leaving = eidetic_attention_triton((*inputs, score), options, pos=pos, state=state, fresh=fresh, config=SMALL)
        return [y, *leaving.values(), *gradients([y, leaving["k"], leaving["v"]], inputs, seeded(2))]

    for found, expected in zip(run(True), run(False), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("sizes", "entered"),
    [
        ((20, 3, 18), True),
        ((20, 0, 18, True), False),
        pytest.param((20, 3, 0), True, marks=pytest.mark.long),
        pytest.param((20, 0, 18), False, marks=pytest.mark.long),
        pytest.param((20, 3, 18), False, marks=pytest.mark.long),
        pytest.param((20, 3, 0), False, marks=pytest.mark.long),
        pytest.param((20, 0, 18), True, marks=pytest.mark.long),
        pytest.param((20, 0, 18, True), True, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_state_that_is_not_wanted_changes_nothing(sizes, entered):
    """Bitwise: outputs and gradients."""
    recurrence = EideticAttention(*sizes)
    (*inputs, score), state = recurrence.example(seeded(0), 2, 33, torch.float32, wide=False)
    inputs = [x.to(DEVICE).requires_grad_() for x in inputs]
    score, pos = score.to(DEVICE), positions(seeded(1), 2, 33, 0.02).to(DEVICE)
    options = Options(20, recurrence.n_fading, recurrence.n_eidetic, recurrence.sliding, 0.4)
    state = {name: x.to(DEVICE).requires_grad_(x.is_floating_point() and name != "score") for name, x in state.items()}
    wanted = [*inputs, *(x for x in state.values() if entered and x.requires_grad)]

    def run(need_final_state):
        empty = recurrence.initial((*inputs, score)) if need_final_state else {}
        given = {"state": state} if entered else {"state": empty, "fresh": True}
        y, leaving = eidetic_attention_triton(
            (*inputs, score), options, pos=pos, config=SMALL, need_final_state=need_final_state, **given
        )
        assert bool(leaving) == need_final_state
        return [y, *gradients([y], wanted, seeded(2))]

    for found, expected in zip(run(False), run(True), strict=True):
        assert torch.equal(found, expected)


def attended(inputs, recurrence, poison=None):
    """The output and the gradients of q, k and v in a document of several windows, which sees memories. poison: a token whose key
    is NaN."""
    options = Options(recurrence.window, recurrence.n_fading, recurrence.n_eidetic, recurrence.sliding, inputs[0].shape[-1] ** -0.5)
    own = [x.to(DEVICE).requires_grad_() for x in inputs[:5]]
    given = list(own)
    if poison is not None:
        given[1] = given[1].index_fill(1, torch.tensor(poison, device=DEVICE), torch.nan)
    pos = torch.arange(inputs[0].shape[1], dtype=torch.int32, device=DEVICE).repeat(2, 1)
    state = recurrence.initial((*own, inputs[5].to(DEVICE)))
    y, _ = eidetic_attention_triton(
        (*given, inputs[5].to(DEVICE)), options, pos=pos, state=state, fresh=True, config=SMALL, need_final_state=False
    )
    return y, torch.autograd.grad(y.sum(), own[:5], allow_unused=True)


FADING = EideticAttention(4, 2, 3), EideticAttention(4, 0, 3, sliding=True)


@pytest.mark.parametrize(
    ("size", "recurrence"),
    some(list(itertools.product([1e3, 1e9, 1e12, 1e16], FADING)), [(1e3, FADING[0]), (1e16, FADING[1])]),
    ids=str,
)
def test_scores_of_any_size_have_finite_weights(recurrence, size):
    """Keys of fading tokens so large, and of others: then a token sees one row, the definition's where the largest is alone."""
    inputs, _ = recurrence.example(seeded(0), 2, 33, torch.float32, wide=False)
    inputs = (inputs[0], size * inputs[1], inputs[2], size * inputs[3], inputs[4], inputs[5].float())
    y, gradients_found = attended(inputs, recurrence)
    assert y.abs().max() <= max(inputs[2].abs().max(), inputs[4].abs().max()) * (1 + 1e-5)
    assert all(x is None or bool(torch.isfinite(x).all()) for x in gradients_found)
    pos = torch.arange(33).repeat(2, 1)
    expected, _ = recurrence.reference(
        tuple(x.double() for x in inputs), pos, recurrence.initial(tuple(x.double() for x in inputs))
    )
    same = (y.cpu().double() - expected).abs().amax(-1) <= 1e-4
    assert same.float().mean() > 0.9


def test_a_key_that_is_no_number_makes_those_that_see_it_none():
    recurrence = EideticAttention(4, 2, 3)
    inputs, _ = recurrence.example(seeded(0), 2, 33, torch.float32, wide=False)
    inputs = (*inputs[:5], inputs[5].float())
    y, _ = attended(inputs, recurrence, poison=20)
    seen = y.isnan().flatten(2).all(2)
    assert bool(seen[:, 20:24].all()), "those in its window"
    assert not seen[:, :20].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sliding", [False, True])
def test_the_launch_configs_of_runs(sliding, dtype):
    recurrence = EideticAttention(150, 0 if sliding else 16, 64, sliding)
    compare(recurrence, 700, LaunchConfig(), wide=True, dtype=dtype, starts=0.004)
    rows_first = {"queries_backward": 32, "warps_backward": 4, "rows_first": 1}
    compare(recurrence, 700, replace(LaunchConfig(), queries=64, warps=4, **rows_first), wide=True, dtype=dtype, starts=0.004)


@pytest.mark.parametrize("lengths", [(1, 9, 70), pytest.param((8, 31, 54), marks=pytest.mark.long)], ids=str)
def test_what_is_chosen_is_what_the_definition_keeps(lengths):
    """Bitwise the final States of the PyTorch form, for spans of several lengths: equal scores, negative ones, both zeros;
    documents that begin before the span and within it.
    """
    recurrence, length = EideticAttention(8, 3, 24), 70
    inputs, state = recurrence.example(seeded(0), 3, length, torch.float32, wide=False)
    score = torch.randint(-3, 4, (3, length), generator=seeded(1)) * 0.25
    score[score == 0] *= torch.randint(0, 2, (int((score == 0).sum()),), generator=seeded(2)) * 2.0 - 1
    assert torch.signbit(score[score == 0]).any()
    inputs = tuple(x.to(DEVICE) for x in (*inputs[:5], score))
    state = {name: x.to(DEVICE) for name, x in state.items()}
    pos = torch.stack([torch.arange(length) + state["seen"].cpu()[0], *positions(seeded(3), 2, length, 0.03)]).to(DEVICE)
    options = Options(8, 3, 24, sliding=False, scale=1.0)
    for n in lengths:
        begun, given = tuple(x[:, :n] for x in inputs), {"pos": pos[:, :n], "state": state}
        _, found = eidetic_attention_triton(begun, options, config=SMALL, **given)
        for name, leaf in final_state(begun, options, **given).items():
            assert torch.equal(found[name], leaf), name
            assert found[name].dtype == leaf.dtype


def test_a_fading_memory_as_long_as_the_window_reaches_back_to_the_first_token():
    """Of a document, or of the tokens read of it."""
    pos = torch.stack((torch.arange(20), torch.arange(20) + 6)).to(DEVICE)
    options = Options(8, 8, 3, sliding=False, scale=1.0)
    seen, _ = select_memories(torch.rand(2, 20, generator=seeded(0)).to(DEVICE), options, pos=pos, state=None)
    whole, begun = seen.row[:, :, 3:].tolist()
    assert whole == [[-1] * 8, [*range(8)], [*range(8, 16)]]
    assert begun == [[-1] * 6 + [0, 1], [*range(2, 10)], [*range(10, 18)]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", ["l2", "l1", "max"])
@pytest.mark.parametrize(("length", "channels", "k", "cut"), [(37, 300, 4, 21), (3, 17, 5, 1)])
def test_innovation_is_its_definitions_and_the_same_bits_over_any_cut(length, channels, k, cut, norm, dtype):
    """Also in segments shorter than the predictor. Rows of another document are NaN and are not read."""
    y, tail = (torch.randn(2, n, channels, generator=seeded(n)).to(dtype) for n in (length, k))
    weights, pos = torch.rand(k, generator=seeded(1)), positions(seeded(2), 2, length, 0.1)
    pos[1] = torch.arange(length)  # a document that begins with the span
    tail[1] = torch.nan
    expected, _ = innovation(y.double(), weights.double(), pos, tail.double().nan_to_num(), norm=norm)
    y, weights, pos, tail = (x.to(DEVICE) for x in (y, weights, pos, tail))
    found = innovation_triton(y, weights, pos, tail, norm)
    assert found.dtype == torch.float32
    assert relative_error(found.double().cpu(), expected) <= 1e-6
    before = torch.cat((tail, y[:, :cut]), dim=1)[:, -k:]
    pieces = (
        innovation_triton(y[:, :cut], weights, pos[:, :cut], tail, norm),
        innovation_triton(y[:, cut:], weights, pos[:, cut:], before, norm),
    )
    assert torch.equal(torch.cat(pieces, dim=1), found)
