"""Matrix-state recurrences, GSA, Lattice and B'MOJO's attention on a GPU, compared with fla's, mamba_ssm's and torch's: time and
memory.

Every row passes a gate first: the error of outputs, final States and all gradients against the float64 reference on the same
rounded inputs, at the row's sizes with fewer tokens, with document starts and an entering State, in float32 and bfloat16, in
memory that is filled with NaN, and twice with the same bits. Times are medians of CUDA events around whole calls, including
autograd and launches, with cold caches. They are also measured for CUDA graphs of the calls, because at these sizes the host may
be slower than the kernels. fla's gated delta rule has no backward pass on Hopper with this version of Triton, so only its forward
pass is compared. B'MOJO's attention is compared with the same computation composed of torch's fused attention with masks, block by
block, and with FlexAttention over all memories, whose block mask is built beforehand.

Lattice without projection (osr) is held against its form in PyTorch, which goes token by token and is what a GPU ran before it had
kernels.

Peers are used where `fla` and `mamba_ssm` can be imported; without them a row's time is only said.

    python benchmarks/matrix_gpu.py [--only gsa,gla,mamba2,delta_net,gated_delta_net,kda,rwkv7,lattice,osr,bmojo,loop]
"""

import argparse
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from blocks_gpu import by_kernel
from report import Report, worst
from scan_gpu import Clock, compare, peak_gib
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from triton.runtime import driver
from triton.testing import do_bench

from baton.kernels.common.kernel_check import check
from baton.kernels.delta_rule.op import delta_rule
from baton.kernels.delta_rule.reference import delta_rule_reference
from baton.kernels.eidetic_attention.chunked import Options, eidetic_attention_chunked
from baton.kernels.eidetic_attention.recurrence import EideticAttention
from baton.kernels.eidetic_attention.topk_memory_launch import select_memories
from baton.kernels.eidetic_attention.triton_launch import eidetic_attention_triton
from baton.kernels.gated_linear_attention.op import gated_linear_attention
from baton.kernels.gated_linear_attention.reference import gla_reference
from baton.kernels.gated_slot_attention.op import gated_slot_attention
from baton.kernels.gated_slot_attention.reference import gsa_reference
from baton.kernels.generalized_delta_rule import generalized_delta_rule
from baton.kernels.generalized_delta_rule.reference import generalized_delta_rule_reference
from baton.kernels.head_scale import head_scale
from baton.kernels.lattice.chunked import lattice_chunked
from baton.kernels.lattice.op import lattice
from baton.kernels.lattice.reference import lattice_reference
from baton.kernels.lattice.variant import UpdateRule

Kind = Literal[
    *("gsa", "gla", "mamba2", "delta_net", "gated_delta_net", "kda", "rwkv7"),
    *("lattice-dec", "lattice-enc", "lattice-sim", "osr-dec", "osr-enc", "osr-sim"),
]
GATE_TOKENS = 160
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
GATES_LIMIT = 8e-3  # of gradients of gates and step sizes in bfloat16
GATE_NAMES = ("dg", "dbeta", "dgamma")
RWKV7_BOUND = -math.exp(-0.5)
"""Of its log-decays."""


@dataclass(frozen=True)
class Case:
    """Sizes. slots: gated slot attention's; of Lattice d_key is the slots, d_value the dimension."""

    kind: Kind
    batch: int
    length: int
    heads: int
    d_key: int
    d_value: int
    slots: int = 0

    def __str__(self) -> str:
        slots = f" M{self.slots}" if self.slots else ""
        return f"{self.kind} B{self.batch} T{self.length} H{self.heads} K{self.d_key} V{self.d_value}{slots}"


