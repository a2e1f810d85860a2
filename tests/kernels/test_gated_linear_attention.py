"""Properties of gated linear attention: equivalent forms, other libraries' forms, strong and weak gates, memory. Split invariance
is tested in test_law.py."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import relative_error
from support.fla import naive
from support.long_form import alternating
from support.memory import LargestTensor
from support.recurrences import gradients, law, positions, seeded, seeds
from torch import Tensor

from baton.kernels.common.example_inputs import extreme_log_gates
from baton.kernels.errors import KernelError
from baton.kernels.gated_linear_attention import gated_linear_attention
from baton.kernels.gated_linear_attention.chunk_math import ChannelDecay
from baton.kernels.gated_linear_attention.chunked import CHUNK, gla_chunked, gla_final_state
from baton.kernels.gated_linear_attention.reference import gla_reference

BATCH, HEADS, D_KEY, D_VALUE = 2, 3, 5, 7

every_gate = pytest.mark.parametrize("gate", ["key", "value", "scalar", "none"])
GIVEN_GATES = ["key", "value", "scalar"]
every_given_gate = pytest.mark.parametrize("gate", GIVEN_GATES)


def _gate_shape(gate: str, heads: int, d_key: int, d_value: int) -> tuple[int, ...]:
    return {"key": (heads, d_key), "value": (heads, d_value), "scalar": (heads,)}[gate]


def _arguments(
    seed: int, gate: str, length: int, group: int = 1, dtype: torch.dtype = torch.float64, gates=extreme_log_gates
) -> tuple[list[Tensor], Tensor]:
    """q, k, v and, where there is one, g; and an initial state."""
    generator = seeded(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    inputs = [randn(BATCH, length, HEADS * group, D_KEY), randn(BATCH, length, HEADS, D_KEY), randn(BATCH, length, HEADS, D_VALUE)]
    if gate != "none":
        inputs.append(gates(generator, BATCH, length, *_gate_shape(gate, HEADS, D_KEY, D_VALUE), dtype=dtype))
    return inputs, randn(BATCH, HEADS, D_KEY, D_VALUE)


def _mild_gates(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    return -torch.rand(*shape, generator=generator, dtype=dtype)


def _with_gradients(run, inputs: list[Tensor], state: Tensor) -> list[Tensor]:
    """Output, leaving state and the gradients of inputs and state."""
    leaves = [x.clone().requires_grad_() for x in (*inputs, state)]
    outputs = run(leaves[:-1], leaves[-1])
    return [*outputs, *gradients(outputs, leaves, seeded(99))]


def _assert_close(found, expected, tolerance: float) -> None:
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert relative_error(one, other) <= tolerance, f"result {number}: {relative_error(one, other):.1e}"


@every_gate
@law(max_examples=10)
@given(seed=seeds, length=st.integers(1, 70), group=st.integers(1, 3), chunk=st.integers(1, 80))
def test_any_chunk_size_equals_the_definition(gate: str, seed: int, length: int, group: int, chunk: int):
    inputs, state = _arguments(seed, gate, length, group)
    pos = positions(seeded(seed), BATCH, length, 0.1)

    def fast(x, S):
        g = None if gate == "none" else x[3]
        return gla_chunked(*x[:3], g, gate=gate, scale=0.3, pos=pos, initial_state=S, chunk=chunk)

    def definition(x, S):
        return gla_reference(*x, gate=gate, scale=0.3, pos=pos, initial_state=S)

    _assert_close(_with_gradients(fast, inputs, state), _with_gradients(definition, inputs, state), 1e-10)


@every_gate
def test_all_tokens_at_once_are_the_same_recurrence(gate: str):
    """y_t = sum_s (a_{s+1} ... a_t) (q_t . k_s) v_s over all earlier tokens s of the document, and what is left of the state."""
    length = 2 * CHUNK + 3
    inputs, state = _arguments(1, gate, length)
    pos = positions(seeded(2), BATCH, length, 0.02)
    y, _ = gated_linear_attention(*inputs, gate=gate, pos=pos, initial_state=state)
    q, k, v = inputs[:3]
    decay = {
        "key": lambda: inputs[3][..., None],
        "value": lambda: inputs[3][..., None, :],
        "scalar": lambda: inputs[3][..., None, None],
        "none": lambda: torch.zeros(BATCH, length, HEADS, 1, 1, dtype=torch.float64),
    }[gate]()
    for t in (0, 1, CHUNK - 1, CHUNK, length - 1):
        left = decay[:, : t + 1].flip(1).cumsum(1).flip(1)
        after = torch.cat((left[:, 1:], torch.zeros_like(left[:, :1])), dim=1).exp()
        visible = t - torch.arange(t + 1) <= pos[:, t, None]
        terms = after * visible[:, :, None, None, None] * k[:, : t + 1, :, :, None] * v[:, : t + 1, :, None, :]
        entering = left[:, 0].exp() * state * (pos[:, t] > t)[:, None, None, None]
        assert relative_error(y[:, t], torch.einsum("bhk,bhkv->bhv", q[:, t], terms.sum(1) + entering)) <= 1e-12


def test_gla_is_flash_linear_attentions():
    inputs, state = _arguments(3, "key", 83, dtype=torch.float32, gates=_mild_gates)
    found = _with_gradients(lambda x, S: gated_linear_attention(*x, gate="key", scale=D_KEY**-0.5, initial_state=S), inputs, state)
    theirs = naive("gla").naive_recurrent_gla
    _assert_close(found, _with_gradients(lambda x, S: theirs(*x, initial_state=S, output_final_state=True), inputs, state), 3e-6)


def test_the_scalar_gate_is_flash_linear_attentions_simple_gla():
    inputs, state = _arguments(4, "scalar", 83, dtype=torch.float32, gates=_mild_gates)
    found = _with_gradients(lambda x, S: gated_linear_attention(*x, gate="scalar", scale=0.3, initial_state=S), inputs, state)
    theirs = naive("simple_gla").naive_recurrent_simple_gla
    _assert_close(found, _with_gradients(lambda x, S: theirs(*x, scale=0.3, initial_state=S), inputs, state), 3e-6)
    y, _ = gated_linear_attention(*inputs, gate="scalar", scale=0.3)
    parallel, _ = naive("simple_gla").naive_parallel_simple_gla(*inputs, scale=0.3)
    assert relative_error(y, parallel) <= 3e-6


def test_no_gate_is_flash_linear_attentions_linear_attention():
    inputs, state = _arguments(5, "none", 83, dtype=torch.float32)
    found = _with_gradients(lambda x, S: gated_linear_attention(*x, gate="none", scale=0.3, initial_state=S), inputs, state)
    theirs = naive("linear_attn").naive_recurrent_linear_attn
    expected = _with_gradients(lambda x, S: theirs(*x, scale=0.3, initial_state=S, output_final_state=True), inputs, state)
    _assert_close(found, expected, 3e-6)


def test_retention_is_flash_linear_attentions():
    """Decays 1 - 2^(-5 - head), all tokens of the sequence alike (Sun et al. 2023, equation 8)."""
    (q, k, v), _ = _arguments(6, "none", 150, dtype=torch.float32)
    decay = torch.log1p(-(2.0 ** (-5.0 - torch.arange(HEADS)))).expand(BATCH, 150, HEADS)
    y, _ = gated_linear_attention(q, k, v, decay, gate="scalar", scale=D_KEY**-0.5)
    theirs = naive("retention").naive_retention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    assert relative_error(y, theirs) <= 3e-6


def test_a_state_of_one_column_is_flash_linear_attentions_hgrn():
    """HGRN's h = a h + x, element by element, is a key-gated state whose only value is 1."""
    generator = seeded(7)
    x, g = (torch.randn(2, 90, 6, generator=generator) for _ in range(2))
    g = -g.abs()
    ones = torch.ones(2, 90, 1, 1)
    _, S = gated_linear_attention(x[:, :, None], x[:, :, None], ones, g[:, :, None], gate="key")
    theirs, _ = naive("hgrn").naive_recurrent_hgrn(x, g)
    assert relative_error(S[:, 0, :, 0], theirs[:, -1]) <= 3e-6
    # HGRN2 writes x with strength 1 - a, and reads with q
    strength = -torch.expm1(g)
    y, _ = gated_linear_attention(torch.ones(2, 90, 1, 6), strength[:, :, None], ones, g[:, :, None], gate="key")
    theirs, _ = naive("hgrn").naive_recurrent_hgrn(strength, g)
    assert relative_error(y[:, :, 0, 0], theirs.sum(-1)) <= 3e-6


