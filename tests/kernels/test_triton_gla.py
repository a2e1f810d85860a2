"""Gated linear and gated slot attention's Triton kernels against the definitions: interpreted on a CPU, compiled on a GPU."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.bfloat16 import products_of_bfloat16
from support.compare import relative_error, worst
from support.gla import DEVICE, LIMITS, SMALL, compare, example, rounded, with_gradients
from support.long_form import alternating, some
from support.recurrences import positions, seeded
from support.rounding import products_are_rounded

from baton.kernels.common.adjacent_views import merge_adjacent
from baton.kernels.gated_linear_attention import op, triton_launch
from baton.kernels.gated_linear_attention.launch_args import LaunchConfig
from baton.kernels.gated_linear_attention.reference import gla_reference
from baton.kernels.gated_linear_attention.triton_launch import gla_final_state_triton, gla_triton
from baton.kernels.gated_slot_attention import triton_launch as gated_slot_attention
from baton.kernels.gated_slot_attention.recurrence import GatedSlotAttention
from baton.kernels.gated_slot_attention.reference import SLOT_ACTIVATIONS, gsa_reference
from baton.kernels.gated_slot_attention.triton_launch import (
    gsa_final_state_triton,
    gsa_triton,
    slot_weights,
    slot_weights_backward,
    write_strength,
)

WIDTHS = (16, 32, 64, 128)
# batch, tokens, heads of q, of k and of v, d_key, d_value: less than a chunk, odd ones, groups, a head for all
SIZES = {
    "none": (1, 19, 1, 1, 3, 8, 17),
    "scalar": (2, 21, 4, 2, 2, 19, 9),
    "key": (1, 21, 4, 2, 2, 20, 7),
    "value": (2, 18, 2, 2, 2, 8, 20),
}


@pytest.mark.parametrize(("starts", "gate"), alternating([False, True], SIZES))
def test_outputs_and_gradients_are_the_definitions(gate, starts):
    compare(gate, SIZES[gate], SMALL, starts=starts, strength=20.0 if starts else 1.0)


WIDE = LaunchConfig(chunk=64, x=16, x_gated=16, x_read=16, x_prepared=16, x_scores=16, y=16, y_gated=16, target_programs=1)


def widest_blocks(g, chunk):
    """log2 of the tokens of the blocks that are joined at one token, of each chunk of log decays [1, T, ...]."""
    sums = g.unflatten(1, (-1, chunk)).cumsum(2)[0] / math.log(2)
    widths = torch.full((len(sums),), chunk.bit_length() - 1)
    for level in range(chunk.bit_length() - 1, 3, -1):
        blocks = sums.unflatten(1, (-1, 1 << level))
        apart = (blocks - blocks[:, :, (1 << level - 1) - 1, None]).abs()
        widths = torch.where((apart <= 64).flatten(1).all(1), widths, level - 1)
    return widths.tolist()


@pytest.mark.parametrize(("dtype", "chunk", "widths"), [(torch.float32, 32, [5, 5, 4, 3]), (torch.bfloat16, 64, [6, 5, 4, 3])])
@pytest.mark.parametrize("gate", some(["key", "value"], ["key"]))
def test_blocks_joined_at_one_token_are_as_wide_as_decays_allow(gate, dtype, chunk, widths, monkeypatch):
    """Weak and strong gates, and cotangents far from 1: no factor loses what it multiplies. Of float32 chunks have 32 tokens."""
    products_of_bfloat16(monkeypatch)
    sizes = (1, 4 * chunk, 1, 1, 1, 16, 16)
    given, cotangents = example(gate, sizes, dtype)
    gates = torch.rand(1, 4, chunk, 1, 16, generator=seeded(3)) * torch.tensor([0.9, 4.0, 7.0, 14.0])[:, None, None, None]
    given["g"] = -gates.flatten(1, 2).to(dtype).double()
    assert widest_blocks(given["g"], chunk) == widths
    options = {"gate": gate, "scale": 0.3, "pos": None}
    expected = with_gradients(gla_reference, given, cotangents, **options)
    for size in (1.0, 2.0**-60):
        found = with_gradients(gla_triton, rounded(given, dtype), [d * size for d in cotangents], config=WIDE, **options)
        for name, value in expected.items():
            of_cotangents = 1 if name in ("y", "leaving") else size
            assert relative_error(found[name].double().cpu() / of_cotangents, value) <= LIMITS[dtype], (name, size)


@pytest.mark.parametrize("gate", some(SIZES, ("key",)))
def test_a_sequence_may_be_cut_into_pieces(gate):
    """If heads and states give too few programs."""
    heads = SIZES[gate][2:5]
    compare(gate, (1, 130, *heads, 6, 5), replace(SMALL, target_programs=1 << 20), starts=gate in ("none", "key"))


@pytest.mark.parametrize("gate", some(("scalar", "value", "none", "key"), ("scalar",)))
def test_few_scores_are_kept_and_many_are_made_again(gate, monkeypatch):
    made, scores = [], triton_launch.LinearAttentionLaunch.launch_scores
    monkeypatch.setattr(
        triton_launch.LinearAttentionLaunch, "launch_scores", lambda self, *a, **k: (made.append(self), scores(self, *a, **k))[1]
    )
    for share, expected in ((triton_launch.SCORES_SHARE, 2), (1000, 3)):
        monkeypatch.setattr(triton_launch, "SCORES_SHARE", share)
        compare(gate, (1, 21, 2, 2, 2, 40, 50), SMALL, starts=True)
        assert len(made) == expected
        made.clear()


def test_groups_of_heads_are_sequences(monkeypatch):
    """Two groups of two heads that share a key and a query, as the public function launches them."""
    monkeypatch.setattr(op, "use_triton", lambda *_: True)
    monkeypatch.setattr(triton_launch, "_DEFAULT", SMALL)
    compare("scalar", (2, 21, 2, 2, 4, 9, 8), None, starts=True, op=op.gated_linear_attention)


@pytest.mark.parametrize("gate", ["key", "value"])
def test_bfloat16_is_rounded_once(gate):
    compare(gate, SIZES[gate], SMALL, starts=True, dtype=torch.bfloat16)


@pytest.mark.parametrize("gate", some(SIZES, ("scalar", "key")))
def test_products_of_bfloat16(gate, monkeypatch):
    products_of_bfloat16(monkeypatch)
    compare(gate, SIZES[gate], SMALL, starts=True, dtype=torch.bfloat16)


@pytest.mark.parametrize("gate", some(("value", "none"), ("value",)))
def test_pieces_with_the_state_handed_on_are_the_whole(gate):
    """And what `gla_final_state_triton` returns for a span is what the span adds."""
    sizes = SIZES[gate]
    given, cotangents = example(gate, sizes)
    given, pos = rounded(given, torch.float32), positions(seeded(2), *sizes[:2], 0.1).to(DEVICE)
    options = {"gate": gate, "scale": 0.3, "config": SMALL}

    def in_two(pos, initial_state, **given):
        outputs, state = [], initial_state
        for span in (slice(None, 10), slice(10, None)):
            part = {name: None if x is None else x[:, span] for name, x in given.items()}
            y, state = gla_triton(**part, pos=pos[:, span], initial_state=state, **options)
            outputs.append(y)
        return torch.cat(outputs, 1), state

    whole = with_gradients(gla_triton, given, cotangents, pos=pos, **options)
    cut = with_gradients(in_two, given, cotangents, pos=pos)
    for name, value in whole.items():
        assert relative_error(cut[name], value) <= 1e-5, name
    effect = gla_final_state_triton(given["k"], given["v"], given["g"], gate=gate, pos=pos, config=SMALL)
    _, leaving = gla_triton(**{**given, "initial_state": None}, pos=pos, **options)
    torch.testing.assert_close(effect, leaving, rtol=1e-6, atol=1e-6)


def test_equal_calls_give_equal_bits_and_views_are_taken():
    given, cotangents = example("key", SIZES["key"])
    given = rounded(given, torch.float32)
    once, again = (with_gradients(gla_triton, given, cotangents, gate="key", scale=0.3, pos=None, config=SMALL) for _ in range(2))
    views = {name: None if x is None else torch.stack((x, x), -1)[..., 0] for name, x in given.items()}
    viewed = with_gradients(gla_triton, views, cotangents, gate="key", scale=0.3, pos=None, config=SMALL)
    for name, x in once.items():
        assert torch.equal(x, again[name])
        assert torch.equal(x, viewed[name])


@pytest.mark.parametrize("gate", some(["scalar", "value"], ["scalar"]))
def test_gradients_of_neighbouring_columns_are_neighbours(gate):
    """Of q, k and v as a projection returns them. They are those of gradients apart: to the bit in the interpreter, to rounding on
    a GPU, whose compiler lays a tile out by the distance of its rows and then joins other products and sums in one instruction."""
    given, cotangents = example(gate, (2, 21, 4, 2, 2, 9, 12))
    given = rounded(given, torch.float32)
    options = {"gate": gate, "scale": 0.3, "pos": None, "config": SMALL}
    apart = with_gradients(gla_triton, given, cotangents, **options)
    columns = torch.cat([given[name].flatten(2) for name in "qkv"], 2).split([given[name][0, 0].numel() for name in "qkv"], 2)
    leaves = [x.unflatten(2, given[name].shape[2:]).requires_grad_() for name, x in zip("qkv", columns, strict=True)]
    y, _ = outputs = gla_triton(*leaves, given["g"], initial_state=given["initial_state"], **options)
    grads = torch.autograd.grad(outputs, leaves, [d.to(y.device, y.dtype) for d in cotangents])
    ((_, widths),) = merge_adjacent([x.flatten(2) for x in grads])
    assert widths == [x.shape[2] for x in columns]
    for name, x in zip("qkv", grads, strict=True):
        assert relative_error(x, apart[name]) <= (0 if x.device.type == "cpu" else 1e-6), name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate", SIZES)
def test_the_launch_configs_of_runs(gate, dtype):
    batch, tokens, queries, keys, heads = SIZES[gate][:5]
    for config in (LaunchConfig(), LaunchConfig(chunk=32)):
        compare(gate, (batch, 10 * tokens, queries, keys, heads, 96, 160), config, starts=True, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("gate", SIZES)
@pytest.mark.parametrize("d_key", WIDTHS)
@pytest.mark.parametrize("d_value", WIDTHS)
def test_tiles_of_all_sizes(gate, d_key, d_value):
    """With ptxas 12.8 the delta rule's with few values were wrong on a Hopper, without a word: see `kernels.compile.assembler`."""
    batch, _, queries, keys, heads = SIZES[gate][:5]
    compare(gate, (batch, 150, queries, keys, heads, d_key, d_value), None, starts=True, dtype=torch.bfloat16)


