"""The generalized delta rule's Triton kernels against its definition in float64; in Triton's interpreter where there is no GPU."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from support.bfloat16 import products_of_bfloat16
from support.compare import relative_error, worst
from support.long_form import some
from support.recurrences import gradients, positions, seeded

from baton.kernels.delta_rule.triton_launch import LaunchConfig as DeltaRuleLaunchConfig
from baton.kernels.generalized_delta_rule.chunk_launch import (
    STRONGEST,
    generalized_delta_rule_chunks_triton,
    generalized_delta_rule_transition_triton,
)
from baton.kernels.generalized_delta_rule.chunked import generalized_delta_rule_transition
from baton.kernels.generalized_delta_rule.recurrence import GeneralizedDeltaRule
from baton.kernels.generalized_delta_rule.reference import generalized_delta_rule_reference
from baton.kernels.generalized_delta_rule.triton_launch import LaunchConfig, generalized_delta_rule_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = LaunchConfig(state_block=64, state_block_few=64, checkpoint_interval=8, group_t=2)
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
WIDTHS = (16, 32, 64, 128)
NAMES = ("o", "final", "dr", "dk", "dv", "da", "db", "dg", "dinitial")


def compare(sizes, config, *, starts, dtype=torch.float32, op=generalized_delta_rule_triton, limit=None):
    """Outputs, final state and all gradients, for inputs that are views of wider tensors. sizes: batch, T, heads, d_key, d_value.
    Decays go as far as op can take them."""
    g, (batch, length, heads, d_key, d_value) = seeded(3), sizes

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    keys = (batch, length, heads, d_key)
    a = torch.nn.functional.normalize(normal(*keys), dim=-1)
    b = -torch.rand(keys, generator=g, dtype=torch.float64) * a + 0.05 * normal(*keys)
    decay = -torch.nn.functional.softplus(2 * normal(*keys) - 1).masked_fill(torch.rand(keys, generator=g) < 0.03, 80.0)
    if op is generalized_delta_rule_chunks_triton:
        decay = decay.clamp(min=STRONGEST)
    rounded = [x.to(dtype).double() for x in (normal(*keys), normal(*keys), normal(*keys[:3], d_value), a, b)]
    given = [*rounded, decay.float().double(), normal(batch, heads, d_key, d_value).float().double()]
    pos = positions(seeded(4), batch, length, 0.15) if starts else None

    def leaf(x, like):
        wide = torch.cat((x, x.flip(-1)), -1).to(DEVICE, like)
        return wide.narrow(-1, 0, x.shape[-1]).detach().requires_grad_()

    own = [leaf(x, dtype) for x in given[:5]] + [leaf(x, torch.float32) for x in given[5:]]
    run = partial(
        op,
        *own[:6],
        scale=0.7,
        pos=None if pos is None else pos.to(DEVICE),
        initial_state=own[6],
        config=config,
    )
    o = run()
    found = [*o, *gradients(o, own, seeded(5))]
    leaves = [x.requires_grad_() for x in given]
    wanted = generalized_delta_rule_reference(*leaves[:6], scale=0.7, pos=pos, initial_state=leaves[6])
    wanted = [*wanted, *gradients(wanted, leaves, seeded(5))]
    errors = {name: relative_error(x.cpu(), y) for name, x, y in zip(NAMES, found, wanted, strict=True)}
    assert worst(errors.values()) <= (limit or LIMITS[dtype]), errors
    with torch.no_grad():
        plain = run()
    assert all(torch.equal(x, y) for x, y in zip(plain, o, strict=True))


@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("sizes", [(2, 11, 2, 5, 11), (1, 8, 1, 8, 8), (1, 1, 3, 3, 2)], ids=str)
def test_it_is_the_definition(sizes, starts):
    """Values in several programs and in one, lengths that are no multiple of a chunk, and a single token."""
    compare(sizes, SMALL, starts=starts)


def test_larger_blocks_and_bfloat16():
    compare(
        (1, 19, 2, 17, 33), replace(SMALL, state_block=4096, state_block_few=2048, group_t=4), starts=True, dtype=torch.bfloat16
    )


CHUNKS = DeltaRuleLaunchConfig(chunk=16, x=16, y=16, values=16, values_backward=16, x_chunk=16, y_chunk=16)
"""Eight tokens in each, which the kernels take as two."""


@pytest.mark.parametrize("starts", some([False, True], [True]))
@pytest.mark.parametrize("sizes", [(2, 19, 2, 5, 11), (1, 1, 3, 17, 2)], ids=str)
def test_chunks_are_the_definition(sizes, starts):
    compare(sizes, CHUNKS, starts=starts, op=generalized_delta_rule_chunks_triton)


def test_chunks_in_bfloat16(monkeypatch):
    products_of_bfloat16(monkeypatch)
    chunks = replace(CHUNKS, chunk=64)  # larger than float32's
    compare((1, 37, 2, 24, 33), chunks, starts=True, dtype=torch.bfloat16, op=generalized_delta_rule_chunks_triton)


@pytest.mark.parametrize("target_programs", [1, 256], ids=["one piece", "pieces"])
def test_transitions_of_chunks(target_programs):
    (_, k, v, a, b, g), _ = GeneralizedDeltaRule().example(seeded(0), 1, 37, torch.float32, False)
    g, pos = g.clamp(min=STRONGEST), positions(seeded(1), 1, 37, 0.05)
    config = replace(CHUNKS, target_programs=target_programs)
    found = generalized_delta_rule_transition_triton(*(x.to(DEVICE) for x in (k, v, a, b, g)), pos=pos.to(DEVICE), config=config)
    wanted = generalized_delta_rule_transition(*(x.double() for x in (k, v, a, b, g)), pos=pos)
    for x, y in zip(found, wanted, strict=True):
        assert relative_error(x.cpu(), y) <= 1e-5


def test_without_a_state_it_begins_at_zero():
    inputs, _ = GeneralizedDeltaRule().example(seeded(0), 2, 9, torch.float32, False)
    inputs = [x.to(DEVICE) for x in inputs]
    o, S = generalized_delta_rule_triton(*inputs, scale=1.0, pos=None, initial_state=None, config=SMALL)
    zero = torch.zeros_like(S)
    again = generalized_delta_rule_triton(*inputs, scale=1.0, pos=None, initial_state=zero, config=SMALL)
    assert torch.equal(o, again[0])
    assert torch.equal(S, again[1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize(
    "sizes", [(2, 150, 3, 64, 64), (8, 70, 32, 64, 64), (1, 100, 2, 128, 128), (1, 90, 2, 192, 64), (2, 1, 3, 64, 64)], ids=str
)
def test_the_launch_configs_of_runs(sizes, dtype):
    compare(sizes, LaunchConfig(), starts=True, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("sizes", [(2, 150, 3, 64, 64), (1, 2050, 2, 64, 64), (1, 100, 2, 128, 128), (2, 1, 3, 64, 64)], ids=str)
def test_the_launch_configs_of_chunks(sizes, dtype):
    compare(sizes, None, starts=True, dtype=dtype, op=generalized_delta_rule_chunks_triton)


@pytest.mark.gpu
@pytest.mark.parametrize("d_key", WIDTHS)
@pytest.mark.parametrize("d_value", WIDTHS)
def test_tiles_of_all_sizes(d_key, d_value):
    """See `test_triton_gla`; few values leave more of bfloat16's rounding."""
    op, sizes = generalized_delta_rule_chunks_triton, (2, 150, 2, d_key, d_value)
    compare(sizes, None, starts=True, dtype=torch.bfloat16, op=op, limit=1e-2)
