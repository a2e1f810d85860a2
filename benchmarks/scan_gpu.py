"""The diagonal scans and the short convolution on a GPU, compared with mamba_ssm's and causal_conv1d's CUDA kernels: time and
memory.

Every row passes a gate first: the error of outputs and gradients against the float64 reference on the same rounded inputs, at the
row's sizes with fewer tokens, split into the same number of pieces, in memory that is filled with NaN, and twice with the same
bits. Times are medians of CUDA events around one call with cold caches. The peers' kernels are called without their autograd
functions, on tensors in the layout that they prefer.

Peers are used where `selective_scan_cuda` and `causal_conv1d_cuda` can be imported; without them a row compares with a copy of the
bytes that have to move.

    python benchmarks/scan_gpu.py [--only main,sizes,conv,extras] [--repetitions 50]
"""

import argparse
import importlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from report import Report, worst
from torch import Tensor

from baton.kernels.diagonal_scan.triton_launch import (
    LaunchConfig,
    ScanInputs,
    default_launch_config,
    diagonal_scan_triton,
    state_transition_triton,
)
from baton.kernels.longhorn.reference import longhorn_reference
from baton.kernels.selective_scan.reference import selective_scan_reference
from baton.kernels.short_conv.op import short_conv
from baton.kernels.short_conv.reference import short_conv_reference

MAIN = ((8, 2048), (1, 16384), (1, 131072))
GATE_TOKENS = 384
WIDTH, STATES, TAPS = 4096, 16, 4
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 5e-3}


@dataclass(frozen=True)
class Case:
    """A scan's sizes. kind: "mamba" or "longhorn"; starts: documents start within; carried: a state enters and leaves."""

    kind: str
    batch: int
    length: int
    channels: int = WIDTH
    d_state: int = STATES
    dtype: torch.dtype = torch.bfloat16
    starts: bool = False
    carried: bool = False

    def __str__(self) -> str:
        what = f"{self.kind} B{self.batch} T{self.length} D{self.channels} N{self.d_state}"
        return (
            what
            + (" pos" if self.starts else "")
            + (" states" if self.carried else "")
            + (" fp32" if self.dtype == torch.float32 else "")
        )


