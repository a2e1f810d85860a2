"""mLSTM's recurrence and layer against transformers' xLSTM, with the same weights."""

import math

import pytest
import torch
import torch.nn.functional as F
from support.compare import relative_error
from support.presets import presets
from support.recurrences import gradients, seeded

from baton.kernels.gated_linear_attention import triton_launch as gla_launch
from baton.kernels.head_scale import triton_launch as head_scale_launch
from baton.kernels.mlstm import mlstm, torch_impl
from baton.kernels.mlstm.recurrence import MLSTM
from baton.kernels.mlstm.reference import mlstm_reference
from baton.models.lm import LanguageModel
from baton.models.mixer import build_mixer
from baton.models.mixer_context import MixerContext
from baton.models.settings.mlstm import MLSTMConfig
from baton.parallel.param_layout import initialize_parameters
from baton.parallel.tensor import megatron_config

B, T, M, H = 2, 37, 64, 4


@pytest.fixture(scope="module")
def theirs():
    from transformers.models.xlstm import configuration_xlstm, modeling_xlstm

    if modeling_xlstm.external_xlstm:
        pytest.skip("transformers' xLSTM is that of the package xlstm, whose kernels need a GPU")
    return configuration_xlstm.xLSTMConfig, modeling_xlstm


def _preset(name):
    return LanguageModel(presets()[name])


def _built(config, dtype):
    mixer = build_mixer(config, MixerContext(M, 3, 1e-6, megatron_config(1), dtype))
    initialize_parameters(mixer, seed=1, tensor_rank=0, tensor_size=1)
    return mixer.to(dtype)


def _undivided(state):
    """The State from theirs, which is divided by exp(m)."""
    C, n, m = state
    return torch.cat((C, n[..., None]), dim=-1) * m[..., None].exp()


def test_the_recurrence_is_transformers_loop_with_a_running_maximum(theirs):
    """In float64, with keys and queries of any sign, gates beyond the soft cap, and a State that arrives divided by exp(3)."""
    g, dtype, K, V = seeded(1), torch.float64, 5, 7
    q, k, v = (torch.randn(B, H, T, d, generator=g, dtype=dtype) for d in (K, K, V))
    i, f = (6 * torch.randn(B, H, T, generator=g, dtype=dtype) for _ in "if")
    C, n = torch.randn(B, H, K, V, generator=g, dtype=dtype), torch.randn(B, H, K, generator=g, dtype=dtype)
    m = torch.full((B, H, 1), 3.0, dtype=dtype)
    leaves = [x.requires_grad_() for x in (q, k, v, i, f, C, n)]

    def ours():
        inputs = (x.transpose(1, 2) for x in (q, k, v, i, F.logsigmoid(f)))
        h, state = mlstm(*inputs, scale=K**-0.5, initial_state=_undivided((C, n, m)))
        return h.transpose(1, 2), state

    def loop():
        h, state = theirs[1].mlstm_recurrent_sequence_native(q, k, v, i, f, C, n, m, True, eps=0.0, dtype_state=dtype)
        return h, _undivided(state)

    found = [[*outputs, *gradients(outputs, leaves, seeded(2))] for outputs in (ours(), loop())]
    for one, other in zip(*found, strict=True):
        assert relative_error(one, other) <= 1e-10


def test_gates_at_their_cap_cost_float32_nothing():
    """Both gates jump between the caps of xLSTM 7B, so that tokens are worth exp(30) times others. Nothing is rescaled."""
    g, length = seeded(3), 300
    q, k, v = (torch.randn(1, length, 2, d, generator=g).abs() for d in (8, 8, 16))
    i, f = (15 * torch.randint(2, (1, length, 2), generator=g).mul(2).sub(1).float() for _ in "if")
    single = [x.clone().requires_grad_() for x in (q, k, v, i, F.logsigmoid(f))]
    double = [x.detach().double().requires_grad_() for x in single]
    found = [[*outputs, *gradients(outputs, leaves, seeded(4))] for outputs, leaves in (
        (mlstm(*single), single), (mlstm_reference(*double), double)
    )]  # fmt: skip
    for one, other in zip(*found, strict=True):
        assert relative_error(one, other) <= 1e-5


NAMES = {
    **{f"{name}.weight": ("in_proj.weight", part) for part, name in enumerate(("q", "k", "v", "ogate_preact"))},
    **{f"{name}gate_preact.weight": ("gates_proj.weight", part) for part, name in enumerate("if")},
    "igate_preact.bias": ("input_gate_bias", None),
    "fgate_preact.bias": ("forget_gate_bias", None),
    "multihead_norm.weight": ("norm_weight", None),
    "out_proj.weight": ("out_proj.weight", None),
}
"""Their parameters: ours, and which of its parts."""


