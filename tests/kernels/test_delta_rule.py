"""Properties of the delta rule: recall, transition, decays, other libraries' forms, memory. Split invariance is tested in
test_law.py."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import relative_error
from support.fla import naive
from support.memory import LargestTensor
from support.recurrences import gradients, law, positions, seeded, seeds
from torch import Tensor
from torch.nn.functional import normalize

from baton.kernels.delta_rule import delta_rule
from baton.kernels.delta_rule.chunked import CHUNK, delta_rule_chunked, delta_rule_transition
from baton.kernels.delta_rule.recurrence import DeltaRule
from baton.kernels.delta_rule.reference import delta_rule_reference

every_gate = pytest.mark.parametrize("gate", ["none", "scalar", "key"])
both = pytest.mark.parametrize("gate", ["none", "scalar"])


def _example(seed: int, batch: int, length: int, dtype: torch.dtype, gate: str, wide: bool = False) -> list[Tensor]:
    """q, k, v, beta, g if there is a gate, initial_state."""
    inputs, state = DeltaRule(gate != "none", by_channel=gate == "key").example(seeded(seed), batch, length, dtype, wide)
    return [*inputs, state["S"]]


def _gate(arguments: list[Tensor]) -> Tensor | None:
    return arguments[4] if len(arguments) == 6 else None


def _orthonormal_keys(seed: int, batch: int, heads: int, d_key: int) -> Tensor:
    """d_key of them, [batch, T = d_key, heads, d_key]."""
    q, _ = torch.linalg.qr(torch.randn(batch, heads, d_key, d_key, generator=seeded(seed), dtype=torch.float64))
    return q.transpose(1, 2).contiguous()


def _recall(S: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bhkv,bhk->bhv", S, k)


@every_gate
@law(max_examples=7)
@given(seed=seeds, batch=st.integers(1, 2), length=st.integers(1, 33), chunk=st.integers(1, 40))
def test_any_chunk_size_equals_the_definition(gate: str, seed: int, batch: int, length: int, chunk: int):
    arguments = _example(seed, batch, length, torch.float64, gate)
    pos = positions(seeded(seed), batch, length, 0.2)
    found = []
    for function, options in ((delta_rule_chunked, {"chunk": chunk}), (delta_rule_reference, {})):
        leaves = [x.clone().requires_grad_() for x in arguments]
        o = function(*leaves[:4], _gate(leaves), scale=0.7, pos=pos, initial_state=leaves[-1], **options)
        found.append([*o, *gradients(o, leaves, seeded(seed))])
    for fast, definition in zip(*found, strict=True):
        assert relative_error(fast, definition) <= 1e-10


@every_gate
@law(max_examples=6)
@given(seed=seeds, length=st.integers(1, 33), chunk=st.integers(1, 40), start_probability=st.sampled_from([0.0, 0.1]))
def test_the_effect_is_the_product_of_the_transitions_for_any_chunk_size(
    gate: str, seed: int, length: int, chunk: int, start_probability: float
):
    arguments = _example(seed, 2, length, torch.float64, gate)
    pos = positions(seeded(seed), 2, length, start_probability)
    q, k, v, beta = arguments[:4]
    M, add = delta_rule_transition(k, v, beta, _gate(arguments), pos=pos, chunk=chunk)
    expected = torch.eye(k.shape[3], dtype=torch.float64).expand_as(M)
    for t in range(length):
        key = k[:, t]
        step = torch.eye(k.shape[3], dtype=torch.float64) - beta[:, t, :, None, None] * key[..., :, None] * key[..., None, :]
        if gate != "none":
            decay = arguments[4][:, t].exp()
            step = step * (decay[..., None, :] if gate == "key" else decay[..., None, None])
        expected = step @ expected.masked_fill((pos[:, t] == 0)[:, None, None, None], 0.0)
    assert relative_error(M, expected) <= 1e-12
    assert relative_error(add, delta_rule_reference(q, k, v, beta, _gate(arguments), pos=pos)[1]) <= 1e-12


@pytest.mark.parametrize("form", ["token by token", "in chunks"])
def test_the_rule_without_a_gate_is_flash_linear_attentions(form: str):
    """Its layout is (batch, heads, time, dim); the chunked form has no initial state and takes whole chunks only."""
    peer = naive("delta_rule")
    q, k, v, beta, state = _example(1, 2, 96, torch.float32, gate="none", wide=True)
    theirs = [x.transpose(1, 2) for x in (q, k, v, beta)]
    if form == "token by token":
        o, final = peer.delta_rule_recurrence(*theirs, initial_state=state)
        found = delta_rule(q, k, v, beta, initial_state=state)
    else:
        o, final = peer.delta_rule_chunkwise(*theirs, chunk_size=32)
        found = delta_rule(q, k, v, beta)
    assert relative_error(found[0], o.transpose(1, 2)) <= 2e-6
    assert relative_error(found[1], final) <= 2e-6


@pytest.mark.parametrize("form", ["token by token", "in chunks"])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_the_gated_rule_is_flash_linear_attentions_and_so_are_its_gradients(form: str, scale: float | None):
    peer = naive("gated_delta_rule")
    inputs, state = DeltaRule(gated=True).example(seeded(2), 2, 75, torch.float32, wide=True)
    # their chunked form takes differences of summed log-decays, which keep few digits where some decays are extreme
    inputs = (*inputs[:4], inputs[4].clamp(min=-1.0))
    found = []
    for theirs in (False, True):
        q, k, v, beta, g, S = leaves = [x.clone().requires_grad_() for x in (*inputs, state["S"])]
        if theirs:
            function = peer.naive_recurrent_gated_delta_rule if form == "token by token" else peer.naive_chunk_gated_delta_rule
            outputs = function(q=q, k=k, v=v, beta=beta, g=g, scale=scale, initial_state=S, output_final_state=True)
        else:
            outputs = delta_rule(q, k, v, beta, g, scale=scale, initial_state=S)
        found.append([*outputs, *gradients(outputs, leaves, seeded(3))])
    for ours, peers in zip(*found, strict=True):
        assert relative_error(ours, peers) <= 5e-6


@pytest.mark.parametrize("form", ["token by token", "in chunks"])
def test_the_rule_of_channels_is_flash_linear_attentions_and_so_are_its_gradients(form: str):
    """Two heads of values for each of keys. Their chunked form takes whole chunks."""
    peer = naive("kda")
    inputs, state = DeltaRule(True, by_channel=True, key_heads=2).example(seeded(2), 2, 64, torch.float32, wide=True)
    inputs = (*inputs[:4], inputs[4].clamp(min=-1.0))
    found = []
    for theirs in (False, True):
        q, k, v, beta, g, S = leaves = [x.clone().requires_grad_() for x in (*inputs, state["S"])]
        if theirs:
            function = peer.naive_recurrent_kda if form == "token by token" else partial(peer.naive_chunk_kda, chunk_size=16)
            outputs = function(q, k, v, g, beta, initial_state=S, output_final_state=True)
        else:
            outputs = delta_rule(q, k, v, beta, g, initial_state=S)
        found.append([*outputs, *gradients(outputs, leaves, seeded(3))])
    for ours, peers in zip(*found, strict=True):
        assert relative_error(ours, peers) <= 5e-6


def test_with_beta_one_a_unit_key_recalls_exactly_what_was_written_last():
    """Whatever the state held, and however strongly it decays."""
    arguments = _example(4, 2, 20, torch.float64, gate="scalar")
    q, _, v, beta, g, S = arguments
    k = normalize(torch.randn(q.shape, generator=seeded(5), dtype=torch.float64), dim=-1)
    for t in range(20):
        token = slice(t, t + 1)
        o, S = delta_rule(
            k[:, token], k[:, token], v[:, token], torch.ones_like(beta[:, token]), g[:, token], scale=1.0, initial_state=S
        )
        assert relative_error(_recall(S, k[:, t]), v[:, t]) <= 1e-14
        assert relative_error(o, v[:, token]) <= 1e-14


def test_a_repeated_key_recalls_the_last_value_and_the_others_keep_theirs():
    """Orthonormal keys, written twice with other values: a sum over all writes would recall the sum of both."""
    k = _orthonormal_keys(6, 2, 3, 8)
    first, second = torch.randn(2, 2, 8, 3, 5, generator=seeded(7), dtype=torch.float64)
    again = torch.arange(8) % 2 == 0
    keys, values = torch.cat((k, k[:, again]), 1), torch.cat((first, second[:, again]), 1)
    _, S = delta_rule(keys, keys, values, torch.ones(2, 12, 3, dtype=torch.float64))
    expected = torch.where(again[None, :, None, None], second, first)
    for n in range(8):
        assert relative_error(_recall(S, k[:, n]), expected[:, n]) <= 1e-13


def test_an_entering_state_decays_before_its_old_value_is_erased():
    """With beta 1/2, what k recalls is half the decayed old value plus half the new one, the decay on the old one only."""
    k = _orthonormal_keys(8, 1, 2, 4)[:, :1]
    old, new = torch.randn(2, 1, 1, 2, 3, generator=seeded(9), dtype=torch.float64)
    half, g = torch.full((1, 1, 2), 0.5, dtype=torch.float64), torch.full((1, 1, 2), -0.3, dtype=torch.float64)
    S = torch.einsum("bthk,bthv->bhkv", k, old)
    _, S = delta_rule(k, k, new, half, g, initial_state=S)
    assert relative_error(_recall(S, k[:, 0]), 0.5 * g[:, 0, :, None].exp() * old[:, 0] + 0.5 * new[:, 0]) <= 1e-14


@every_gate
def test_beta_zero_without_decay_keeps_every_bit_of_the_state(gate: str):
    q, k, v, *_, state = _example(10, 2, 3 * CHUNK // 2, torch.float32, gate, wide=True)
    nothing = torch.zeros(v.shape[:3])
    g = {"none": None, "scalar": nothing, "key": torch.zeros_like(k)}[gate]
    o, final = delta_rule(q, k, v, nothing, g, initial_state=state)
    assert torch.equal(final, state)
    assert relative_error(o, torch.einsum("bhkv,bthk->bthv", state, q) * q.shape[3] ** -0.5) <= 1e-6


def test_a_log_decay_of_zero_is_no_gate():
    q, k, v, beta, state = _example(11, 2, 100, torch.float32, gate="none", wide=True)
    plain = delta_rule(q, k, v, beta, initial_state=state)
    for ours, without in zip(delta_rule(q, k, v, beta, torch.zeros_like(beta), initial_state=state), plain, strict=True):
        assert torch.equal(ours, without)


@both
@law(max_examples=8)
@given(seed=seeds, length=st.integers(1, 200), d_key=st.integers(1, 12))
def test_the_transition_never_makes_a_state_longer(gate: str, seed: int, length: int, d_key: int):
    """Unit keys and beta in 0..2: a product of (decayed) partial reflections. Some keys are repeated, some all but."""
    generator = seeded(seed)
    k = torch.randn(1, length, 2, d_key, generator=generator, dtype=torch.float64)
    k[:, 1::3] = k[:, :-1:3] + 1e-7 * k[:, 1::3]
    k = normalize(k, dim=-1)
    beta = 2 * torch.rand(1, length, 2, generator=generator, dtype=torch.float64)
    beta[:, ::5] = 2.0
    g = -torch.rand(1, length, 2, generator=generator, dtype=torch.float64) * 0.01 if gate == "scalar" else None
    M, _ = delta_rule_transition(k, torch.zeros_like(k), beta, g, pos=None)
    norm = torch.linalg.matrix_norm(M, ord=2)
    assert (norm <= (1 if g is None else g.sum(1).exp()) * (1 + 1e-12)).all()


def test_reflections_keep_the_length_of_a_state():
    """beta = 2 with unit keys: the transition is orthogonal, over any number of tokens."""
    k = normalize(torch.randn(1, 500, 2, 9, generator=seeded(12), dtype=torch.float64), dim=-1)
    M, _ = delta_rule_transition(k, torch.zeros_like(k), torch.full((1, 500, 2), 2.0, dtype=torch.float64), None, pos=None)
    assert relative_error(M @ M.transpose(2, 3), torch.eye(9, dtype=torch.float64).expand_as(M)) <= 1e-12


def test_extreme_decays_before_small_ones_cost_no_digits():
    """float32: exp(g) of a token counts with its own digits, also where the log-decays before it sum to -1000 and more."""
    q, k, v, beta, g, state = _example(13, 2, CHUNK, torch.float32, gate="scalar", wide=True)
    g = torch.where(torch.arange(CHUNK)[:, None] < CHUNK // 2, -40.0, 1e-2 * g.clamp(min=-1.0))
    leaves = [x.clone().requires_grad_() for x in (q, k, v, beta, g, state)]
    outputs = delta_rule(*leaves[:5], initial_state=leaves[5])
    exact_leaves = [x.double().requires_grad_() for x in (q, k, v, beta, g, state)]
    exact = delta_rule_reference(*exact_leaves[:5], initial_state=exact_leaves[5])
    results = [*outputs, *gradients(outputs, leaves, seeded(14))]
    for single, double in zip(results, [*exact, *gradients(exact, exact_leaves, seeded(14))], strict=True):
        assert single.isfinite().all()
        assert relative_error(single, double) <= 5e-6


@pytest.mark.parametrize("length", [1024, pytest.param(4096, marks=pytest.mark.long)])
def test_float32_stays_with_float64_over_many_tokens(length):
    """The definition in float64, token by token, on the same numbers; mild decays, so that the state holds hundreds of tokens. Of
    four sequences two have a gate, which makes no decay in the others, and strengths are at most 1 or 2."""
    batch, heads, d_key, d_value = 4, 1, 16, 8
    generator = seeded(15)
    q, k = (normalize(torch.randn(batch, length, heads, d_key, generator=generator), dim=-1) for _ in range(2))
    beta = torch.tensor([1.0, 2.0, 1.0, 2.0])[:, None, None] * torch.sigmoid(torch.randn(batch, length, heads, generator=generator))
    g = -0.01 * torch.rand(batch, length, heads, generator=generator)
    g[:2] = 0.0
    S = torch.randn(batch, heads, d_key, d_value, generator=generator)
    arguments = [q, k, torch.randn(batch, length, heads, d_value, generator=generator), beta, g, S]
    pos = positions(seeded(16), batch, length, 1e-3)
    leaves = [x.clone().requires_grad_() for x in arguments]
    halves = []
    for gated, lanes in ((False, slice(0, 2)), (True, slice(2, 4))):
        q, k, v, beta, g, S = (x[lanes] for x in leaves)
        halves.append(delta_rule(q, k, v, beta, g if gated else None, pos=pos[lanes], initial_state=S))
    outputs = [torch.cat(pair) for pair in zip(*halves, strict=True)]
    exact_leaves = [x.double().requires_grad_() for x in arguments]
    exact = delta_rule_reference(*exact_leaves[:-1], pos=pos, initial_state=exact_leaves[-1])
    names = ("o", "S", "dq", "dk", "dv", "dbeta", "dg", "dS")
    results = zip(names, [*outputs, *gradients(outputs, leaves, seeded(17))], strict=True)
    for (name, single), double in zip(results, [*exact, *gradients(exact, exact_leaves, seeded(17))], strict=True):
        for lane in range(2 if name == "dg" else 0, batch):
            assert relative_error(single[lane], double[lane]) <= 3e-6, (name, lane)


@every_gate
def test_nothing_larger_than_the_inputs_the_borders_or_one_chunk_is_ever_allocated(gate: str):
    batch, length, heads, d_key, d_value = 1, 1024, 2, 32, 48
    generator = seeded(18)
    normal = [torch.randn(batch, length, heads, d, generator=generator) for d in (d_key, d_key, d_value)]
    gates = [torch.sigmoid(torch.randn(batch, length, heads, generator=generator)) for _ in range(2)]
    q, k, v, beta, g = normal[0], normalize(normal[1], dim=-1), normal[2], gates[0], gates[1].log()
    g = g[..., None].expand_as(k).contiguous() if gate == "key" else g
    arguments = [q, k, v, beta, *(() if gate == "none" else (g,)), torch.randn(batch, heads, d_key, d_value, generator=generator)]
    leaves = [x.requires_grad_() for x in arguments]
    with LargestTensor() as largest:
        outputs = delta_rule(*leaves[:-1], initial_state=leaves[-1])
        gradients(outputs, leaves, seeded(19))
    state, widest = batch * heads * d_key * d_value, batch * length * heads * max(d_key, d_value)
    assert largest.numel <= max(widest, batch * heads * CHUNK * CHUNK, state)
    assert largest.numel < length * state / 8


def test_one_token_at_a_time_is_decoding():
    """A piece of one token needs a matrix of one by one: the same code, and no T x T of anything."""
    arguments = _example(20, 2, 70, torch.float64, gate="scalar")
    q, k, v, beta, g, S = arguments
    whole, final = delta_rule(q, k, v, beta, g, initial_state=S)
    for t in range(70):
        token = slice(t, t + 1)
        o, S = delta_rule(q[:, token], k[:, token], v[:, token], beta[:, token], g[:, token], initial_state=S)
        assert relative_error(o, whole[:, token]) <= 1e-11
    assert relative_error(S, final) <= 1e-11


def test_a_state_kept_in_low_precision_and_heads_that_are_no_groups_are_refused():
    q, k, v, beta, state = (x.bfloat16() for x in _example(21, 2, 5, torch.float32, gate="none"))
    with pytest.raises(ValueError, match="initial_state has dtype bfloat16, expected float32"):
        delta_rule(q, k, v, beta, initial_state=state)
    with pytest.raises(ValueError, match="v has 1 heads, expected the 2 of q and k, or a multiple"):
        delta_rule(q, k, v[:, :, :1], beta[:, :, :1])
    o, final = delta_rule(q, k, v, beta, initial_state=state.float())
    assert (o.dtype, final.dtype) == (torch.bfloat16, torch.float32)