@every_gate
@pytest.mark.parametrize("group", [2, 4])
def test_query_heads_of_a_group_read_one_state(group: int, gate: str):
    """The same as repeating keys, values and gates for each of them, gradients summed over the group."""
    inputs, state = _arguments(8, gate, 75, group)

    def shared(x, S):
        return gated_linear_attention(*x, gate=gate, initial_state=S)

    def repeated(x, S):
        q, rest = x[0], [t.repeat_interleave(group, dim=2) for t in x[1:]]
        y, last = gated_linear_attention(q, *rest, gate=gate, initial_state=S.repeat_interleave(group, dim=1))
        return y, last[:, ::group]

    found, expected = (_with_gradients(run, inputs, state) for run in (shared, repeated))
    _assert_close(found[:-1], expected[:-1], 1e-12)
    # every copy of the state reaches y, but only the first one of each group leaves: both count once
    _assert_close(found[-1:], expected[-1:], 1e-12)


@every_gate
@pytest.mark.parametrize("single", ["k", "q", "k and q"])
def test_a_single_head_is_every_heads(single: str, gate: str):
    """Mamba-2's B and C: the same as repeating it, its gradient summed over the heads."""
    inputs, state = _arguments(26, gate, 75)
    inputs[:2] = [x[:, :, :1] if name in single else x for name, x in zip("qk", inputs)]

    def shared(x, S):
        return gated_linear_attention(*x, gate=gate, initial_state=S)

    def repeated(x, S):
        return gated_linear_attention(*(t.expand(-1, -1, HEADS, -1) for t in x[:2]), *x[2:], gate=gate, initial_state=S)

    _assert_close(*(_with_gradients(run, inputs, state) for run in (shared, repeated)), 1e-12)


