"""Mamba-3's layer against flash-linear-attention's, whose kernels (mamba_ssm's) are replaced by their formula over all pairs of
tokens: cumulative angles, as the paper writes it, and not a state that turns."""

import math
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from support.compare import relative_error
from support.interchange import fla_models
from support.recurrences import gradients, positions, seeded
from torch import nn

from baton.kernels.mamba3 import mamba3
from baton.kernels.mamba3.recurrence import Mamba3
from baton.kernels.mamba3.rotation import sums_in_documents
from baton.models.mixer import build_mixer
from baton.models.mixer_context import MixerContext
from baton.models.settings.mamba3 import Mamba3Config
from baton.parallel.param_layout import initialize_parameters
from baton.parallel.tensor import megatron_config

B, T, M = 2, 37, 24


def over_pairs(Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D, Z, **_):
    """The function that mamba_ssm's kernels compute, with its arguments: token s reaches t with gamma_s and, where s < t, with the
    share of its next token, times the decay between them and the product of q and k at the difference of their angles."""
    y = _of_inputs(Q[:, :, None], K[:, :, None], V[:, :, None], ADT, DT, Trap, Q_bias[:, None], K_bias[:, None], Angles, D)[:, :, 0]
    return y if Z is None else y * F.silu(Z)


def several_over_pairs(Q, K, V, ADT, DT, Trap, Q_bias, K_bias, MIMO_V, MIMO_Z, MIMO_Out, Angles, D, Z, **_):
    """The same where a head has several inputs. State r turns with r + N / 2, so its kernels' states are brought in our order."""
    order = _order(Q.shape[-1], Angles.shape[-1])
    V, Q, K, Q_bias, K_bias = torch.einsum("bthp,hjp->btjhp", V, MIMO_V), *(x[..., order] for x in (Q, K, Q_bias, K_bias))
    y = _of_inputs(Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D)
    if Z is None:
        return y
    return torch.einsum("btjhp,btjhp,hjp->bthp", y, F.silu(torch.einsum("bthp,hjp->btjhp", Z, MIMO_Z)), MIMO_Out)


