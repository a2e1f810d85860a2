"""Properties of window attention: equality with masked attention, blocks, memory. Split invariance is tested in test_law.py."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support.compare import relative_error
from support.memory import LargestTensor
from support.recurrences import gradients, law, positions, seeded, seeds

from baton.kernels.window_attention import window_attention
from baton.kernels.window_attention.chunked import window_attention_chunked
from baton.kernels.window_attention.op import empty
from baton.kernels.window_attention.reference import window_attention_reference


def _arguments(
    seed: int, length: int, heads: int = 4, groups: int = 2, dim: int = 6, dtype: torch.dtype = torch.float64, sinks=False
):
    generator = seeded(seed)
    shapes = [(2, length, heads, dim), (2, length, groups, dim), (2, length, groups, dim), *([(2, length, heads)] if sinks else [])]
    return [torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(("sinks", "soft_cap"), [(False, None), (True, None), (True, 0.6), (False, 50.0)])
@pytest.mark.parametrize("window", [None, 1, 3, 40])
def test_one_document_is_masked_attention(window: int | None, sinks: bool, soft_cap: float | None):
    """Against an explicit softmax over all keys, of capped scores, and over a sink that is one more without a value."""
    leaves = _arguments(1, 23, sinks=sinks)
    q, k, v, *sink = leaves
    options = {"sinks": sink[0] if sinks else None, "soft_cap": soft_cap}
    y, _ = window_attention(q, k, v, window=window, pos=torch.arange(23).expand(2, -1), **options)
    scores = torch.einsum("bihk,bjhk->bhij", q, k.repeat_interleave(2, dim=2)) * 6**-0.5
    scores = scores if soft_cap is None else soft_cap * (scores / soft_cap).tanh()
    distance = torch.arange(23)[:, None] - torch.arange(23)
    hidden = (distance < 0) | (distance >= (window or 23))
    scores = torch.cat((scores.masked_fill(hidden, -torch.inf), *(x.transpose(1, 2).unsqueeze(-1) for x in sink)), dim=-1)
    weights = scores.softmax(-1)[..., :23]
    expected = torch.einsum("bhij,bjhk->bihk", weights, v.repeat_interleave(2, dim=2))
    assert relative_error(y, expected) <= 1e-14
    for ours, theirs in zip(gradients([y], leaves, seeded(2)), gradients([expected], leaves, seeded(2)), strict=True):
        assert relative_error(ours, theirs) <= 1e-12


@law(max_examples=10)
@given(
    seed=seeds, length=st.integers(1, 40), window=st.one_of(st.none(), st.integers(1, 12)), chunk=st.integers(1, 40),
    sinks=st.booleans(), soft_cap=st.sampled_from([None, 0.8]),
)  # fmt: skip
def test_any_block_size_equals_the_definition(seed, length, window, chunk, sinks, soft_cap):
    pos = positions(seeded(seed), 2, length, 0.1)
    found = []
    for function, options in ((window_attention_chunked, {"chunk": chunk}), (window_attention_reference, {})):
        leaves = _arguments(seed, length, sinks=sinks)
        state = empty(leaves[1].detach(), leaves[2].detach(), 0 if window is None else window - 1)
        options |= {"sinks": leaves[3] if sinks else None, "soft_cap": soft_cap}
        y, _ = function(*leaves[:3], window=window, pos=pos, state=state, scale=0.7, **options)
        found.append([y, *gradients([y], leaves, seeded(seed))])
    for ours, theirs in zip(*found, strict=True):
        assert relative_error(ours, theirs) <= 1e-10


def test_packed_documents_are_torchs_causal_attention_of_each():
    lengths = [7, 1, 12]
    q, k, v = (x.detach() for x in _arguments(3, sum(lengths), groups=4))
    pos = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)
    y, _ = window_attention(q, k, v, window=None, pos=pos)
    for part, *qkv in zip(*(x.split(lengths, dim=1) for x in (y, q, k, v)), strict=True):
        expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in qkv), is_causal=True).transpose(1, 2)
        assert relative_error(part, expected) <= 1e-14


def test_a_state_that_has_read_nothing_is_no_key():
    """Rows of zeros are not keys, even if positions say that the document began earlier; in one segment or two."""
    q, k, v = (x.detach() for x in _arguments(4, 9))
    pos = 50 + torch.arange(9).expand(2, -1)
    y, _ = window_attention(q, k, v, window=5, pos=pos)
    from_start, _ = window_attention(q, k, v, window=5, pos=pos - 50)
    first, state = window_attention(q[:, :2], k[:, :2], v[:, :2], window=5, pos=pos[:, :2])
    second, _ = window_attention(q[:, 2:], k[:, 2:], v[:, 2:], window=5, pos=pos[:, 2:], state=state)
    assert torch.equal(y, from_start)
    assert relative_error(torch.cat((first, second), dim=1), y) <= 1e-14


def test_a_window_never_makes_a_matrix_of_all_pairs():
    length, window = 2048, 64
    leaves = _arguments(5, length, dtype=torch.float32)
    with LargestTensor() as largest:
        y, _ = window_attention(*leaves, window=window)
        gradients([y], leaves, seeded(6))
    # an input, or the mask or scores of a block
    assert largest.numel <= max(leaves[0].numel(), 2 * 4 * window * (2 * window - 1))


def test_a_window_of_nothing_is_refused():
    with pytest.raises(ValueError, match="window is 0, expected at least 1"):
        window_attention(*_arguments(7, 3), window=0)
    with pytest.raises(ValueError, match=r"sinks has shape \(2, 3\), expected \(batch, T, heads\) = \(2, 3, 4\)"):
        window_attention(*_arguments(7, 3), window=2, sinks=torch.ones(2, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"soft_cap is 0\.0, expected a number above 0, or None"):
        window_attention(*_arguments(7, 3), window=2, soft_cap=0.0)
    with pytest.raises(ValueError, match="key heads that divides 4 heads"):
        window_attention(*_arguments(8, 3, groups=3), window=2)
