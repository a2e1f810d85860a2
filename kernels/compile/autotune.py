"""Searches the fastest launch configurations of kernels on this machine's GPU, for the shapes of a run (`baton tune`).

The search starts at the configuration in use and goes step by step. A step tries all combinations of a few fields, because some
values are only good together, and compiles them at once. It adopts a combination that is at least 2 % faster and whose outputs and
gradients equal those of the configuration in use up to rounding. Runs never search; they read the table (launch_configs).
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.compile import fitting, launch_configs
from baton.kernels.compile.aot import META, Target, compiling
from baton.kernels.delta_rule import triton_launch as delta_rule
from baton.kernels.diagonal_scan import triton_launch as diagonal_scan
from baton.kernels.eidetic_attention import op as eidetic
from baton.kernels.eidetic_attention import triton_launch as eidetic_attention
from baton.kernels.eidetic_attention.launch_config import default_launch_config
from baton.kernels.errors import LaunchConfigError
from baton.kernels.gated_linear_attention import triton_launch as gated_linear_attention
from baton.kernels.gated_linear_attention.reference import Gate
from baton.kernels.lattice import triton_launch as lattice
from baton.kernels.lattice.variant import UpdateRule, Variant, slot_norms
from baton.kernels.short_conv import triton_launch as short_conv
from baton.kernels.window_attention import op as window
from baton.kernels.window_attention import triton_launch as window_attention

LEAST_GAIN = 0.02
REPETITIONS = 11
FLUSHED = 256 * 2**20  # bytes written before each call to evict L2, more than any L2 has
FLUSH_MS = 0.05  # that takes, at least
_LIMITS = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}

STEPS: dict[str, tuple[dict[str, tuple[int, ...]], ...]] = {
    diagonal_scan.KERNEL: (
        {"min_programs": (512, 1024, 2048)},
        {"target_programs": (1024, 2048, 4096)},
        {"prefetch_t": (2, 4, 6, 8), "unroll": (1, 2)},
        {"prefetch_t_transition": (2, 4, 8)},
    ),
    gated_linear_attention.KERNEL: (
        {"chunk": (32, 64)},
        {"x": (32, 64, 128), "y": (64, 128), "warps": (4, 8)},
        {"x_products": (32, 64, 128)},
        {"x_gated": (32, 64), "y_gated": (32, 64), "warps_gated": (4, 8)},
        {"registers_gated": (168, 255)},
        {"x_read": (32, 64), "warps_read": (4, 8)},
        {"warps_scores": (4, 8)},
        {"stages": (1, 2, 3)},
        {"x_shared": (32, 64, 128), "warps_shared": (4, 8), "registers_shared": (128, 168, 255)},
        {"stages_shared": (2, 3, 4)},
        {"warps_scores_shared": (4, 8), "registers_scores_shared": (128, 255)},
        {"heads": (8, 16, 32, 64)},
    ),
    delta_rule.KERNEL: (
        {"values": (32, 64), "warps_walk": (4, 8)},
        {"values_backward": (32, 64, 128), "warps_backward": (4, 8), "stages_backward": (1, 2)},
        {"warps_inverse": (1, 2, 4)},
        {"x_chunk": (32, 64), "y_chunk": (64, 128), "warps_chunk": (4, 8)},
        {"x": (32, 64, 128), "y": (64, 128), "warps": (4, 8)},
        {"x_products": (32, 64, 128)},
        {"x_scores": (16, 32), "warps_scores": (4, 8)},
        {"x_gated": (32, 64), "y_gated": (32, 64), "warps_gated": (4, 8)},
        {"stages": (1, 2)},
    ),
    lattice.KERNEL: (
        {"chunk": (0, 32, 64), "warps_chunk": (2, 4)},
        {"group_t": (4, 8), "warps_chunk_backward": (2, 4), "warps_parallel": (2, 4)},
        {"slots": (16, 64), "warps": (1, 4, 8), "parts": (2, 4)},
        {"slots_backward": (8, 16, 64), "warps_backward": (1, 4, 8), "parts_backward": (2, 4)},
        {"warps_dec": (2, 4, 8), "parts_dec": (2, 4)},
        {"warps_dec_backward": (4, 8), "parts_dec_backward": (2, 4), "block_t_backward": (1, 2)},
        {"block_t": (2, 4, 8)},
        {"block_t_backward": (1, 2, 4)},
    ),
    eidetic_attention.KERNEL: (
        {"queries": (64, 128), "keys": (32, 64, 128), "warps": (4, 8)},
        {"queries_backward": (32, 64, 128), "keys_backward": (64, 128), "warps_backward": (4, 8), "rows_first": (0, 1)},
        {"stages": (1, 2, 3), "stages_backward": (1, 2, 3)},
        {"registers": (128, 255)},
    ),
    short_conv.KERNEL: (
        {"block_d": (64, 128, 256), "block_t": (4, 8, 16), "block_t_backward": (4, 8)},
        {"span": (32, 64, 128, 256), "span_backward": (64, 128, 256, 512)},
    ),
}
"""For each kernel, the steps of the search: tuples of fields that are varied together. Chunk lengths that `baton plan` relies on
are not varied."""

Call = Callable[[Any], list[Tensor]]
"""A call with a given launch configuration; returns outputs and gradients."""


@dataclass(frozen=True)
class Tuned:
    """Result of a search.

    config: the fields of the fastest configuration that differ from the kernel's defaults.
    before_ms, after_ms: median time of forward and backward in milliseconds, with the configuration in use and with the fastest.
    """

    request: launch_configs.Request
    config: dict[str, int]
    before_ms: float
    after_ms: float

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {size}" for name, size in (self.request.shape | self.request.sizes).items())
        config = ", ".join(f"{name} {value}" for name, value in self.config.items()) or "the defaults"
        return f"{self.request.kernel} ({sizes}): {config}; {self.before_ms:.3f} -> {self.after_ms:.3f} ms"

    def entry(self, device: torch.device, dtype: torch.dtype) -> launch_configs.Entry:
        """The row for the table, under the most specific of the device's names."""
        sizes = ", ".join(f"{name} {size}" for name, size in self.request.sizes.items())
        precision = str(dtype).removeprefix("torch.")
        why = f"{self.after_ms:.3f} ms beside {self.before_ms:.3f}, forward and backward, {precision}: {sizes}"
        return launch_configs.Entry(
            self.request.kernel, launch_configs.table_names(device)[-1], self.request.shape, self.config, why
        )