def _order(states, pairs):
    """Their states in our order."""
    firsts = torch.arange(pairs)
    turning = torch.stack((firsts, firsts + states // 2), dim=1).flatten()
    return torch.cat((turning, torch.tensor([n for n in range(states) if n not in turning], dtype=torch.long)))


def _of_inputs(Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D):
    """y [B, T, J, heads, P] for Q, K [B, T, J, groups, N], V [B, T, J, heads, P] and biases [heads, J, N]."""
    heads, pairs, length = V.shape[3], Angles.shape[-1], V.shape[1]
    q, k = (x.repeat_interleave(heads // x.shape[3], 3) + bias.transpose(0, 1) for x, bias in ((Q, Q_bias), (K, K_bias)))
    angle = (math.pi * torch.tanh(Angles) * DT.transpose(1, 2)[..., None]).cumsum(1)[:, :, None]
    lam = torch.sigmoid(Trap)
    gamma, before = lam * DT, F.pad(((1 - lam) * DT)[..., 1:], (0, 1))
    G = ADT.cumsum(-1)
    lower = torch.ones(length, length, dtype=torch.bool).tril()
    weights = (gamma[..., None, :] + before[..., None, :] * lower.tril(-1)) * (G[..., None] - G[..., None, :]).masked_fill(
        ~lower, -torch.inf
    ).exp()
    q_pairs, k_pairs = (torch.view_as_complex(x[..., : 2 * pairs].unflatten(-1, (pairs, 2)).contiguous()) for x in (q, k))
    turned = [torch.polar(torch.ones_like(angle), angle) * x for x in (q_pairs, k_pairs)]
    scores = torch.einsum("btjhr,bsihr->bjihts", turned[0], turned[1].conj()).real
    scores = scores + torch.einsum("btjhn,bsihn->bjihts", q[..., 2 * pairs :], k[..., 2 * pairs :])
    return torch.einsum("bjihts,bsihp->btjhp", weights[:, None, None] * scores, V) + D[:, None] * V


class _Norm(nn.Module):
    """fla's RMSNormGated in plain PyTorch."""

    def __init__(self, hidden_size, eps, group_size=None, norm_before_gate=True, **_):
        super().__init__()
        assert norm_before_gate
        self.weight, self.eps, self.size = nn.Parameter(torch.ones(hidden_size)), eps, group_size or hidden_size

    def forward(self, x, z=None):
        y = F.rms_norm(x.unflatten(-1, (-1, self.size)), (self.size,), eps=self.eps).flatten(-2) * self.weight
        return y if z is None else y * F.silu(z)


@pytest.mark.skipif(find_spec("fla") is None, reason="flash-linear-attention is not installed")
@pytest.mark.parametrize(
    "config",
    [
        Mamba3Config(head_dim=6, d_state=10),
        Mamba3Config(head_dim=6, d_state=10, n_groups=2, rope_fraction=1.0, output_norm=True),
        Mamba3Config(head_dim=6, d_state=10, mimo_rank=4),
        Mamba3Config(head_dim=6, d_state=10, n_groups=2, rope_fraction=1.0, output_norm=True, mimo_rank=3),
    ],
    ids=["as released", "groups, whole states, norm", "MIMO as released", "MIMO, groups, whole states, norm"],
)
def test_the_layer_is_flash_linear_attentions_and_so_are_its_gradients(config, monkeypatch, single_mesh):
    fla_models()
    from fla.layers import mamba3 as layers

    monkeypatch.setattr(layers, "RMSNormGated", _Norm)
    monkeypatch.setattr(layers, "mamba3_siso_combined", over_pairs)
    monkeypatch.setattr(layers, "mamba3_mimo_combined", several_over_pairs)
    mixer = build_mixer(config, MixerContext(M, 3, 1e-5, megatron_config(1), torch.float32))
    initialize_parameters(mixer, seed=1, tensor_rank=0, tensor_size=1)
    layer = layers.Mamba3(
        hidden_size=M, state_size=10, head_dim=6, n_groups=config.n_groups, rope_fraction=config.rope_fraction,
        is_outproj_norm=config.output_norm, is_mimo=config.mimo_rank > 1, mimo_rank=config.mimo_rank, layer_idx=0,
    )  # fmt: skip
    heads, groups, rank = 2 * M // 6, config.n_groups, config.mimo_rank
    order = _order(10, config.pairs).argsort() if rank > 1 else torch.arange(10)

    def joined(of):
        """Their parameters, or gradients, of ours."""
        z, x, dt, A, lam, *bc = of["in_proj.weight"].split(
            [2 * M, 2 * M, *(heads,) * 3, *((groups * rank * 20,) if groups > 1 else ())]
        )
        by_group = (bc[0] if bc else of["bc_proj.weight"]).unflatten(0, (groups, 2, rank, 10))[:, :, :, order]
        found = {name: of[name] for name in ("dt_bias", "D", "out_proj.weight")}
        found |= {name: of[name] for name in ("mimo_x", "mimo_z", "mimo_o") if rank > 1}
        found |= {name: of[name][order] for name in ("B_norm.weight", "C_norm.weight")}
        found |= {name: of[name].view(heads, rank, 10)[..., order] for name in ("B_bias", "C_bias")}
        found |= {"norm.weight": of["norm.weight"]} if config.output_norm else {}
        parts = z, x, *(by_group[:, n].transpose(0, 1).flatten(0, 2) for n in range(2)), dt, A, lam, of["angle_proj.weight"]
        return found | {"in_proj.weight": torch.cat(parts)}

    with torch.no_grad():
        for n, p in enumerate(mixer.parameters()):
            p.add_(0.1 * torch.randn(p.shape, generator=seeded(10 + n)))
        mixer.dt_bias += 3  # steps of several tenths, whose angles are seen
        theirs = dict(layer.named_parameters())
        values = joined(dict(mixer.named_parameters()))
        assert values.keys() == theirs.keys()
        for name, value in values.items():
            theirs[name].copy_(value)
    x, pos = torch.randn(B, T, M, generator=seeded(3)), torch.arange(T, dtype=torch.int32).repeat(B, 1)
    found = []
    for module in (mixer, layer):
        leaf = x.clone().requires_grad_()
        y = mixer(leaf, pos, None)[0] if module is mixer else layer.cuda_kernels_forward(leaf)[0]
        names = [name for name, _ in module.named_parameters()]
        dx, *grads = gradients([y], [leaf, *module.parameters()], seeded(4))
        found.append({"y": y, "dx": dx} | dict(zip(names, grads, strict=True)))
    ours, theirs = {name: found[0][name] for name in ("y", "dx")} | joined(found[0]), found[1]
    for name, value in theirs.items():
        assert relative_error(ours[name], value) <= 1e-5, name


def test_the_angle_of_a_long_document_is_exact():
    """One token is written, and turns by 3 radians a token from then on. A sum of float32 angles would be off by 0.01."""
    length, theta = 1 << 16, 3.0
    one, last = torch.ones(1, length, 1), torch.arange(length) == length - 1
    x = (torch.arange(length) == 0).float().view(1, length, 1, 1)
    k, q = torch.tensor([0.6, -1.1]), torch.tensor([0.3, 0.7])
    B, C = k.expand(1, length, 1, 2), q.expand(1, length, 1, 2) * last.view(1, length, 1, 1)
    zero = torch.zeros(1, 2)
    angle = torch.tensor(-theta * (length - 1), dtype=torch.float64)
    turned = torch.view_as_complex(k.double()) * torch.polar(torch.ones_like(angle), angle)
    expected = (torch.view_as_real(turned) * q.double()).sum()
    state = None
    for span in (slice(0, length - 9999), slice(length - 9999, length)):
        inputs = (a[:, span] for a in (x, B, C, one, 0 * one, one, theta * one))
        y, state = mamba3(*inputs, zero, zero, torch.zeros(1), initial_state=state)
    assert relative_error(y[0, -1, 0, 0], expected) <= 1e-5


@pytest.mark.parametrize("probability", [0.0, 0.001, 0.1])
def test_sums_in_documents_are_those_of_each_document(probability):
    """Of 70 chunks and a part of one, whose edges are two chunks and a part of one."""
    x, y = (torch.randn(2, 4500, 3, generator=seeded(n), dtype=torch.float64) for n in (1, 2))
    pos = positions(seeded(3), 2, 4500, probability) if probability else None
    found, mirror = sums_in_documents(x, pos), sums_in_documents(y, pos, backward=True)
    for lane in range(2):
        starts = [] if pos is None else (pos[lane] == 0).nonzero().flatten().tolist()
        spans = torch.tensor_split(x[lane], starts)
        assert relative_error(found[lane], torch.cat([span.cumsum(0) for span in spans])) <= 1e-12
    assert relative_error((found * y).sum(), (x * mirror).sum()) <= 1e-12


@pytest.mark.parametrize("strong", [-150.0, -1e6])
def test_a_decay_to_nothing_within_a_token_is_exact(strong):
    """No decay is divided by: the token after it reads the two alone, and all gradients are finite."""
    (x, B, C, dt, _, lam, theta, *shared), state = Mamba3().example(seeded(3), 2, 70, torch.float32, wide=False)
    g = torch.zeros_like(dt).index_fill_(1, torch.tensor([40]), strong)
    leaves = [a.clone().requires_grad_() for a in (x, B, C, dt, g, lam, theta, *shared, *state.values())]
    y, leaving = mamba3(*leaves[:-3], initial_state=dict(zip(state, leaves[-3:], strict=True)))
    # from the token on, with nothing before it
    alone, _ = mamba3(*(a[:, 40:] for a in (x, B, C, dt, 0 * g, lam, theta)), *shared)
    assert relative_error(y[:, 40:], alone) <= 1e-5
    assert all(grad.isfinite().all() for grad in gradients((y, *leaving.values()), leaves, seeded(4)))
