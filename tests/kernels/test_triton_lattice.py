"""Lattice's Triton kernels against the reference in float64; in Triton's interpreter where there is no GPU."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from support.compare import relative_error
from support.long_form import alternating, some
from support.recurrences import positions, seeded

from baton.kernels.lattice.chunk_kernel_utils import load_sectors
from baton.kernels.lattice.reference import lattice_reference
from baton.kernels.lattice.triton_launch import LaunchConfig, _LatticeLaunch, lattice_triton
from baton.kernels.lattice.variant import VARIANTS, UpdateRule, slot_norms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = LaunchConfig(
    slots=4, slots_backward=4, warps=1, warps_backward=1, block_t=2, block_t_backward=2, checkpoint_interval=8, chunk=0
)
CHUNKS = LaunchConfig(chunk=16, slots_chunk=16, warps_chunk=1, warps_chunk_backward=1)
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 5e-3}


def compare(variant, sizes, config, *, starts, forgets, project=True, dtype=torch.float32, far=(), short=True):
    """Outputs, final slots and all gradients; with projection, the slots' gradients without their component along the slots.

    Steps rotate slots by up to about a radian, those of the tokens `far` by as much as possible. Without projection the initial
    slots have norms from below MIN_NORM to 3, and one is all zeros.

    short: whether slots without projection may become short, initially or by forgetting. The gradient grows with the square of 1 /
    |s|, so over many tokens rounding dominates it: the reference in float32 is then itself off by 1e-2. If False, slots start with
    norms from 0.1, steps are small and little is forgotten; the reference in float32 is then within 1e-6.
    """
    batch, tokens, heads, d, m = sizes
    g = seeded(0)

    def randn(*shape, dtype=dtype):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).double()

    def slots(*shape):
        S = randn(*shape, dtype=torch.float32)
        S = S / slot_norms(S)
        if not project:
            S = S * torch.logspace(-3.5 if short else -1.0, 0.5, shape[-1], dtype=torch.float64)
            if short:
                S[..., 0, :, shape[-1] // 2] = 0.0
        return S.float().double()

    along = (batch, tokens, heads)
    names = ("q", "k", "v", "gamma", *(("mu",) if forgets else ()), "S0", "S")
    k = F.normalize(randn(*along, m), dim=-1).to(dtype).double()
    shifts = ((0.0, 0.0) if short else (-2.0, 6.0))[: 1 + forgets]
    gates = [torch.sigmoid(randn(*along) + shift).to(dtype).double() for shift in shifts]
    v = randn(*along, d) / d**0.5
    for x in (k, v):
        x[:, list(far)] *= 16
    given = dict(zip(names, (randn(*along, m), k, v, *gates, slots(heads, d, m), slots(batch, heads, d, m))))
    cotangents = randn(*along, d), randn(batch, heads, d, m, dtype=torch.float32)
    pos = positions(seeded(1), batch, tokens, 0.1) if starts else None

    def run(op, place, kind):
        own = {
            name: x.to(place, torch.float32 if name in ("S0", "S") and kind == torch.bfloat16 else kind)
            for name, x in given.items()
        }
        leaves = {name: x.requires_grad_() for name, x in own.items()}
        y, leaving = op(leaves, None if pos is None else pos.to(place))
        cast = [c.to(place, o.dtype) for c, o in zip(cotangents, (y, leaving))]
        grads = torch.autograd.grad([y, leaving], list(leaves.values()), cast, allow_unused=True, materialize_grads=True)
        found = {"y": y, "leaving": leaving, **{f"d{name}": x for name, x in zip(leaves, grads, strict=True)}}
        for name in ("S0", "S") if project else ():
            radial = (found[f"d{name}"] * own[name]).sum(-2, keepdim=True)
            found[f"d{name}"] = found[f"d{name}"] - own[name] * radial
        return found

    def defined(leaves, pos):
        options = {name: x for name, x in leaves.items() if name != "S"}
        return lattice_reference(**options, rule=UpdateRule(variant, project), pos=pos, initial_state=leaves["S"])

    def fused(leaves, pos):
        return lattice_triton(**{"mu": None, **leaves}, rule=UpdateRule(variant, project), pos=pos, config=config)

    expected = run(defined, "cpu", torch.float64)
    for name, x in run(fused, DEVICE, dtype).items():
        assert relative_error(x.double().cpu(), expected[name].detach()) <= LIMITS[dtype], name


@pytest.mark.parametrize(("starts", "variant"), alternating([True, False], VARIANTS))
def test_outputs_and_gradients_are_the_definitions(variant, starts):
    compare(variant, (1, 21, 2, 9, 7) if starts else (2, 11, 1, 8, 8), SMALL, starts=starts, forgets=starts)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("warps", "parts", "steps"), [(1, 4, 1), (2, 1, 4)])
def test_however_a_program_is_cut(variant, warps, parts, steps):
    """With all slots of a head in one program, and of whole blocks."""
    cut = {
        f"{name}{which}": n
        for name, n in (("warps", warps), ("parts", parts))
        for which in ("", "_backward", "_dec", "_dec_backward")
    }
    compare(
        variant,
        (1, 16, 1, 16, 8),
        LaunchConfig(**cut, block_t=steps, block_t_backward=steps, checkpoint_interval=8, chunk=0),
        starts=False,
        forgets=True,
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_projection_outputs_and_gradients_are_the_definitions(variant):
    compare(variant, (1, 11, 2, 9, 7), replace(SMALL, chunk=16), starts=True, forgets=True, project=False)


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_projection_however_a_program_is_cut(variant):
    """All slots in one program of two warps."""
    cut = {f"{name}{which}": n for name, n in (("warps", 2), ("parts", 1)) for which in ("", "_backward", "_dec", "_dec_backward")}
    config = LaunchConfig(**cut, block_t=4, block_t_backward=4, checkpoint_interval=8)
    compare(variant, (1, 16, 1, 16, 8), config, starts=False, forgets=False, project=False)


def test_without_projection_a_token_alone():
    """As in generation: one token with the State of the tokens before it."""
    compare("dec", (2, 1, 1, 8, 8), SMALL, starts=False, forgets=True, project=False)


@pytest.mark.parametrize(
    ("case", "variant"),
    alternating([((1, 40, 2, 9, 7), False, 8), ((2, 37, 1, 16, 16), True, 4), ((1, 16, 1, 20, 40), True, 16)], ["enc", "sim"]),
    ids=str,
)
def test_chunk_by_chunk(case, variant):
    """Documents that start inside chunks, an incomplete last chunk, slots in several programs, and one or several groups of tokens
    per chunk; forgetting where documents start.
    """
    sizes, starts, steps = case
    compare(variant, sizes, replace(CHUNKS, group_t=steps), starts=starts, forgets=starts)


@pytest.mark.parametrize(("starts", "variant"), alternating([False, True], ["enc", "sim"]))
def test_chunks_that_go_token_by_token(variant, starts):
    """Between chunks that do not."""
    compare(variant, (1, 60, 1, 16, 16), CHUNKS, starts=starts, forgets=starts, far=(18, 20, 33))


@pytest.mark.parametrize("variant", some(VARIANTS, VARIANTS[:1]))
def test_bfloat16(variant):
    compare(variant, (1, 37, 2, 16, 16), CHUNKS, starts=True, forgets=False, dtype=torch.bfloat16)


@pytest.mark.parametrize("variant", ["enc", "sim"])
def test_which_chunks_are_safe(variant):
    """All chunks of moderate steps are safe; a chunk in which slots turn by right angles is not."""
    g = seeded(3)
    q, k = torch.randn(1, 48, 1, 16, generator=g), F.normalize(torch.randn(1, 48, 1, 16, generator=g), dim=-1)
    v, gamma = F.normalize(torch.randn(1, 48, 1, 16, generator=g), dim=-1), torch.rand(1, 48, 1, generator=g)
    k[:, 20:22], v[:, 20:22] = 30 * k[:, 20:22], 10 * v[:, 20:22]
    S = torch.randn(1, 1, 16, 16, generator=g)
    S /= slot_norms(S)
    run = _LatticeLaunch(*(x.to(DEVICE) for x in (q, k, v, gamma)), None, S[0].to(DEVICE), UpdateRule(variant, True), None, CHUNKS)
    unsafe = run.forward(S.to(DEVICE), keep=True)[2][2]
    assert unsafe.flatten().tolist() == [0, 1, 0]


@triton.jit
def _sectors(numbers, out, first, C: tl.constexpr, N: tl.constexpr):
    found = load_sectors(numbers, first, C, N)
    tl.store(out + tl.arange(0, found.shape[0]), found)


@pytest.mark.parametrize(("chunk", "first", "steps"), [(32, 8, 8), (32, 24, 8), (16, 4, 4), (16, 0, 16), (32, 0, 32)])
def test_a_number_of_every_sector_that_a_group_reads_is_loaded(chunk, first, steps):
    """And of no other sector; sectors hold 8 numbers."""
    numbers, out = torch.arange(chunk * (chunk + 3), dtype=torch.float32, device=DEVICE), torch.full((1024,), -1.0, device=DEVICE)
    _sectors[1,](numbers, out, first, C=chunk, N=steps)
    read = {(t * chunk + s) // 8 for t in range(chunk + 3) for s in range(first, first + steps)}
    assert {int(x) // 8 for x in out.tolist() if x >= 0} == read


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_launch_configs_of_runs_without_projection(variant, dtype):
    """Also for a single token, and with this GPU's row of the table."""
    compare(variant, (2, 150, 3, 64, 64), LaunchConfig(), starts=True, forgets=True, project=False, dtype=dtype, short=False)
    compare(variant, (1, 128, 2, 64, 64), None, starts=False, forgets=False, project=False, dtype=dtype)
    compare(variant, (2, 1, 3, 64, 64), None, starts=False, forgets=True, project=False, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [0, LaunchConfig().chunk])
def test_the_launch_configs_of_runs(variant, dtype, chunk):
    compare(variant, (2, 150, 3, 64, 64), LaunchConfig(chunk=chunk), starts=True, forgets=True, dtype=dtype)
    compare(variant, (1, 128, 2, 64, 64), LaunchConfig(chunk=chunk), starts=False, forgets=False, dtype=dtype, far=(40,))