def tune(requests: Sequence[launch_configs.Request], device: torch.device, dtype: torch.dtype) -> Iterator[Tuned]:
    """The fastest launch configuration for each request. Raises LaunchConfigError, which names the candidate, if one crashes the
    GPU."""
    for request in requests:
        call, default, used = _SETUPS[request.kernel](request, device, dtype)
        expected, best, before = call(used), used, _milliseconds(call, used, device)
        after = before
        for step in STEPS[request.kernel]:
            tried = [replace(best, **dict(zip(step, values, strict=True))) for values in itertools.product(*step.values())]
            tried = [config for config in tried if config != best and _fits(config)]
            if device.type == "cuda":
                _compile(request, tried, dtype)
            for config in tried:
                try:
                    took = _measured(call, config, expected, device, dtype)
                except RuntimeError as error:  # the CUDA context is unusable after that, so no other candidate can be timed
                    raise LaunchConfigError(_failed(request, config, default, error)) from None
                if took < (1 - LEAST_GAIN) * after:
                    best, after = config, took
        found = {name: value for name, value in asdict(best).items() if value != getattr(default, name)}
        yield Tuned(request, found, before, after)


def _compile(request: launch_configs.Request, tried: Sequence[Any], dtype: torch.dtype) -> None:
    """Compiles the candidates into Triton's cache on all cores. One that fails is compiled again when it is timed, which reports
    why."""
    here = Target.here()
    assert here is not None
    with fitting.exactly(), compiling(here):
        call, _, _ = _SETUPS[request.kernel](request, META, dtype)
        for config in tried:
            call(config)