CASES = (
    *(Case("gsa", b, t, 4, 512, 512, 64) for b, t in ((8, 2048), (1, 131072))),
    *(Case("gla", b, t, 4, 256, 512) for b, t in ((8, 2048), (1, 131072))),
    Case("mamba2", 8, 2048, 64, 128, 64),
    Case("delta_net", 8, 2048, 16, 128, 128),
    Case("gated_delta_net", 8, 2048, 16, 128, 128),
    *(Case("kda", b, t, 16, 128, 128) for b, t in ((8, 2048), (1, 4096))),
    *(Case("rwkv7", b, t, 32, 64, 64) for b, t in ((8, 2048), (1, 16384))),
    *(
        Case(kind, b, t, h, 64, 64)
        for h in (16, 32)
        for b, t in ((8, 2048), (1, 16384))
        for kind in ("delta_net", "lattice-dec", "lattice-enc", "lattice-sim")
    ),
    *(Case(kind, 8, 2048, 16, 64, 64) for kind in ("osr-dec", "osr-enc", "osr-sim")),
)
"""Sizes of models of 1.3B; the last ones also of 340M, with DeltaNet's kernel as the measure of Lattice's."""


def inputs_of(case: Case, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Inputs by name as a model gives them; gates in float32, some near nothing and some that forget nearly all."""
    g = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(case.batch, case.length, *shape, device="cuda", generator=g)

    H, K, V = case.heads, case.d_key, case.d_value
    shared = 1 if case.kind == "mamba2" else H
    q, k, v = normal(shared, K), normal(shared, K), normal(H, V)
    if case.kind == "gsa":
        # scores have no scale: queries of length 1 make them what the states' vectors are
        found = {"q": F.normalize(q, dim=-1), "k": k, "v": v, "g": F.logsigmoid(3 + 2 * normal(H, case.slots))}
    elif case.kind == "gla":
        found = {"q": q, "k": k, "v": v, "g": F.logsigmoid(normal(H, K)) / 16}
    elif case.kind == "rwkv7":
        a = F.normalize(normal(H, K), dim=-1)
        found = {
            "r": q,
            "k": k,
            "v": v,
            "a": a,
            "b": -torch.sigmoid(normal(H, K)) * a,
            "g": RWKV7_BOUND * torch.sigmoid(normal(H, K)),
        }
    elif case.kind == "mamba2":
        found = {"q": q, "k": k, "v": v, "step": F.softplus(normal(H) - 3)}
    else:
        found = {"q": q, "k": F.normalize(k, dim=-1), "v": v, "beta": torch.sigmoid(normal(H))}
        if case.kind == "gated_delta_net":
            found["g"] = -F.softplus(normal(H) - 3)
        elif case.kind == "kda":
            found["g"] = -F.softplus(normal(H, K) - 3)
        elif case.kind.startswith(("lattice", "osr")):
            S0 = torch.linalg.qr(torch.randn(H, V, K, device="cuda", generator=g))[0].contiguous()
            return {
                **{name: x.to(dtype) for name, x in zip("qkv", (q, found["k"], F.normalize(v, dim=-1)), strict=True)},
                "gamma": found["beta"],
                "S0": S0,
            }
    return {name: x.to(dtype) if name in "rqkvab" else x for name, x in found.items()}


def state_of(case: Case, inputs: dict[str, Tensor], seed: int = 3) -> dict[str, Tensor]:
    """Leaves of a state that enters."""
    g = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(case.batch, case.heads, *shape, device="cuda", generator=g)

    if case.kind == "gsa":
        return {"first_k": normal(case.d_key, case.slots), "first_v": normal(case.slots, case.d_value)}
    if case.kind.startswith("lattice"):
        return {"first": F.normalize(normal(case.d_value, case.d_key), dim=2)}
    if case.kind.startswith("osr"):
        return {"first": normal(case.d_value, case.d_key) / 4}
    return {"first": normal(case.d_key, case.d_value)}


def run(case: Case, inputs: dict[str, Tensor], pos: Tensor | None = None, defined: bool = False) -> list[Tensor]:
    """Output and leaving states, ours or the definition's. inputs: with the state's leaves, if one enters."""
    given = dict(inputs)
    first = given.pop("first", None)
    scale = case.d_key**-0.5
    if case.kind == "gsa":
        slots = {"k": given.pop("first_k"), "v": given.pop("first_v")} if "first_k" in given else None
        op = gsa_reference if defined else gated_slot_attention
        y, leaving = op(**given, pos=pos, initial_state=slots)
        return [y, leaving["k"], leaving["v"]]
    if case.kind in ("gla", "mamba2"):
        if case.kind == "mamba2":
            step = given.pop("step")
            # as mamba_ssm's: A of -1, and a token's value is scaled by its step size
            given |= {"v": head_scale(given["v"], step), "g": -step}
        gate: Any = "key" if case.kind == "gla" else "scalar"
        attend = gla_reference if defined else gated_linear_attention
        return list(attend(**given, gate=gate, scale=scale, pos=pos, initial_state=first))
    if case.kind.startswith(("lattice", "osr")):
        variant: Any = case.kind.partition("-")[2]
        project = case.kind.startswith("lattice")
        if defined:
            return list(lattice_reference(**given, rule=UpdateRule(variant, project), pos=pos, initial_state=first))
        return list(lattice(**given, variant=variant, project=project, pos=pos, initial_state=first))
    if case.kind == "rwkv7":
        generalized = generalized_delta_rule_reference if defined else generalized_delta_rule
        bound = {} if defined else {"lower_bound": RWKV7_BOUND}
        return list(generalized(**given, **bound, scale=scale, pos=pos, initial_state=first))
    rule = delta_rule_reference if defined else delta_rule
    return list(rule(**{"g": None, **given}, scale=scale, pos=pos, initial_state=first))


def gate_of(case: Case) -> tuple[Case, Tensor]:
    """The case with fewer tokens, and their positions."""
    small = replace(case, batch=min(case.batch, 2), length=GATE_TOKENS + 3)
    return small, ((torch.arange(small.length, device="cuda") + 50) % 70).to(torch.int32).repeat(small.batch, 1)


def gate(report: Report, case: Case) -> None:
    """Errors, and equal bits, with fewer tokens."""
    small, pos = gate_of(case)

    def found(inputs: dict[str, Tensor], dtype: torch.dtype | None, defined: bool) -> dict[str, Tensor]:
        leaves = {name: x.to(dtype or x.dtype).detach().requires_grad_() for name, x in inputs.items()}
        outputs = run(small, leaves, pos, defined)
        g = torch.Generator("cuda").manual_seed(1)
        cotangents = [torch.randn(x.shape, device="cuda", generator=g).bfloat16().to(x.dtype) for x in outputs]
        grads = torch.autograd.grad(outputs, list(leaves.values()), cotangents)
        results = {f"output {n}": x.detach() for n, x in enumerate(outputs)}
        return results | {f"d{name}": x for name, x in zip(leaves, grads, strict=True)}

    details, passed = [], True
    torch.use_deterministic_algorithms(True)  # fills what is not written with NaN
    for dtype, limit in LIMITS.items():
        inputs = inputs_of(small, dtype, seed=7)
        inputs |= state_of(small, inputs)
        expected = found(inputs, torch.float64, True)
        ours, again = (found(inputs, None, False) for _ in range(2))
        errors = {name: float((ours[name].double() - x).norm() / (x.norm() or 1.0)) for name, x in expected.items()}
        allowed = {name: GATES_LIMIT if name in GATE_NAMES and dtype == torch.bfloat16 else limit for name in errors}
        worst = max(errors, key=lambda name: (errors[name] != errors[name], errors[name] / allowed[name]))
        equal = all(torch.equal(again[name], x) for name, x in ours.items())
        passed = passed and equal and all(error <= allowed[name] for name, error in errors.items())
        details.append(f"{str(dtype).removeprefix('torch.')} {errors[worst]:.1e} ({worst}){'' if equal else ', bits DIFFER'}")
    torch.use_deterministic_algorithms(False)
    report.gate(str(case), passed, f"{len(errors)} tensors, {', '.join(details)}, bits equal" if passed else ", ".join(details))


METRICS = ("forward ms", "fwd+bwd ms", "fwd+bwd as a graph ms", "extra GiB")


def times(clock: Clock, forward: Callable[..., Tensor], inputs: dict[str, Tensor], back: bool = True) -> tuple[float, ...]:
    """Milliseconds forwards as in training, both ways, both ways as a CUDA graph (nan: not possible), GiB that both take beyond
    outputs and gradients."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    ahead = clock(partial(forward, **leaves))
    if not back:
        return ahead, *(float("nan"),) * 3
    y = forward(**leaves)
    dy = torch.randn_like(y)
    del y

    def backward(y: Tensor) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(y, list(leaves.values()), dy, allow_unused=True)

    extra = peak_gib(partial(forward, **leaves), backward, lambda y: (y,))
    both = partial(_both, forward, backward, leaves)
    return ahead, clock(both), clock.recorded(both), extra


def _both(forward: Callable[..., Tensor], backward: Callable[[Tensor], Any], leaves: dict[str, Tensor]) -> Any:
    return backward(forward(**leaves))


def peer_of(case: Case) -> tuple[str, Callable[..., Tensor] | None, bool]:
    """Its name, the same computation by it (None: it is not here), and whether it has a backward pass."""
    scale = case.d_key**-0.5
    try:
        if case.kind == "gsa":
            op = importlib.import_module("fla.ops.gsa").chunk_gsa
            # it takes in what it is told: 1 - alpha

            def slots(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
                return op(q, k, v, (1 - g.exp()).to(v.dtype), g, scale=1.0)[0]

            return "fla", slots, True
        if case.kind == "gla":
            op = importlib.import_module("fla.ops.gla").chunk_gla
            return "fla", lambda q, k, v, g: op(q, k, v, g, scale=scale)[0], True
        if case.kind == "delta_net":
            op = importlib.import_module("fla.ops.delta_rule").chunk_delta_rule
            return "fla", lambda q, k, v, beta: op(q, k, v, beta.to(v.dtype), scale=scale)[0], True
        if case.kind == "gated_delta_net":
            op = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
            return "fla", lambda q, k, v, g, beta: op(q, k, v, g, beta.to(v.dtype), scale=scale)[0], False
        if case.kind == "kda":
            op = importlib.import_module("fla.ops.kda").chunk_kda
            return "fla", lambda q, k, v, g, beta: op(q, k, v, g, beta.to(v.dtype), scale=scale)[0], True
        if case.kind == "rwkv7":
            op = importlib.import_module("fla.ops.rwkv7").chunk_rwkv7
            # as fla's model calls it; the bound lets it use tensor cores
            words = {"scale": scale, "safe_gate": True, "chunk_size": 64, "lower_bound": RWKV7_BOUND}
            return "fla", lambda r, k, v, a, b, g: op(r, g, k, v, a, b, **words)[0], True
        if case.kind == "mamba2":
            scan = importlib.import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
            decay = -torch.ones(case.heads, device="cuda")
            return "mamba_ssm", lambda q, k, v, step: scan(v, step, decay, k, q * scale, 256), True
    except ImportError:
        return "fla or mamba_ssm", None, False
    return "", None, False


def one(report: Report, clock: Clock, case: Case, measure: dict[tuple[int, ...], tuple[str, tuple[float, ...]]]) -> None:
    """measure: DeltaNet's times by sizes, which Lattice's are held against."""
    gate(report, case)
    inputs = inputs_of(case, torch.bfloat16)
    own = times(clock, lambda **given: run(case, given)[0], inputs)
    graph = f"as a graph {own[2]:.3f} ms"
    report.say(f"{case}: forward {own[0]:.3f} ms, both ways {own[1]:.3f} ms, {graph}, {own[3]:.2f} GiB beyond")
    if case.length <= 16384:
        leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
        y = run(case, leaves)[0]
        dy = torch.randn_like(y)
        by_kernel(
            report, str(case), lambda: torch.autograd.grad(run(case, leaves)[0], list(leaves.values()), dy, allow_unused=True)
        )
    sizes = (case.batch, case.length, case.heads, case.d_key, case.d_value)
    if case.kind.startswith("osr"):
        in_pytorch(report, case, inputs, own)
    name, peer, back = peer_of(case)
    if peer is not None:
        theirs = times(clock, peer, inputs, back)
        for metric, ours, other in zip(METRICS, own, theirs, strict=True):
            if other == other:
                compare(report, case, metric, ours, name, other)
        if case.kind == "delta_net":
            measure[sizes] = (f"{name}'s DeltaNet", theirs)
    elif name:
        report.say(f"{case}: {name} is not here")
    if case.kind.startswith("lattice") and sizes in measure:
        other_name, theirs = measure[sizes]
        for metric, ours, other in list(zip(METRICS, own, theirs, strict=True))[:3]:
            compare(report, case, metric, ours, other_name, other)


def in_pytorch(report: Report, case: Case, inputs: dict[str, Tensor], own: tuple[float, ...]) -> None:
    """Lattice's form in PyTorch beside what the kernels took, once: it takes seconds."""
    few, variant = Clock(1), case.kind.partition("-")[2]
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}

    def forward() -> Tensor:
        rule: Any = UpdateRule(variant, False)
        return lattice_chunked(**leaves, mu=None, tau=None, rule=rule, pos=None, initial_state=None)[0]

    dy = torch.randn_like(forward())
    compare(report, case, "forward ms", own[0], "PyTorch's form", few(forward))
    both = few(lambda: torch.autograd.grad(forward(), list(leaves.values()), dy))
    compare(report, case, "fwd+bwd ms", own[1], "PyTorch's form", both)


def python_loop(report: Report, clock: Clock) -> None:
    """Lattice's definition token by token, its step compiled, beside the kernels at 2048 tokens."""
    case = Case("lattice-dec", 8, 2048, 32, 64, 64)
    gate(report, case)
    inputs = inputs_of(case, torch.bfloat16)

    @torch.compile
    def step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.einsum("bhdm,bhm->bhd", S, k) - v
        a, weight = torch.einsum("bhdm,bhd->bhm", S, h), -gamma[..., None] * k
        U = S + (h[..., None] - S * a[:, :, None, :]) * weight[:, :, None, :]
        S = U / U.norm(dim=2, keepdim=True)
        return S, torch.einsum("bhdm,bhm->bhd", S, q)

    def loop(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, S0: Tensor) -> Tensor:
        S, outputs = S0.expand(case.batch, *S0.shape), []
        for t in range(case.length):
            S, y = step(S, q[:, t].float(), k[:, t].float(), v[:, t].float(), gamma[:, t])
            outputs.append(y)
        return torch.stack(outputs, 1)

    own = times(clock, lambda **given: run(case, given)[0], inputs)
    few = Clock(1)
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    y = loop(**leaves)
    ours = run(case, leaves)[0]
    difference = float((y - ours.float()).norm() / y.norm())
    report.gate(f"{case} loop", difference <= LIMITS[torch.bfloat16], f"the compiled loop differs by {difference:.1e}")
    ahead = few(partial(loop, **leaves))
    dy = torch.randn_like(y)
    both = few(lambda: torch.autograd.grad(loop(**leaves), list(leaves.values()), dy))
    compare(report, case, "forward ms", own[0], "compiled step, looped", ahead)
    compare(report, case, "fwd+bwd ms", own[1], "compiled step, looped", both)


def bmojo(report: Report, clock: Clock, batch: int, length: int) -> None:
    """Attention over a window of 512, 16 fading and 64 eidetic tokens, 32 heads of 64."""
    heads, dim, recurrence = 32, 64, EideticAttention(512, 16, 64)
    name = f"bmojo B{batch} T{length} H{heads} D{dim}"
    for dtype in (torch.float32, torch.bfloat16):
        # documents, a State that enters, all gradients, equal bits
        torch.use_deterministic_algorithms(True)
        finding = check(EideticAttention(40, 16, 24), torch.device("cuda"), dtype)
        torch.use_deterministic_algorithms(False)
        report.gate(f"{name} {str(dtype).removeprefix('torch.')}", finding.passed, str(finding))
    options = Options(recurrence.window, recurrence.n_fading, recurrence.n_eidetic, False, dim**-0.5)
    g = torch.Generator("cuda").manual_seed(0)
    leaves = [torch.randn(batch, length, heads, dim, device="cuda", generator=g).bfloat16().requires_grad_() for _ in range(5)]
    score = torch.rand(batch, length, device="cuda", generator=g)
    pos = torch.arange(length, device="cuda").repeat(batch, 1)
    state = recurrence.initial((*leaves, score))
    dy = torch.randn_like(leaves[0])

    def fused() -> Tensor:
        return eidetic_attention_triton((*leaves, score), options, pos=pos, state=state)[0]

    def blocks() -> Tensor:
        return eidetic_attention_chunked((*leaves, score), options, pos=pos, state=state)[0]

    known, _ = select_memories(score, options, pos=pos, state=None, need_last=False)
    assert known.row is not None
    assert known.slot is not None
    slot, valid, M = known.slot, known.row.flatten(1) >= 0, options.n_fading + options.n_eidetic

    def memories() -> list[Tensor]:
        """Keys and values of all memories, which are chosen anew as the kernels choose them, [B, memories M, heads, dim]."""
        seen, _ = select_memories(score, options, pos=pos, state=None, need_last=False)
        assert seen.row is not None
        rows, lane = seen.row.clamp(min=0).to(torch.int64), torch.arange(batch, device="cuda")[:, None, None]
        eidetic, fading = rows.split((options.n_eidetic, options.n_fading), dim=2)
        return [
            torch.cat((x[lane, eidetic], far[lane, fading]), 2).flatten(1, 2)
            for x, far in zip(leaves[1:3], leaves[3:], strict=True)
        ]

    def sees(b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        of_memory = (slot[b, i] == (j - length) // M) & valid[b, (j - length).clamp(min=0)]
        return torch.where(j < length, (i >= j) & (i - j < options.window), of_memory)

    keys = length + valid.shape[1]
    mask = torch.compile(create_block_mask)(sees, batch, None, length, keys, device="cuda")
    attend = torch.compile(flex_attention)

    def flex() -> Tensor:
        k, v = (torch.cat((x, y), 1).transpose(1, 2) for x, y in zip(leaves[1:3], memories(), strict=True))
        return attend(leaves[0].transpose(1, 2), k, v, block_mask=mask, scale=options.scale).transpose(1, 2)

    def gradients(forward: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        y = forward()
        return (y.detach(), *torch.autograd.grad(y, leaves, dy))

    ours, by_blocks, by_flex = gradients(fused), gradients(blocks), gradients(flex)
    off = worst(
        float((a - b).float().norm() / b.float().norm()) for x in (by_blocks, by_flex) for a, b in zip(ours, x, strict=True)
    )
    report.gate(name, off <= 2e-2, f"differs from torch's two by {off:.1e}")
    ahead, both = clock(fused), clock(lambda: gradients(fused))
    for peer, forward in (("masked SDPA", blocks), ("FlexAttention", flex)):
        compare(report, name, "forward ms", ahead, peer, clock(forward))
        compare(report, name, "fwd+bwd ms", both, peer, clock(partial(gradients, forward)))
    by_kernel(report, name, lambda: gradients(fused))


def main() -> None:
    kinds = [*get_args(Kind), "bmojo", "loop"]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join(kinds), help="kinds, or their beginnings, separated by commas; loop: see there")
    parser.add_argument("--tokens", type=int, default=0, help="of a sequence; 0: of all lengths")
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--tuning-ms", type=int, default=100, help="for which the peers' tuners time a configuration (default 100)")
    arguments = parser.parse_args()
    # the tuners ask the driver for it
    driver.active.get_benchmarker = lambda: partial(do_bench, warmup=arguments.tuning_ms // 4, rep=arguments.tuning_ms)
    parts = tuple(arguments.only.split(","))
    torch.backends.cuda.matmul.allow_tf32 = False
    report = Report("matrix_gpu", torch.cuda.get_device_name())
    clock, measure = Clock(arguments.repetitions), {}
    for case in CASES:
        if case.kind.startswith(parts) and arguments.tokens in (0, case.length):
            one(report, clock, case, measure)
            report.save()
    if "bmojo" in parts:
        for batch, length in ((8, 2048), (1, 16384)):
            bmojo(report, clock, batch, length)
            report.save()
    if "loop" in parts:
        python_loop(report, clock)
    report.save()


if __name__ == "__main__":
    main()
