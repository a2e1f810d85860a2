"""Properties of B'MOJO's attention: the paper's interleaved form, memory, ties, innovation. Split invariance is tested in
test_law.py.

Scores are inputs in test_law.py, so both sides of a comparison select the same tokens; tests/models/test_bmojo.py shows that the
scores themselves are invariant to splits.
"""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import relative_error
from support.long_form import alternating
from support.memory import LargestTensor
from support.recurrences import fresh, gradients, law, moving, piece, positions, seeded, seeds
from torch.utils._python_dispatch import TorchDispatchMode

from baton.kernels.eidetic_attention import eidetic_attention, innovation
from baton.kernels.eidetic_attention.recurrence import EideticAttention, Innovation
from baton.kernels.eidetic_attention.topk_memory import topk
from baton.kernels.errors import KernelError

HEADS, DIM = 2, 3


def _arguments(seed: int, length: int, batch: int = 1, dtype: torch.dtype = torch.float64):
    generator = seeded(seed)
    leaves = [torch.randn(batch, length, HEADS, DIM, generator=generator, dtype=dtype).requires_grad_() for _ in range(5)]
    return leaves, torch.rand(batch, length, generator=generator, dtype=dtype)


@pytest.mark.parametrize(("window", "n_fading", "n_eidetic"), [(8, 3, 5), (4, 4, 2), (4, 0, 6), (4, 1, 0), (3, 0, 0)])
def test_the_papers_interleaved_form_is_the_same_function(window: int, n_fading: int, n_eidetic: int):
    """Memory blocks placed before the chunks, and one sliding window of window + m keys over all of it (section 3.3)."""
    chunks = 6
    length, m = window * chunks, n_fading + n_eidetic
    leaves, score = _arguments(1, length)
    sizes = {"window": window, "n_fading": n_fading, "n_eidetic": n_eidetic}
    y, _ = eidetic_attention(*leaves, score, **sizes, pos=torch.arange(length)[None])

    q, k, v, fading_k, fading_v = (x[0] for x in leaves)
    keys, values, place, is_key = [], [], [], []
    for c in range(chunks):
        begin = c * window
        best = sorted(range(begin), key=lambda s: (-float(score[0, s]), s))[:n_eidetic]
        fading = list(range(max(0, begin - n_fading), begin))
        for source_k, source_v, tokens, room in ((k, v, best, n_eidetic), (fading_k, fading_v, fading, n_fading)):
            keys += [source_k[s] for s in tokens] + [torch.zeros_like(k[0])] * (room - len(tokens))
            values += [source_v[s] for s in tokens] + [torch.zeros_like(v[0])] * (room - len(tokens))
            is_key += [True] * len(tokens) + [False] * (room - len(tokens))
        place += [len(keys) + j for j in range(window)]
        keys += list(k[begin : begin + window])
        values += list(v[begin : begin + window])
        is_key += [True] * window
    place_T = torch.tensor(place)
    distance = place_T[:, None] - torch.arange(len(keys))
    seen = (distance >= 0) & (distance < window + m) & torch.tensor(is_key)
    scores = torch.einsum("ihk,jhk->hij", q, torch.stack(keys)) * DIM**-0.5
    expected = torch.einsum("hij,jhk->ihk", scores.masked_fill(~seen, -torch.inf).softmax(-1), torch.stack(values))[None]
    assert relative_error(y, expected) <= 1e-14
    for ours, theirs in zip(gradients([y], leaves, seeded(2)), gradients([expected], leaves, seeded(2)), strict=True):
        assert relative_error(ours, theirs) <= 1e-12


@law(max_examples=16)
@given(
    seed=seeds,
    m=st.integers(1, 9),
    length=st.integers(1, 30),
    levels=st.integers(1, 4),
    cuts=st.lists(st.integers(1, 29), max_size=6),
)
def test_the_memory_of_any_pieces_is_the_memory_of_the_whole(seed: int, m: int, length: int, levels: int, cuts: list[int]):
    """Against sorting all scores, with many ties."""
    score = torch.randint(0, levels, (2, length), generator=seeded(seed)).float()
    where = torch.arange(length).expand(2, -1)
    kept_score, kept_where = torch.zeros(2, m), torch.full((2, m), -1)
    for begin, end in itertools.pairwise([0, *sorted({c for c in cuts if c < length}), length]):
        counted = torch.ones(2, m + end - begin, dtype=torch.bool)
        selection = topk(m, kept_score, kept_where, score[:, begin:end], where[:, begin:end], counted)
        kept_score, kept_where = selection.score, selection.where
    for b in range(2):
        best = sorted(sorted(range(length), key=lambda t: (-float(score[b, t]), t))[:m])
        assert kept_where[b].tolist() == best + [-1] * (m - len(best))
        assert kept_score[b].tolist() == [float(score[b, t]) for t in best] + [0.0] * (m - len(best))


