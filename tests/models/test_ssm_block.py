"""Settings of Mamba and Longhorn that omit a part or change initial values, compared with plain loops over the papers'
equations."""

import math

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from support.compare import relative_error
from support.recurrences import seeded

from baton.models import initializers
from baton.models.mixer import build_mixer
from baton.models.mixer_context import MixerContext
from baton.models.settings.longhorn import LonghornConfig
from baton.models.settings.mamba import MambaConfig
from baton.parallel.param_layout import initialize_parameters
from baton.parallel.tensor import megatron_config

B, T, M, N, R = 2, 11, 6, 5, 3
SIZES = {"expand": 3, "d_state": N, "d_conv": 4, "dt_rank": R}
SETTINGS = {
    "mamba": MambaConfig(**SIZES),
    "mamba, algorithm 2 as printed": MambaConfig(**SIZES, skip=False, discretization="zoh"),
    "mamba, static step sizes": MambaConfig(**SIZES, selective=("C", "B"), A_init="half"),
    "mamba, static B": MambaConfig(**SIZES, selective=("dt", "C"), A_init="random"),
    "mamba, static C": MambaConfig(**SIZES, selective=("B",), skip=False),
    "mamba, time-invariant": MambaConfig(**SIZES, selective=(), discretization="zoh"),
    "no gate": MambaConfig(**SIZES, block="no_gate"),
    "no gate, time-invariant": MambaConfig(**SIZES, block="no_gate", selective=(), discretization="zoh"),
    "h3": MambaConfig(**SIZES, block="h3"),
    "h3, time-invariant": MambaConfig(**SIZES, block="h3", selective=(), discretization="zoh"),
    "longhorn": LonghornConfig(**SIZES),
    "longhorn without skip": LonghornConfig(**SIZES, skip=False),
    "longhorn, algorithm 1 as printed": LonghornConfig(**SIZES, skip=False, beta_bias=False),
}


def mixer(settings, width=M):
    layer = build_mixer(settings, MixerContext(width, 3, 1e-5, megatron_config(1), torch.float64))
    initialize_parameters(layer, seed=1, tensor_rank=0, tensor_size=1)
    with torch.no_grad():
        for number, p in enumerate(layer.parameters()):
            p.add_(0.1 * torch.randn(p.shape, generator=seeded(number)))
    return layer.double()


def by_hand(p, x, window, S):
    """The block, token by token; p: parameters by name, of which D and a bias may be missing; window: the last inputs of the
    convolution [B, 3, D]; S: the state [B, D, N]. Documents do not start inside. A token's projections are x, which is convolved,
    and z, or x alone, or q, k and v."""
    longhorn, outputs = "A_log" not in p, []
    for t in range(x.shape[1]):
        inner, *others = (p["in_proj.weight"] @ x[:, t, :, None]).squeeze(-1).split(3 * M, dim=-1)
        if len(others) == 2:
            q, (inner, v) = inner, others
        window = torch.cat((window, inner[:, None]), dim=1)[:, -4:]
        u = torch.einsum("bwd,dw->bd", window, p["conv_weight"]) + p["conv_bias"]
        u = u * v if len(others) == 2 else u / (1 + torch.exp(-u))
        # rows of x_proj: those of a code, of B (or k) and of C (or q), as far as there are; what has none is a parameter
        step_proj, rows = p.get("beta_proj.weight" if longhorn else "dt_proj.weight"), p.get("x_proj.weight")
        step, used = p.get("beta_bias" if longhorn else "dt_bias", 0.0) + torch.zeros_like(u), 0
        if step_proj is not None:
            step, used = step + (u @ rows[:R].T) @ step_proj.T, R
        if "B" in p:
            first = p["B"]
        else:
            first, used = (u @ rows[used : used + N].T)[:, None], used + N
        second = p["C"] if "C" in p else (u @ rows[used:].T)[:, None]
        if longhorn:
            first = first.squeeze(1)
            beta = 1 / (1 + torch.exp(-step))
            eps = beta / (1 + beta * (first * first).sum(-1, keepdim=True))
            S = (1 - eps[:, :, None] * first[:, None] ** 2) * S + (eps * u)[:, :, None] * first[:, None]
        else:
            delta, A = torch.log1p(torch.exp(step))[:, :, None], -torch.exp(p["A_log"])
            size = (torch.exp(delta * A) - 1) / A if p["zoh"] else delta
            S = torch.exp(delta * A) * S + size * first * u[:, :, None]
        y = (S * second).sum(-1) + p.get("D", 0.0) * u
        gate = [z / (1 + torch.exp(-z)) for z in others] if len(others) == 1 else [q] if others else [1.0]
        outputs.append((y * gate[0]) @ p["out_proj.weight"].T)
    return torch.stack(outputs, dim=1), window[:, -3:], S


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_block_is_a_plain_loop_over_its_algorithm(single_mesh, settings):
    """Outputs, the State that leaves and all gradients, with a State that arrives."""
    layer, g = mixer(settings), seeded(9)
    x = torch.randn(B, T, M, generator=g, dtype=torch.float64).requires_grad_()
    window = torch.randn(B, 3, 3 * M, generator=g, dtype=torch.float64).requires_grad_()
    S = torch.randn(B, 3 * M, N, generator=g, dtype=torch.float64).requires_grad_()
    pos = 7 + torch.arange(T, dtype=torch.int32).repeat(B, 1)
    y, leaving = layer(x, pos, {"conv": window, layer.config.state_name: S})
    wanted = dict(layer.named_parameters()) | {"x": x, "window": window, "S": S}
    own = dict(layer.named_parameters()) | {"zoh": getattr(settings, "discretization", None) == "zoh"}
    results, expected = (y, leaving["conv"], leaving[layer.config.state_name]), by_hand(own, x, window, S)
    cotangents = [torch.randn(part.shape, generator=g, dtype=torch.float64) for part in expected]
    for found, exact in zip(results, expected, strict=True):
        assert relative_error(found, exact) <= 1e-13
    found = torch.autograd.grad(results, list(wanted.values()), cotangents)
    exact = torch.autograd.grad(expected, list(wanted.values()), cotangents)
    for name, one, other in zip(wanted, found, exact, strict=True):
        assert relative_error(one, other) <= 1e-12, name


