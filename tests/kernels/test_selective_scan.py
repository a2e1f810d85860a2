"""Properties of the selective scan: discretizations, chunks, extreme inputs, memory. Split invariance is tested in test_law.py."""

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import relative_error
from support.memory import LargestTensor
from support.recurrences import gradients, law, positions, seeded, seeds

from baton.kernels.common.example_inputs import extreme_steps
from baton.kernels.diagonal_scan.chunked import ChunkBuffers
from baton.kernels.selective_scan import selective_scan
from baton.kernels.selective_scan.chunked import chunk_length, selective_scan_chunked
from baton.kernels.selective_scan.reference import selective_scan_reference

both_discretizations = pytest.mark.parametrize("discretization", ["euler", "zoh"])


def _arguments(seed: int, batch: int, length: int, channels: int, d_state: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """x, dt, A, B, C, D, initial_state."""
    generator = seeded(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    dt = extreme_steps(generator, batch, length, channels, dtype=dtype)
    A = -torch.exp(randn(channels, d_state))
    x, B, C, D = randn(batch, length, channels), randn(batch, length, d_state), randn(batch, length, d_state), randn(channels)
    return [x, dt, A, B, C, D, randn(batch, channels, d_state)]


@both_discretizations
@law(max_examples=12)
@given(
    seed=seeds,
    batch=st.integers(1, 2),
    length=st.integers(1, 33),
    channels=st.integers(1, 7),
    d_state=st.integers(1, 6),
    chunk=st.integers(1, 40),
)
def test_any_chunk_size_equals_the_definition(
    discretization: str, seed: int, batch: int, length: int, channels: int, d_state: int, chunk: int
):
    arguments = _arguments(seed, batch, length, channels, d_state, torch.float64)
    pos = positions(seeded(seed), batch, length, 0.2)
    leaves = [x.clone().requires_grad_() for x in arguments]
    outputs = selective_scan_chunked(*leaves[:6], pos=pos, initial_state=leaves[6], zoh=discretization == "zoh", chunk=chunk)
    results = [*outputs, *gradients(outputs, leaves, seeded(seed))]
    leaves = [x.clone().requires_grad_() for x in arguments]
    outputs = selective_scan_reference(*leaves[:6], pos=pos, initial_state=leaves[6], discretization=discretization)
    for fast, definition in zip(results, [*outputs, *gradients(outputs, leaves, seeded(seed))], strict=True):
        assert relative_error(fast, definition) <= 1e-10


@both_discretizations
@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_the_chunk_size_does_not_change_a_bit(discretization: str, n_threads: int, threads: None):
    arguments = _arguments(3, 2, 45, 131, 17, torch.float32)
    pos = positions(seeded(4), 2, 45, 0.1)
    results = []
    for chunk in (1, 2, 7, 16, 44, 45, 64):
        torch.set_num_threads(n_threads)
        results.append(
            selective_scan_chunked(*arguments[:6], pos=pos, initial_state=arguments[6], zoh=discretization == "zoh", chunk=chunk)
        )
    for y, final in results[1:]:
        assert torch.equal(y, results[0][0])
        assert torch.equal(final, results[0][1])


def test_results_with_and_without_gradients_have_the_same_bits():
    arguments = _arguments(5, 2, 40, 9, 4, torch.float32)
    leaves = [x.clone().requires_grad_() for x in arguments]
    tracked = selective_scan(*leaves[:6], initial_state=leaves[6])
    untracked = selective_scan(*arguments[:6], initial_state=arguments[6])
    assert tracked[0].requires_grad
    assert tracked[1].requires_grad
    assert not untracked[0].requires_grad
    assert torch.equal(tracked[0], untracked[0])
    assert torch.equal(tracked[1], untracked[1])


def test_equal_runs_give_equal_gradients():
    arguments = _arguments(6, 2, 70, 33, 5, torch.float32)
    runs = []
    for _ in range(2):
        leaves = [x.clone().requires_grad_() for x in arguments]
        runs.append(gradients(selective_scan(*leaves[:6], initial_state=leaves[6]), leaves, seeded(7)))
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


def test_zero_order_hold_with_one_state_is_a_gated_average():
    """Theorem 1 of the Mamba paper: N = 1, A = -1, B = 1, dt = softplus(l) gives h = (1 - g) h + g x with g = sigmoid(l)."""
    generator = seeded(8)
    x, logits = torch.randn(2, 50, 3, generator=generator).double(), 3 * torch.randn(2, 50, 3, generator=generator).double()
    h = torch.randn(2, 3, generator=generator).double()
    ones = torch.ones(2, 50, 1).double()
    y, final = selective_scan(
        x,
        torch.nn.functional.softplus(logits),
        -torch.ones(3, 1).double(),
        ones,
        ones,
        torch.zeros(3).double(),
        initial_state=h[:, :, None],
        discretization="zoh",
    )
    gate, expected = torch.sigmoid(logits), []
    for t in range(50):
        h = (1 - gate[:, t]) * h + gate[:, t] * x[:, t]
        expected.append(h)
    assert relative_error(y, torch.stack(expected, dim=1)) <= 1e-13
    assert relative_error(final[:, :, 0], h) <= 1e-13


def test_the_two_discretizations_agree_in_the_limit_of_small_steps():
    x, _, A, B, C, D, _ = _arguments(9, 1, 20, 3, 2, torch.float64)
    differences = []
    for step in (1e-3, 1e-4):
        dt = torch.full_like(x, step)
        euler, zoh = (selective_scan(x, dt, A, B, C, 0 * D, discretization=rule)[0] for rule in ("euler", "zoh"))
        differences.append(relative_error(euler, zoh))
    assert differences[0] < 1e-2
    # of first order: a tenth of the step, a tenth of the difference
    assert differences[1] == pytest.approx(differences[0] / 10, rel=0.05)


@both_discretizations
@pytest.mark.parametrize("step", [0.0, 1e-30, 1e-6, 50.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_steps_give_numbers(discretization: str, step: float, dtype: torch.dtype):
    x, dt, _, B, C, D, state = _arguments(10, 2, 40, 3, 16, dtype)
    A = -torch.arange(1, 17, dtype=dtype).expand(3, 16).contiguous()
    leaves = [x.clone().requires_grad_() for x in (x, torch.full_like(dt, step), A, B, C, D, state)]
    pos = positions(seeded(11), 2, 40, 0.1)
    outputs = selective_scan(*leaves[:6], pos=pos, initial_state=leaves[6], discretization=discretization)
    for x in (*outputs, *gradients(outputs, leaves, seeded(12))):
        assert x.isfinite().all()


@pytest.mark.parametrize("step", [1e-9, 1e-4, 0.0299, 0.0301, 0.5])
def test_the_rate_gradient_of_small_steps_does_not_cancel(step: float):
    """Zero-order hold from no state over one token: dh/dA = dt^2 (1/2 + x/3 + x^2/8 ...) B x, which float32 must get right."""
    one = torch.ones(1, 1, 1)
    A = torch.full((1, 1), -1.0, requires_grad=True)
    _, final = selective_scan(one, one * step, A, one, one, torch.zeros(1), discretization="zoh")
    final.backward(torch.ones_like(final))
    x = -float(torch.tensor(step))
    term, expected = 1.0, 0.0
    for k in range(30):
        expected += term * (k + 1) / ((k + 1) * (k + 2))
        term *= x / (k + 1)
    assert A.grad is not None
    assert float(A.grad) == pytest.approx(x * x * expected, rel=2e-5)


@both_discretizations
def test_nothing_of_the_size_of_all_expanded_tokens_is_ever_allocated(discretization: str):
    batch, length, channels, d_state = 2, 1024, 96, 16
    arguments = _arguments(13, batch, length, channels, d_state, torch.float32)
    leaves = [x.clone().requires_grad_() for x in arguments]
    chunk = chunk_length(batch, channels, d_state)
    with LargestTensor() as largest:
        outputs = selective_scan(*leaves[:6], initial_state=leaves[6], discretization=discretization)
        gradients(outputs, leaves, seeded(14))
    expanded_token = batch * channels * d_state
    assert largest.numel <= max((chunk + 1) * expanded_token, batch * length * channels, -(-length // chunk) * expanded_token)
    assert largest.numel < length * expanded_token / 8


def test_chunks_are_long_enough_for_their_borders_to_be_cheap_and_short_enough_for_the_cache():
    for batch, channels, d_state in ((1, 8, 4), (4, 384, 16), (8, 4096, 64)):
        chunk = chunk_length(batch, channels, d_state)
        assert 16 <= chunk <= 64
        assert chunk == 16 or chunk * batch * channels * d_state <= 1 << 19


@both_discretizations
def test_a_scan_leaves_nothing_behind(discretization: str):
    """No reference cycle keeps a chunk's expanded buffers alive until garbage collection."""
    arguments = _arguments(23, 1, 64, 32, 16, torch.float32)

    def buffers() -> int:
        return sum(isinstance(x, ChunkBuffers) for x in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        leaves = [x.requires_grad_() for x in arguments]
        outputs = selective_scan(*leaves[:6], initial_state=leaves[6], discretization=discretization)
        gradients(outputs, leaves, seeded(24))
        assert buffers() == 0
    finally:
        gc.enable()
