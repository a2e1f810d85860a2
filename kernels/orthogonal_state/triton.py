"""The orthogonal state recurrence on a GPU: launches the Triton kernels of `per_token` and `backward`.

The one thing to know: these run with projection and without thresholds; slots enter and are loaded with norm 1, see `chunked`,
which runs everything else and makes them so. Kept for the backward pass are the arguments and the slots at borders. The kernels
have a slot's values side by side, callers a value's slots.
"""

from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels import launch
from baton.kernels import tiles as table
from baton.kernels.ahead import on_gpu
from baton.kernels.orthogonal_state.rule import Rule, Variant

KERNEL = "orthogonal_state"


@dataclass(frozen=True)
class Tiles:
    """How the kernels are cut; powers of two.

    Attributes:
        slots, slots_back: of a program in encoding and similarity, forwards and backwards; where they are not all of a head's, what
            is summed over slots is left in parts. In decoding a program has all.
        warps, warps_back: of such a program.
        parts, parts_back: into which slots are cut along d: the more, the fewer lanes are summed over along d, and the more along
            slots.
        warps_all, warps_all_back, parts_all, parts_all_back: the same in decoding.
        steps: tokens that are loaded together, one such block ahead of what is computed; divides border.
        steps_back: tokens whose slots are in registers together backwards; divides border.
        border: tokens between two states that are kept for the backward pass.
    """

    slots: int = 16
    slots_back: int = 16
    warps: int = 1
    warps_back: int = 1
    parts: int = 2
    parts_back: int = 4
    warps_all: int = 4
    warps_all_back: int = 8
    parts_all: int = 2
    parts_all_back: int = 2
    steps: int = 4
    steps_back: int = 2
    border: int = 32


_DEFAULT = Tiles()


def shape_of(variant: Variant, d: int, m: int) -> table.Shape:
    """What tiles depend on, in classes."""
    return {"variant": variant, "d": table.power_of_two(d), "m": table.power_of_two(m)}


def in_triton(x: Tensor, compute_dtype: torch.dtype, rule: Rule, tau: Tensor | None) -> bool:
    """Whether these kernels compute it: on a GPU, in float32, with projection and without thresholds."""
    return on_gpu(x) and compute_dtype == torch.float32 and rule.project and tau is None


def orthogonal_state_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    S0: Tensor,
    *,
    mu: Tensor | None,
    variant: Variant,
    pos: Tensor | None,
    S: Tensor,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """As `op.orthogonal_state` with projection.

    S0, S: slots that documents start with, [heads, d, m], and that enter, [batch, heads, d, m], of norm 1; to both there are
    gradients, whose parts along the slots mean nothing. mu: at least SMALLEST_GATE.
    """
    if tiles is None:
        batch, length, heads, m = q.shape
        sizes = {"batch": batch, "tokens": length, "heads": heads, "d": v.shape[3], "m": m}
        tiles = table.choose(KERNEL, _DEFAULT, q.device, shape_of(variant, v.shape[3], m), sizes)
    y, leaving = _OrthogonalState.apply(q, k, v, gamma, mu, S0, S, variant, launch.positions(pos), tiles)
    return y, leaving


def own(border: int, steps: int, slots: int, d: int, variant: Variant) -> int:
    """Numbers that a program of `backward` keeps for itself."""
    return border // steps * slots * d + border * (2 * slots + (d if variant == "dec" else 0) + 1)


