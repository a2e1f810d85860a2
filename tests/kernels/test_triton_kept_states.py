"""Kernels that keep the states between chunks of tokens for the backward pass, instead of computing them again: the same bits, and
what is kept is not launched again."""

from dataclasses import replace

import pytest
import torch
from support.gla import DEVICE, SMALL
from support.long_form import some
from support.recurrences import positions, seeded

from baton.kernels.delta_rule.recurrence import DeltaRule
from baton.kernels.delta_rule.triton_launch import DeltaRuleLaunch, delta_rule_triton
from baton.kernels.delta_rule.triton_launch import LaunchConfig as DeltaLaunchConfig
from baton.kernels.gated_linear_attention.recurrence import GatedLinearAttention
from baton.kernels.gated_linear_attention.triton_launch import LinearAttentionLaunch, gla_triton
from baton.kernels.gated_slot_attention.recurrence import GatedSlotAttention
from baton.kernels.gated_slot_attention.triton_launch import gsa_triton

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in matmul")  # of pairs that a mask takes away

TOKENS, MANY = 37, 197
SMALL_DELTA = DeltaLaunchConfig(chunk=16, x=16, y=16, values=16, values_backward=16, x_chunk=16, y_chunk=16)


def of_gla(inputs, initial, **options):
    y, S = gla_triton(*inputs, *(() if len(inputs) == 4 else (None,)), initial_state=initial["S"], scale=0.5, **options)
    return y, {"S": S}


def of_rule(inputs, initial, **options):
    y, S = delta_rule_triton(*inputs, *(() if len(inputs) == 5 else (None,)), initial_state=initial["S"], scale=0.5, **options)
    return y, {"S": S}


def of_slots(inputs, initial, **options):
    return gsa_triton(*inputs, initial_state=initial, scale=1.0, slot_activation="softmax", **options)


LINEAR, RULE = (LinearAttentionLaunch, "launch_chunk_h"), (DeltaRuleLaunch, "compute_u")
PIECES = replace(SMALL_DELTA, target_programs=64)
CASES = {
    "key": (GatedLinearAttention("key"), of_gla, {"gate": "key", "config": SMALL}, LINEAR, 3),
    "value": (GatedLinearAttention("value"), of_gla, {"gate": "value", "config": SMALL}, LINEAR, 3),
    "scalar, shared": (GatedLinearAttention("scalar", shared=True), of_gla, {"gate": "scalar", "config": SMALL}, LINEAR, 3),
    "none": (GatedLinearAttention("none"), of_gla, {"gate": "none", "config": SMALL}, LINEAR, 3),
    "slots": (GatedSlotAttention(), of_slots, {"config": SMALL}, LINEAR, 6),
    "delta rule": (DeltaRule(gated=False), of_rule, {"config": SMALL_DELTA}, RULE, 2),
    "delta rule in pieces": (DeltaRule(gated=True), of_rule, {"config": PIECES}, RULE, 2),
    "delta rule by channel": (DeltaRule(gated=True, by_channel=True), of_rule, {"config": SMALL_DELTA}, RULE, 2),
}


LONG = ("value", "none", "scalar, shared", "delta rule by channel", "delta rule in pieces")


@pytest.mark.parametrize("case", some(CASES, [case for case in CASES if case not in LONG]))
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
def test_kept_states_give_the_bits_of_recomputed_ones(case, dtype, monkeypatch):
    """Products of bfloat16 are a GPU's."""
    recurrence, op, options, (launches, name), walks = CASES[case]
    g = seeded(0)
    tokens = MANY if case.endswith("in pieces") else TOKENS
    inputs, state = recurrence.example(g, 2, tokens, torch.float32, wide=False)
    pos = positions(seeded(1), 2, tokens, 0.1).to(DEVICE)
    launched, launch = [], getattr(launches, name)
    prepared, prepare = [], LinearAttentionLaunch.launch_prepare
    monkeypatch.setattr(LinearAttentionLaunch, "launch_prepare", lambda self, *a: (prepared.append(1), prepare(self, *a))[1])

    def counted(*args, **own):
        launched.append(launch(*args, **own))
        return launched[-1]

    monkeypatch.setattr(launches, name, counted)
    found = []
    for keep_states in (False, True):
        launched.clear()
        prepared.clear()
        leaves = [x.to(DEVICE, dtype).requires_grad_() for x in inputs]
        initial = {key: x.to(DEVICE).requires_grad_() for key, x in state.items()}
        y, final = op(leaves, initial, pos=pos, keep_states=keep_states, **options)
        cotangents = [torch.randn(x.shape, generator=seeded(2)).to(DEVICE, x.dtype) for x in (y, *final.values())]
        grads = torch.autograd.grad([y, *final.values()], [*leaves, *initial.values()], cotangents)
        if launches is DeltaRuleLaunch:
            assert (launched[0][2] is not None) == (tokens == MANY)
        found.append((len(launched), len(prepared), [y, *final.values(), *grads]))
    (again, twice, recomputed), (once, first, kept) = found
    # of pieces nothing is kept
    assert (again, again - once) == (walks, 2 if case == "slots" else int(tokens == TOKENS))
    # decays by key too are made once
    assert twice - first == (case in ("key", "slots"))
    assert all(map(torch.equal, recomputed, kept))
    assert all(x.isfinite().all() and x.abs().sum() > 0 for x in kept)
