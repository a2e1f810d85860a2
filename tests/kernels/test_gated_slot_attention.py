"""Properties of gated slot attention: two passes, slot activations, slots as averages, other libraries' forms, memory. Split
invariance is tested in test_law.py."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import relative_error
from support.fla import naive
from support.memory import LargestTensor
from support.recurrences import gradients, law, positions, seeded, seeds
from torch import Tensor

from baton.kernels.common.example_inputs import extreme_log_gates
from baton.kernels.errors import KernelError
from baton.kernels.gated_linear_attention import gated_linear_attention
from baton.kernels.gated_linear_attention.chunked import CHUNK
from baton.kernels.gated_slot_attention import gated_slot_attention
from baton.kernels.gated_slot_attention.chunked import gsa_chunked, gsa_final_state
from baton.kernels.gated_slot_attention.reference import SLOT_ACTIVATIONS, gsa_reference

BATCH, HEADS, D_KEY, SLOTS, D_VALUE = 2, 3, 6, 5, 4

every_slot_activation = pytest.mark.parametrize("slot_activation", list(SLOT_ACTIVATIONS))


def _mild_gates(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    return -torch.rand(*shape, generator=generator, dtype=dtype)


def _arguments(
    seed: int, length: int, group: int = 1, dtype: torch.dtype = torch.float64, gates=extreme_log_gates, slots: int = SLOTS
) -> list[Tensor]:
    """q, k, v, g and the entering slots of keys and of values."""
    generator = seeded(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    q, k, v = (randn(BATCH, length, *size) for size in ((HEADS * group, D_KEY), (HEADS, D_KEY), (HEADS, D_VALUE)))
    g = gates(generator, BATCH, length, HEADS, slots, dtype=dtype)
    return [q, k, v, g, randn(BATCH, HEADS, D_KEY, slots), randn(BATCH, HEADS, slots, D_VALUE)]


def _run(*arguments: Tensor, run=gated_slot_attention, **options) -> tuple[Tensor, Tensor, Tensor]:
    """Output and the leaving slots of keys and of values, of `_arguments`."""
    *inputs, k, v = arguments
    y, state = run(*inputs, initial_state={"k": k, "v": v}, **options)
    return y, state["k"], state["v"]


def _with_gradients(run, arguments: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in arguments]
    outputs = run(*leaves)
    return [*outputs, *gradients(outputs, leaves, seeded(99))]


def _assert_close(found, expected, tolerance: float) -> None:
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert relative_error(one, other) <= tolerance, f"result {number}: {relative_error(one, other):.1e}"


@every_slot_activation
@law(max_examples=8)
@given(seed=seeds, length=st.integers(1, 70), group=st.integers(1, 3), chunk=st.integers(1, 80))
def test_any_chunk_size_equals_the_definition(slot_activation: str, seed: int, length: int, group: int, chunk: int):
    arguments, pos = _arguments(seed, length, group), positions(seeded(seed), BATCH, length, 0.1)
    options = {"slot_activation": slot_activation, "scale": 0.4, "pos": pos}
    found = _with_gradients(lambda *x: _run(*x, run=gsa_chunked, chunk=chunk, **options), arguments)
    _assert_close(found, _with_gradients(lambda *x: _run(*x, run=gsa_reference, **options), arguments), 1e-10)


@every_slot_activation
@pytest.mark.parametrize("group", [1, 3])
def test_it_is_two_passes_of_gated_linear_attention(group: int, slot_activation: str):
    """Gate along the values of the first, along the keys of the second, the link between them (equation 7, gates put right)."""
    arguments, pos = _arguments(1, 2 * CHUNK + 9, group), positions(seeded(2), BATCH, 2 * CHUNK + 9, 0.02)

    def two_passes(q, k, v, g, k_slots, v_slots):
        write = 1 - g.exp()
        scores, k_slots = gated_linear_attention(q, k, write, g, gate="value", scale=0.4, pos=pos, initial_state=k_slots)
        y, v_slots = gated_linear_attention(
            SLOT_ACTIVATIONS[slot_activation](scores), write, v, g, gate="key", pos=pos, initial_state=v_slots
        )
        return y, k_slots, v_slots

    found = _with_gradients(lambda *x: _run(*x, slot_activation=slot_activation, scale=0.4, pos=pos), arguments)
    _assert_close(found, _with_gradients(two_passes, arguments), 1e-11)


@pytest.mark.parametrize("group", [1, 3])
def test_it_is_flash_linear_attentions(group: int):
    arguments = _arguments(3, 83, group, dtype=torch.float32, gates=_mild_gates)

    def theirs(q, k, v, g, k_slots, v_slots):
        write = -torch.expm1(g)
        # theirs puts query heads of a group next to each other as well, and gives back the slots of the group's first
        states = {"initial_state": (k_slots, v_slots), "output_final_state": True}
        y, (k_last, v_last) = naive("gsa").naive_recurrent_gsa(q, k, v, write, g, scale=0.4, **states)
        return y, k_last, v_last

    _assert_close(_with_gradients(lambda *x: _run(*x, scale=0.4), arguments), _with_gradients(theirs, arguments), 3e-6)


def test_attention_with_bounded_memory_is_one_of_its_gates():
    """ABC, renormalised: slots are running means weighted by exp(s), so alpha_t = exp(z_{t-1} - z_t) with z = logcumsumexp(s).

    Its first token fills the slots, whatever s is: alpha_0 = 0. Ours in float64: z of 83 tokens is large beside its steps.
    """
    q, k, v, s, _, _ = _arguments(4, 83, gates=lambda g, *shape, dtype: torch.randn(*shape, generator=g, dtype=dtype))
    z = s.logcumsumexp(1)
    g = torch.cat((torch.full_like(z[:, :1], -1e4), z[:, :-1] - z[:, 1:]), dim=1)
    y, state = gated_slot_attention(q, k, v, g)
    assert relative_error(state["v"], torch.einsum("bthm,bthv->bhmv", s.softmax(1), v)) <= 1e-13
    theirs, (k_last, v_last) = naive("gsa").naive_recurrent_gsa(
        *(x.float() for x in (q, k, v, s)), scale=1.0, output_final_state=True
    )
    _assert_close((y, state["k"], state["v"]), (theirs, k_last, v_last), 1e-5)


def test_slots_that_keep_all_keep_every_bit():
    q, k, v, g, k_slots, v_slots = _arguments(5, 70, dtype=torch.float32)
    y, k_last, v_last = _run(q, k, v, 0 * g, k_slots, v_slots)
    assert torch.equal(k_last, k_slots)
    assert torch.equal(v_last, v_slots)
    scores = torch.einsum("bthk,bhkm->bthm", q, k_slots)
    assert relative_error(y, torch.einsum("bthm,bhmv->bthv", scores.softmax(-1), v_slots)) <= 1e-6


def test_slots_that_keep_nothing_give_back_the_token():
    q, k, v, g, k_slots, v_slots = _arguments(6, 70)
    y, k_last, v_last = _run(q, k, v, 0 * g - 1e4, k_slots, v_slots)
    assert relative_error(y, v) <= 1e-14
    assert torch.equal(k_last, k[:, -1, :, :, None].expand_as(k_last))
    assert torch.equal(v_last, v[:, -1, :, None, :].expand_as(v_last))


@law(max_examples=10)
@given(seed=seeds, length=st.integers(1, 100))
def test_slots_are_sub_convex_combinations_of_what_was_written(seed: int, length: int):
    """From slots of zero: weights of at least 0 that sum to 1 minus the product of the gates, so no slot exceeds its inputs."""
    q, k, v, g, _, _ = _arguments(seed, length)
    total = -torch.expm1(g.sum(1))
    _, state = gated_slot_attention(q, k, v, g)
    for slots, written in ((state["k"].transpose(2, 3), k), (state["v"], v)):
        low, high = (
            bound[:, :, None].clamp(**side) for bound, side in ((written.amin(1), {"max": 0}), (written.amax(1), {"min": 0}))
        )
        assert (slots <= high + 1e-12).all()
        assert (slots >= low - 1e-12).all()
    ones = torch.ones_like(v)
    _, state = gated_slot_attention(q, torch.ones_like(k), ones, g)
    assert relative_error(state["k"], total[:, :, None, :].expand_as(state["k"])) <= 1e-12
    assert relative_error(state["v"], total[:, :, :, None].expand_as(state["v"])) <= 1e-12


def test_one_slot_is_read_whatever_is_asked():
    """A softmax over one slot is 1: the output is the leaky average of the values, and no gradient reaches q and k."""
    arguments = _arguments(7, 70, slots=1)
    found = _with_gradients(_run, arguments)
    _, _, v, g, _, v_slots = arguments
    average, after = [], v_slots[:, :, 0]
    for t in range(70):
        after = g[:, t].exp() * after - torch.expm1(g[:, t]) * v[:, t]
        average.append(after)
    assert relative_error(found[0], torch.stack(average, dim=1)) <= 1e-13
    y, *_ = leaves = [x.clone().requires_grad_() for x in arguments]
    dq, dk = torch.autograd.grad(gated_slot_attention(*leaves[:4])[0].sum(), leaves[:2])
    assert not dq.any()
    assert not dk.any()
    assert y is leaves[0]


@every_slot_activation
def test_strong_gates_are_as_exact_as_weak_ones(slot_activation: str):
    """float32 against the definition in float64 on the same numbers; 1 - alpha for gates of -1e-6 included."""

    def gates(generator, *shape, dtype):
        weak = extreme_log_gates(generator, *shape, dtype=dtype) * 1e-2
        return torch.where(torch.rand(*shape, generator=generator) < 0.1, -3e3, weak)

    arguments = _arguments(8, 300, dtype=torch.float32, gates=gates)
    options = {"pos": positions(seeded(9), BATCH, 300, 0.01), "scale": 0.5, "slot_activation": slot_activation}
    found = _with_gradients(lambda *x: _run(*x, **options), arguments)
    expected = _with_gradients(lambda *x: _run(*x, run=gsa_reference, **options), [x.double() for x in arguments])
    assert all(x.isfinite().all() for x in found)
    _assert_close(found, expected, 3e-6)


def test_twenty_thousand_tokens_that_each_write_a_millionth():
    """In float32, where 1 - alpha computed from alpha would be off by a tenth: slots of a constant are (1 - alpha^T) times it."""
    length = 20_000
    g = torch.full((1, length, 1, 2), -1e-6)
    k, v = torch.tensor([1.0, -2.0, 3.0]).expand(1, length, 1, 3), torch.tensor([0.5, 4.0]).expand(1, length, 1, 2)
    y, state = gated_slot_attention(k, k, v, g)
    filled = -torch.expm1(length * torch.tensor(-1e-6).double())
    assert relative_error(state["k"][0, 0], (filled * k[0, 0, 0].double())[:, None].expand(3, 2)) <= 1e-5
    assert relative_error(y[0, -1, 0], filled * v[0, 0, 0].double()) <= 1e-5


@pytest.mark.parametrize("group", [2, 4])
def test_query_heads_of_a_group_read_the_same_slots(group: int):
    arguments = _arguments(10, 75, group)

    def repeated(q, *rest):
        k, v, g = (x.repeat_interleave(group, dim=2) for x in rest[:3])
        y, k_last, v_last = _run(q, k, v, g, *(x.repeat_interleave(group, dim=1) for x in rest[3:]))
        return y, k_last[:, ::group], v_last[:, ::group]

    _assert_close(_with_gradients(_run, arguments), _with_gradients(repeated, arguments), 1e-12)


def test_states_alone_are_the_states_of_a_run():
    """Bit for bit, and without queries: one message with both slots can leave before any score exists."""
    q, k, v, g, _, _ = _arguments(11, 2 * CHUNK + 5, dtype=torch.float32)
    pos = positions(seeded(12), BATCH, 2 * CHUNK + 5, 0.02)
    _, state = gated_slot_attention(q, k, v, g, pos=pos)
    alone = gsa_final_state(k, v, g, pos=pos)
    assert all(torch.equal(alone[name], state[name]) for name in ("k", "v"))


def test_nothing_of_the_size_of_all_expanded_tokens_is_ever_allocated():
    batch, length, heads, d_key, slots, d_value = 1, 1024, 2, 48, 24, 40
    generator = seeded(13)
    sizes = [(batch, length, heads, d) for d in (d_key, d_key, d_value, slots)]
    q, k, v, g = (torch.randn(*size, generator=generator) for size in sizes)
    with LargestTensor() as largest:
        _with_gradients(lambda *x: gated_slot_attention(*x)[:1], [q, k, v, -g.abs()])
    assert largest.numel <= batch * heads * max(length * d_key, CHUNK * CHUNK, slots * d_key)


def test_what_does_not_fit_is_refused():
    q, k, v, g, k_slots, v_slots = _arguments(14, 5)
    with pytest.raises(
        KernelError, match=r"slot_activation is 'tanh', expected one of \('softmax', 'identity', 'silu', 'relu', 'relu2'\)"
    ):
        gated_slot_attention(q, k, v, g, slot_activation="tanh")
    with pytest.raises(KernelError, match="gate_logit_normalizer is 0, expected more than 0, or None"):
        gated_slot_attention(q, k, v, g, gate_logit_normalizer=0)
    with pytest.raises(KernelError, match="q has 4 heads, expected a multiple of the 3 of v"):
        gated_slot_attention(torch.cat((q, q[:, :, :1]), dim=2), k, v, g)
    with pytest.raises(KernelError, match="k has 1 heads, expected the 3 of v"):
        gated_slot_attention(q, k[:, :, :1], v, g)
    with pytest.raises(KernelError, match=r"initial_state has the keys \['k'\], expected \['k', 'v'\]"):
        gated_slot_attention(q, k, v, g, initial_state={"k": k_slots})
    with pytest.raises(KernelError, match=r"initial_state k has shape \(2, 3, 5, 4\), expected .* = \(2, 3, 6, 5\)"):
        gated_slot_attention(q, k, v, g, initial_state={"k": v_slots, "v": k_slots})
