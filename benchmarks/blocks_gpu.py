"""A Mamba block on a GPU (norm, projections, convolution, scan, gate, residual), forward and backward, beside mamba_ssm's.

The one thing to know: both have the same weights, fp32 parameters, bfloat16 products and an fp32 residual stream. To it each adds
once, ours behind the mixer, mamba_ssm's before its norm, and casts its weights in every call. The gate compares outputs and
gradients of the two, and ours with itself in float32. Ours also takes document positions, which mamba_ssm's has no place for. Where
the time goes is printed by kernel.

    python benchmarks/blocks_gpu.py [--models mamba-130m,mamba-1.4b] [--batch 8] [--tokens 2048] [--repetitions 50]
"""

import argparse
import importlib
from collections import defaultdict
from collections.abc import Callable
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
from baton.parallel.config import LayoutConfig
from baton.parallel.layout import initialize_parameters
from baton.parallel.tensor import drop_compute_copies

AGREE = 2e-2  # of two bfloat16 computations that round in other places
NAMES = {
    "in_proj.weight": "in_proj.weight",
    "conv_weight": "conv1d.weight",
    "conv_bias": "conv1d.bias",
    "x_proj.weight": "x_proj.weight",
    "dt_proj.weight": "dt_proj.weight",
    "dt_bias": "dt_proj.bias",
    "A_log": "A_log",
    "D": "D",
    "out_proj.weight": "out_proj.weight",
}
"""Ours: mamba_ssm's."""


def our_layer(config: ModelConfig, dtype: torch.dtype) -> nn.Module:
    with torch.device("cuda"):
        model = LanguageModel(config, compute_dtype=dtype)
    initialize_parameters(model, 0, 0, 1)
    return model.layers["0"]["mamba"]


def peer_layer(config: ModelConfig, ours: nn.Module) -> nn.Module | None:
    """mamba_ssm's block with the same weights."""
    modules = [_imported(f"mamba_ssm.{name}") for name in ("modules.mamba_simple", "modules.block", "ops.triton.layer_norm")]
    if None in modules:
        return None
    simple, block, norm = modules
    settings = config.mixers["mamba"]
    mixer = partial(simple.Mamba, d_state=settings.d_state, d_conv=settings.d_conv, expand=settings.expand)
    rms = partial(norm.RMSNorm, eps=config.norm_eps)
    layer = block.Block(config.d_model, mixer, nn.Identity, norm_cls=rms, fused_add_norm=True, residual_in_fp32=True).cuda()
    theirs = dict(layer.mixer.named_parameters())
    with torch.no_grad():
        for name, other in NAMES.items():
            theirs[other].copy_(ours.mixer.get_parameter(name).view_as(theirs[other]))
        layer.norm.weight.copy_(ours.norm.weight)
    return layer


def steps_of(
    ours: nn.Module, theirs: nn.Module | None, hidden: Tensor, residual: Tensor, pos: Tensor, dy: Tensor
) -> tuple[Callable[[], dict[str, Tensor]], Callable[[], dict[str, Tensor]]]:
    """One call of each: forward, backward; what leaves, to be added to the stream, and all gradients, by our names."""

    def our_step() -> dict[str, Tensor]:
        drop_compute_copies(ours)
        stream = residual.requires_grad_()
        parameters = [ours.mixer.get_parameter(name) for name in NAMES]
        (leaving, out), _ = ours((stream, hidden), pos, None)
        grads = torch.autograd.grad([out, leaving], [stream, *parameters, ours.norm.weight], [dy.to(out.dtype), dy])
        return {"leaves": out.detach(), **dict(zip(("x", *NAMES, "norm"), grads, strict=True))}

    def their_step() -> dict[str, Tensor]:
        assert theirs is not None
        stream = residual.requires_grad_()
        parameters = [theirs.mixer.get_parameter(name) for name in NAMES.values()]
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out, leaving = theirs(hidden, stream)
        grads = torch.autograd.grad([out, leaving], [stream, *parameters, theirs.norm.weight], [dy.to(out.dtype), dy])
        return {"leaves": out.detach(), **dict(zip(("x", *NAMES, "norm"), grads, strict=True))}

    return our_step, their_step


def error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.float().flatten(), expected.float().flatten()
    return float((found - expected).norm() / expected.norm())


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    return max((error(x, expected[name]), name) for name, x in found.items())


def by_kernel(report: Report, case: str, step: Callable[[], Any]) -> None:
    """Where the time of a call goes, the largest parts first."""
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


def one_model(report: Report, name: str, batch: int, length: int, clock: Clock) -> None:
    config = ModelConfig(**yaml.safe_load((files("baton.configs") / "models" / f"{name}.yaml").read_text()))
    config = config.model_copy(update={"n_layers": 1, "vocab_size": 64})
    g = torch.Generator("cuda").manual_seed(0)
    hidden, residual, dy = (torch.randn(batch, length, config.d_model, device="cuda", generator=g) for _ in range(3))
    hidden, pos = hidden.bfloat16(), torch.arange(length, dtype=torch.int32, device="cuda").repeat(batch, 1)
    ours = our_layer(config, torch.bfloat16)
    theirs = peer_layer(config, ours)
    our_step, their_step = steps_of(ours, theirs, hidden, residual, pos, dy)
    exact, _ = steps_of(our_layer(config, torch.float32), None, hidden, residual, pos, dy)
    found, case = our_step(), f"{name} block {batch} x {length}"
    off, where = worst(found, exact())
    report.gate(f"{case} itself", off <= AGREE, f"bfloat16 and float32 differ by {off:.1e} ({where}), {AGREE:.0e} allowed")
    if theirs is None:
        report.say(f"{case}: mamba_ssm is not here; ours {clock(our_step):.3f} ms")
        by_kernel(report, f"{case}, ours", our_step)
        return
    off, where = worst(found, their_step())
    report.gate(case, off <= AGREE, f"differs from mamba_ssm's by {off:.1e} ({where}), {AGREE:.0e} allowed")
    # the second without the host's time, which at the smaller size is the longer one
    for metric, timed in (("fwd+bwd us", clock), ("fwd+bwd as a graph us", clock.recorded)):
        mine, other = timed(our_step), timed(their_step)
        report.row(case, metric, 1000 * mine, "mamba_ssm", 1000 * other, gate=case, higher_is_better=False)
    by_kernel(report, f"{case}, ours", our_step)
    by_kernel(report, f"{case}, mamba_ssm", their_step)


def _imported(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="mamba-130m,mamba-1.4b", help="names of configs/models, separated by commas")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repetitions", type=int, default=50)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    meshes.initialize(LayoutConfig(), device=torch.device("cuda", 0), rank=0, store=torch.distributed.HashStore())
    report = Report("blocks_gpu", device=f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name in arguments.models.split(","):
        one_model(report, name, arguments.batch, arguments.tokens, Clock(arguments.repetitions))
    report.save()
    meshes.shutdown()


if __name__ == "__main__":
    main()