@pytest.mark.parametrize("channel", ["key", "value"])
def test_equal_channels_are_one_number_per_head(channel: str):
    inputs, state = _arguments(9, "scalar", 70)
    width = D_KEY if channel == "key" else D_VALUE
    one = gated_linear_attention(*inputs, gate="scalar", initial_state=state)
    all_of_them = gated_linear_attention(
        *inputs[:3], inputs[3][..., None].expand(-1, -1, -1, width), gate=channel, initial_state=state
    )
    _assert_close(all_of_them, one, 1e-13)


def test_a_gate_along_the_values_is_one_along_the_keys_of_the_transposed_state():
    (_, k, v, g), state = _arguments(10, "value", 70)
    _, S = gated_linear_attention(k, k, v, g, gate="value", initial_state=state)
    _, transposed = gated_linear_attention(v, v, k, g, gate="key", initial_state=state.transpose(2, 3).contiguous())
    assert relative_error(S, transposed.transpose(2, 3)) <= 1e-13


@every_given_gate
def test_a_gate_of_one_is_no_gate_and_one_of_zero_forgets(gate: str):
    (q, k, v, g), state = _arguments(11, gate, 70)
    _assert_close(
        gated_linear_attention(q, k, v, 0 * g, gate=gate, initial_state=state),
        gated_linear_attention(q, k, v, gate="none", initial_state=state),
        1e-13,
    )
    y, S = gated_linear_attention(q, k, v, 0 * g - 1e4, gate=gate, initial_state=state)
    assert relative_error(y, (q * k).sum(-1, keepdim=True) * v) <= 1e-13
    assert relative_error(S, k[:, -1, :, :, None] * v[:, -1, :, None, :]) <= 1e-13