def test_among_equal_scores_the_oldest_tokens_stay():
    leaves, score = _arguments(3, 30)
    sizes = {"window": 5, "n_fading": 0, "n_eidetic": 4}
    for pieces in ([30], [1] * 30, [7, 12, 11]):
        state = None
        begin = 0
        for n in pieces:
            part = slice(begin, begin + n)
            pos = torch.arange(begin, begin + n)[None]
            _, state = eidetic_attention(*(x[:, part] for x in leaves), 0 * score[:, part] + 0.5, **sizes, pos=pos, state=state)
            begin += n
        assert state["where"].tolist() == [[0, 1, 2, 3]]
        assert torch.equal(state["frozen_k"], leaves[1][:, :4])


@pytest.mark.parametrize(("cuts", "sliding"), alternating([[8, 16, 24], [5, 17, 18], [1, 2, 31]], [False, True]), ids=str)
def test_four_ranks_with_unaligned_documents(sliding: bool, cuts: list[int]):
    """Split at multiples of the window in the row (which are not multiples in the documents) and elsewhere; three lanes, random
    starts.
    """
    length, batch = 37, 3
    for seed in range(6):
        leaves, score = _arguments(seed, length, batch)
        pos = positions(seeded(seed + 50), batch, length, 0.06)
        sizes = {"window": 4, "n_fading": 0 if sliding else 3, "n_eidetic": 5, "sliding": sliding}
        whole, _ = eidetic_attention(*leaves, score, **sizes, pos=pos)
        state, pieces = None, []
        for begin, end in itertools.pairwise([0, *cuts, length]):
            part = slice(begin, end)
            y, state = eidetic_attention(*(x[:, part] for x in leaves), score[:, part], **sizes, pos=pos[:, part], state=state)
            pieces.append(y)
        split = torch.cat(pieces, dim=1)
        assert relative_error(split, whole) <= 1e-12
        for ours, theirs in zip(gradients([split], leaves, seeded(9)), gradients([whole], leaves, seeded(9)), strict=True):
            assert relative_error(ours, theirs) <= 1e-10


def test_a_memory_is_frozen_between_multiples_of_the_window():
    """The eidetic tokens at token 8 stay until token 11, whatever scores come between."""
    leaves, score = _arguments(4, 16)
    sizes = {"window": 4, "n_fading": 1, "n_eidetic": 2}
    frozen = []
    state = None
    for t in range(16):
        _, state = eidetic_attention(
            *(x[:, t : t + 1] for x in leaves), score[:, t : t + 1] + t, **sizes, pos=torch.tensor([[t]]), state=state
        )
        frozen.append(state["frozen_k"])
    for t in range(1, 16):
        assert torch.equal(frozen[t], frozen[t - 1]) == (t % 4 != 0)
    assert torch.equal(frozen[8][:, :2], leaves[1][:, 6:8])
    assert torch.equal(frozen[8][:, 2:], leaves[3][:, 7:8])


SPANS = (
    EideticAttention(4, 2, 3),
    EideticAttention(3, 3, 7),
    EideticAttention(5, 0, 2),
    EideticAttention(4, 1, 0),
    EideticAttention(1, 1, 2),
    EideticAttention(1, 0, 0),
    EideticAttention(3, 0, 0, sliding=True),
    EideticAttention(4, 0, 3, sliding=True),
    EideticAttention(50, 9, 60),
)


@pytest.mark.parametrize("attention", SPANS, ids=str)
@law(max_examples=6)
@given(
    seed=seeds,
    length=st.integers(1, 60),
    start_probability=st.sampled_from([0.0, 0.04, 0.15, 0.5]),
    levels=st.integers(1, 30),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    cuts=st.lists(st.integers(1, 59), max_size=5),
)
def test_a_state_that_leaves_first_has_every_bit_of_the_walk(
    attention: EideticAttention, seed: int, length: int, start_probability: float, levels: int, dtype: torch.dtype, cuts: list[int]
):
    """Many publications and starts in a span, or none, and many ties: against the reference, the blocks and any segments.

    The initial State is one that the first document has left, so that positions continue it.
    """
    generator = seeded(seed)
    before = torch.randint(1, 2 * attention.window + 9, (1,), generator=generator).item()
    (q, *keyed, score), _ = attention.example(generator, 2, before + length, torch.float32, wide=False)
    score = torch.randint(0, levels, score.shape, generator=generator).float()
    inputs = (*(x.to(dtype) for x in (q, *keyed)), score.to(dtype))
    pos = positions(generator, 2, before + length, start_probability)
    with torch.no_grad():
        _, state = attention.run(piece(attention, inputs, 0, before), pos[:, :before], None)
        inputs, pos = piece(attention, inputs, before, before + length), pos[:, before:]
        found = attention.final_state(inputs, pos, state)
        walked = [attention.run(inputs, pos, state)[1], attention.reference(inputs, pos, state)[1], state]
        for begin, end in itertools.pairwise([0, *sorted({cut for cut in cuts if cut < length}), length]):
            walked[2] = attention.final_state(piece(attention, inputs, begin, end), pos[:, begin:end], walked[2])
    for expected in walked:
        assert found.keys() == expected.keys()
        for name, x in expected.items():
            assert found[name].dtype == x.dtype
            assert torch.equal(found[name], x), name


