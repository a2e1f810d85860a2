"""The Lattice recurrence on a GPU: launches the Triton kernels of `triton_forward` and `triton_backward`, or those of chunks.

Thresholds are not in these kernels (`no_kernel`); `chunked` runs them. With projection slots enter and are loaded with norm 1,
which `chunked` makes sure of. Without projection every variant runs token by token. Kept for the backward pass are the arguments
and the slots at borders. The kernels have a slot's values side by side, callers a value's slots.
"""

from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels.common import launch_utils
from baton.kernels.common.launch_utils import LazyModule
from baton.kernels.compile import launch_configs
from baton.kernels.compile.aot import on_gpu
from baton.kernels.lattice.variant import Rule, Variant

_kernels = LazyModule("baton.kernels.lattice.triton_forward")

KERNEL = "lattice"


@dataclass(frozen=True)
class LaunchConfig:
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
        chunk: tokens of a chunk in encoding and similarity, a power of two from 16, which are between kept states there; 0: token
            by token.
        slots_chunk, warps_chunk, warps_chunk_back: of such a program, 16 slots at least; parts, parts_back, steps, steps_back are
            those of a chunk that goes token by token.
        steps_chunk: tokens of a chunk that the walk has in registers together; divides chunk.
        warps_beside: of programs that have a chunk each.
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
    chunk: int = 32
    slots_chunk: int = 64
    warps_chunk: int = 4
    warps_chunk_back: int = 4
    steps_chunk: int = 8
    warps_beside: int = 4


_DEFAULT = LaunchConfig()
_Kept = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Slots at borders [B, H, C, m, d]; of chunks also those that leave, as the kernels have them, which chunks are not safe, and their
slots' scales."""


def shape_of(rule: Rule, d: int, m: int) -> launch_configs.Shape:
    """What the launch configuration depends on, in classes. Rules without projection (the paper's OSR) are tuned apart."""
    return {
        "variant": rule.variant if rule.project else f"osr-{rule.variant}",
        "d": launch_utils.next_power_of_2(d),
        "m": launch_utils.next_power_of_2(m),
    }


def no_kernel(*, sparse: bool) -> str | None:
    """Why a GPU runs these options in PyTorch's form; None: the kernels have them. See `Recurrence.no_kernel`."""
    return "thresholds of slots (L1, sparsity > 0) are not in its kernels" if sparse else None


def use_triton(x: Tensor, compute_dtype: torch.dtype, *, sparse: bool) -> bool:
    """Whether these kernels compute it: on a GPU, in float32, and with options that they have."""
    return on_gpu(x) and compute_dtype == torch.float32 and no_kernel(sparse=sparse) is None


def lattice_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    S0: Tensor,
    *,
    mu: Tensor | None,
    rule: Rule,
    pos: Tensor | None,
    S: Tensor,
    config: LaunchConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """As `op.lattice` without thresholds.

    S0, S: slots that documents start with, [heads, d, m], and that enter, [batch, heads, d, m], with gradients to both. With
    projection they have norm 1, the parts of their gradients along the slots mean nothing, and mu is at least SMALLEST_GATE.
    """
    if config is None:
        batch, length, heads, m = q.shape
        sizes = {"batch": batch, "tokens": length, "heads": heads, "d": v.shape[3], "m": m}
        config = launch_configs.choose(KERNEL, _DEFAULT, q.device, shape_of(rule, v.shape[3], m), sizes)
    y, leaving = _Lattice.apply(q, k, v, gamma, mu, S0, S, rule, launch_utils.int32_positions(pos), config)
    return y, leaving


def own(border: int, steps: int, slots: int, d: int, variant: Variant) -> int:
    """Numbers that a program of `triton_backward` keeps for itself."""
    return border // steps * slots * d + border * (2 * slots + (d if variant == "dec" else 0) + 1)


def own_of_chunks(chunk: int, slots: int, d: int) -> int:
    """Numbers that a program of `triton_chunk_forward` keeps for itself."""
    return 2 * chunk * chunk + 2 * chunk * slots + slots * d


