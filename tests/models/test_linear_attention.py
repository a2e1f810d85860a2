"""GLA, RetNet, HGRN2, Mamba-2 and GSA compared with their papers: formulas, sizes, States. Split invariance is in
test_mixers.py."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from support.compare import relative_error
from support.fla import naive

from baton.kernels.gate import forget_gate
from baton.kernels.gated_slot_attention import op as gated_slot_attention
from baton.models.config import ModelConfig
from baton.models.mixer import build_mixer
from baton.models.mixer_context import MixerContext
from baton.models.settings import kinds
from baton.parallel import linear
from baton.parallel.param_layout import initialize_parameters, parameter_count
from baton.parallel.tensor import megatron_config

pytestmark = pytest.mark.usefixtures("single_mesh")

MIXERS = ("gla", "retnet", "hgrn2", "mamba2", "gsa")
B, T, M = 2, 29, 24


def _built(kind, d_model=M, dtype=torch.float32, **settings):
    """A mixer with distinct values everywhere, also where the initial ones are all equal."""
    mixer = build_mixer(kinds()[kind](**settings), MixerContext(d_model, 3, 1e-5, megatron_config(1), dtype))
    initialize_parameters(mixer, seed=1, tensor_rank=0, tensor_size=1)
    with torch.no_grad():
        g = torch.Generator().manual_seed(2)
        for p in mixer.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=g))
    return mixer


def _tokens(seed=3):
    """x, its positions in the middle of one document, and its projections' split by the widths given."""
    x = torch.randn(B, T, M, generator=torch.Generator().manual_seed(seed))
    return x, torch.arange(T, dtype=torch.int32).repeat(B, 1)


def _parts(mixer, x, **widths):
    """in_proj's parts by name, each [B, T, heads, width]."""
    flat = F.linear(x, mixer.in_proj.weight).split([heads * width for heads, width in widths.values()], dim=-1)
    return {name: part.unflatten(2, size) for (name, size), part in zip(widths.items(), flat, strict=True)}


