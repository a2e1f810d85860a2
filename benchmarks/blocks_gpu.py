"""One block of each model on a GPU (norm, mixer, residual), forward and backward, compared with mamba_ssm's, fla's, or our Mamba's.

Both sides have the same weights and an fp32 residual stream. The peers' weights are bfloat16, except mamba_ssm's, whose block
needs fp32 weights under autocast. Our parameters are fp32 and cast in every call, and our block also takes document positions. The
gates compare outputs and gradients of both sides, and ours with itself in float32; for models with discrete choices, to the
tolerance with which rounding the stream to bfloat16 changes the choices in float32. Models that no other library trains are
compared with our Mamba block in the same call. The time by kernel is printed.

    python benchmarks/blocks_gpu.py [--models mamba-1.4b,gsa-1.3b,lattice-1.3b/sim] [--batch 8] [--tokens 2048]
"""

import argparse
import importlib
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from types import ModuleType
from typing import Any

import torch
import yaml
from report import Report
from scan_gpu import Clock
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from baton.models.config import ModelConfig
from baton.models.lm import LanguageModel
from baton.parallel import mesh as meshes
from baton.parallel.cast_weights import drop_cast_weights
from baton.parallel.config import LayoutConfig
from baton.parallel.param_layout import initialize_parameters

AGREE = 2e-2  # of two bfloat16 computations that round in other places
CHOOSES = {"bmojo"}  # what is remembered, by scores that rounding puts in another order
ALLOWED = 3.0  # times what float32 loses of it where the stream alone is rounded
NORM = "norm.weight"  # the block's own, beside its mixer's parameters
NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "mamba": {
        "in_proj.weight": ("in_proj.weight",),
        "conv_weight": ("conv1d.weight",),
        "conv_bias": ("conv1d.bias",),
        "x_proj.weight": ("x_proj.weight",),
        "dt_proj.weight": ("dt_proj.weight",),
        "dt_bias": ("dt_proj.bias",),
        "A_log": ("A_log",),
        "D": ("D",),
        "out_proj.weight": ("out_proj.weight",),
    },
    "gsa": {
        "in_proj.weight": ("q_proj.weight", "k_proj.weight", "v_proj.weight", "f_proj.weight"),
        "norm.weight": ("g_norm.weight",),
        "out_proj.weight": ("o_proj.weight",),
    },
    "gla": {
        "in_proj.weight": ("q_proj.weight", "k_proj.weight", "v_proj.weight", "g_proj.weight"),
        "code_proj.weight": ("gk_proj.0.weight",),
        "decay_proj.weight": ("gk_proj.1.weight",),
        "decay_bias": ("gk_proj.1.bias",),
        "norm.weight": ("g_norm_swish_gate.weight",),
        "out_proj.weight": ("o_proj.weight",),
    },
}
"""Of a mixer: parameters by our names, and a peer's, of which ours is made one below the other."""

Found = dict[str, Tensor]
Call = Callable[[], Found]


@dataclass(frozen=True)
class Peer:
    """Someone else's block. run: (what is added to the stream, the stream) to (what is to be added next, the stream)."""

    name: str
    mixer: nn.Module
    norm: nn.Module
    run: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def config_of(model: str) -> ModelConfig:
    """model: a name in configs/models, of Lattice also a variant: NAME/VARIANT. One layer of it."""
    name, _, variant = model.partition("/")
    values = yaml.safe_load((files("baton.configs") / "models" / f"{name}.yaml").read_text())
    if variant:
        values["mixers"]["lattice"]["variant"] = variant
    return ModelConfig(**values).model_copy(update={"n_layers": 1, "vocab_size": 64})


def our_block(config: ModelConfig, dtype: torch.dtype) -> tuple[str, nn.Module]:
    """The first sub-block's mixer's name in the configuration, and the sub-block."""
    with torch.device("cuda"):
        model = LanguageModel(config, compute_dtype=dtype)
    initialize_parameters(model, 0, 0, 1)
    name, block = next(iter(model.layers["0"].items()))
    return name, block