def _measured(call: Call, config: Any, expected: Sequence[Tensor], device: torch.device, dtype: torch.dtype) -> float:
    """Time of a candidate in milliseconds; infinite if its results differ or it exceeds the GPU's resources."""
    from triton.runtime.errors import OutOfResources

    try:
        with fitting.exactly():
            return _milliseconds(call, config, device) if _agree(call(config), expected, _LIMITS[dtype]) else math.inf
    except OutOfResources:
        return math.inf


def _failed(request: launch_configs.Request, config: Any, default: Any, error: RuntimeError) -> str:
    """Description of a candidate, for errors."""
    own = asdict(default)
    changed = ", ".join(f"{name} {value}" for name, value in asdict(config).items() if value != own[name]) or "its defaults"
    sizes = ", ".join(f"{name} {size}" for name, size in (request.shape | request.sizes).items())
    why = str(error).strip().split("\n")[0]
    return (
        f"{request.kernel} ({sizes}) with {changed}: {why}; what was found before is in the table, nothing of this kernel is: "
        f"tune the others with --kernel, and take this candidate out of STEPS in kernels/compile/autotune.py"
    )


def _fits(config: Any) -> bool:
    """Whether the values satisfy the constraints that the attributes' descriptions state."""
    if isinstance(config, diagonal_scan.LaunchConfig):
        return (
            config.checkpoint_interval % config.block_t == 0
            and config.prefetch_t <= config.block_t
            and config.prefetch_t_transition <= config.block_t_transition
        )
    if isinstance(config, lattice.LaunchConfig):
        # slots per warp: with more, registers spill; with fewer, warps mostly wait for memory
        return all(8 <= n <= 16 for n in (config.slots // config.warps, config.slots_backward // config.warps_backward))
    if isinstance(config, short_conv.LaunchConfig):
        return config.span % config.block_t == 0 and config.span_backward % config.block_t_backward == 0
    return True


def _scan(request: launch_configs.Request, device: torch.device, dtype: torch.dtype) -> tuple[Call, Any, Any]:
    g, sizes, d_state = _generator(device), request.sizes, int(request.shape["d_state"])
    batch, length, channels = sizes["batch"], sizes["tokens"], sizes["channels"]
    kind = request.shape["kind"]

    def randn(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=g, device=device).to(dtype)

    inputs = diagonal_scan.ScanInputs(
        x=randn(batch, length, channels),
        dt=randn(batch, length, channels) if sizes["activate"] else randn(batch, length, channels).sigmoid(),
        B=randn(batch, length, d_state),
        C=randn(batch, length, d_state),
        D=torch.ones(channels, device=device),
        A=-torch.arange(1.0, d_state + 1, device=device).repeat(channels, 1) if kind != "longhorn" else None,
        dt_bias=torch.full((channels,), -3.0, device=device) if sizes["activate"] else None,
        z=randn(batch, length, channels) if sizes["gated"] else None,
    )
    leaves = [x.requires_grad_() for x in inputs if x is not None]
    dy, dfinal = randn(batch, length, channels), randn(batch, channels, d_state, dtype=torch.float32)

    def call(config: diagonal_scan.LaunchConfig) -> list[Tensor]:
        activate, zoh = bool(sizes["activate"]), kind == "mamba zoh"
        y, final = diagonal_scan.diagonal_scan_triton(
            inputs, pos=None, initial_state=None, activate=activate, zoh=zoh, config=config
        )
        return [y, final, *torch.autograd.grad([y, final], leaves, [dy, dfinal])]

    default = diagonal_scan.default_launch_config(d_state, kind == "mamba zoh")
    return call, default, launch_configs.choose(request.kernel, default, device, request.shape, sizes)


def _conv(request: launch_configs.Request, device: torch.device, dtype: torch.dtype) -> tuple[Call, Any, Any]:
    g, sizes = _generator(device), request.sizes
    shape, channels = (sizes["batch"], sizes["tokens"], sizes["channels"]), sizes["channels"]
    x, weight, bias, dy = (
        torch.randn(*s, generator=g, device=device).to(dtype)
        for s in (shape, (channels, int(request.shape["width"])), (channels,), shape)
    )
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]

    def call(config: short_conv.LaunchConfig) -> list[Tensor]:
        y, tail = short_conv.short_conv_triton(x, weight, bias, pos=None, tail=None, silu=True, config=config)
        return [y, tail, *torch.autograd.grad([y], leaves, [dy])]

    default = short_conv.LaunchConfig()
    return call, default, launch_configs.choose(request.kernel, default, device, request.shape, sizes)


def _gla(request: launch_configs.Request, device: torch.device, dtype: torch.dtype) -> tuple[Call, Any, Any]:
    g, sizes, gate = _generator(device), request.sizes, cast(Gate, request.shape["gate"])
    tokens, heads, d_key, d_value = (sizes["batch"], sizes["tokens"]), sizes["heads"], sizes["d_key"], sizes["d_value"]
    of_gate = {"key": (heads, d_key), "value": (heads, d_value), "scalar": (heads,)}

    def randn(*shape: int) -> Tensor:
        return torch.randn(*tokens, *shape, generator=g, device=device).to(dtype)

    leaves = [randn(sizes["query_heads"], d_key), randn(sizes["key_heads"], d_key), randn(heads, d_value)]
    leaves += [F.logsigmoid(3 + randn(*of_gate[gate]).float())] if gate in of_gate else []
    leaves = [x.requires_grad_() for x in leaves]
    dy = randn(max(sizes["query_heads"], heads), d_value)

    def call(config: gated_linear_attention.LaunchConfig) -> list[Tensor]:
        q, k, v, *gates = leaves
        y, final = gated_linear_attention.gla_triton(
            q,
            k,
            v,
            gates[0] if gates else None,
            gate=gate,
            scale=d_key**-0.5,
            pos=None,
            initial_state=None,
            config=config,
        )
        return [y, final, *torch.autograd.grad([y], leaves, [dy])]

    default = gated_linear_attention.LaunchConfig()
    return call, default, launch_configs.choose(request.kernel, default, device, request.shape, sizes)


def _delta_rule(request: launch_configs.Request, device: torch.device, dtype: torch.dtype) -> tuple[Call, Any, Any]:
    g, sizes = _generator(device), request.sizes
    shape = (sizes["batch"], sizes["tokens"], sizes["heads"])

    def randn(*last: int) -> Tensor:
        return torch.randn(*shape, *last, generator=g, device=device)

    q, k, v, dy = (randn(sizes[name]) for name in ("d_key", "d_key", "d_value", "d_value"))
    leaves = [q.to(dtype), F.normalize(k, dim=-1).to(dtype), v.to(dtype), torch.sigmoid(randn())]
    channels = {"none": None, "scalar": (), "key": (sizes["d_key"],)}[str(request.shape["gate"])]
    leaves += [] if channels is None else [F.logsigmoid(3 + randn(*channels))]
    leaves = [x.requires_grad_() for x in leaves]

    def call(config: delta_rule.LaunchConfig) -> list[Tensor]:
        q, k, v, beta, *g = leaves
        y, final = delta_rule.delta_rule_triton(
            q, k, v, beta, g[0] if g else None, scale=1.0, pos=None, initial_state=None, config=config
        )
        return [y, final, *torch.autograd.grad([y], leaves, [dy.to(dtype)])]

    default = delta_rule.LaunchConfig()
    return call, default, launch_configs.choose(request.kernel, default, device, request.shape, sizes)


def _lattice(request: launch_configs.Request, device: torch.device, dtype: torch.dtype) -> tuple[Call, Any, Any]:
    g, sizes, name = _generator(device), request.sizes, str(request.shape["variant"])
    rule = UpdateRule(cast(Variant, name.removeprefix("osr-")), not name.startswith("osr-"))
    shape = (sizes["batch"], sizes["tokens"], sizes["heads"])

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device=device)

    slots = randn(sizes["batch"], sizes["heads"], sizes["d"], sizes["m"])
    q, k, v = (randn(*shape, sizes[name]).to(dtype) for name in ("m", "m", "d"))
    leaves = [q, F.normalize(k, dim=-1), v, 0.2 * torch.sigmoid(randn(*shape)), slots / slot_norms(slots)]
    leaves, dy = [x.requires_grad_() for x in leaves], randn(*shape, sizes["d"]).to(dtype)

    def call(config: lattice.LaunchConfig) -> list[Tensor]:
        q, k, v, gamma, S = leaves
        y, final = lattice.lattice_triton(q, k, v, gamma, S[0].detach(), mu=None, rule=rule, pos=None, S=S, config=config)
        return [y, final, *torch.autograd.grad([y], leaves, [dy])]

    default = lattice.LaunchConfig()
    return call, default, launch_configs.choose(request.kernel, default, device, request.shape, sizes)