@pytest.mark.parametrize("slot_activation", SLOT_ACTIVATIONS)
def test_weights_and_strengths_of_slots(slot_activation):
    """Rows of an odd number of slots, scores and gates that reach far."""
    scores, cotangents = (30 * torch.randn(3, 7, 2, 11, generator=seeded(n)) for n in (0, 1))
    leaf = scores.double().requires_grad_()
    expected = SLOT_ACTIVATIONS[slot_activation](leaf)
    expected.backward(cotangents.double())
    assert leaf.grad is not None
    found = slot_weights(scores.to(DEVICE), slot_activation, torch.float32).cpu()
    assert relative_error(found.double(), expected.detach()) <= 1e-6
    found = slot_weights_backward(scores.to(DEVICE), cotangents.to(DEVICE), slot_activation).cpu()
    assert relative_error(found.double(), leaf.grad) <= 1e-6
    gates = -torch.logspace(-12, 2, 77).view(7, 11)
    for found, value in zip(write_strength(gates.to(DEVICE)).cpu().flatten(), -torch.expm1(gates.double()).flatten()):
        assert float(found) == pytest.approx(float(value), rel=2e-6)


def test_slots_are_two_passes():
    """Gated slot attention, every gradient, and what a span adds to the slots."""
    batch, tokens, queries, heads, d_key, slots, d_value = 2, 21, 4, 2, 12, 8, 18
    g = seeded(3)
    shapes = [(queries, d_key), (heads, d_key), (heads, d_value), (heads, slots)]
    given = [torch.randn(batch, tokens, *shape, generator=g) for shape in shapes]
    given[3] = F.logsigmoid(3 * given[3])
    state = [torch.randn(batch, heads, *shape, generator=g) for shape in ((d_key, slots), (slots, d_value))]
    cotangents = [torch.randn(batch, tokens, queries, d_value, generator=g), *(torch.randn(x.shape, generator=g) for x in state)]
    pos = positions(seeded(1), batch, tokens, 0.1)

    def run(op, device, dtype, **options):
        leaves = [x.to(device, dtype).requires_grad_() for x in (*given, *state)]
        arriving = {"k": leaves[4], "v": leaves[5]}
        y, leaving = op(*leaves[:4], scale=0.5, slot_activation="softmax", pos=pos.to(device), initial_state=arriving, **options)
        outputs = [y, leaving["k"], leaving["v"]]
        return [*outputs, *torch.autograd.grad(outputs, leaves, [d.to(device, dtype) for d in cotangents])]

    expected = run(gsa_reference, "cpu", torch.float64)
    for found, value in zip(run(gsa_triton, DEVICE, torch.float32, config=SMALL), expected, strict=True):
        assert relative_error(found.double().cpu(), value) <= 1e-5
    k, v, g = (x.to(DEVICE) for x in given[1:])
    effect = gsa_final_state_triton(k, v, g, pos=pos.to(DEVICE), config=SMALL)
    _, whole = gsa_reference(*(x.double() for x in given), pos=pos)
    for name, x in whole.items():
        assert relative_error(effect[name].double().cpu(), x) <= 1e-5