class _Run:
    """One call's shapes and launches."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, mu: Tensor | None, S0: Tensor, rule: Rule, pos: Tensor | None,
        config: LaunchConfig,
    ) -> None:  # fmt: skip
        self.q, self.k, self.v = (launch_utils.contiguous_last_dim(x) for x in (q, k, v))
        self.gamma, self.mu, self.S0, self.pos, self.config = gamma, mu, S0.mT.contiguous(), pos, config
        self.kernels, self.variant, self.all = _kernels, rule.variant, rule.variant == "dec"
        self.project = rule.project
        self.batch, self.length, self.heads, self.m = q.shape
        self.d = v.shape[3]
        self.chunked = config.chunk > 0 and not self.all and rule.project
        self.border = config.chunk if self.chunked else config.border
        self.borders = -(-self.length // self.border)
        self.strides = launch_utils.strides(self.q, self.k, self.v, gamma, mu)
        kinds = {"dec": self.kernels.DEC, "enc": self.kernels.ENC, "sim": self.kernels.SIM}
        self.options = {
            "D": self.d, "M": self.m, "H": self.heads, "VARIANT": kinds[rule.variant].value,
            "FORGET": mu is not None, "HAS_POS": pos is not None, "BORDER": self.border,
            "BD": max(16 if self.chunked else 4, launch_utils.next_power_of_2(self.d)),
            "EVEN": self.length % self.border == 0, "num_stages": 1,
        }  # fmt: skip

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.q.device)

    def or_q(self, x: Tensor | None) -> Tensor:
        """A pointer for what is not there and is not read."""
        return self.q if x is None else x

    def programs(self, slots: int) -> tuple[int, int]:
        """Slots of a program, and programs of a head."""
        wanted = max(16 if self.chunked else 4, launch_utils.next_power_of_2(self.m))
        slots = wanted if self.all else min(slots, wanted)
        return slots, -(-self.m // slots)

    def cut(self, slots: int, warps: int, parts: int) -> dict[str, int]:
        """How a program's slots lie: at least 4 of each warp, and 4 values in a part."""
        warps = min(warps, slots // 4)
        return {"BM": slots, "PARTS": min(parts, int(self.options["BD"]) // 4), "WARPS": warps, "num_warps": warps}

    def forward(self, S: Tensor, *, keep: bool) -> tuple[Tensor, Tensor, "_Kept"]:
        """The output, the slots that leave and, if kept, those at borders."""
        config = self.config
        if self.chunked:
            return self._forward_in_chunks(S)
        slots, parts = self.programs(config.slots)
        cut = self.cut(slots, *((config.warps_all, config.parts_all) if self.all else (config.warps, config.parts)))
        y, last = self._outputs(parts), self.new(self.batch, self.heads, self.m, self.d)
        borders = self.new(self.batch, self.heads, self.borders, self.m, self.d) if keep else None
        self.kernels.lattice_forward_kernel[(parts, self.batch * self.heads)](
            self.q, self.k, self.v, self.gamma, self.or_q(self.mu), self.or_q(self.pos), S.mT.contiguous(), self.S0, y,
            self.or_q(borders), last, self.length, *self.strides, KEEP=keep, STEPS=config.steps, PROJECT=self.project, **cut,
            **self.options,
        )  # fmt: skip
        return self._summed(y), last.mT.contiguous(), (borders, None, None, None)

    def _outputs(self, parts: int) -> Tensor:
        dtype = self.q.dtype if parts == 1 else torch.float32
        return self.new(parts, self.batch, self.length, self.heads, self.d, dtype=dtype)

    def _summed(self, y: Tensor) -> Tensor:
        return y[0] if y.shape[0] == 1 else y.sum(0).to(self.q.dtype)

    def _numbers(self) -> Tensor:
        """What the walk reads of each chunk's tokens alone."""
        numbers = self.new(self.batch * self.heads, self.borders, self.border + 3, self.border)
        options = self._options("D", "H", "FORGET", "HAS_POS", "EVEN", "BORDER", "BD", "num_stages")
        _chunks()[0].lattice_chunk_gram_kernel[(self.borders, self.batch * self.heads)](
            self.v, self.gamma, self.or_q(self.mu), self.or_q(self.pos), numbers, self.length, *self.strides[6:], num_warps=1,
            **options,
        )  # fmt: skip
        return numbers

    def _options(self, *names: str) -> dict[str, Any]:
        return {name: self.options[name] for name in names}

    def _forward_in_chunks(self, S: Tensor) -> tuple[Tensor, Tensor, "_Kept"]:
        config, chunks, numbers = self.config, self.borders, self._numbers()
        slots, parts = self.programs(config.slots_chunk)
        cut = self.cut(slots, config.warps_chunk, config.parts)
        y, last = self._outputs(parts), self.new(self.batch, self.heads, self.m, self.d)
        borders = self.new(self.batch, self.heads, chunks, self.m, self.d)
        unsafe = self.new(parts, self.batch, self.heads, chunks, dtype=torch.int32)
        scales = self.new(self.batch, self.heads, chunks, self.m)
        rows = self.new(self.batch * self.heads, parts, chunks, 2, self.border, slots)
        memory = own_of_chunks(self.border, slots, int(self.options["BD"]))
        _chunks()[0].lattice_chunk_forward_kernel[(parts, self.batch * self.heads)](
            self.q, self.k, self.v, self.gamma, self.or_q(self.mu), self.or_q(self.pos), numbers, S.mT.contiguous(), self.S0, y,
            borders, last, unsafe, rows, scales, self.new(parts * self.batch * self.heads, memory), self.length, *self.strides,
            OWN=memory, STEPS=config.steps, GROUP=config.steps_chunk, **cut, **self.options,
        )  # fmt: skip
        options = self._options("D", "M", "H", "HAS_POS", "EVEN", "BORDER", "BD", "num_stages")
        _chunks()[0].lattice_chunk_output_kernel[(chunks, self.batch * self.heads, parts)](
            self.q, self.v, numbers, self.S0, borders, unsafe, rows, y, self.length, *self.strides[:3], *self.strides[6:9],
            BM=slots, num_warps=config.warps_beside, **options,
        )  # fmt: skip
        leaving = last.mT.contiguous()
        return self._summed(y), leaving, (borders, last, unsafe, scales)

    def backward(self, kept: "_Kept", dy: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, v, gamma, mu, what is loaded and what entered."""
        config, (borders, last, unsafe, scales) = self.config, kept
        slots, parts = self.programs(config.slots_chunk if self.chunked else config.slots_back)
        if self.chunked:
            cut = self.cut(slots, config.warps_chunk_back, config.parts_back)
        else:
            cut = self.cut(
                slots, *((config.warps_all_back, config.parts_all_back) if self.all else (config.warps_back, config.parts_back))
            )
        shape, steps, dy = (self.batch, self.length, self.heads), config.steps_back, launch_utils.contiguous_last_dim(dy)
        dq, dk = (self.new(*shape, self.m, dtype=x.dtype) for x in (self.q, self.k))
        dv = self.new(parts, *shape, self.d, dtype=self.v.dtype if parts == 1 else torch.float32)
        dgamma, dmu = self.new(parts, *shape), None if self.mu is None else self.new(parts, *shape)
        dfirst = self.new(self.batch, self.heads, self.m, self.d)
        dloaded = torch.zeros_like(dfirst)
        memory = own(self.border, steps, slots, int(self.options["BD"]), self.variant)
        memory += slots * int(self.options["BD"]) if self.chunked else 0
        states = self.new(parts * self.batch * self.heads, memory)
        found = (dq, dk, dv, dgamma, self.or_q(dmu), dfirst, dloaded, self.length, *self.strides, *launch_utils.strides(dy))
        options = {"STEPS": steps, "OWN": memory, **cut, **self.options}
        arriving, grid = dlast.mT.contiguous(), (parts, self.batch * self.heads)
        gates = (self.gamma, self.or_q(self.mu), self.or_q(self.pos))
        if self.chunked:
            numbers, chunks = self._numbers(), self.borders
            rows = self.new(self.batch * self.heads, parts, chunks, _chunks()[1].ROWS.value, self.border, slots)
            dlasts = self.new(self.batch, self.heads, chunks, self.m, self.d)
            each, beside = (chunks, self.batch * self.heads, parts), {"BM": slots, "num_warps": config.warps_beside}
            common = self._options("D", "M", "H", "HAS_POS", "EVEN", "BORDER", "BD", "num_stages") | beside
            _chunks()[1].lattice_backward_pre_kernel[each](
                self.q, self.k, self.v, numbers, self.S0, borders, unsafe, rows, dy, dq, self.length, *self.strides[:9],
                *launch_utils.strides(dy), VARIANT=self.options["VARIANT"], GROUP=config.steps_chunk, **common,
            )  # fmt: skip
            _chunks()[1].lattice_chunk_backward_kernel[grid](
                self.q, self.k, self.v, *gates, numbers, self.S0, borders, last, unsafe, rows, scales, dy, arriving, states, dlasts,
                *found, GROUP=config.steps_chunk, **options,
            )  # fmt: skip
            _chunks()[1].lattice_backward_post_kernel[each](
                self.v, numbers, self.S0, borders, unsafe, rows, dlasts, dy, dv, dgamma, self.or_q(dmu), self.length,
                *self.strides[6:9], *launch_utils.strides(dy), FORGET=self.options["FORGET"], **common,
            )  # fmt: skip
        else:
            _backward().lattice_backward_kernel[grid](
                self.q, self.k, self.v, *gates, self.S0, borders, dy, arriving, states, *found, PROJECT=self.project, **options
            )
        return (
            dq,
            dk,
            dv[0] if parts == 1 else dv.sum(0).to(self.v.dtype),
            (dgamma[0] if parts == 1 else dgamma.sum(0)).to(self.gamma.dtype),
            None if dmu is None or self.mu is None else (dmu[0] if parts == 1 else dmu.sum(0)).to(self.mu.dtype),
            dloaded.sum(0).mT,
            dfirst.mT,
        )


class _Lattice(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, mu: Tensor | None, S0: Tensor, S: Tensor, rule: Rule,
        pos: Tensor | None, config: LaunchConfig,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        y, last, kept = _Run(q, k, v, gamma, mu, S0, rule, pos, config).forward(S, keep=any(ctx.needs_input_grad))
        ctx.save_for_backward(q, k, v, gamma, mu, S0, pos, *kept)
        ctx.rule, ctx.config = rule, config
        return y, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dlast: Tensor) -> tuple[Any, ...]:
        q, k, v, gamma, mu, S0, pos, *kept = ctx.saved_tensors
        run = _Run(q, k, v, gamma, mu, S0, ctx.rule, pos, ctx.config)
        grads = run.backward(kept, dy, dlast)
        return (*(grad if want else None for want, grad in zip(ctx.needs_input_grad[:7], grads, strict=True)), *(None,) * 3)


@cache
def _backward() -> ModuleType:
    from baton.kernels.lattice import triton_backward

    return triton_backward


@cache
def _chunks() -> tuple[ModuleType, ModuleType]:
    from baton.kernels.lattice import triton_chunk_backward, triton_chunk_forward

    return triton_chunk_forward, triton_chunk_backward
