"""A forward pass that does not need final States does not compute them: outputs and gradients are bitwise the same."""

from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from support.models import micro_batches, model_of, training
from torch.utils._python_dispatch import TorchDispatchMode

from baton.kernels.compile.aot import META, Target, launching_nothing
from baton.kernels.eidetic_attention.recurrence import EideticAttention, Innovation
from baton.kernels.errors import KernelError
from baton.kernels.short_conv.recurrence import ShortConv
from baton.kernels.window_attention.recurrence import WindowAttention
from baton.models.block import SubBlock
from baton.models.config import ModelConfig
from baton.models.forward_context import ForwardContext
from baton.models.lm import LanguageModel
from baton.models.mixer import build_mixer
from baton.models.mixer_context import MixerContext
from baton.models.settings import SMALL_WIDTH, kinds
from baton.parallel.param_layout import initialize_parameters
from baton.parallel.tensor import megatron_config
from baton.training.build import build
from baton.training.evaluation.evaluate import evaluate
from baton.training.step.cuda_graphs import CudaGraphs
from baton.training.step.executor import StepExecutor

B, T, M = 2, 21, SMALL_WIDTH
POS = torch.tensor([[5 + t for t in range(T)], [0, 1, 0, *range(T - 3)]], dtype=torch.int32)


CASES = {kind: (kind, {}) for kind in kinds()} | {
    "mamba, time-invariant": ("mamba", {"selective": ()}),
    "gsa, abc": ("gsa", {"gate": "abc"}),
}


@pytest.fixture(scope="module", params=CASES)
def mixer(request, single_mesh):
    kind, changes = CASES[request.param]
    settings = kinds()[kind].small().model_copy(update=changes)
    mixer = build_mixer(settings, MixerContext(M, 3, 1e-5, megatron_config(1), torch.float32))
    initialize_parameters(mixer, seed=1, tensor_rank=0, tensor_size=1)
    return mixer


@pytest.mark.parametrize("entered", [False, True])
def test_every_mixers_outputs_and_gradients_are_the_same(mixer, entered):
    generator = torch.Generator().manual_seed(2)
    x, before, dy = (torch.randn(B, T, M, generator=generator) for _ in range(3))
    with torch.no_grad():
        _, state = mixer(before, (POS[:, :1] + torch.arange(-T, 0)).clamp(min=0).to(torch.int32), None)
    found = []
    for wanted in (True, False):
        own = x.clone().requires_grad_()
        entering = {name: leaf.clone().requires_grad_(leaf.is_floating_point()) for name, leaf in state.items()}
        y, left = mixer(own, POS, entering if entered else None, ForwardContext(need_final_state=wanted))
        assert left.keys() == state.keys()
        leaves = [own, *mixer.parameters(), *(leaf for leaf in entering.values() if entered and leaf.requires_grad)]
        leaves = [leaf for leaf in leaves if leaf.requires_grad]
        found.append([y, *torch.autograd.grad(y, leaves, dy, allow_unused=True, materialize_grads=True)])
    for kept, dropped in zip(*found, strict=True):
        assert torch.equal(dropped, kept)
    for leaf in left.values():
        with pytest.raises(KernelError, match="was not made"):
            leaf.detach()
    if left:
        with pytest.raises((KernelError, TypeError)):
            mixer(x, POS, left)


EVERY_WAY = {"bmojo", "hybrid"}
"""Models that the default suite runs in each of the ways."""
ONE_WAY = {"attention", "gated_delta_net", "gla", "lattice", "ttt"}
"""Those that it runs where layers are run again: one of each family of recurrences. Every mixer is compared above."""


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        pytest.param(kind, how, marks=[] if kind in EVERY_WAY or (how == "full" and kind in ONE_WAY) else pytest.mark.long)
        for kind in [*kinds(), "hybrid"]
        for how in ("none", "selective", "full")
    ],
)
def test_a_models_losses_and_gradients_are_the_same(kind, how, single_mesh):
    """Also where a layer is run again, in the backward pass."""
    batch, found = micro_batches(0, 0, 1, 2)[0], []
    for wanted in (True, False):
        model = LanguageModel(model_of(kind), recompute=how)
        initialize_parameters(model, 0, 0, 1)
        hidden, states = model(batch.tokens, batch.pos, None, ForwardContext(need_final_state=wanted))
        loss = model.loss(hidden, batch.labels)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for kept, dropped in zip(*found, strict=True):
        assert torch.equal(dropped, kept)
    assert {number: list(state) for number, state in states.items()} == {
        number: [leaf.name for leaf in leaves] for number, leaves in model.state_specs.items()
    }