@every_given_gate
def test_strong_gates_are_as_exact_as_weak_ones(gate: str):
    """float32 against the definition in float64 on the same numbers; a difference of cumulated sums would be off by 4e-4 here."""

    def gates(generator, *shape, dtype):
        weak = extreme_log_gates(generator, *shape, dtype=dtype) * 1e-2
        return torch.where(torch.rand(*shape, generator=generator) < 0.1, -3e3, weak)

    inputs, state = _arguments(12, gate, 300, dtype=torch.float32, gates=gates)
    pos = positions(seeded(13), BATCH, 300, 0.01)
    found = _with_gradients(lambda x, S: gated_linear_attention(*x, gate=gate, pos=pos, initial_state=S), inputs, state)
    exact = [x.double() for x in inputs]
    expected = _with_gradients(lambda x, S: gla_reference(*x, gate=gate, pos=pos, initial_state=S), exact, state.double())
    assert all(x.isfinite().all() for x in found)
    _assert_close(found, expected, 2e-6)


@pytest.mark.parametrize(("g", "gate"), alternating([-1e-7, -1e-4, -0.5], GIVEN_GATES))
def test_twenty_thousand_equal_tokens_are_a_geometric_series(gate: str, g: float):
    """S = k v^T (1 - a^T) / (1 - a), in float32 also where 1 - a is not a number float32 can tell from 0."""
    length = 20_000
    generator = seeded(14)
    k, v = torch.randn(1, 1, 1, 3, generator=generator), torch.randn(1, 1, 1, 4, generator=generator)
    gates = torch.full((1, length, *_gate_shape(gate, 1, 3, 4)), g)
    y, S = gated_linear_attention(*(x.expand(1, length, 1, -1) for x in (k, k, v)), gates, gate=gate)
    exact = torch.tensor(g, dtype=torch.float32).double()
    series = torch.expm1(length * exact) / torch.expm1(exact)
    assert relative_error(S[0, 0], series * k.double().view(3, 1) * v.double().view(1, 4)) <= 1e-5
    assert relative_error(y[0, -1, 0], series * k.double().square().sum() * v.double().view(4)) <= 1e-5


@every_given_gate
def test_gates_of_another_document_do_not_change_a_bit(gate: str):
    """However strong: the first token of a document, whose gate decays nothing, among them."""
    inputs, state = _arguments(15, gate, 60, dtype=torch.float32)
    pos = torch.cat((torch.arange(20), torch.arange(40))).expand(BATCH, -1)
    results = []
    for strength in (1.0, 1e30):
        g = inputs[3].clone()
        g[:, :21] *= strength
        results.append(
            _with_gradients(lambda x, S: gated_linear_attention(*x, gate=gate, pos=pos, initial_state=S), [*inputs[:3], g], state)
        )
    for one, other in zip(*results, strict=True):
        assert other.isfinite().all()
        if one.shape[1] == 60:
            assert torch.equal(one[:, 20:], other[:, 20:])
    assert not results[1][-2][:, 20].any(), "the gate of a first token has no effect, so no gradient"


@every_gate
def test_results_with_and_without_gradients_have_the_same_bits(gate: str):
    inputs, state = _arguments(16, gate, 100, 2, dtype=torch.float32)
    leaves = [x.clone().requires_grad_() for x in (*inputs, state)]
    tracked = gated_linear_attention(*leaves[:-1], gate=gate, initial_state=leaves[-1])
    for with_gradient, without in zip(tracked, gated_linear_attention(*inputs, gate=gate, initial_state=state), strict=True):
        assert with_gradient.requires_grad
        assert not without.requires_grad
        assert torch.equal(with_gradient, without)


@every_gate
def test_states_alone_are_the_states_of_a_run(gate: str):
    """Bit for bit: they may be sent before the outputs exist."""
    inputs, _ = _arguments(17, gate, 2 * CHUNK + 5, dtype=torch.float32)
    pos = positions(seeded(18), BATCH, 2 * CHUNK + 5, 0.02)
    _, S = gated_linear_attention(*inputs, gate=gate, pos=pos)
    k, v, *gates = inputs[1:]
    assert torch.equal(gla_final_state(k, v, gates[0] if gates else None, gate=gate, pos=pos), S)