@pytest.mark.parametrize(
    ("dtype", "bias", "eps", "length", "limit"),
    [(torch.float64, 0.0, 0.0, 48, 1e-12), (torch.float32, -10.0, 1e-6, T, 1e-5)],
    ids=["float64, open gates", "float32, as released"],
)
def test_the_layer_is_transformers_and_so_are_its_gradients(theirs, single_mesh, dtype, bias, eps, length, limit):
    """As released, input gates begin nearly closed, and what is added to the normalizer is lost in rounding. With open gates the
    norm cancels most of the gradient of their bias. In float64 their code takes whole chunks alone."""
    config = MLSTMConfig(heads=H, input_gate_bias=bias)
    mixer = _built(config, dtype)
    theirs_config = theirs[0](
        hidden_size=M, num_heads=H, num_hidden_layers=1, chunk_size=16, eps=eps, norm_reduction_force_float32=False
    )
    layer = theirs[1].xLSTMLayer(theirs_config).to(dtype)
    with torch.no_grad():
        for p in mixer.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=seeded(2), dtype=dtype))

    def ours(name, of):
        own, part = NAMES[name]
        rows = [size for _, size in next(d for d in config.parameters(M) if d.name == own).fused_splits]
        return of[own] if part is None else of[own].split(rows)[part]

    given, own = dict(layer.named_parameters()), dict(mixer.named_parameters())
    assert set(given) == set(NAMES)
    with torch.no_grad():
        for name, parameter in given.items():
            parameter.copy_(ours(name, own))
    x, pos = torch.randn(B, length, M, generator=seeded(3), dtype=dtype), torch.arange(length, dtype=torch.int32).repeat(B, 1)
    found = []
    for module in (mixer, layer):
        leaf = x.clone().requires_grad_()
        y, state = module(leaf, pos, None) if module is mixer else module(leaf)
        C = state["C"] if module is mixer else _undivided(state)
        grads = gradients([y], [leaf, *module.parameters()], seeded(4))
        names = ["x", *(name for name, _ in module.named_parameters())]
        found.append((y, C, dict(zip(names, grads, strict=True))))
    (y, C, grads), (their_y, their_C, their_grads) = found
    assert relative_error(y, their_y) <= limit
    assert relative_error(C, their_C) <= limit
    assert relative_error(grads["x"], their_grads["x"]) <= limit
    for name in given:
        assert relative_error(ours(name, grads), their_grads[name]) <= limit, name


def test_gates_begin_as_in_the_release(single_mesh):
    """Forget gates from sigmoid(3) to sigmoid(6) over the heads, input gates of exp(cap(-10)), both of them whatever the token."""
    mixer = _built(MLSTMConfig(heads=H), torch.float32)
    assert not mixer.gates_proj.weight.any()
    torch.testing.assert_close(mixer.forget_gate_bias.detach(), torch.linspace(3.0, 6.0, H))
    x = torch.randn(1, 1, M, generator=seeded(5))
    _, state = mixer(x, torch.zeros(1, 1, dtype=torch.int32), None)
    _, k, _, _ = mixer.in_proj(x, mixer.in_proj.local_splits)
    expected = math.exp(15 * math.tanh(-10 / 15)) * k.unflatten(2, (H, -1))[:, 0]
    torch.testing.assert_close(state["C"][..., -1], expected)


def test_the_7b_model_has_as_many_parameters_as_transformers(theirs):
    """Whose defaults are the released model's."""
    with torch.device("meta"):
        counts = [sum(p.numel() for p in m.parameters()) for m in (theirs[1].xLSTMForCausalLM(theirs[0]()), _preset("xlstm-7b"))]
    assert counts[0] == counts[1]


def test_on_a_gpu_it_is_the_definition(monkeypatch):
    """By Triton's interpreter, in float32: there the keys are gated by a kernel of their own."""
    for module in (torch_impl, head_scale_launch, gla_launch):
        monkeypatch.setattr(module, "on_gpu", lambda x: True)
    example, state = MLSTM(scale=0.5).example(seeded(6), 1, 70, torch.float32, wide=False)
    found = []
    for function in (mlstm, mlstm_reference):
        leaves = [x.clone().requires_grad_() for x in (*example, state["C"])]
        outputs = function(*leaves[:-1], scale=0.5, initial_state=leaves[-1])
        found.append([*outputs, *gradients(outputs, leaves, seeded(7))])
    for one, other in zip(*found, strict=True):
        assert relative_error(one, other) <= 1e-5
