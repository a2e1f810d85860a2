"""S4D's mixer compared with the convolution of its paper, its initial values, and what it costs on a GPU."""

import math

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from support.compare import relative_error
from support.operators import Counted
from support.recurrences import seeded

from baton.kernels.s4d import chunked
from baton.kernels.s4d.recurrence import RECURRENCES
from baton.models.initializers import S4DFrequencies
from baton.models.mixer import build_mixer
from baton.models.mixer_context import MixerContext
from baton.models.settings.s4d import CHUNK, S4DConfig
from baton.parallel.param_layout import initialize_parameters
from baton.parallel.tensor import megatron_config

B, T, M, INNER, N = 2, 150, 12, 24, 16


def by_convolution(p, x):
    """The block with one convolution as long as the sequence, by FFT: its kernel is 2 Re sum_n C_n (exp(dt A_n) - 1) / A_n
    exp(dt A_n)^l. Projections: x and z, x alone, or q, k and v."""
    inner, *others = (x @ p["in_proj.weight"].T).split(INNER, dim=-1)
    if len(others) == 2:
        q, (inner, v) = inner, others
    u = F.conv1d(inner.mT, p["conv_weight"][:, None], p["conv_bias"], padding=3, groups=INNER)[..., :T]
    u = u * v.mT if len(others) == 2 else F.silu(u)
    A = torch.complex(-p["A_log"].exp(), p["A_imag"])
    dtA = p["log_dt"].exp()[:, None] * A
    weights = torch.view_as_complex(p["C"]) * (dtA.exp() - 1) / A
    kernel = 2 * torch.einsum("dn,dnl->dl", weights, (dtA[..., None] * torch.arange(T)).exp()).real
    y = torch.fft.irfft(torch.fft.rfft(kernel, 2 * T) * torch.fft.rfft(u, 2 * T), 2 * T)[..., :T] + p["D"][:, None] * u
    gate = q if len(others) == 2 else F.silu(others[0]) if others else 1.0
    return (y.mT * gate) @ p["out_proj.weight"].T


@pytest.mark.usefixtures("single_mesh")
@pytest.mark.parametrize(("law", "block"), [("lin", "mamba"), ("inv", "no_gate"), ("inv", "h3")])
def test_the_mixer_is_the_papers_convolution_with_gradients(law, block):
    settings = S4DConfig(d_state=N, A_init=law, block=block)
    mixer = build_mixer(settings, MixerContext(M, 3, 1e-5, megatron_config(1), torch.float64))
    initialize_parameters(mixer, seed=1, tensor_rank=0, tensor_size=1)
    mixer.double()
    for number, p in enumerate(mixer.parameters()):
        p.data.add_(0.1 * torch.randn(p.shape, generator=seeded(number)))
    x, cotangent = (torch.randn(B, T, M, generator=seeded(n), dtype=torch.float64) for n in (50, 51))
    copies = {name: p.detach().clone().requires_grad_() for name, p in mixer.named_parameters()}
    y, expected = mixer(x, torch.arange(T).repeat(B, 1), None)[0], by_convolution(copies, x)
    assert relative_error(y, expected) <= 1e-12
    y.backward(cotangent)
    expected.backward(cotangent)
    for name, p in mixer.named_parameters():
        assert relative_error(p.grad, copies[name].grad) <= 1e-10, name


def test_initial_frequencies_are_the_papers():
    lin, inv = torch.empty(3, N // 2), torch.empty(3, N // 2)
    S4DFrequencies("lin")(lin, seeded(1))
    S4DFrequencies("inv")(inv, seeded(1))
    for n in range(N // 2):
        assert lin[:, n].tolist() == pytest.approx(3 * [math.pi * n], rel=1e-6)
        assert inv[:, n].tolist() == pytest.approx(3 * [N / math.pi * (N / (2 * n + 1) - 1)], rel=1e-6)


def test_operators_and_memory_traffic_of_a_token_are_those_counted():
    (recurrence,) = RECURRENCES
    assert chunked.CHUNK == CHUNK

    def counted(length):
        inputs, state = recurrence.example(seeded(0), 1, length, torch.float32, wide=True)
        with Counted() as ahead:
            y, _ = recurrence.run(tuple(x.requires_grad_() for x in inputs), torch.arange(length)[None], state)
        with Counted() as back:
            y.sum().backward()
        return inputs[1].shape, (ahead.launches, back.launches, ahead.moved, back.moved)

    ((channels, pairs), short), (_, long) = counted(64), counted(128)
    eager = S4DConfig(d_state=2 * pairs)._eager(channels)
    for a, b, said in zip(short, long, (*eager.launches, *eager.moved), strict=True):
        assert said == pytest.approx((b - a) / 64, rel=0.1)


def test_settings_that_do_not_fit_are_refused_with_what_to_change():
    with pytest.raises(ValidationError, match=r"dt_min=0.5 exceeds dt_max=0.1"):
        S4DConfig(dt_min=0.5)
    with pytest.raises(ValidationError, match="multiple of 2"):
        S4DConfig(d_state=5)