class Clock:
    """Times calls. repetitions: of each."""

    def __init__(self, repetitions: int) -> None:
        self.repetitions = repetitions
        self._filler = torch.empty(256 << 20, dtype=torch.int8, device="cuda")  # several times the cache

    def __call__(self, call: Callable[[], Any]) -> float:
        """Median milliseconds."""
        for _ in range(3):
            call()
        times = []
        for _ in range(self.repetitions):
            # and long enough for what is timed to be launched while it runs
            for _ in range(6):
                self._filler.zero_()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            times.append((begin, end))
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in times)

    def recorded(self, call: Callable[[], Any]) -> float:
        """Median milliseconds of a CUDA graph of the call: its kernels, without the host that launches them."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
        return self(graph.replay)


def inputs_of(case: Case, seed: int = 0) -> tuple[ScanInputs, Tensor | None, Tensor | None]:
    """Inputs as a model gives them, with some step sizes near 0 and some that forget everything; pos; the entering state."""
    g = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=g).to(dtype)

    sizes, shared = (case.batch, case.length, case.channels), (case.batch, case.length, case.d_state)
    A = -torch.arange(1, case.d_state + 1, device="cuda").float().repeat(case.channels, 1) if case.kind == "mamba" else None
    dt = normal(*sizes)
    dt[:, ::7] *= 8
    inputs = ScanInputs(
        x=normal(*sizes), dt=dt, A=A, B=normal(*shared), C=normal(*shared), D=normal(case.channels, dtype=torch.float32),
        dt_bias=torch.rand(case.channels, device="cuda", generator=g) * -4 - 1, z=normal(*sizes),
    )  # fmt: skip
    pos = None
    if case.starts:
        pos = ((torch.arange(case.length, device="cuda") + 500) % 700).to(torch.int32).repeat(case.batch, 1)
    state = normal(case.batch, case.channels, case.d_state, dtype=torch.float32) if case.carried else None
    return inputs, pos, state


def gradients(
    function: Callable[..., tuple[Tensor, Tensor]],
    inputs: ScanInputs,
    pos: Tensor | None,
    state: Tensor | None,
    dtype: torch.dtype | None,
) -> dict[str, Tensor]:
    """Outputs, final state, and gradients of all inputs for one random cotangent of both. dtype: what inputs are cast to."""
    named = {**inputs._asdict(), "state": state}
    leaves = {k: x.to(dtype or x.dtype).detach().requires_grad_() for k, x in named.items() if x is not None}
    own = ScanInputs(**{k: leaves.get(k) for k in ScanInputs._fields})  # type: ignore[arg-type]
    y, final = function(own, pos, leaves.get("state"))
    g = torch.Generator("cuda").manual_seed(1)
    cotangents = [torch.randn(x.shape, device="cuda", generator=g).bfloat16().to(x.dtype) for x in (y, final)]
    found = torch.autograd.grad([y, final], list(leaves.values()), cotangents)
    return {"y": y.detach(), "final": final.detach(), **{f"d{k}": x for k, x in zip(leaves, found, strict=True)}}


def definition(inputs: ScanInputs, pos: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor]:
    x, dt, A, B, C, D, z, dt_bias = inputs
    assert dt_bias is not None
    assert z is not None
    if A is None:
        y, final = longhorn_reference(x, B, C, torch.sigmoid(dt + dt_bias), D, pos=pos, initial_state=state)
    else:
        size = torch.nn.functional.softplus(dt + dt_bias)
        y, final = selective_scan_reference(x, size, A, B, C, D, pos=pos, initial_state=state)
    return y * torch.nn.functional.silu(z), final


def with_launch_config(config: LaunchConfig) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(inputs: ScanInputs, pos: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return diagonal_scan_triton(inputs, pos=pos, initial_state=state, activate=True, config=config)

    return run


def gate(report: Report, case: Case) -> None:
    """Errors, and equal bits, with fewer tokens: in one piece, and cut."""
    small = replace(case, batch=min(case.batch, 2), length=min(case.length, GATE_TOKENS))
    inputs, pos, state = inputs_of(small, seed=7)
    expected = gradients(definition, inputs, pos, state, torch.float64)
    largest, name, passed, equal = 0.0, "", True, True
    torch.use_deterministic_algorithms(True)  # fills what is not written with NaN
    for config in (
        replace(default_launch_config(case.d_state), full=1),
        replace(default_launch_config(case.d_state), full=1 << 20, programs=1 << 20),
    ):
        run = with_launch_config(config)
        found, again = (gradients(run, inputs, pos, state, None) for _ in range(2))
        equal = equal and all(torch.equal(again[key], x) for key, x in found.items())
        for key, want in expected.items():
            error = float((found[key].double() - want).norm() / (want.norm() or 1.0))
            passed = passed and error <= LIMITS[case.dtype]
            largest, name = max((largest, name), (error, key))
    torch.use_deterministic_algorithms(False)
    detail = f"{len(expected)} tensors to {largest:.1e} ({name}), bits {'equal' if equal else 'DIFFER'}"
    report.gate(str(case), passed and equal, detail)


def times(clock: Clock, case: Case) -> tuple[float, float, float]:
    """Milliseconds forwards, as in training, and backwards; GiB that both take beyond inputs and gradients."""
    inputs, pos, state = inputs_of(case)
    leaves = [x.requires_grad_() for x in (*inputs, state) if x is not None]

    def forward() -> tuple[Tensor, Tensor]:
        return diagonal_scan_triton(inputs, pos=pos, initial_state=state, activate=True)

    def backward(y: Tensor, final: Tensor, keep: bool) -> tuple[Tensor, ...]:
        outputs, cotangents = ([y, final], [dy, dfinal]) if case.carried else ([y], [dy])
        return torch.autograd.grad(outputs, leaves, cotangents, retain_graph=keep)

    ahead, (y, final) = clock(forward), forward()
    dy, dfinal = torch.randn_like(y), torch.randn_like(final)
    back = clock(partial(backward, y, final, True))
    del y, final
    return ahead, back, peak_gib(forward, lambda kept: backward(kept[0], kept[1], False), lambda kept: (kept[0],))


def peer_times(clock: Clock, case: Case, peer: ModuleType) -> tuple[float, float, float]:
    """The same of mamba_ssm's kernels, on [B, D, T]."""
    inputs, _, _ = inputs_of(case)
    u, delta, z = (x.transpose(1, 2).contiguous() for x in (inputs.x, inputs.dt, inputs.z))  # type: ignore[union-attr]
    B, C = (x.transpose(1, 2).contiguous()[:, None] for x in (inputs.B, inputs.C))
    A, D, dt_bias = inputs.A, inputs.D, inputs.dt_bias
    del inputs

    def forward() -> list[Tensor]:
        return peer.fwd(u, delta, A, B, C, D, z, dt_bias, True)

    def backward(kept: list[Tensor]) -> list[Tensor]:
        out, x, _ = kept
        return peer.bwd(u, delta, A, B, C, D, z, dt_bias, dout, x, out, None, True, False)

    ahead, kept = clock(forward), forward()
    dout = torch.randn_like(kept[0])
    back = clock(partial(backward, kept))
    del kept
    return ahead, back, peak_gib(forward, backward, lambda kept: (kept[2],))