@pytest.mark.parametrize(
    ("dtype", "lies"),
    [
        (torch.float32, "columns"),
        pytest.param(torch.bfloat16, "apart", marks=pytest.mark.long),
        pytest.param(torch.bfloat16, "in time", marks=pytest.mark.long),
        pytest.param(torch.bfloat16, "columns", marks=pytest.mark.long),
        pytest.param(torch.float32, "apart", marks=pytest.mark.long),
        pytest.param(torch.float32, "in time", marks=pytest.mark.long),
    ],
    ids=str,
)
def test_slots_of_what_is_projected(dtype, lies, monkeypatch):
    """As a projection's columns, as tensors of their own, or as columns of some of the tokens; every gradient, which lies as what
    it is of, and what a span adds to the slots. What is made again has the same bits."""
    if dtype == torch.bfloat16:
        products_of_bfloat16(monkeypatch)
    batch, tokens, queries, heads, d_key, slots, d_value, g = 2, 21, 4, 2, 12, 9, 18, seeded(3)
    sizes = {"q": (queries, d_key), "k": (heads, d_key), "v": (heads, d_value), "g": (heads, slots)}
    widths = [count * size for count, size in sizes.values()]
    rows = (2 * torch.randn(batch, tokens + 3 * (lies == "in time"), sum(widths), generator=g)).to(DEVICE, dtype)
    columns = rows[:, -tokens:].split(widths, dim=-1)
    parts = [x.contiguous() if lies == "apart" else x for x in columns]
    given = [x.unflatten(2, size) for x, size in zip(parts, sizes.values(), strict=True)]
    state = [torch.randn(batch, heads, *shape, generator=g) for shape in ((d_key, slots), (slots, d_value))]
    dy = torch.randn(batch, tokens, queries, d_value, generator=g).bfloat16()
    cotangents, pos = [dy, *(torch.randn(x.shape, generator=g) for x in state)], positions(seeded(1), batch, tokens, 0.1)

    def run(op, device, cast, **options):
        leaves = [x.detach().to(device, cast or x.dtype).requires_grad_() for x in given]
        arriving = [x.to(device, cast or x.dtype).requires_grad_() for x in state]
        entering = dict(zip("kv", arriving))
        y, leaving = op(
            *leaves,
            scale=0.5,
            slot_activation="softmax",
            gate_logit_normalizer=2.0,
            pos=pos.to(device),
            initial_state=entering,
            **options,
        )
        outputs = [y, leaving["k"], leaving["v"]]
        ds = [d.to(x.device, x.dtype) for d, x in zip(cotangents, outputs)]
        return [*outputs, *torch.autograd.grad(outputs, [*leaves, *arriving], ds)]

    expected = run(gsa_reference, "cpu", torch.float64)
    found, again = (run(gsa_triton, DEVICE, None, config=SMALL, recompute_activations=on) for on in (False, True))
    limit = GatedSlotAttention.bfloat16_limit if dtype == torch.bfloat16 else LIMITS[dtype]
    for name, have, same, want in zip(("y", "k", "v", *sizes, "first k", "first v"), found, again, expected, strict=True):
        assert relative_error(have.double().cpu(), want) <= limit, (name, relative_error(have.double().cpu(), want))
        assert torch.equal(have, same), name
    grads = [x.flatten(2) for x in found[3:7]]
    assert [x.dtype for x in grads] == [dtype] * 4
    assert [whole.shape[2] for whole, _ in merge_adjacent(grads)] == (widths if lies == "apart" else [sum(widths)])
    effect = gsa_final_state_triton(*given[1:], gate_logit_normalizer=2.0, pos=pos.to(DEVICE), config=SMALL)
    _, whole = gsa_reference(*(x.double().cpu() for x in given), gate_logit_normalizer=2.0, pos=pos)
    for name, x in whole.items():
        assert relative_error(effect[name].double().cpu(), x) <= limit