class _Run:
    """One call's shapes and launches."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, mu: Tensor | None, S0: Tensor, variant: Variant, pos: Tensor | None,
        tiles: Tiles,
    ) -> None:  # fmt: skip
        self.q, self.k, self.v = (launch.in_rows(x) for x in (q, k, v))
        self.gamma, self.mu, self.S0, self.pos, self.tiles = gamma, mu, S0.mT.contiguous(), pos, tiles
        self.kernels, self.variant, self.all = _kernels(), variant, variant == "dec"
        self.batch, self.length, self.heads, self.m = q.shape
        self.d = v.shape[3]
        self.borders = -(-self.length // tiles.border)
        self.strides = launch.strides(self.q, self.k, self.v, gamma, mu)
        kinds = {"dec": self.kernels.DEC, "enc": self.kernels.ENC, "sim": self.kernels.SIM}
        self.options = {
            "D": self.d, "M": self.m, "H": self.heads, "VARIANT": kinds[variant].value,
            "FORGET": mu is not None, "HAS_POS": pos is not None, "BORDER": tiles.border, "BD": max(4, table.power_of_two(self.d)),
            "EVEN": self.length % tiles.border == 0, "num_stages": 1,
        }  # fmt: skip

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.q.device)

    def or_q(self, x: Tensor | None) -> Tensor:
        """A pointer for what is not there and is not read."""
        return self.q if x is None else x

    def programs(self, slots: int) -> tuple[int, int]:
        """Slots of a program, and programs of a head."""
        wanted = max(4, table.power_of_two(self.m))
        slots = wanted if self.all else min(slots, wanted)
        return slots, -(-self.m // slots)

    def cut(self, slots: int, warps: int, parts: int) -> dict[str, int]:
        """How a program's slots lie: at least 4 of each warp, and 4 values in a part."""
        warps = min(warps, slots // 4)
        return {"BM": slots, "PARTS": min(parts, int(self.options["BD"]) // 4), "WARPS": warps, "num_warps": warps}

    def forward(self, S: Tensor, *, keep: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """The output, the slots that leave and, if kept, those at borders [B, H, C, m, d]."""
        tiles = self.tiles
        slots, parts = self.programs(tiles.slots)
        cut = self.cut(slots, *((tiles.warps_all, tiles.parts_all) if self.all else (tiles.warps, tiles.parts)))
        y = self.new(parts, self.batch, self.length, self.heads, self.d, dtype=self.q.dtype if parts == 1 else torch.float32)
        last = self.new(self.batch, self.heads, self.m, self.d)
        borders = self.new(self.batch, self.heads, self.borders, self.m, self.d) if keep else None
        self.kernels.forward_kernel[(parts, self.batch * self.heads)](
            self.q, self.k, self.v, self.gamma, self.or_q(self.mu), self.or_q(self.pos), S.mT.contiguous(), self.S0, y,
            self.or_q(borders), last, self.length, *self.strides, KEEP=keep, STEPS=tiles.steps, **cut, **self.options,
        )  # fmt: skip
        return y[0] if parts == 1 else y.sum(0).to(self.q.dtype), last.mT.contiguous(), borders

    def backward(self, borders: Tensor, dy: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, v, gamma, mu, what is loaded and what entered."""
        tiles = self.tiles
        slots, parts = self.programs(tiles.slots_back)
        warps = (tiles.warps_all_back, tiles.parts_all_back) if self.all else (tiles.warps_back, tiles.parts_back)
        cut = self.cut(slots, *warps)
        shape, steps, dy = (self.batch, self.length, self.heads), tiles.steps_back, launch.in_rows(dy)
        dq, dk = (self.new(*shape, self.m, dtype=x.dtype) for x in (self.q, self.k))
        dv = self.new(parts, *shape, self.d, dtype=self.v.dtype if parts == 1 else torch.float32)
        dgamma, dmu = self.new(parts, *shape), None if self.mu is None else self.new(parts, *shape)
        dfirst = self.new(self.batch, self.heads, self.m, self.d)
        dloaded = torch.zeros_like(dfirst)
        memory = own(tiles.border, steps, slots, int(self.options["BD"]), self.variant)
        states = self.new(parts * self.batch * self.heads, memory)
        _backward().backward_kernel[(parts, self.batch * self.heads)](
            self.q, self.k, self.v, self.gamma, self.or_q(self.mu), self.or_q(self.pos), self.S0, borders, dy,
            dlast.mT.contiguous(), states, dq, dk, dv, dgamma, self.or_q(dmu), dfirst, dloaded, self.length, *self.strides,
            *launch.strides(dy), STEPS=steps, OWN=memory, **cut, **self.options,
        )  # fmt: skip
        return (
            dq,
            dk,
            dv[0] if parts == 1 else dv.sum(0).to(self.v.dtype),
            dgamma.sum(0).to(self.gamma.dtype),
            None if dmu is None or self.mu is None else dmu.sum(0).to(self.mu.dtype),
            dloaded.sum(0).mT,
            dfirst.mT,
        )


class _OrthogonalState(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, mu: Tensor | None, S0: Tensor, S: Tensor, variant: Variant,
        pos: Tensor | None, tiles: Tiles,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        y, last, borders = _Run(q, k, v, gamma, mu, S0, variant, pos, tiles).forward(S, keep=any(ctx.needs_input_grad))
        ctx.save_for_backward(q, k, v, gamma, mu, S0, pos, borders)
        ctx.variant, ctx.tiles = variant, tiles
        return y, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dlast: Tensor) -> tuple[Any, ...]:
        q, k, v, gamma, mu, S0, pos, borders = ctx.saved_tensors
        run = _Run(q, k, v, gamma, mu, S0, ctx.variant, pos, ctx.tiles)
        grads = run.backward(borders, dy, dlast)
        return (*(grad if want else None for want, grad in zip(ctx.needs_input_grad[:7], grads, strict=True)), *(None,) * 3)


@cache
def _kernels() -> ModuleType:
    """Imported when they are first needed: where there is no GPU there need be no Triton."""
    from baton.kernels.orthogonal_state import per_token

    return per_token


@cache
def _backward() -> ModuleType:
    from baton.kernels.orthogonal_state import backward

    return backward
