"""Test-time training compared with a loop whose inner gradients autograd takes, and with flash-linear-attention's naive function;
what it costs on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from support.compare import relative_error
from support.fla import naive
from support.operators import Counted
from support.recurrences import seeded

from baton.kernels.ttt import ttt
from baton.models.mixer import build_mixer
from baton.models.mixer_context import MixerContext
from baton.models.rope import rope_rates
from baton.models.settings.ttt import TTTConfig
from baton.parallel.param_layout import initialize_parameters
from baton.parallel.tensor import megatron_config

B, T, M, H, D, K = 2, 13, 12, 3, 4, 5


def by_hand(p, x, pos, model):
    """The block token by token in each row, with the inner loss as it is written and its gradient by autograd."""
    names = ("W1", "b1") if model == "linear" else ("W1", "b1", "W2", "b2")
    qk, v, gate, step = (x @ p["in_proj.weight"].T).split([H * D, H * D, H * D, H], dim=-1)
    lr = {"linear": 1.0, "mlp": 0.1}[model] / D * torch.sigmoid(step + p["step_bias"])

    def f(z, weights):
        z = torch.einsum("hd,hde->he", z, weights[0]) + weights[1]
        return z if model == "linear" else torch.einsum("he,hed->hd", F.gelu(z, approximate="tanh"), weights[2]) + weights[3]

    def norm(z):
        return F.layer_norm(z, (D,), eps=1e-6) * p["inner_norm_weight"] + p["inner_norm_bias"]

    def row(b, t, name):
        """The convolved and rotated query or key of a token."""
        y = p[f"{name}_bias"].clone()
        for back in range(4):
            if pos[b, t] >= back:
                y = y + p[name][:, 3 - back] * qk[b, t - back]
        place = int(pos[b, t]) % K
        first, second = y.view(H, D).chunk(2, dim=-1)
        turned = torch.complex(first, second) * torch.polar(
            torch.ones(D // 2).double(), place * torch.tensor(rope_rates(1e4, D), dtype=torch.float64)
        )
        return torch.cat((turned.real, turned.imag), dim=-1)

    rows = []
    for b in range(B):
        for t in range(T):
            place = int(pos[b, t]) % K
            if pos[b, t] == 0:
                now = [p[name] for name in names]
            if place == 0:
                start, sums = now, [torch.zeros_like(w) for w in now]
            q, k = row(b, t, "conv_q"), row(b, t, "conv_k")
            loss = (norm(f(k, start)) - (v[b, t].view(H, D) - k)).square().sum(-1) / 2
            grads = torch.autograd.grad((lr[b, t] * loss).sum(), start, create_graph=True)
            # lr is a factor of the step, and does not depend on the weights
            sums = [s + g for s, g in zip(sums, grads, strict=True)]
            now = [w - p["token_scale"][place].clamp(min=0) * s for w, s in zip(start, sums, strict=True)]
            o = (q + norm(f(q, now))).flatten()
            o = o / (o.square().mean() + 1e-5).sqrt() * p["norm.weight"]
            rows.append((o * F.gelu(gate[b, t])) @ p["out_proj.weight"].T)
    return torch.stack(rows).view(B, T, M)


@pytest.mark.usefixtures("single_mesh")
@pytest.mark.parametrize("model", ["linear", "mlp"])
def test_the_mixer_is_its_loop_with_gradients(model):
    settings = TTTConfig(model=model, heads=H, head_dim=D, mini_batch=K)
    mixer = build_mixer(settings, MixerContext(M, 3, 1e-5, megatron_config(1), torch.float64))
    initialize_parameters(mixer, seed=1, tensor_rank=0, tensor_size=1)
    mixer.double()
    for number, p in enumerate(mixer.parameters()):
        p.data.add_(0.3 * torch.randn(p.shape, generator=seeded(number)))
    x, cotangent = (torch.randn(B, T, M, generator=seeded(n), dtype=torch.float64) for n in (50, 51))
    pos = torch.stack((torch.arange(T), torch.cat((torch.arange(3), torch.arange(T - 3)))))
    copies = {name: p.detach().clone().requires_grad_() for name, p in mixer.named_parameters()}
    y, expected = mixer(x, pos, None)[0], by_hand(copies, x, pos, model)
    assert relative_error(y, expected) <= 1e-12
    y.backward(cotangent)
    expected.backward(cotangent)
    for name, p in mixer.named_parameters():
        assert relative_error(p.grad, copies[name].grad) <= 1e-10, name


def test_ttt_linear_is_flas_with_gradients():
    """Its step sizes depend on the token that reads alone, and its outputs are z + LayerNorm(z)."""
    length, normal = 4 * K, lambda seed, *shape: torch.randn(*shape, generator=seeded(seed))
    q, k, v = (normal(n, B, length, H, D) for n in range(3))
    scale, weight, bias = torch.rand(K, generator=seeded(3)) / D, 1 + 0.1 * normal(4, H, D), 0.1 * normal(5, H, D)
    W, b = 0.5 * normal(6, H, D, D), 0.1 * normal(7, H, D)
    found = []
    for ours in (True, False):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, scale, weight, bias, W, b)]
        q_, k_, v_, scale_, weight_, bias_, W_, b_ = leaves
        if ours:
            z, state = ttt(q_, k_, v_, torch.ones(B, length, H), *leaves[3:], pos=torch.arange(length).repeat(B, 1))
            y = z + F.layer_norm(z, (D,), eps=1e-6) * weight_ + bias_
            W_T, b_T = (w + state[name] - scale_[-1] * state[f"{name}_grad"] for name, w in (("W1", W_), ("b1", b_)))
        else:
            eta = scale_.repeat(4)[None, :, None, None].expand(B, -1, H, 1)
            start = W_.expand(B, -1, -1, -1), b_[:, None].expand(B, -1, -1, -1)
            y, W_T, b_T = naive("ttt").chunk_ttt_linear_ref(1.0 * q_, k_, v_, weight_, bias_, eta, 1.0, 1e-6, K, *start, True)
            b_T = b_T.squeeze(2)
        outputs = (y, W_T, b_T)
        grads = torch.autograd.grad(outputs, leaves, [normal(60 + n, *x.shape) for n, x in enumerate(outputs)])
        found.append((*outputs, *grads))
    for number, (a, expected) in enumerate(zip(*found, strict=True)):
        assert relative_error(a, expected) <= 1e-5, number


@pytest.mark.parametrize("model", ["linear", "mlp"])
def test_operators_and_memory_traffic_of_a_token_are_those_counted(model):
    settings = TTTConfig(model=model, heads=1)
    size, d = settings.mini_batch, settings.head_dim
    shapes = [(d,), (d,), *settings.weight_shapes(d).values()]

    def counted(length):
        generator = seeded(1)
        along = [torch.randn(1, length, 1, d, generator=generator) for _ in "qkv"]
        weights = [torch.randn(1, *shape[-2:], generator=generator) / 8 for shape in (s if len(s) == 1 else s[1:] for s in shapes)]
        inputs = [x.requires_grad_() for x in (*along, torch.rand(1, length, 1), torch.ones(size), *weights)]
        with Counted() as ahead:
            y, _ = ttt(*inputs, pos=torch.arange(length)[None])
        with Counted() as back:
            y.sum().backward()
        return ahead.launches, back.launches, ahead.moved, back.moved

    eager = settings._eager(d, settings.elements(d))
    for short, long, said in zip(counted(2 * size), counted(4 * size), (*eager.launches, *eager.moved), strict=True):
        assert said == pytest.approx((long - short) / (2 * size), rel=0.05)


def test_settings_that_do_not_fit_are_refused_with_what_to_change():
    with pytest.raises(ValueError, match="head_dim=64 does not divide d_model=100; set heads, or another head_dim"):
        TTTConfig().check(100)
    with pytest.raises(ValidationError, match="multiple of 2"):
        TTTConfig(head_dim=5)