def _rms(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


@torch.no_grad()
def test_gla_is_its_formula():
    mixer = _built("gla", heads=3, d_key=6, d_value=5, gate_low_rank_dim=4)
    x, pos = _tokens()
    p = _parts(mixer, x, q=(3, 6), k=(3, 6), v=(3, 5), gate=(3, 5))
    logits = x @ mixer.code_proj.weight.T @ mixer.decay_proj.weight.T + mixer.decay_bias
    decay = torch.sigmoid(logits.double()).pow(1 / 16).log().float().unflatten(2, (3, 6))
    o, S = naive("gla").naive_recurrent_gla(p["q"], p["k"], p["v"], decay, output_final_state=True)
    gated = _rms(o, mixer.norm.weight) * F.silu(p["gate"])
    y, state = mixer(x, pos, None)
    assert relative_error(y, gated.flatten(2) @ mixer.out_proj.weight.T) <= 1e-6
    assert relative_error(state["S"], S) <= 1e-6


@torch.no_grad()
def test_retnet_is_its_formula():
    """Positions as complex rotations of consecutive angles; the decays are flash-linear-attention's."""
    mixer = _built("retnet", heads=3, d_key=8, d_value=5)
    x, pos = _tokens()
    p = _parts(mixer, x, q=(3, 8), k=(3, 8), v=(3, 5), gate=(3, 5))
    angles = pos[..., None] * 1e4 ** (-torch.arange(4, dtype=torch.float64) / 4)

    def turned(t):
        z = torch.complex(t[..., :4].double(), t[..., 4:].double()) * torch.polar(torch.ones_like(angles), angles)[:, :, None]
        return torch.cat((z.real, z.imag), dim=-1).float()

    o = naive("retention").naive_retention(*(t.transpose(1, 2) for t in (turned(p["q"]), turned(p["k"]), p["v"]))).transpose(1, 2)
    gated = _rms(o, mixer.norm.weight) * F.silu(p["gate"])
    assert relative_error(mixer(x, pos, None)[0], gated.flatten(2) @ mixer.out_proj.weight.T) <= 1e-6


@pytest.mark.parametrize("normalization", ["sum", "rms"])
@torch.no_grad()
def test_linear_attention_is_causal_attention_with_the_kernel_of_its_feature_map(normalization):
    """As a matrix of weights between all tokens, which are divided by their sum; between two documents they are 0."""
    mixer = _built("linear_attention", heads=3, d_key=6, d_value=5, normalization=normalization)
    x, pos = _tokens()
    pos = torch.cat((pos[:, :17], pos[:, :12]), dim=1)
    p = _parts(mixer, x, q=(3, 6), k=(3, 6), v=(3, 5))
    q, k = (torch.where(t > 0, t + 1, t.exp()) for t in (p["q"], p["k"]))
    weights = torch.einsum("bthk,bshk->bhts", q, k).tril()
    weights[:, :, 17:, :17] = 0
    if normalization == "sum":
        weights = weights / weights.sum(-1, keepdim=True)
    o = torch.einsum("bhts,bshv->bthv", weights, p["v"])
    o = o if normalization == "sum" else _rms(o, mixer.norm.weight)
    assert relative_error(mixer(x, pos, None)[0], o.flatten(2) @ mixer.out_proj.weight.T) <= 2e-6


def test_a_sum_of_weights_that_may_be_zero_is_refused():
    with pytest.raises(ValidationError, match="set feature_map to elu or relu, or normalization: rms"):
        kinds()["linear_attention"](feature_map="identity")


@pytest.mark.parametrize(("bound", "bounds"), [(0.0, "fixed"), (0.3, "fixed"), (0.3, "learned")])
@torch.no_grad()
def test_hgrn2_is_its_formula(bound, bounds):
    mixer = _built("hgrn2", heads=3, d_key=6, d_value=5, lower_bound=bound, bounds=bounds)
    if bounds == "learned":
        assert abs(torch.sigmoid(mixer.bound).mean() - bound) < 0.05  # begins there, and `_built` adds a tenth of noise
        bound = torch.sigmoid(mixer.bound.double()).unflatten(0, (3, 6))
    x, pos = _tokens()
    p = _parts(mixer, x, q=(3, 6), f=(3, 6), v=(3, 5))
    keep = bound + (1 - bound) * torch.sigmoid(p["f"].double())
    gla = naive("gla").naive_recurrent_gla
    # theirs divides by sqrt(d_key)
    o, S = gla(6**0.5 * F.silu(p["q"]), (1 - keep).float(), p["v"], keep.log().float(), output_final_state=True)
    y, state = mixer(x, pos, None)
    assert relative_error(y, _rms(o.flatten(2), mixer.norm.weight) @ mixer.out_proj.weight.T) <= 1e-6
    assert relative_error(state["S"], S) <= 1e-6


@pytest.mark.parametrize("bound", [0.0, 1e-6, 0.5])
def test_forget_gates_are_exact_at_both_ends(bound):
    """What is kept and what is taken in sum to 1; the logarithm is never above 0 and never infinite."""
    f = torch.tensor([-200.0, -60.0, -5.0, 0.0, 5.0, 16.0, 40.0, 90.0])
    _, take, log_keep = forget_gate(f, f, factor=1 - bound)
    exact_take = (1 - bound) * torch.sigmoid(-f.double())
    assert relative_error(take, exact_take) <= 1e-6
    assert (log_keep <= 0).all()
    assert log_keep.isfinite().all()
    # far up, keeping all but a millionth must not be rounded to keeping all
    assert relative_error(log_keep[4:], torch.log1p(-exact_take[4:])) <= 1e-6
    assert relative_error(log_keep.exp(), 1 - exact_take) <= 1e-6


@torch.no_grad()
@pytest.mark.parametrize(
    "settings", [{}, {"n_groups": 3}, {"n_groups": 2, "norm_group_size": 48}, {"norm_group_size": 16}], ids=str
)
def test_mamba2_is_its_formula(settings):
    """Token by token, from the definition: convolutions as sums over their taps, one state per head, a loop over heads for what
    groups share and over groups of channels for the norm."""
    mixer = _built("mamba2", expand=2, head_dim=8, d_state=5, d_conv=3, **settings)
    heads, width, groups = 6, 48, settings.get("n_groups", 1)
    x, pos = _tokens()
    z, u, dt, *bc = F.linear(x, mixer.in_proj.weight).split([width, width, heads, *([10 * groups] if groups > 1 else [])], dim=-1)
    bc = bc[0] if bc else x @ mixer.bc_proj.weight.T

    def convolved(t, weight, bias):
        padded = F.pad(t, (0, 0, 2, 0))
        return F.silu(sum(padded[:, tap : tap + T] * weight[:, tap] for tap in range(3)) + bias)

    u = convolved(u, mixer.conv_weight, mixer.conv_bias).unflatten(2, (heads, 8))
    of_groups = convolved(bc, mixer.bc_conv_weight, mixer.bc_conv_bias).split([5, 5] * groups, dim=-1)
    b, c = (torch.stack([of_groups[2 * (h * groups // heads) + which] for h in range(heads)], dim=2) for which in (0, 1))
    dt = F.softplus(dt + mixer.dt_bias)
    S, outputs = torch.zeros(B, heads, 8, 5), []
    for t in range(T):
        S = torch.exp(-dt[:, t] * mixer.A_log.exp())[..., None, None] * S
        S = S + (dt[:, t, :, None] * u[:, t])[..., None] * b[:, t, :, None, :]
        outputs.append(torch.einsum("bhpn,bhn->bhp", S, c[:, t]) + mixer.D[:, None] * u[:, t])
    gated = torch.stack(outputs, dim=1).flatten(2) * F.silu(z)
    size = settings.get("norm_group_size", width // groups)
    normed = torch.cat([_rms(*both) for both in zip(gated.split(size, -1), mixer.norm.weight.split(size), strict=True)], dim=-1)
    y, state = mixer(x, pos, None)
    assert relative_error(y, normed @ mixer.out_proj.weight.T) <= 1e-6
    assert relative_error(state["S"].transpose(2, 3), S) <= 1e-6


@pytest.mark.parametrize("groups", [1, 2])
def test_mamba2_is_transformers_with_the_same_weights(groups):
    """Output, and the gradients of the input and of every parameter; its norm too is one of each group."""
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    ours = _built("mamba2", expand=2, head_dim=8, d_state=5, d_conv=4, n_groups=groups)
    sizes = {"num_heads": 6, "head_dim": 8, "hidden_size": M, "state_size": 5, "expand": 2, "n_groups": groups, "conv_kernel": 4}
    theirs = Mamba2Mixer(Mamba2Config(num_hidden_layers=1, chunk_size=8, **sizes), layer_idx=0).eval()

    def as_theirs(p):
        """Our parameters, or their gradients, under their names: they fuse z, x, B, C, dt and the convolutions."""
        z, u, dt, *bc = p["in_proj.weight"].split([48, 48, 6, *([20] if groups > 1 else [])])
        bc = bc[0] if bc else p["bc_proj.weight"]

        def by_kind(x):
            """All groups' B, then all groups' C."""
            return torch.cat((*x.split(5)[::2], *x.split(5)[1::2]))

        return {
            "in_proj.weight": torch.cat((z, u, by_kind(bc), dt)),
            "conv1d.weight": torch.cat((p["conv_weight"], by_kind(p["bc_conv_weight"]))).unsqueeze(1),
            "conv1d.bias": torch.cat((p["conv_bias"], by_kind(p["bc_conv_bias"]))),
            **{name: p[name] for name in ("A_log", "D", "dt_bias", "norm.weight", "out_proj.weight")},
        }

    assert len(dict(ours.named_parameters())) == (11 if groups == 1 else 10)
    theirs.load_state_dict(as_theirs({name: p.detach() for name, p in ours.named_parameters()}), strict=True)
    x, pos = _tokens()
    found = x.clone().requires_grad_()
    expected = x.clone().requires_grad_()
    y, other = ours(found, pos, None)[0], theirs(expected)
    other = other[0] if isinstance(other, tuple) else other
    assert relative_error(y, other) <= 1e-6
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(4))
    y.backward(dy)
    other.backward(dy)
    assert relative_error(found.grad, expected.grad) <= 1e-5
    grads = as_theirs({name: p.grad for name, p in ours.named_parameters()})
    for name, p in theirs.named_parameters():
        assert relative_error(grads[name], p.grad) <= 1e-5, name


@torch.no_grad()
@pytest.mark.parametrize(
    ("kv_heads", "settings"),
    [
        (4, {}),
        (2, {}),
        (2, {"feature_map": "identity", "value_activation": None, "output_activation": None}),
        (4, {"feature_map": "relu", "value_activation": None}),
        (2, {"gate": "data_independent"}),
    ],
)
def test_gsa_is_its_formula(kv_heads, settings):
    """silu, then the norm, then the projection; no gate on the output, no scale on the scores. Or other activations, or none."""
    mixer = _built("gsa", head_dim=6, heads=4, kv_heads=kv_heads, slots=5, **settings)
    x, pos = _tokens()
    fixed = "gate" in settings
    p = _parts(mixer, x, q=(4, 6), k=(kv_heads, 6), v=(kv_heads, 6), **({} if fixed else {"alpha": (kv_heads, 5)}))
    logits = mixer.decay_bias.reshape(kv_heads, 5).expand(B, T, -1, -1) if fixed else p["alpha"]
    alpha = torch.sigmoid(logits.double()).pow(1 / 8)
    mapped = {"silu": F.silu, "relu": F.relu, "identity": lambda x: x}[settings.get("feature_map", "silu")]
    value, output = (F.silu if settings.get(f"{what}_activation", "silu") else lambda x: x for what in ("value", "output"))
    q, k, v = mapped(p["q"]), mapped(p["k"]), value(p["v"])
    states = {"scale": 1.0, "output_final_state": True}
    o, (slots_k, slots_v) = naive("gsa").naive_recurrent_gsa(q, k, v, (1 - alpha).float(), alpha.log().float(), **states)
    y, state = mixer(x, pos, None)
    assert relative_error(y, _rms(output(o).flatten(2), mixer.norm.weight) @ mixer.out_proj.weight.T) <= 1e-6
    assert relative_error(state["k"], slots_k) <= 1e-6
    assert relative_error(state["v"], slots_v) <= 1e-6


@torch.no_grad()
def test_gsas_slots_without_a_gate_are_weighted_means():
    """As flash-linear-attention's code of ABC that follows the paper; in two documents, and in two pieces with a State between."""
    mixer = _built("gsa", head_dim=6, heads=4, kv_heads=4, slots=5, gate="abc")
    x, pos = _tokens()
    p = _parts(mixer, x, q=(4, 6), k=(4, 6), v=(4, 6), alpha=(4, 5))
    by_head = [(F.silu(t) if name != "alpha" else t).transpose(1, 2) for name, t in p.items()]
    by_head[0] = by_head[0] * 6**0.5  # theirs divides scores by it
    pieces = (slice(0, 17), slice(17, T))
    o = torch.cat([naive("abc").naive_cumsum_abc(*(t[:, :, piece] for t in by_head))[0] for piece in pieces], dim=2)
    y = _rms(F.silu(o.transpose(1, 2).flatten(2)), mixer.norm.weight) @ mixer.out_proj.weight.T
    pos = torch.cat((pos[:, :17], pos[:, : T - 17]), dim=1)
    assert relative_error(mixer(x, pos, None)[0], y) <= 1e-5
    first, state = mixer(x[:, :20], pos[:, :20], None)
    second, _ = mixer(x[:, 20:], pos[:, 20:], state)
    assert relative_error(torch.cat((first, second), dim=1), y) <= 1e-5


@pytest.mark.parametrize("selective", [False, True])
def test_gsas_kernels_hand_the_projection_one_gradient(selective, monkeypatch):
    """The interpreted kernels are the CPU's form, and the gradients of q, k, v and alpha lie side by side."""
    x, pos = (t[:1] for t in _tokens())
    mixer = _built("gsa", head_dim=6, heads=4, kv_heads=2, slots=5)
    mixer.context = replace(mixer.context, selective_recompute=selective)
    found, runs, runs_of = [], [], linear._runs
    monkeypatch.setattr(linear, "_runs", lambda widths, grads: (runs.append(runs_of(widths, grads)), runs[-1])[1])
    monkeypatch.setattr(linear, "_NARROW", 0)  # nothing is put together
    for kernels in (False, True):
        monkeypatch.setattr(gated_slot_attention, "use_triton", lambda *_, kernels=kernels: kernels)
        leaf = x.clone().requires_grad_()
        y, state = mixer(leaf, pos, None)
        cotangents = [torch.randn(out.shape, generator=torch.Generator().manual_seed(4)) for out in (y, *state.values())]
        grads = torch.autograd.grad([y, *state.values()], [leaf, *mixer.parameters()], cotangents)
        found.append([y, *state.values(), *grads])
    for have, want in zip(*found, strict=True):
        assert relative_error(have, want) <= 1e-5
    # of out_proj and of in_proj, each time
    assert [[grad.shape[1] for _, grad in each] for each in runs] == [[M], [24, 12, 12, 10], [M], [58]]


# d = 2048, the defaults: matrices in units of d^2 (Zhang et al. 2024, section 4.1 and its baselines), and what else there is
D = 2048
PARAMETERS = {
    "gsa": (4 + 1 / 8, D),
    "gla": (4, 16 * (D + D // 2) + D // 2 + D // 4),
    "retnet": (8, 512),
    "hgrn2": (4, D),
    "mamba2": (6, D * (64 + 256) + (2 * D + 256) * 5 + 3 * 64 + 2 * D),
}
# numbers of state per layer, in units of d (the same paper's comparison; Mamba-2: 2 d channels times d_state)
STATE = {"gsa": 2 * 64, "gla": 256, "retnet": 512, "hgrn2": 128, "mamba2": 2 * 128}


@pytest.mark.parametrize("kind", MIXERS)
def test_sizes_are_the_papers(kind):
    with torch.device("meta"):
        mixer = build_mixer(kinds()[kind](), MixerContext(D, 24, 1e-5, megatron_config(1), torch.bfloat16))
    squares, rest = PARAMETERS[kind]
    assert parameter_count(mixer) == squares * D**2 + rest
    carried = sum(torch.Size(leaf.shape).numel() for leaf in mixer.state_specs if not leaf.name.startswith("conv"))
    assert carried == STATE[kind] * D


@pytest.mark.parametrize("kind", MIXERS)
@torch.no_grad()
def test_bfloat16_matmuls_leave_gates_and_states_in_float32(kind):
    settings = kinds()[kind].small().model_dump(exclude={"kind"})
    single, low = (_built(kind, dtype=dtype, **settings) for dtype in (torch.float32, torch.bfloat16))
    x, pos = _tokens()
    y, state = single(x, pos, None)
    low_y, low_state = low(x, pos, None)
    assert relative_error(low_y, y) <= 3e-2
    for leaf in low.state_specs:
        assert low_state[leaf.name].dtype == leaf.dtype == (torch.bfloat16 if leaf.name.startswith("conv") else torch.float32)
        assert relative_error(low_state[leaf.name], state[leaf.name]) <= 3e-2


@pytest.mark.parametrize("kind", ["gla", "gsa"])
@torch.no_grad()
def test_long_memories_survive_bfloat16(kind):
    """With a gate's logit of 7, a root of it keeps 0.9999 of the state per token: a number that bfloat16 does not have."""
    sizes = {"gla": {"heads": 3, "d_key": 6, "d_value": 5}, "gsa": {"head_dim": 6, "heads": 4, "slots": 5}}[kind]
    mixer = _built(kind, dtype=torch.bfloat16, **sizes)
    x, pos = _tokens()
    _, before = mixer(x, pos, None)
    if kind == "gla":
        mixer.decay_proj.weight.zero_()
        mixer.decay_bias.fill_(7.0)
        mixer.in_proj.weight.zero_()
    else:
        mixer.in_proj.weight.zero_()
        # all of alpha's rows read the first feature, which is made 1
        mixer.in_proj.weight[-4 * 5 :, 0] = 7.0
    for module in mixer.modules():
        module._cast_weight_cache = None
    silent = torch.zeros(B, T, M)
    silent[..., 0] = 1.0
    _, after = mixer(silent, pos + T, before)
    gate_logit_normalizer = mixer.config.gate_logit_normalizer
    kept = torch.sigmoid(torch.tensor(7.0, dtype=torch.float64)) ** (T / gate_logit_normalizer)
    for name, leaf in before.items():
        assert relative_error(after[name], kept * leaf.double()) <= 1e-6


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("gla", {"heads": 5}, r"mixers\.gla: d_model / \(2 heads\) = 64 / 10 is not a whole number; set d_key"),
        ("retnet", {}, r"mixers\.retnet: d_model / d_key = 64 / 256 is not a whole number; set heads"),
        ("retnet", {"heads": 2, "d_key": 5}, "d_key=5 is odd, and rotary positions rotate pairs; make it even"),
        ("hgrn2", {"heads": 7}, r"mixers\.hgrn2: d_model / heads = 64 / 7 is not a whole number; set d_value"),
        ("hgrn2", {"lower_bound": 1.0}, "less than 1"),
        ("hgrn2", {"bounds": "learned"}, r"bounds=learned needs lower_bound > 0"),
        ("mamba2", {"head_dim": 48}, r"expand \* d_model / head_dim = 128 / 48 is not a whole number; set head_dim"),
        ("mamba2", {"n_groups": 3}, r"mixers\.mamba2: n_groups=3 does not divide expand \* d_model / head_dim = 2; set n_groups"),
        (
            "mamba2",
            {"norm_group_size": 48},
            r"expand \* d_model / norm_group_size = 128 / 48 is not a whole number; set norm_group_size",
        ),
        ("mamba2", {"n_groups": 0}, "greater than or equal to 1"),
        (
            "gated_delta_net",
            {"heads": 2, "v_heads": 3},
            r"mixers\.gated_delta_net: v_heads=3 is not a multiple of heads=2; set v_heads",
        ),
        ("mamba2", {"A_init_min": 17.0}, r"A_init_min=17\.0 exceeds A_init_max=16\.0"),
        ("gsa", {"head_dim": 7}, "head_dim=7 does not divide d_model=64"),
        ("gsa", {"head_dim": 16, "kv_heads": 3}, "kv_heads=3 does not divide heads=4"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_what_to_change(kind, settings, message):
    with pytest.raises(ValidationError, match=message):
        ModelConfig(d_model=64, n_layers=2, vocab_size=61, pattern=(kind,), mixers={kind: settings})