def test_what_is_left_out_has_no_parameter(single_mesh):
    names = {key: {name for name, _ in mixer(settings).named_parameters()} for key, settings in SETTINGS.items()}
    assert names["mamba"] - names["mamba, algorithm 2 as printed"] == {"D"}
    assert names["mamba"] ^ names["mamba, static step sizes"] == {"dt_proj.weight"}
    assert names["mamba"] ^ names["mamba, static C"] == {"dt_proj.weight", "C", "D"}
    assert names["mamba"] ^ names["mamba, time-invariant"] == {"x_proj.weight", "dt_proj.weight", "B", "C"}
    assert names["longhorn"] - names["longhorn without skip"] == {"D"}
    assert names["longhorn"] - names["longhorn, algorithm 1 as printed"] == {"D", "beta_bias"}


def initial(**settings):
    layer = build_mixer(MambaConfig(**settings), MixerContext(1024, 3, 1e-5, megatron_config(1), torch.float32))
    initialize_parameters(layer, seed=1, tensor_rank=0, tensor_size=1)
    return layer


def steps_of(**settings):
    return F.softplus(initial(**settings).dt_bias.detach().double())


def test_initial_values_of_A_are_those_of_the_papers_table_8(single_mesh):
    A = {kind: -torch.exp(initial(A_init=kind).A_log.detach().double()) for kind in ("s4d_real", "half", "random")}
    assert torch.allclose(A["s4d_real"], -torch.arange(1, 17, dtype=torch.float64).expand(2048, 16), rtol=1e-6)
    assert torch.allclose(A["half"], torch.full((2048, 16), -0.5, dtype=torch.float64), rtol=1e-6)
    drawn = torch.log(-A["random"])
    for quantile in (0.1, 0.5, 0.9):
        assert abs((drawn < math.sqrt(2) * torch.erfinv(torch.tensor(2 * quantile - 1))).double().mean() - quantile) < 0.01


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"selective": ["dt", "dt"]}, "names a part twice"),
        ({"selective": ["B"], "projection_norm_eps": 1e-6}, "projection_norm_eps"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(settings, said):
    with pytest.raises(ValidationError, match=said):
        MambaConfig(**settings)


@pytest.mark.parametrize(("low", "high"), [(1e-3, 1e-1), (0.02, 0.05)])
def test_initial_step_sizes_have_the_distribution_that_is_asked_for(single_mesh, low, high):
    """By their bounds and the share below each tenth of the range, of 2048 numbers."""
    of = {kind: steps_of(dt_init=kind, dt_min=low, dt_max=high) for kind in ("uniform", "log_uniform")}
    for steps in of.values():
        assert low * (1 - 1e-5) <= steps.min()
        assert steps.max() <= high * (1 + 1e-5)
    for tenth in range(1, 10):
        linear, geometric = low + (high - low) * tenth / 10, low * (high / low) ** (tenth / 10)
        assert abs((of["uniform"] < linear).double().mean() - tenth / 10) < 0.05
        assert abs((of["log_uniform"] < geometric).double().mean() - tenth / 10) < 0.05


def test_initial_step_sizes_are_at_least_the_floor(single_mesh):
    for kind in ("uniform", "log_uniform"):
        steps = steps_of(dt_init=kind, dt_floor=0.03)
        assert steps.min() >= 0.03 * (1 - 1e-5)
        assert 0.1 < (steps < 0.03 * (1 + 1e-5)).double().mean() < 0.9


def test_the_default_initial_step_sizes_are_the_released_codes_to_the_bit():
    """The released code: exp(rand * (log(max) - log(min)) + log(min)), clamped, then dt + log(-expm1(-dt))."""
    found = torch.empty(513)
    initializers.InverseSoftplusLogUniform(1e-3, 1e-1, 1e-4)(found, seeded(4))
    drawn = torch.empty(513).uniform_(math.log(1e-3), math.log(1e-1), generator=seeded(4))
    dt = torch.exp(drawn).clamp(min=1e-4)
    assert torch.equal(found, dt + torch.log(-torch.expm1(-dt)))
    assert MambaConfig().dt_init == "log_uniform"
    assert (MambaConfig().skip, LonghornConfig().skip, LonghornConfig().beta_bias) == (True, True, True)