class Operators(TorchDispatchMode):
    """Counts the operators that run within it and compute something: on a GPU, launches."""

    def __init__(self):
        super().__init__()
        self.ran = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and "empty" not in func.__name__:
            self.ran[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def as_on_a_gpu():
    with launching_nothing(Target(90, "NVIDIA H200")):
        yield META


@contextmanager
def on_the_cpu():
    yield torch.device("cpu")


def ran(kind, place, wanted):
    """Operators of a sub-block's forward and backward pass."""
    with place() as device, device:
        config = ModelConfig(d_model=M, n_layers=1, vocab_size=64, pattern=[kind], mixers={kind: kinds()[kind].small()})
        block = SubBlock(kind, config, MixerContext(M, 1, 1e-5, megatron_config(1), torch.float32))
        x, pos = torch.zeros(B, 64, M, requires_grad=True), torch.zeros(B, 64, dtype=torch.int32)
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.zero_()
        with Operators() as forward:
            (stream, y), _ = block((x, None), pos, None, ForwardContext(need_final_state=wanted))
        with Operators() as backward:
            torch.autograd.backward([stream, y], [torch.zeros_like(stream), torch.zeros_like(y)])
    return forward.ran, backward.ran


# of nothing but the State: masks and copies of keys and values; in B'MOJO also of the best tokens at the end, and what is frozen
LEAST = {"attention": 6, "bmojo": 60, "mamba": 1, "mamba2": 2, "delta_net": 1, "lattice": 1}


@pytest.mark.parametrize("place", [as_on_a_gpu, on_the_cpu], ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", LEAST)
def test_what_is_not_wanted_is_not_made(kind, place, single_mesh):
    ran(kind, place, wanted=True)  # what is the same in every layer is made once
    (forward, backward), (kept_forward, kept_backward) = (ran(kind, place, wanted) for wanted in (False, True))
    saved = kept_forward.total() - forward.total()
    assert saved >= LEAST[kind], f"{kept_forward - forward}"
    assert not forward - kept_forward
    assert backward.total() <= kept_backward.total()
    if kind == "attention":
        assert not forward["masked_fill"]


def test_bmojos_memories_are_no_operators_of_pytorch(single_mesh):
    """On a GPU kernels choose them, copy them and give their gradients back: what is left is of projections and of the scan."""
    ran("bmojo", as_on_a_gpu, wanted=False)
    forward, backward = ran("bmojo", as_on_a_gpu, wanted=False)
    others = Counter({"mm": 8, "_unsafe_view": 8, "exp": 1, "neg": 1, "new_zeros": 1, "innovation": 1})
    assert not forward - others
    assert not set(backward) & {"index_put", "index_add", "scatter_add", "masked_fill", "new_zeros", "clone", "slice_backward"}
    # 5 are of the two convolutions: sums of their weights' gradients, and one tensor of both for the projection
    assert backward.total() <= 38


class Again:
    def __init__(self, device):
        pass

    def warm_up(self, run):
        run()

    def record(self, run):
        return run


@pytest.mark.parametrize("kind", ["attention", "bmojo", "mamba"])
def test_steps_and_evaluations_of_whole_sequences_want_none(kind, single_mesh, monkeypatch):
    """Recorded or not."""
    batches = micro_batches(0, 0, 1, 2)
    for recurrence in (WindowAttention, EideticAttention, Innovation, ShortConv):
        monkeypatch.setattr(recurrence, "run", lambda self, *given: pytest.fail(f"{self} makes a State"))
    train_state = build(model_of(kind), training(), single_mesh)
    for graphs in (None, CudaGraphs(train_state.model, Again)):
        assert StepExecutor(train_state.model, train_state.engine, single_mesh, cuda_graphs=graphs).step(batches, 1e-3).updated
    evaluate(train_state.model, batches, 1, 1, single_mesh)
    with pytest.raises(pytest.fail.Exception, match="makes a State"):
        train_state.model(batches[0].tokens, batches[0].pos)