def _eidetic_attention(request: launch_configs.Request, device: torch.device, dtype: torch.dtype) -> tuple[Call, Any, Any]:
    """Example inputs with memories of as many rows as in the models' default settings, or whole documents."""
    g, sizes = _generator(device), request.sizes
    shape, dim, tokens = (sizes["batch"], sizes["tokens"]), sizes["dim"], sizes["window"]

    def randn(heads: int) -> Tensor:
        return torch.randn(*shape, heads, dim, generator=g, device=device).to(dtype).requires_grad_()

    leaves = [randn(sizes["heads"]), *(randn(sizes["groups"]) for _ in range(4))]
    score, dy = torch.rand(shape, generator=g, device=device), torch.randn_like(leaves[0])
    options = eidetic_attention.Options(tokens, min(16, tokens), 64, False, dim**-0.5)
    state = eidetic.empty(eidetic.state_specs(options, leaves[1], torch.float32), sizes["batch"], device)
    pos = torch.arange(sizes["tokens"], device=device).expand(shape)

    def whole(config: eidetic_attention.LaunchConfig) -> list[Tensor]:
        q, k, v, *_ = leaves
        empty = window.empty(k, v, 0)
        options = {"window": None, "pos": pos, "state": empty, "scale": dim**-0.5, "fresh": True, "need_final_state": False}
        y, _ = window_attention.window_attention_triton(q, k, v, config=config, **options)
        return [y, *torch.autograd.grad(y, (q, k, v), dy)]

    def call(config: eidetic_attention.LaunchConfig) -> list[Tensor]:
        y, _ = eidetic_attention.eidetic_attention_triton((*leaves, score), options, pos=pos, state=state, config=config)
        return [y, *torch.autograd.grad(y, leaves, dy)]

    alone = "whole" in request.shape
    default = default_launch_config(dim, whole=alone)
    return whole if alone else call, default, launch_configs.choose(request.kernel, default, device, request.shape, sizes)