def peak_gib(forward: Callable[[], Any], backward: Callable[[Any], Any], outputs: Callable[[Any], Any]) -> float:
    """The most that a forward and backward pass hold beyond their outputs and gradients."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = forward()
    grads = backward(kept)
    found = sum(x.nbytes for x in (*outputs(kept), *grads) if x is not None)
    return (torch.cuda.max_memory_allocated() - before - found) / 2**30


def main_cases(report: Report, clock: Clock, peer: ModuleType | None) -> None:
    """The three shapes, both kinds, and what begin costs."""
    for batch, length in MAIN:
        mamba = Case("mamba", batch, length)
        gate(report, mamba)
        ahead, back, peak = times(clock, mamba)
        begin = clock(partial(state_transition_triton, inputs_of(mamba)[0], pos=None, activate=True))
        if peer is not None:
            others = peer_times(clock, mamba, peer)
            for metric, ours, theirs in zip(("forward ms", "backward ms", "extra GiB"), (ahead, back, peak), others, strict=True):
                compare(report, mamba, metric, ours, "mamba_ssm", theirs)
        else:
            report.say(f"{mamba}: forward {ahead:.3f} ms, backward {back:.3f} ms, {peak:.2f} GiB; mamba_ssm is not here")
        compare(report, mamba, "begin ms", begin, "forward", ahead)
        longhorn = Case("longhorn", batch, length)
        gate(report, longhorn)
        own = times(clock, longhorn)
        compare(report, longhorn, "forward ms", own[0], "our mamba", ahead)
        compare(report, longhorn, "backward ms", own[1], "our mamba", back)


def sizes(report: Report, clock: Clock, peer: ModuleType | None) -> None:
    """Other numbers of states and channels, and float32."""
    cases = [Case("mamba", 8, 2048, d_state=n) for n in (8, 32, 64)]
    cases += [Case("mamba", 8, 2048, channels=d) for d in (768, 1536, 2048, 8192)]
    cases += [Case("mamba", 8, 2048, dtype=torch.float32)]
    for case in cases:
        gate(report, case)
        ahead, back, _ = times(clock, case)
        if peer is None:
            report.say(f"{case}: forward {ahead:.3f} ms, backward {back:.3f} ms; mamba_ssm is not here")
            continue
        theirs = peer_times(clock, case, peer)
        compare(report, case, "forward ms", ahead, "mamba_ssm", theirs[0])
        compare(report, case, "backward ms", back, "mamba_ssm", theirs[1])


def extras(report: Report, clock: Clock) -> None:
    """What positions and states cost; odd sizes are gates alone."""
    for kind in ("mamba", "longhorn"):
        for odd in (Case(kind, 2, 301, 67, 17, dtype, starts=True, carried=True) for dtype in LIMITS):
            gate(report, odd)
        plain = times(clock, Case(kind, 8, 2048))
        for case in (Case(kind, 8, 2048, starts=True), Case(kind, 8, 2048, carried=True)):
            gate(report, case)
            own = times(clock, case)
            compare(report, case, "forward ms", own[0], "without", plain[0])
            compare(report, case, "backward ms", own[1], "without", plain[1])


def conv(report: Report, clock: Clock, peer: ModuleType | None) -> None:
    """The short convolution with SiLU, against a copy of the bytes that have to move and causal_conv1d."""
    for sizes in ((8, 2048, WIDTH), (8, 2048, 2 * WIDTH), (1, 16384, WIDTH)):
        conv_case(report, clock, peer, *sizes)


def conv_case(report: Report, clock: Clock, peer: ModuleType | None, batch: int, length: int, channels: int) -> None:
    name = f"conv B{batch} T{length} D{channels}"
    x = torch.randn(batch, length, channels, device="cuda").bfloat16().requires_grad_()
    weight, bias = (torch.randn(*s, device="cuda").bfloat16().requires_grad_() for s in ((channels, TAPS), (channels,)))

    def run(function: Any, cast: torch.dtype) -> list[Tensor]:
        leaves = [t.detach().to(cast).requires_grad_() for t in (x[:2, :GATE_TOKENS], weight, bias)]
        y, _ = function(*leaves, activation="silu")
        dy = torch.randn(y.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(2)).bfloat16().to(y.dtype)
        return [y, *torch.autograd.grad(y, leaves, dy)]

    torch.use_deterministic_algorithms(True)
    found, again, expected = (
        run(short_conv, torch.bfloat16),
        run(short_conv, torch.bfloat16),
        run(short_conv_reference, torch.float64),
    )
    torch.use_deterministic_algorithms(False)
    error = worst(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))
    equal = all(map(torch.equal, found, again))
    report.gate(name, error <= LIMITS[torch.bfloat16] and equal, f"4 tensors to {error:.1e}, bits {'equal' if equal else 'DIFFER'}")
    y, _ = short_conv(x, weight, bias, activation="silu")
    dy, target = torch.randn_like(y), torch.empty_like(y)
    ahead = clock(partial(short_conv, x, weight, bias, activation="silu"))
    back = clock(partial(torch.autograd.grad, y, (x, weight, bias), dy, retain_graph=True))
    copied = clock(partial(target.copy_, y.detach()))
    compare(report, name, "forward ms", ahead, "copy", copied)
    compare(report, name, "backward ms", back, "copy of 3 tensors", 1.5 * copied)
    if peer is None:
        report.say(f"{name}: causal_conv1d is not here")
        return
    lying, own_weight, own_bias = x.detach().transpose(1, 2), weight.detach(), bias.detach()
    out = torch.empty_like(lying)
    theirs = clock(partial(peer.causal_conv1d_fwd, lying, own_weight, own_bias, None, None, out, None, True))
    compare(report, name, "forward ms", ahead, "causal_conv1d", theirs)


def compare(report: Report, case: Case | str, metric: str, ours: float, peer_name: str, peer: float) -> None:
    # the table has one digit: microseconds, MiB
    scale, unit = (1000, "us") if metric.endswith("ms") else (1024, "MiB")
    label = f"{metric.rsplit(' ', 1)[0]} {unit}"
    report.row(str(case), label, scale * ours, peer_name, scale * peer, gate=str(case), higher_is_better=False)


def _imported(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="main,sizes,extras,conv", help="parts, separated by commas")
    parser.add_argument("--repetitions", type=int, default=50)
    arguments = parser.parse_args()
    parts = arguments.only.split(",")
    report = Report("scan_gpu", torch.cuda.get_device_name())
    clock, scans, convs = Clock(arguments.repetitions), _imported("selective_scan_cuda"), _imported("causal_conv1d_cuda")
    if "conv" in parts:
        conv(report, clock, convs)
        report.save()
    if "main" in parts:
        main_cases(report, clock, scans)
        report.save()
    if "extras" in parts:
        extras(report, clock)
        report.save()
    if "sizes" in parts:
        sizes(report, clock, scans)
    report.save()


if __name__ == "__main__":
    main()
