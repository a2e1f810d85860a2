"""Properties of the generalized delta rule: chunks of any size, another library's forms, the delta rule as a special case. Split
invariance is tested in test_law.py."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import relative_error
from support.fla import naive
from support.recurrences import gradients, law, positions, seeded, seeds

from baton.kernels.delta_rule.recurrence import DeltaRule
from baton.kernels.delta_rule.reference import delta_rule_reference
from baton.kernels.generalized_delta_rule import generalized_delta_rule
from baton.kernels.generalized_delta_rule.chunked import generalized_delta_rule_chunked, generalized_delta_rule_transition
from baton.kernels.generalized_delta_rule.recurrence import GeneralizedDeltaRule
from baton.kernels.generalized_delta_rule.reference import generalized_delta_rule_reference


def _example(seed: int, batch: int, length: int, dtype: torch.dtype, wide: bool = False):
    """r, k, v, a, b, g, initial_state, where b is any vector and not a multiple of a: the rule does not depend on it."""
    (*inputs, g), state = GeneralizedDeltaRule().example(seeded(seed), batch, length, dtype, wide)
    b = inputs[4]
    inputs[4] = b + 0.1 * torch.randn(b.shape, generator=seeded(seed), dtype=dtype)
    return [*inputs, g, state["S"]]


@law(max_examples=10)
@given(seed=seeds, batch=st.integers(1, 2), length=st.integers(1, 33), chunk=st.integers(1, 40))
def test_any_chunk_size_equals_the_definition(seed: int, batch: int, length: int, chunk: int):
    arguments = _example(seed, batch, length, torch.float64)
    pos = positions(seeded(seed), batch, length, 0.2)
    found = []
    for function, options in ((generalized_delta_rule_chunked, {"chunk": chunk}), (generalized_delta_rule_reference, {})):
        leaves = [x.clone().requires_grad_() for x in arguments]
        o = function(*leaves[:-1], scale=0.7, pos=pos, initial_state=leaves[-1], **options)
        found.append([*o, *gradients(o, leaves, seeded(seed))])
    for fast, definition in zip(*found, strict=True):
        assert relative_error(fast, definition) <= 1e-10


@law(max_examples=6)
@given(seed=seeds, length=st.integers(1, 33), chunk=st.integers(1, 40), start_probability=st.sampled_from([0.0, 0.1]))
def test_the_effect_is_the_product_of_the_transitions_for_any_chunk_size(
    seed: int, length: int, chunk: int, start_probability: float
):
    r, k, v, a, b, g, _ = _example(seed, 2, length, torch.float64)
    pos = positions(seeded(seed), 2, length, start_probability)
    M, add = generalized_delta_rule_transition(k, v, a, b, g, pos=pos, chunk=chunk)
    expected = torch.eye(k.shape[3], dtype=torch.float64).expand_as(M)
    for t in range(length):
        step = torch.diag_embed(g[:, t].exp()) + b[:, t, :, :, None] * a[:, t, :, None, :]
        expected = step @ expected.masked_fill((pos[:, t] == 0)[:, None, None, None], 0.0)
    assert relative_error(M, expected) <= 1e-12
    assert relative_error(add, generalized_delta_rule_reference(r, k, v, a, b, g, pos=pos)[1]) <= 1e-12


@pytest.mark.parametrize("form", ["token by token", "in chunks"])
def test_it_is_flash_linear_attentions_and_so_are_its_gradients(form: str):
    """Their layout is (batch, heads, time, dim); their chunked form takes whole chunks and differences of summed log-decays."""
    peer = naive("generalized_delta_rule/dplr")
    arguments = _example(2, 2, 64, torch.float32, wide=True)
    arguments[5] = arguments[5].clamp(min=-1.0)
    found = []
    for theirs in (False, True):
        *inputs, S = leaves = [x.clone().requires_grad_() for x in arguments]
        if theirs:
            function, options = (
                (peer.dplr_recurrence, {}) if form == "token by token" else (peer.dplr_chunkwise, {"chunk_size": 16})
            )
            o, final = function(*(x.transpose(1, 2) for x in inputs), initial_state=S, **options)
            outputs = o.transpose(1, 2), final
        else:
            outputs = generalized_delta_rule(*inputs, scale=inputs[0].shape[3] ** -0.5, initial_state=S)
        found.append([*outputs, *gradients(outputs, leaves, seeded(3))])
    for ours, peers in zip(*found, strict=True):
        assert relative_error(ours, peers) <= 1e-5


@pytest.mark.parametrize("by_channel", [False, True])
def test_the_delta_rule_is_a_special_case(by_channel: bool):
    """(I - beta k k^T) Diag(exp(g)) = Diag(exp(g)) - beta k (exp(g) k)^T."""
    (q, k, v, beta, g), state = DeltaRule(True, by_channel=by_channel).example(seeded(4), 2, 70, torch.float64, wide=True)
    pos, strength, g = positions(seeded(4), 2, 70, 0.1), beta[..., None], (g if by_channel else g[..., None]).expand_as(k)
    found = generalized_delta_rule(
        q, strength * k, v, g.exp() * k, -strength * k, g.contiguous(), scale=0.5, pos=pos, initial_state=state["S"]
    )
    expected = delta_rule_reference(q, k, v, beta, g, scale=0.5, pos=pos, initial_state=state["S"])
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, theirs) <= 1e-12