_SETUPS = {
    diagonal_scan.KERNEL: _scan,
    short_conv.KERNEL: _conv,
    gated_linear_attention.KERNEL: _gla,
    delta_rule.KERNEL: _delta_rule,
    lattice.KERNEL: _lattice,
    eidetic_attention.KERNEL: _eidetic_attention,
}


def _agree(found: Sequence[Tensor], expected: Sequence[Tensor], limit: float) -> bool:
    """Whether all results agree up to rounding; false if there is a NaN."""
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(found, expected, strict=True)]
    return all(float((a - b).norm()) <= limit * float(b.norm()) for a, b in pairs)


def _generator(device: torch.device) -> torch.Generator | None:
    return None if device == META else torch.Generator(device).manual_seed(0)


def _milliseconds(call: Call, config: Any, device: torch.device) -> float:
    """Median time of calls with cold L2 in milliseconds. On a CPU, where kernels are interpreted, the time of one call."""
    call(config)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    since = time.perf_counter()
    call(config)
    host = 1e3 * (time.perf_counter() - since)
    if device.type != "cuda":
        return host
    flush = torch.empty(FLUSHED, dtype=torch.int8, device=device)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPETITIONS)]
    for begin, end in events:
        # this also keeps the GPU busy while the timed kernels are launched
        for _ in range(2 + math.ceil(2 * host / FLUSH_MS)):
            flush.zero_()
        begin.record()
        call(config)
        end.record()
    torch.cuda.synchronize(device)
    return statistics.median(begin.elapsed_time(end) for begin, end in events)
