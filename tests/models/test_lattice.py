"""Lattice's mixer compared with its block composed of torch modules; its options and initial slots."""

import pytest
import torch
import torch.nn.functional as F
from support.compare import relative_error

from baton.kernels.lattice.reference import lattice_reference
from baton.kernels.lattice.variant import UpdateRule
from baton.models.mixer import build_mixer
from baton.models.mixer_context import MixerContext
from baton.models.settings.lattice import LatticeConfig
from baton.parallel.param_layout import initialize_parameters, parameter_count
from baton.parallel.tensor import megatron_config

D_MODEL, HEADS, HEAD_DIM, SLOTS, EPS = 24, 4, 7, 5, 1e-6
OPTIONS = [
    {},
    {"variant": "enc"},
    {"variant": "sim", "forget": True},
    {"project": False},
    {"variant": "enc", "sparsity": 0.05, "step_max": 2.0},
    {"conv_activation": "silu", "unit_queries": True, "unit_keys": False, "value_scale": 0.3},
    {"initial_slots": "learned"},
    {"output_norm": False, "d_conv": 2},
]
every_option = pytest.mark.parametrize("options", OPTIONS, ids=str)


def _built(options, dtype=torch.float64):
    config = LatticeConfig(**{"heads": HEADS, "head_dim": HEAD_DIM, "slots": SLOTS, **options})
    layer = build_mixer(config, MixerContext(D_MODEL, 3, EPS, megatron_config(1), dtype)).double()
    initialize_parameters(layer, seed=1, tensor_rank=0, tensor_size=1)
    with torch.no_grad():  # distinct values also where the initial ones are all equal
        for p in layer.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()), dtype=p.dtype))
    return layer


def _inputs(length):
    x = torch.randn(2, length, D_MODEL, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return x, torch.arange(length, dtype=torch.int32).expand(2, length)


def _block(layer, x):
    """The equations, one document from its start."""
    config = layer.config
    widths = [HEADS * SLOTS, HEADS * HEAD_DIM, HEADS * HEAD_DIM, HEADS, *([HEADS] if config.forget else [])]
    qk, v, gate, step, *forget = (x @ w.T for w in layer.in_proj.weight.split(widths))

    def convolved(weight):
        padded = F.pad(qk.transpose(1, 2), (config.d_conv - 1, 0))
        y = F.conv1d(padded, weight[:, None], groups=len(weight)).transpose(1, 2)
        return (F.silu(y) if config.conv_activation == "silu" else y).unflatten(2, (HEADS, SLOTS))

    def unit(u, wanted):
        return u / (u.square().sum(-1, keepdim=True) + EPS).sqrt() if wanted else u

    S0 = layer.S0 if config.initial_slots == "learned" else torch.eye(HEAD_DIM, SLOTS, dtype=x.dtype).repeat(HEADS, 1, 1)
    gamma = config.step_max / (1 + torch.exp(-step - layer.step_bias))
    o, S = lattice_reference(
        unit(convolved(layer.conv_q), config.unit_queries),
        unit(convolved(layer.conv_k), config.unit_keys),
        (v * (config.value_scale or HEAD_DIM**-0.5)).unflatten(2, (HEADS, HEAD_DIM)),
        gamma,
        S0,
        mu=torch.sigmoid(forget[0] + layer.forget_bias) if config.forget else None,
        tau=gamma * config.sparsity if config.sparsity else None,
        rule=UpdateRule(config.variant, config.project),
    )
    o = o.flatten(2)
    if config.output_norm:
        o = o / (o.square().mean(-1, keepdim=True) + EPS).sqrt() * layer.norm.weight
    return (o * F.gelu(gate)) @ layer.out_proj.weight.T, S


@every_option
def test_the_mixer_is_its_equations(options, single_mesh):
    layer, (x, pos) = _built(options), _inputs(40)
    y, leaving = layer(x, pos, None)
    expected, S = _block(layer, x)
    assert relative_error(y, expected) <= 1e-12
    assert relative_error(leaving["S"], S) <= 1e-12


@every_option
def test_pieces_are_the_whole_with_every_option(options, single_mesh):
    layer, (x, pos) = _built(options), _inputs(20)
    pos = torch.where(torch.arange(20) < 13, pos, pos - 13)
    grads = []
    for cuts in ([], [1, 2, 9, 14]):
        layer.zero_grad()
        pieces, state = [], None
        for begin, end in zip([0, *cuts], [*cuts, 20]):
            y, state = layer(x[:, begin:end], pos[:, begin:end], state)
            pieces.append(y)
        y = torch.cat(pieces, dim=1)
        (y.square().sum() + state["S"].square().sum(2).exp().sum()).backward()
        grads.append([y.detach(), *(p.grad.clone() for p in layer.parameters())])
    for whole, cut in zip(*grads, strict=True):
        assert whole.any()
        assert relative_error(cut, whole) <= 1e-10


def test_learned_slots_begin_orthonormal_in_any_direction(single_mesh):
    config = LatticeConfig(heads=500, head_dim=3, slots=2, initial_slots="learned")
    layer = build_mixer(config, MixerContext(D_MODEL, 3, EPS, megatron_config(1), torch.float32))
    initialize_parameters(layer, seed=1, tensor_rank=0, tensor_size=1)
    S0 = layer.S0.detach()
    assert relative_error(S0.mT @ S0, torch.eye(2).expand(500, 2, 2)) <= 1e-6
    assert float(S0.mean(0).abs().max()) <= 4 / (3 * 500) ** 0.5
    assert not layer.S0.baton_layout.decay


def test_parameters_are_the_blocks():
    """4 d_model^2 for four projections, two convolutions, steps with a bias, a norm; learned slots and gates on top."""
    d = 768

    def count(**options):
        with torch.device("meta"):
            return parameter_count(
                build_mixer(LatticeConfig(**options), MixerContext(d, 24, EPS, megatron_config(1), torch.float32))
            )

    plain = 4 * d * d + 2 * 4 * d + 12 * d + 12 + d
    assert count() == plain
    assert count(forget=True) == plain + 12 * d + 12
    assert count(initial_slots="learned") == plain + 12 * 64 * 64
    assert count(output_norm=False) == plain - d


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="slots=65 exceeds head_dim=64"):
        LatticeConfig(slots=65).check(768)
    with pytest.raises(ValueError, match="head_dim=64 does not divide d_model=100; set heads, or another head_dim"):
        LatticeConfig().check(100)
    assert LatticeConfig(heads=3).sizes(100) == {"heads": 3}