def errors_of_slots(monkeypatch, slot_activation, *, twice=True):
    """Of outputs, states and gradients by name, where products are of bfloat16; of more than a chunk, gates that mostly keep."""
    sizes = {"q": (17,), "k": (17,), "v": (35,), "g": (11,)}
    given = {name: torch.randn(1, 70, 3, *size, generator=seeded(n)) for n, (name, size) in enumerate(sizes.items())}
    given["g"] = F.logsigmoid(3 + 2 * given["g"])
    given = {name: x.bfloat16().float() for name, x in given.items()}
    given |= {"first k": torch.randn(1, 3, 17, 11, generator=seeded(4)), "first v": torch.randn(1, 3, 11, 35, generator=seeded(5))}
    pos = positions(seeded(6), 1, 70, 0.02)

    def results(run, dtype):
        leaves = {name: x.to(dtype).requires_grad_() for name, x in given.items()}
        q, k, v, g, first_k, first_v = leaves.values()
        y, leaving = run(
            q, k, v, g, scale=0.5, slot_activation=slot_activation, pos=pos, initial_state={"k": first_k, "v": first_v}
        )
        outputs = {"y": y, **{f"leaving {name}": x for name, x in leaving.items()}}
        cotangents = [torch.randn(x.shape, generator=seeded(n)).bfloat16().to(dtype) for n, x in enumerate(outputs.values())]
        grads = torch.autograd.grad(list(outputs.values()), list(leaves.values()), cotangents)
        return {**outputs, **dict(zip((f"d{name}" for name in leaves), grads))}

    expected = results(gsa_reference, torch.float64)
    with products_are_rounded(monkeypatch, twice=twice):
        found = results(gsa_triton, torch.float32)
    return {name: relative_error(x.double(), expected[name]) for name, x in found.items()}


@pytest.mark.skipif(DEVICE == "cuda", reason="where products are of bfloat16 they are compared as they are")
@pytest.mark.parametrize("slot_activation", some(["softmax", "relu2"], ["softmax"]))
def test_slots_lose_little_to_products_of_bfloat16(slot_activation, monkeypatch):
    errors = errors_of_slots(monkeypatch, slot_activation)
    assert worst(errors.values()) <= LIMITS[torch.bfloat16], errors
    if slot_activation == "softmax":
        # with strengths that are rounded, and read once
        monkeypatch.setattr(gated_slot_attention, "write_strength", lambda gates: write_strength(gates).bfloat16().float())
        more = errors_of_slots(monkeypatch, slot_activation, twice=False)
        for name in ("y", "dq", "dk", "dg"):
            assert more[name] > 1.2 * errors[name], (name, errors, more)