def mamba_ssm(config: ModelConfig) -> Peer | None:
    modules = [_imported(f"mamba_ssm.{name}") for name in ("modules.mamba_simple", "modules.block", "ops.triton.layer_norm")]
    if None in modules:
        return None
    simple, block, norm = modules
    settings = config.mixers["mamba"]
    mixer = partial(simple.Mamba, d_state=settings.d_state, d_conv=settings.d_conv, expand=settings.expand)
    rms = partial(norm.RMSNorm, eps=config.norm_eps)
    layer = block.Block(config.d_model, mixer, nn.Identity, norm_cls=rms, fused_add_norm=True, residual_in_fp32=True).cuda()

    def run(hidden: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return layer(hidden, stream)

    return Peer("mamba_ssm", layer.mixer, layer.norm, run)


def fla(config: ModelConfig) -> Peer | None:
    layers, modules = _imported("fla.layers"), _imported("fla.modules")
    if layers is None or modules is None:
        return None
    name, settings = next(iter(config.mixers.items()))
    sizes = {"hidden_size": config.d_model, "num_heads": settings.heads, "norm_eps": config.norm_eps, "layer_idx": 0}
    if name == "gsa":
        mixer = layers.GatedSlotAttention(num_slots=settings.slots, gate_logit_normalizer=settings.gate_logit_normalizer, **sizes)
    else:
        mixer = layers.GatedLinearAttention(
            gate_logit_normalizer=settings.gate_logit_normalizer, gate_low_rank_dim=settings.gate_low_rank_dim, **sizes
        )
    mixer, norm = mixer.cuda().bfloat16(), modules.RMSNorm(config.d_model, eps=config.norm_eps).cuda().bfloat16()

    def run(hidden: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        normed, stream = norm(hidden, residual=stream, prenorm=True, residual_in_fp32=True)
        return mixer(normed)[0], stream

    return Peer("fla", mixer, norm, run)


PEERS: dict[str, Callable[[ModelConfig], Peer | None]] = {"mamba": mamba_ssm, "gsa": fla, "gla": fla}


def give_weights(names: dict[str, tuple[str, ...]], ours: nn.Module, peer: Peer) -> None:
    """Ours, to the peer."""
    theirs = dict(peer.mixer.named_parameters())
    assert theirs.keys() == {other for others in names.values() for other in others}
    with torch.no_grad():
        peer.norm.weight.copy_(ours.norm.weight)
        for name, others in names.items():
            weight = ours.mixer.get_parameter(name)
            for other, part in zip(others, weight.split([theirs[other].shape[0] for other in others]), strict=True):
                theirs[other].copy_(part.view_as(theirs[other]))


@dataclass(frozen=True)
class Inputs:
    """[B, T, M]: hidden, bfloat16, is to be added to residual, fp32. dy: of what leaves, fp32."""

    hidden: Tensor
    residual: Tensor
    pos: Tensor
    dy: Tensor

    @classmethod
    def of(cls, batch: int, length: int, width: int) -> "Inputs":
        g = torch.Generator("cuda").manual_seed(0)
        hidden, residual, dy = (torch.randn(batch, length, width, device="cuda", generator=g) for _ in range(3))
        pos = torch.arange(length, dtype=torch.int32, device="cuda").repeat(batch, 1)
        return cls(hidden.bfloat16(), residual.requires_grad_(), pos, dy)

    def rounded(self) -> "Inputs":
        """With the residual stream rounded to bfloat16."""
        return replace(self, residual=self.residual.detach().bfloat16().float().requires_grad_())


def our_step(block: nn.Module, given: Inputs) -> Call:
    """Forward and backward: what leaves, to be added to the stream, and all gradients, by our names."""
    parameters = dict(block.mixer.named_parameters())

    def step() -> Found:
        drop_cast_weights(block)
        (stream, out), _ = block((given.residual, given.hidden), given.pos, None, False)  # as in a step
        leaves = [given.residual, block.norm.weight, *parameters.values()]
        grads = torch.autograd.grad([out, stream], leaves, [given.dy.to(out.dtype), given.dy])
        return {"leaves": out.detach(), **dict(zip(("x", f"block's {NORM}", *parameters), grads, strict=True))}

    return step


def their_step(names: dict[str, tuple[str, ...]], peer: Peer, given: Inputs) -> Call:
    parameters = dict(peer.mixer.named_parameters())

    def step() -> Found:
        out, stream = peer.run(given.hidden, given.residual)
        leaves = [given.residual, peer.norm.weight, *parameters.values()]
        dx, dnorm, *grads = torch.autograd.grad([out, stream], leaves, [given.dy.to(out.dtype), given.dy])
        return {"leaves": out.detach(), "x": dx, f"block's {NORM}": dnorm, **dict(zip(parameters, grads, strict=True))}

    return step


def error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.float().flatten(), expected.float().flatten()
    return float((found - expected).norm() / expected.norm())


def worst(found: Found, expected: Found) -> tuple[float, str]:
    errors = [(error(x, expected[name]), name) for name, x in found.items()]
    return max(errors, key=lambda one: (math.isnan(one[0]), one))


def by_our_names(names: dict[str, tuple[str, ...]], theirs: Found) -> Found:
    others = {other for of in names.values() for other in of}
    kept = {name: x for name, x in theirs.items() if name not in others}
    return kept | {name: torch.cat([theirs[other] for other in of]) for name, of in names.items()}


def by_kernel(report: Report, case: str, step: Callable[[], Any]) -> None:
    """Time of a call by kernel, the largest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(5):
            step()
        torch.cuda.synchronize()
    times: defaultdict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        times[event.key[:90]] += event.self_device_time_total / 5
    total = sum(times.values())
    report.say(f"{case}: {total:,.0f} us in kernels")
    for name, microseconds in sorted(times.items(), key=lambda item: -item[1])[:14]:
        report.say(f"  {microseconds:9.1f} us  {100 * microseconds / total:5.1f} %  {name}")


class Bench:
    def __init__(self, report: Report, batch: int, length: int, clock: Clock) -> None:
        self.report, self.shape, self.clock = report, (batch, length), clock
        self.mamba: dict[int, tuple[str, tuple[float, float]]] = {}  # by width: its name, and its times

    def one_model(self, name: str) -> None:
        report, clock, config = self.report, self.clock, config_of(name)
        given = Inputs.of(*self.shape, config.d_model)
        kind, block = our_block(config, torch.bfloat16)
        step, exact = our_step(block, given), our_step(our_block(config, torch.float32)[1], given)
        found, case = step(), f"{name} block {self.shape[0]} x {self.shape[1]}"
        expected = exact()
        (off, where), allowed, why = worst(found, expected), AGREE, ""
        if kind in CHOOSES:
            drift = error(our_step(our_block(config, torch.float32)[1], given.rounded())()[where], expected[where])
            allowed, why = max(AGREE, ALLOWED * drift), f"; float32 with the stream's last bits of bfloat16 changed by {drift:.1e}"
        report.gate(
            f"{case} itself", off <= allowed, f"bfloat16 and float32 differ by {off:.1e} ({where}), {allowed:.0e} allowed{why}"
        )
        # the second without the host's time, which at small sizes is the longer one
        mine = clock(step), clock.recorded(step)
        report.say(f"{case}: {1000 * mine[0]:,.0f} us, as a graph {1000 * mine[1]:,.0f} us")
        by_kernel(report, f"{case}, ours", step)
        if kind == "mamba":
            self.mamba.setdefault(config.d_model, (f"our {name}'s block", mine))
        elif config.d_model in self.mamba:
            self._rows(case, mine, *self.mamba[config.d_model], gate=f"{case} itself")
        if kind not in PEERS:
            return
        peer = PEERS[kind](config)
        if peer is None:
            report.say(f"{case}: {PEERS[kind].__name__} is not here")
            return
        give_weights(NAMES[kind], block, peer)
        other = their_step(NAMES[kind], peer, given)
        theirs = by_our_names(NAMES[kind], other())
        off, where = worst(found, theirs)
        report.gate(case, off <= AGREE, f"differs from {peer.name}'s by {off:.1e} ({where}), {AGREE:.0e} allowed")
        self._rows(case, mine, peer.name, (clock(other), clock.recorded(other)), gate=case)
        by_kernel(report, f"{case}, {peer.name}", other)

    def _rows(self, case: str, mine: tuple[float, float], peer_name: str, theirs: tuple[float, float], gate: str) -> None:
        for metric, own, other in zip(("fwd+bwd us", "fwd+bwd as a graph us"), mine, theirs, strict=True):
            self.report.row(case, metric, 1000 * own, peer_name, 1000 * other, gate=gate, higher_is_better=False)


def _imported(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    models = "mamba-130m,mamba-1.4b,gsa-1.3b,gla-1.3b,longhorn-1.3b,bmojo-1.4b,lattice-1.3b/sim,lattice-1.3b/enc,lattice-1.3b/dec"
    models += ",transformer-1.3b"
    parser.add_argument("--models", default=models, help=f"names of configs/models, separated by commas (default: {models})")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repetitions", type=int, default=30)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    meshes.initialize(LayoutConfig(), device=torch.device("cuda", 0), rank=0, store=torch.distributed.HashStore())
    report = Report("blocks_gpu", device=torch.cuda.get_device_name())
    bench = Bench(report, arguments.batch, arguments.tokens, Clock(arguments.repetitions))
    for name in arguments.models.split(","):
        bench.one_model(name)
    report.save()
    meshes.shutdown()


if __name__ == "__main__":
    main()