@every_gate
def test_nothing_of_the_size_of_all_expanded_tokens_is_ever_allocated(gate: str):
    batch, length, heads, d_key, d_value = 1, 1024, 2, 48, 40
    generator = seeded(19)
    sizes = [(batch, length, heads, d) for d in (d_key, d_key, d_value)]
    inputs = [torch.randn(*size, generator=generator) for size in sizes]
    if gate != "none":
        inputs.append(-torch.rand(batch, length, *_gate_shape(gate, heads, d_key, d_value), generator=generator))
    with LargestTensor() as largest:
        _with_gradients(
            lambda x, S: gated_linear_attention(*x, gate=gate, initial_state=S), inputs, torch.zeros(batch, heads, d_key, d_value)
        )
    pairs, state = CHUNK * CHUNK * heads, heads * d_key * d_value
    assert largest.numel <= batch * max(length * heads * max(d_key, d_value), pairs, state)


def test_a_block_of_a_channel_gate_has_no_pairs_of_tokens_times_channels():
    """Joining blocks two by two instead keeps a block of 64 tokens at a few multiples of its inputs."""
    heads, length, d = 2, 64, 256
    q, k, v, g = (torch.randn(1, heads, length, d, generator=seeded(n)) for n in range(20, 24))
    with LargestTensor() as largest:
        decay = ChannelDecay(-g.abs(), None)
        decay.read_keys(q[:, :, :, None], k, v, torch.zeros(1, heads, d, d))
        decay.read_values(q[:, :, :, None], k, v, torch.zeros(1, heads, d, d))
    assert largest.numel <= heads * d * d


@pytest.mark.parametrize("gate", ["key", "scalar"])
def test_equal_runs_give_equal_gradients(gate: str):
    inputs, state = _arguments(24, gate, 150, 2, dtype=torch.float32)
    runs = [_with_gradients(lambda x, S: gated_linear_attention(*x, gate=gate, initial_state=S), inputs, state) for _ in range(2)]
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


@every_gate
@pytest.mark.parametrize("query_heads", [12, 2, 1])
def test_groups_of_heads_share_keys_whatever_the_queries(gate, query_heads):
    """Two keys for six heads; two queries for each head, one of each key, or one of all."""
    generator, length, heads = seeded(26), 9, 6

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    keys, queries = randn(BATCH, length, 2, D_KEY), randn(BATCH, length, query_heads, D_KEY)
    inputs = [queries, keys, randn(BATCH, length, heads, D_VALUE)]
    if gate != "none":
        inputs.append(_mild_gates(generator, BATCH, length, *_gate_shape(gate, heads, D_KEY, D_VALUE), dtype=torch.float64))
    pos, state = positions(seeded(27), BATCH, length, 0.2), randn(BATCH, heads, D_KEY, D_VALUE)
    options = {"gate": gate, "scale": 0.3, "pos": pos}
    found, expected = (
        _with_gradients(lambda x, S, run=run: run(*x, initial_state=S, **options), inputs, state)
        for run in (gated_linear_attention, gla_reference)
    )
    _assert_close(found, expected, 1e-12)


def test_what_does_not_fit_the_gate_is_refused():
    (q, k, v, g), state = _arguments(25, "key", 5)
    for gate, given_g, message in (
        ("keys", g, r"gate is 'keys', expected one of \('key', 'value', 'scalar', 'none'\)"),
        ("none", g, "g is given, expected None for gate 'none'"),
        ("key", None, r"g is a NoneType, expected a tensor of shape \(batch, T, heads, d_key\)"),
        ("value", g, r"g has shape \(2, 5, 3, 5\), expected \(batch, T, heads, d_value\) = \(2, 5, 3, 7\)"),
        ("scalar", g, r"g has shape \(2, 5, 3, 5\), expected \(batch, T, heads\) = \(2, 5, 3\)"),
    ):
        with pytest.raises(KernelError, match=message):
            gated_linear_attention(q, k, v, given_g, gate=gate)
    with pytest.raises(KernelError, match="q has 4 heads, expected a multiple of the 3 of v, 1 or the 3 of k"):
        gated_linear_attention(torch.cat((q, q[:, :, :1]), dim=2), k, v, g, gate="key")
    with pytest.raises(KernelError, match="k has 2 heads, expected the 3 of v, or a divisor"):
        gated_linear_attention(q, k[:, :, :2], v, g, gate="key")
    with pytest.raises(KernelError, match=r"initial_state has shape \(2, 3, 7, 5\)"):
        gated_linear_attention(q, k, v, g, gate="key", initial_state=state.transpose(2, 3))