class Operators(TorchDispatchMode):
    """Within this context, `names` are the operators that ran, autograd's included."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


ATTENTION = ("attention", "softmax", "mm")


def _attended(names: set[str]) -> set[str]:
    return {name for name in names if any(part in name for part in ATTENTION)}


@pytest.mark.parametrize("attention", [EideticAttention(64, 4, 16), EideticAttention(64, 0, 16, sliding=True)], ids=str)
def test_nothing_is_attended_to_for_the_leaving_state_forwards_or_backwards(attention: EideticAttention):
    length = 2048
    example = attention.example(seeded(11), 1, length, torch.float32, wide=False)
    pos = positions(seeded(12), 1, length, 0.002)
    inputs, state = fresh(*example)
    with Operators() as ran, LargestTensor() as most:
        left = attention.final_state(inputs, pos, state)
        grads = gradients([*moving(left).values()], [*inputs, *moving(state).values()], seeded(13))
    assert any(grad.any() for grad in grads)
    assert not _attended(ran.names)
    assert most.numel <= max(x.numel() for x in inputs)
    with Operators() as ran:
        attention.forward_no_state(inputs, pos, state).sum().backward()
    assert _attended(ran.names)


def test_the_score_alone_is_the_runs():
    recurrence = Innovation()
    for length in (1, 2, 9):
        inputs, state = recurrence.example(seeded(3), 2, length, torch.float32, wide=False)
        pos = positions(seeded(4), 2, length, 0.3)
        for entering in (state, None):
            assert torch.equal(recurrence.forward_no_state(inputs, pos, entering), recurrence.run(inputs, pos, entering)[0])


def test_no_gradient_flows_through_a_score():
    leaves, score = _arguments(5, 12)
    score.requires_grad_()
    y, _ = eidetic_attention(*leaves, score, window=3, n_fading=1, n_eidetic=2, pos=torch.arange(12)[None])
    assert torch.autograd.grad(y.sum(), score, allow_unused=True, materialize_grads=True)[0].abs().max() == 0


NORMS = {
    "l2": lambda missed: (sum(x * x for x in missed) / len(missed)) ** 0.5,
    "l1": lambda missed: sum(map(abs, missed)) / len(missed),
    "max": lambda missed: max(map(abs, missed)),
}


@law(max_examples=16)
@given(seed=seeds, length=st.integers(1, 20), k=st.integers(1, 5), cut=st.integers(1, 19), norm=st.sampled_from(sorted(NORMS)))
def test_innovation_is_what_the_outputs_before_do_not_foretell(seed: int, length: int, k: int, cut: int, norm: str):
    generator = seeded(seed)
    y = torch.randn(2, length, 7, generator=generator, dtype=torch.float64)
    weights = torch.rand(k, generator=generator, dtype=torch.float64)
    pos = positions(generator, 2, length, 0.2)
    tail = torch.randn(2, k, 7, generator=generator, dtype=torch.float64)
    score, leaving = innovation(y, weights, pos, tail, norm=norm)
    history = torch.cat((tail, y), dim=1)
    for b in range(2):
        for t in range(length):
            foretold = sum((weights[j - 1] * history[b, k + t - j] for j in range(1, k + 1) if j <= pos[b, t]), torch.zeros(7))
            assert abs(float(score[b, t]) - NORMS[norm]((y[b, t] - foretold).tolist())) <= 1e-12
    if cut < length:
        first, state = innovation(y[:, :cut], weights, pos[:, :cut], tail, norm=norm)
        second, state = innovation(y[:, cut:], weights, pos[:, cut:], state, norm=norm)
        assert relative_error(torch.cat((first, second), dim=1), score) <= 1e-14
        assert torch.equal(state, leaving)


def test_an_unknown_norm_is_refused():
    y = torch.randn(1, 4, 3)
    with pytest.raises(KernelError, match=r"innovation: norm is 'l3', expected one of l2, l1, max"):
        innovation(y, torch.ones(2), torch.arange(4)[None], y[:, :2], norm="l3")


@pytest.mark.parametrize(
    "sizes",
    [
        {"window": 0, "n_fading": 0, "n_eidetic": 0},
        {"window": 3, "n_fading": 4, "n_eidetic": 0},
        {"window": 3, "n_fading": 1, "n_eidetic": 0, "sliding": True},
        {"window": 3, "n_fading": 1, "n_eidetic": -1},
    ],
)
def test_impossible_sizes_are_refused(sizes):
    leaves, score = _arguments(6, 4)
    with pytest.raises(ValueError, match="expected a window of at least 1, n_fading between 0 and the window"):
        eidetic_attention(*leaves, score, **sizes, pos=torch.arange(4)[None])


def test_memory_grows_with_the_length_alone():
    length, window, n_eidetic = 2048, 64, 16
    leaves, score = _arguments(7, length, dtype=torch.float32)
    with LargestTensor() as most:
        y, _ = eidetic_attention(*leaves, score, window=window, n_fading=4, n_eidetic=n_eidetic, pos=torch.arange(length)[None])
        gradients([y], leaves, seeded(8))
    assert most.numel <= max(leaves[0].numel(), HEADS * window * (2 * window + 2 * (n_eidetic + 4)))
