"""Properties of Longhorn: bounds, equivalent forms, large keys, long runs and memory. Split invariance is tested in test_law.py."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import relative_error
from support.memory import LargestTensor
from support.recurrences import gradients, law, positions, seeded, seeds
from torch import Tensor

from baton.kernels.common.example_inputs import extreme_gates, extreme_keys
from baton.kernels.diagonal_scan.chunked import ChunkBuffers, chunk_length
from baton.kernels.longhorn import longhorn
from baton.kernels.longhorn.chunked import LonghornTerms, longhorn_chunked
from baton.kernels.longhorn.reference import longhorn_exact_reference, longhorn_reference


def _arguments(seed: int, batch: int, length: int, channels: int, d_state: int, dtype: torch.dtype) -> list[Tensor]:
    """x, k, q, beta, D, initial_state."""
    generator = seeded(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    k = extreme_keys(generator, batch, length, d_state, dtype=dtype)
    beta = extreme_gates(generator, batch, length, channels, dtype=dtype)
    x, q, D = randn(batch, length, channels), randn(batch, length, d_state), randn(channels)
    return [x, k, q, beta, D, randn(batch, channels, d_state)]


def _decay_and_add(x: Tensor, k: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """decay and add of the chunked form for all tokens at once, [batch, T, channels, d_state]."""
    along = [t.transpose(0, 1).contiguous() for t in (x, k, beta)]
    buffers = ChunkBuffers(x, k.shape[2], x.shape[1])
    decay = buffers.expanded(buffers.decay_flat, x.shape[1])
    add = torch.empty_like(decay)
    LonghornTerms(buffers, ()).compute(along, decay, add)
    return decay.permute(1, 0, 3, 2), add.permute(1, 0, 3, 2)


@law(max_examples=12)
@given(
    seed=seeds,
    batch=st.integers(1, 2),
    length=st.integers(1, 33),
    channels=st.integers(1, 7),
    d_state=st.integers(1, 6),
    chunk=st.integers(1, 40),
)
def test_any_chunk_size_equals_the_definition(seed: int, batch: int, length: int, channels: int, d_state: int, chunk: int):
    arguments = _arguments(seed, batch, length, channels, d_state, torch.float64)
    pos = positions(seeded(seed), batch, length, 0.2)
    leaves = [x.clone().requires_grad_() for x in arguments]
    outputs = longhorn_chunked(*leaves[:5], pos=pos, initial_state=leaves[5], chunk=chunk)
    results = [*outputs, *gradients(outputs, leaves, seeded(seed))]
    leaves = [x.clone().requires_grad_() for x in arguments]
    outputs = longhorn_reference(*leaves[:5], pos=pos, initial_state=leaves[5])
    for fast, definition in zip(results, [*outputs, *gradients(outputs, leaves, seeded(seed))], strict=True):
        assert relative_error(fast, definition) <= 1e-10


@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_the_chunk_size_does_not_change_a_bit(n_threads: int, threads: None):
    torch.set_num_threads(n_threads)
    arguments = _arguments(3, 2, 45, 131, 17, torch.float32)
    pos = positions(seeded(4), 2, 45, 0.1)
    results = [longhorn_chunked(*arguments[:5], pos=pos, initial_state=arguments[5], chunk=c) for c in (1, 2, 7, 16, 44, 45, 64)]
    for y, final in results[1:]:
        assert torch.equal(y, results[0][0])
        assert torch.equal(final, results[0][1])


def test_results_with_and_without_gradients_have_the_same_bits():
    arguments = _arguments(5, 2, 40, 9, 4, torch.float32)
    leaves = [x.clone().requires_grad_() for x in arguments]
    tracked = longhorn(*leaves[:5], initial_state=leaves[5])
    untracked = longhorn(*arguments[:5], initial_state=arguments[5])
    for with_gradient, without in zip(tracked, untracked, strict=True):
        assert with_gradient.requires_grad
        assert not without.requires_grad
        assert torch.equal(with_gradient, without)


def test_equal_runs_give_equal_gradients():
    arguments = _arguments(6, 2, 70, 33, 5, torch.float32)
    runs = []
    for _ in range(2):
        leaves = [x.clone().requires_grad_() for x in arguments]
        runs.append(gradients(longhorn(*leaves[:5], initial_state=leaves[5]), leaves, seeded(7)))
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


def test_the_ratio_form_and_the_parallel_form_are_the_same_recurrence():
    """S = a S + b with a as printed and as a ratio, one token at a time; and S_t = sum_s (a_{s+1} ... a_t) b_s, all at once."""
    x, k, q, beta, D, state = _arguments(8, 2, 24, 5, 4, torch.float64)
    y, final = longhorn(x, k, q, beta, D, initial_state=state)
    squares = k.square()[:, :, None, :]
    beta_1, total = beta[..., None], squares.sum(-1, keepdim=True)
    eps = beta_1 / (1 + beta_1 * total)
    ratio = (1 + beta_1 * (total - squares)) / (1 + beta_1 * total)
    b = eps * x[..., None] * k[:, :, None, :]
    assert relative_error(ratio, 1 - eps * squares) <= 1e-13
    S, sequential = state, []
    for t in range(24):
        S = ratio[:, t] * S + b[:, t]
        sequential.append(S)
    paths = torch.zeros(24, 25, *state.shape, dtype=torch.float64)
    for t in range(24):
        for s in range(t + 1):
            paths[t, s] = ratio[:, s + 1 : t + 1].prod(dim=1)
        paths[t, 24] = ratio[:, : t + 1].prod(dim=1)
    parallel = torch.einsum("tsbdn,sbdn->btdn", paths, torch.cat((b.transpose(0, 1), state[None])))
    for states in (torch.stack(sequential, dim=1), parallel):
        assert relative_error((states * q[:, :, None, :]).sum(-1) + D * x, y) <= 1e-12
        assert relative_error(states[:, -1], final) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
def test_the_decay_lies_between_its_bounds(scale: float, dtype: torch.dtype):
    """Exactly, not up to rounding: 1 / (1 + beta |k|^2) <= a <= 1, and the forgetting of a token sums to less than 1."""
    x, k, _, beta, _, _ = _arguments(9, 2, 50, 33, 16, dtype)
    k = k * scale
    k[:, ::7, 1:] *= 1e-4  # one key nearly alone: 1 - eps k^2 and |k|^2 - k_n^2 cancel completely
    decay, _ = _decay_and_add(x, k, beta)
    floor = (1 + beta * k.square().sum(-1, keepdim=True)).reciprocal()
    assert (decay >= floor[..., None]).all()
    assert (decay <= 1).all()
    assert ((1 - decay.double()).sum(-1) < 1 + 1e-5).all()
    exact, exact_beta = k.double().square()[:, :, None, :], beta.double()[..., None]
    others = exact.expand(-1, -1, 33, -1) @ (1 - torch.eye(16, dtype=torch.float64))
    true = (1 + exact_beta * others) / (1 + exact_beta * exact.sum(-1, keepdim=True))
    assert ((decay.double() - true) / true).abs().max() <= 8 * torch.finfo(dtype).eps


def test_a_key_or_a_gate_of_zero_changes_no_bit_of_the_state():
    x, k, q, beta, D, state = _arguments(10, 2, 20, 9, 5, torch.float32)
    for nothing in ((x, 0 * k, q, beta), (x, k, q, 0 * beta)):
        y, final = longhorn(*nothing, D, initial_state=state)
        assert torch.equal(final, state)
        assert relative_error(y, torch.einsum("bdn,btn->btd", state, q) + D * x) <= 1e-6


@law(max_examples=8)
@given(seed=seeds, scale=st.sampled_from([0.03, 1.0, 30.0]), batch=st.integers(1, 2), d_state=st.integers(1, 8))
def test_the_state_stays_within_its_bound(seed: int, scale: float, batch: int, d_state: int):
    """S_t[i, n]^2 <= S_0[i, n]^2 + sum over tokens of eps x^2: no growth faster than the root of the length."""
    x, k, q, beta, D, state = _arguments(seed, batch, 60, 6, d_state, torch.float64)
    k = scale * k
    bound = state.square()
    for t in range(60):
        eps = beta[:, t] / (1 + beta[:, t] * k[:, t].square().sum(-1, keepdim=True))
        bound = bound + (eps * x[:, t].square())[..., None]
        _, state = longhorn(x[:, t : t + 1], k[:, t : t + 1], q[:, t : t + 1], beta[:, t : t + 1], D, initial_state=state)
        assert (state.square() <= bound * (1 + 1e-12)).all()


@pytest.mark.parametrize("scale", [30.0, 1e4])
def test_large_keys_are_as_exact_as_small_ones(scale: float):
    """float32 against the definition in float64, on the same numbers, one key nearly alone in every third token."""
    arguments = _arguments(11, 2, 50, 33, 16, torch.float32)
    arguments[1] = scale * torch.randn(2, 50, 16, generator=seeded(12))
    arguments[1][:, ::3, 1:] *= 1e-4
    pos = positions(seeded(13), 2, 50, 0.05)
    leaves = [x.clone().requires_grad_() for x in arguments]
    outputs = longhorn(*leaves[:5], pos=pos, initial_state=leaves[5])
    exact_leaves = [x.double().requires_grad_() for x in arguments]
    exact = longhorn_reference(*exact_leaves[:5], pos=pos, initial_state=exact_leaves[5])
    results = [*outputs, *gradients(outputs, leaves, seeded(14))]
    for single, double in zip(results, [*exact, *gradients(exact, exact_leaves, seeded(14))], strict=True):
        assert single.isfinite().all()
        assert relative_error(single, double) <= 5e-5


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_bfloat16_keys_of_any_size_are_as_good_as_their_rounding(scale: float):
    x, k, q, beta, D, state = _arguments(15, 2, 64, 33, 16, torch.float32)
    low = [t.to(torch.bfloat16) for t in (x, scale * k, q, beta)]
    leaves = [t.clone().requires_grad_() for t in (*low, D, state)]
    outputs = longhorn(*leaves[:5], initial_state=leaves[5])
    exact_leaves = [t.double().requires_grad_() for t in (*low, D, state)]
    exact = longhorn_reference(*exact_leaves[:5], initial_state=exact_leaves[5])
    assert [t.dtype for t in outputs] == [torch.bfloat16, torch.float32]
    cotangents = [torch.randn(t.shape, generator=seeded(16)).to(t.dtype) for t in outputs]
    grads = torch.autograd.grad(outputs, leaves, cotangents)
    exact_grads = torch.autograd.grad(exact, exact_leaves, [t.double() for t in cotangents])
    for rounded, double in zip((*outputs, *grads), (*exact, *exact_grads), strict=True):
        assert relative_error(rounded, double) <= 5e-3


def test_twenty_thousand_tokens_leave_numbers_within_the_bound():
    """Lanes: large random keys, constant tiny ones (the worst case: the state grows like the root of the length), constant large
    ones.
    """
    length = 20_000
    k = torch.ones(3, length, 4) * torch.tensor([30.0, 0.01, 30.0])[:, None, None]
    k[0] *= torch.randn(length, 4, generator=seeded(17))
    inputs = [torch.ones(3, length, 3), k, torch.ones(3, length, 4), torch.full((3, length, 3), 0.9), torch.zeros(3)]
    leaves = [t.requires_grad_() for t in inputs]
    y, final = longhorn(*leaves)
    assert y.isfinite().all()
    eps = 0.9 / (1 + 0.9 * k.detach().square().sum(-1))
    assert (final.detach().abs().amax((1, 2)) <= eps.sum(1).sqrt() * (1 + 1e-3)).all()
    assert float(final.detach()[1].min()) > 20
    for grad in torch.autograd.grad([y, final], leaves, [torch.ones_like(y), torch.ones_like(final)]):
        assert grad.isfinite().all()


@pytest.mark.long
def test_a_hundred_thousand_tokens_of_large_bfloat16_keys_leave_numbers_within_the_bound():
    """Lanes: random keys of 30, and the same large key repeated. |S| <= sqrt(sum of eps x^2), from a state of zeros."""
    length = 100_000
    generator = seeded(21)
    k = 30 * torch.randn(2, length, 4, generator=generator)
    k[1] = k[1, :1]
    beta, x, q = torch.rand(2, length, 3, generator=generator), *torch.randn(2, 2, length, 4, generator=generator)
    inputs = [t.to(torch.bfloat16) for t in (x[..., :3], k, q, beta)]
    leaves = [t.requires_grad_() for t in (*inputs, torch.zeros(3))]
    y, final = longhorn(*leaves)
    assert (y.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    assert y.isfinite().all()
    x, k, _, beta = (t.detach().double() for t in inputs)
    added = (beta * x.square() / (1 + beta * k.square().sum(-1, keepdim=True))).sum(1)
    assert (final.detach().abs().amax(2) <= added.sqrt() * (1 + 1e-3)).all()
    for grad in torch.autograd.grad([y, final], leaves, [torch.ones_like(y), torch.ones_like(final)]):
        assert grad.isfinite().all()


def test_nothing_of_the_size_of_all_expanded_tokens_is_ever_allocated():
    batch, length, channels, d_state = 2, 1024, 96, 16
    leaves = [x.requires_grad_() for x in _arguments(18, batch, length, channels, d_state, torch.float32)]
    chunk = chunk_length(batch, channels, d_state)
    with LargestTensor() as largest:
        outputs = longhorn(*leaves[:5], initial_state=leaves[5])
        gradients(outputs, leaves, seeded(19))
    expanded_token = batch * channels * d_state
    assert largest.numel <= max((chunk + 1) * expanded_token, batch * length * channels, -(-length // chunk) * expanded_token)
    assert largest.numel < length * expanded_token / 8


@law(max_examples=10)
@given(seed=seeds, d_state=st.integers(1, 8))
def test_the_exact_form_minimises_its_objective(seed: int, d_state: int):
    """|S - S'|^2 + beta (S k - x)^2 per channel: its normal equations are (I + beta k k^T) s = s' + beta x k."""
    x, k, q, beta, D, state = _arguments(seed, 2, 1, 5, d_state, torch.float64)
    k = k.clamp(-3, 3)
    _, final = longhorn_exact_reference(x, k, q, beta, D, initial_state=state)
    key, gate = k[:, 0, None, :], beta[:, 0, :, None]
    matrix = torch.eye(d_state, dtype=torch.float64) + gate[..., None] * key[..., None] * key[:, :, None, :]
    expected = torch.linalg.solve(matrix, state + gate * x[:, 0, :, None] * key)
    assert relative_error(final, expected) <= 1e-12


@law(max_examples=10)
@given(seed=seeds, length=st.integers(1, 12))
def test_the_residual_of_the_exact_form_shrinks_by_what_the_key_says(seed: int, length: int):
    """x - S_t k = (x - S_{t-1} k) / (1 + beta |k|^2), with S_{t-1} = 0 where a document starts; y reads S_t with q."""
    x, k, q, beta, D, state = _arguments(seed, 2, length, 5, 4, torch.float64)
    pos = positions(seeded(seed), 2, length, 0.2)
    y, _ = longhorn_exact_reference(x, k, q, beta, D, pos=pos, initial_state=state)
    for t in range(length):
        token = slice(t, t + 1)
        before = state.masked_fill((pos[:, t] == 0)[:, None, None], 0.0)
        _, state = longhorn_exact_reference(
            x[:, token], k[:, token], q[:, token], beta[:, token], D, pos=pos[:, token], initial_state=state
        )
        key = k[:, t, :, None]
        shrunk = (x[:, t] - (before @ key)[..., 0]) / (1 + beta[:, t] * key.square().sum(1))
        assert relative_error(x[:, t] - (state @ key)[..., 0], shrunk) <= 1e-9
        assert relative_error((state @ q[:, t, :, None])[..., 0] + D * x[:, t], y[:, t]) <= 1e-12


def test_the_two_forms_are_one_where_a_key_has_a_single_entry():
    """k k^T is diagonal then; with one more entry it is not, and the forms differ."""
    x, k, q, beta, D, state = _arguments(20, 2, 15, 5, 4, torch.float64)
    single = k * torch.nn.functional.one_hot(torch.arange(15) % 4, 4)
    exact = longhorn_exact_reference(x, single, q, beta, D, initial_state=state)
    for ours, theirs in zip(longhorn(x, single, q, beta, D, initial_state=state), exact, strict=True):
        assert relative_error(ours, theirs) <= 1e-13
    other = longhorn_exact_reference(x, k, q, beta, D, initial_state=state)
    assert relative_error(longhorn(x, k, q, beta, D, initial_state=state)[0], other[0]) > 1e-2
