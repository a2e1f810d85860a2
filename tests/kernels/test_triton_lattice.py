"""Lattice's Triton kernels against the definition: interpreted on a CPU, compiled on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from support.compare import relative_error
from support.recurrences import positions, seeded

from baton.kernels.orthogonal_state.reference import orthogonal_state_reference
from baton.kernels.orthogonal_state.rule import VARIANTS, Rule, norms
from baton.kernels.orthogonal_state.triton import Tiles, orthogonal_state_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Tiles(slots=4, slots_back=4, warps=1, warps_back=1, steps=2, steps_back=2, border=8)
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 5e-3}


def compare(variant, sizes, tiles, *, starts, forgets, dtype=torch.float32):
    """Outputs, slots that leave and all gradients, to the slots' the part across them. Steps turn slots by up to a radian or so."""
    batch, tokens, heads, d, m = sizes
    g = seeded(0)

    def randn(*shape, dtype=dtype):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).double()

    def unit(*shape):
        S = randn(*shape, dtype=torch.float32)
        return S / norms(S)

    along = (batch, tokens, heads)
    names = ("q", "k", "v", "gamma", *(("mu",) if forgets else ()), "S0", "S")
    k = F.normalize(randn(*along, m), dim=-1).to(dtype).double()
    gates = [torch.sigmoid(randn(*along)).to(dtype).double() for _ in range(1 + forgets)]
    given = dict(zip(names, (randn(*along, m), k, randn(*along, d) / d**0.5, *gates, unit(heads, d, m), unit(batch, heads, d, m))))
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
        for name in ("S0", "S"):
            radial = (found[f"d{name}"] * own[name]).sum(-2, keepdim=True)
            found[f"d{name}"] = found[f"d{name}"] - own[name] * radial
        return found

    def defined(leaves, pos):
        options = {name: x for name, x in leaves.items() if name != "S"}
        return orthogonal_state_reference(**options, rule=Rule(variant, True), pos=pos, initial_state=leaves["S"])

    def fused(leaves, pos):
        return orthogonal_state_triton(**{"mu": None, **leaves}, variant=variant, pos=pos, tiles=tiles)

    expected = run(defined, "cpu", torch.float64)
    for name, x in run(fused, DEVICE, dtype).items():
        assert relative_error(x.double().cpu(), expected[name].detach()) <= LIMITS[dtype], name


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("starts", [False, True])
def test_outputs_and_gradients_are_the_definitions(variant, starts):
    compare(variant, (1, 21, 2, 9, 7) if starts else (2, 11, 1, 8, 8), SMALL, starts=starts, forgets=starts)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("warps", "parts", "steps"), [(1, 4, 1), (2, 1, 4)])
def test_however_a_program_is_cut(variant, warps, parts, steps):
    """With all slots of a head, and of whole chunks of whole slots."""
    cut = {f"{name}{which}": n for name, n in (("warps", warps), ("parts", parts)) for which in ("", "_back", "_all", "_all_back")}
    compare(variant, (1, 16, 1, 16, 8), Tiles(**cut, steps=steps, steps_back=steps, border=8), starts=False, forgets=True)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tiles_of_runs(variant, dtype):
    compare(variant, (2, 150, 3, 64, 64), Tiles(), starts=True, forgets=True, dtype=dtype)
