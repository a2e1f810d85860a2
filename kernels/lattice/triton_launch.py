"""Launches of Lattice's Triton kernels, token by token or chunk by chunk, with their gradient.

The kernels have no thresholds (`no_kernel`); `chunked` computes them. With projection, initial slots and S0 have norm 1, which
`chunked` ensures. Without projection every variant runs token by token. The backward pass keeps the arguments and the checkpointed
slots. The kernels store slots as [m, d], callers as [d, m].
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels.common import launch_utils
from baton.kernels.common.launch_utils import LazyModule
from baton.kernels.compile import launch_configs
from baton.kernels.compile.aot import on_gpu
from baton.kernels.lattice.variant import UpdateRule, Variant

_forward = LazyModule("baton.kernels.lattice.triton_forward")
_backward = LazyModule("baton.kernels.lattice.triton_backward")
_chunk_forward = LazyModule("baton.kernels.lattice.triton_chunk_forward")
_chunk_backward = LazyModule("baton.kernels.lattice.triton_chunk_backward")

KERNEL = "lattice"


@dataclass(frozen=True)
class LaunchConfig:
    """Block sizes of the kernels; powers of two.

    Attributes:
        slots, slots_backward: slots of a program in encoding and similarity, forward and backward. Where they are not all of a
            head's, sums over slots are stored in parts. In decoding a program holds all slots.
        warps, warps_backward: warps of such a program.
        parts, parts_backward: parts that d is split into: with more parts, sums over d involve fewer warp lanes, and sums over
            slots more.
        warps_dec, warps_dec_backward, parts_dec, parts_dec_backward: the same in decoding.
        block_t: tokens loaded together, one block ahead of the computation; divides checkpoint_interval.
        block_t_backward: tokens whose slots are in registers together in the backward pass; divides checkpoint_interval.
        checkpoint_interval: tokens between two checkpointed states.
        chunk: tokens of a chunk in encoding and similarity, a power of two from 16; also the checkpoint interval there. 0: no
        chunks.
        slots_chunk, warps_chunk, warps_chunk_backward: of a program that goes from chunk to chunk, at least 16 slots. parts,
            parts_backward, block_t and block_t_backward are those of a chunk that runs token by token.
        group_t: tokens of a chunk whose sequential steps are in registers together; divides chunk.
        warps_parallel: warps of programs that compute one chunk each.
    """

    slots: int = 16
    slots_backward: int = 16
    warps: int = 1
    warps_backward: int = 1
    parts: int = 2
    parts_backward: int = 4
    warps_dec: int = 4
    warps_dec_backward: int = 8
    parts_dec: int = 2
    parts_dec_backward: int = 2
    block_t: int = 4
    block_t_backward: int = 2
    checkpoint_interval: int = 32
    chunk: int = 32
    slots_chunk: int = 64
    warps_chunk: int = 4
    warps_chunk_backward: int = 4
    group_t: int = 8
    warps_parallel: int = 4


_DEFAULT = LaunchConfig()
_Saved = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Checkpointed slots [B, H, C, m, d]; chunk by chunk also the final slots in the kernels' layout, which chunks are not safe, and
the scales of the slots."""


def shape_of(rule: UpdateRule, d: int, m: int) -> launch_configs.Shape:
    """The table's key. Rules without projection (the paper's OSR) are tuned separately."""
    return {
        "variant": rule.variant if rule.project else f"osr-{rule.variant}",
        "d": launch_utils.next_power_of_2(d),
        "m": launch_utils.next_power_of_2(m),
    }


def no_kernel(*, sparse: bool) -> str | None:
    """Why a GPU computes these options in PyTorch; None: the kernels support them. See `Recurrence.no_kernel`."""
    return "thresholds of slots (L1, sparsity > 0) are not in its kernels" if sparse else None


def use_triton(x: Tensor, compute_dtype: torch.dtype, *, sparse: bool) -> bool:
    """Whether these kernels compute it: on a GPU, in float32, and with options that they support."""
    return on_gpu(x) and compute_dtype == torch.float32 and no_kernel(sparse=sparse) is None


def lattice_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma: Tensor,
    S0: Tensor,
    *,
    mu: Tensor | None,
    rule: UpdateRule,
    pos: Tensor | None,
    S: Tensor,
    config: LaunchConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """As `op.lattice` without thresholds.

    S0, S: the slots that documents start with, [heads, d, m], and the initial ones, [batch, heads, d, m], with gradients to both.
    With projection they have norm 1, their gradients' components along the slots are meaningless, and mu is at least MIN_GATE.
    """
    if config is None:
        batch, length, heads, m = q.shape
        sizes = {"batch": batch, "tokens": length, "heads": heads, "d": v.shape[3], "m": m}
        config = launch_configs.choose(KERNEL, _DEFAULT, q.device, shape_of(rule, v.shape[3], m), sizes)
    y, S_final = _Lattice.apply(q, k, v, gamma, mu, S0, S, rule, launch_utils.int32_positions(pos), config)
    return y, S_final


def scratch_size(checkpoint_interval: int, steps: int, slots: int, d: int, variant: Variant) -> int:
    """Numbers in the scratch memory of a program of `triton_backward`."""
    return checkpoint_interval // steps * slots * d + checkpoint_interval * (2 * slots + (d if variant == "dec" else 0) + 1)


def chunk_scratch_size(chunk: int, slots: int, d: int) -> int:
    """Numbers in the scratch memory of a program of `triton_chunk_forward`."""
    return 2 * chunk * chunk + 2 * chunk * slots + slots * d


class _LatticeLaunch:
    """Shapes and launches of one call."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, mu: Tensor | None, S0: Tensor, rule: UpdateRule, pos: Tensor | None,
        config: LaunchConfig,
    ) -> None:  # fmt: skip
        self.q, self.k, self.v = (launch_utils.contiguous_last_dim(x) for x in (q, k, v))
        self.gamma, self.mu, self.S0, self.pos, self.config = gamma, mu, S0.mT.contiguous(), pos, config
        self.variant, self.decoding = rule.variant, rule.variant == "dec"
        self.project = rule.project
        self.batch, self.length, self.heads, self.m = q.shape
        self.d = v.shape[3]
        self.chunked = config.chunk > 0 and not self.decoding and rule.project
        self.checkpoint_interval = config.chunk if self.chunked else config.checkpoint_interval
        self.checkpoints = -(-self.length // self.checkpoint_interval)
        self.strides = launch_utils.strides(self.q, self.k, self.v, gamma, mu)
        kinds = {"dec": _forward.DEC, "enc": _forward.ENC, "sim": _forward.SIM}
        self.options = {
            "D": self.d, "M": self.m, "H": self.heads, "VARIANT": kinds[rule.variant].value,
            "FORGET": mu is not None, "HAS_POS": pos is not None, "CHECKPOINT_INTERVAL": self.checkpoint_interval,
            "BLOCK_D": max(16 if self.chunked else 4, launch_utils.next_power_of_2(self.d)),
            "EVEN_T": self.length % self.checkpoint_interval == 0, "num_stages": 1,
        }  # fmt: skip

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.q.device)

    def or_q(self, x: Tensor | None) -> Tensor:
        """x, or q as a pointer that is not read."""
        return self.q if x is None else x

    def programs(self, slots: int) -> tuple[int, int]:
        """Slots of a program, and programs of a head."""
        wanted = max(16 if self.chunked else 4, launch_utils.next_power_of_2(self.m))
        slots = wanted if self.decoding else min(slots, wanted)
        return slots, -(-self.m // slots)

    def block_options(self, slots: int, warps: int, parts: int) -> dict[str, int]:
        """Layout of a program's slots: at least 4 slots for each warp, and 4 values in a part."""
        warps = min(warps, slots // 4)
        return {"BLOCK_M": slots, "PARTS": min(parts, int(self.options["BLOCK_D"]) // 4), "WARPS": warps, "num_warps": warps}

    def forward(self, S: Tensor, *, keep: bool) -> tuple[Tensor, Tensor, "_Saved"]:
        """y, the final slots and, if keep, what `backward` needs."""
        config = self.config
        if self.chunked:
            return self._forward_in_chunks(S)
        slots, parts = self.programs(config.slots)
        block_options = self.block_options(
            slots, *((config.warps_dec, config.parts_dec) if self.decoding else (config.warps, config.parts))
        )
        y, last = self._empty_outputs(parts), self.new(self.batch, self.heads, self.m, self.d)
        # last: a pointer of the same dtype and alignment, so that it is the same compiled kernel
        checkpoints = self.new(self.batch, self.heads, self.checkpoints, self.m, self.d) if keep else last
        _forward.lattice_forward_kernel[(parts, self.batch * self.heads)](
            self.q, self.k, self.v, self.gamma, self.or_q(self.mu), self.or_q(self.pos), S.mT.contiguous(), self.S0, y,
            checkpoints, last, self.length, *self.strides, 0 if keep else -1, BLOCK_T=config.block_t,
            PROJECT=self.project, **block_options,
            **self.options,
        )  # fmt: skip
        return self._sum_parts(y), last.mT.contiguous(), (checkpoints if keep else None, None, None, None)

    def _empty_outputs(self, parts: int) -> Tensor:
        dtype = self.q.dtype if parts == 1 else torch.float32
        return self.new(parts, self.batch, self.length, self.heads, self.d, dtype=dtype)

    def _sum_parts(self, y: Tensor) -> Tensor:
        return y[0] if y.shape[0] == 1 else y.sum(0).to(self.q.dtype)

    def _gram(self) -> Tensor:
        """The scalars that the sequential steps of each chunk read; see `store_gram`."""
        gram = self.new(self.batch * self.heads, self.checkpoints, self.checkpoint_interval + 3, self.checkpoint_interval)
        options = self._options("D", "H", "FORGET", "HAS_POS", "EVEN_T", "CHECKPOINT_INTERVAL", "BLOCK_D", "num_stages")
        _chunk_forward.lattice_chunk_gram_kernel[(self.checkpoints, self.batch * self.heads)](
            self.v, self.gamma, self.or_q(self.mu), self.or_q(self.pos), gram, self.length, *self.strides[6:], num_warps=1,
            **options,
        )  # fmt: skip
        return gram

    def _options(self, *names: str) -> dict[str, Any]:
        return {name: self.options[name] for name in names}

    def _forward_in_chunks(self, S: Tensor) -> tuple[Tensor, Tensor, "_Saved"]:
        config, chunks, gram = self.config, self.checkpoints, self._gram()
        slots, parts = self.programs(config.slots_chunk)
        block_options = self.block_options(slots, config.warps_chunk, config.parts)
        y, last = self._empty_outputs(parts), self.new(self.batch, self.heads, self.m, self.d)
        checkpoints = self.new(self.batch, self.heads, chunks, self.m, self.d)
        unsafe = self.new(parts, self.batch, self.heads, chunks, dtype=torch.int32)
        scales = self.new(self.batch, self.heads, chunks, self.m)
        rows = self.new(self.batch * self.heads, parts, chunks, 2, self.checkpoint_interval, slots)
        scratch_numel = chunk_scratch_size(self.checkpoint_interval, slots, int(self.options["BLOCK_D"]))
        _chunk_forward.lattice_chunk_forward_kernel[(parts, self.batch * self.heads)](
            self.q, self.k, self.v, self.gamma, self.or_q(self.mu), self.or_q(self.pos), gram, S.mT.contiguous(), self.S0, y,
            checkpoints, last, unsafe, rows, scales, self.new(parts * self.batch * self.heads, scratch_numel), self.length,
            *self.strides,
            SCRATCH=scratch_numel, BLOCK_T=config.block_t, GROUP_T=config.group_t, **block_options, **self.options,
        )  # fmt: skip
        options = self._options("D", "M", "H", "HAS_POS", "EVEN_T", "CHECKPOINT_INTERVAL", "BLOCK_D", "num_stages")
        _chunk_forward.lattice_chunk_output_kernel[(chunks, self.batch * self.heads, parts)](
            self.q, self.v, gram, self.S0, checkpoints, unsafe, rows, y, self.length, *self.strides[:3], *self.strides[6:9],
            BLOCK_M=slots, num_warps=config.warps_parallel, **options,
        )  # fmt: skip
        S_final = last.mT.contiguous()
        return self._sum_parts(y), S_final, (checkpoints, last, unsafe, scales)

    def backward(self, saved: "_Saved", dy: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, v, gamma, mu, S0 and the initial slots."""
        config, (checkpoints, last, unsafe, scales) = self.config, saved
        slots, parts = self.programs(config.slots_chunk if self.chunked else config.slots_backward)
        if self.chunked:
            block_options = self.block_options(slots, config.warps_chunk_backward, config.parts_backward)
        else:
            block_options = self.block_options(
                slots,
                *(
                    (config.warps_dec_backward, config.parts_dec_backward)
                    if self.decoding
                    else (config.warps_backward, config.parts_backward)
                ),
            )
        shape, steps, dy = (self.batch, self.length, self.heads), config.block_t_backward, launch_utils.contiguous_last_dim(dy)
        dq, dk = (self.new(*shape, self.m, dtype=x.dtype) for x in (self.q, self.k))
        dv = self.new(parts, *shape, self.d, dtype=self.v.dtype if parts == 1 else torch.float32)
        dgamma, dmu = self.new(parts, *shape), None if self.mu is None else self.new(parts, *shape)
        dS_initial = self.new(self.batch, self.heads, self.m, self.d)
        dS0 = torch.zeros_like(dS_initial)
        scratch_numel = scratch_size(self.checkpoint_interval, steps, slots, int(self.options["BLOCK_D"]), self.variant)
        scratch_numel += slots * int(self.options["BLOCK_D"]) if self.chunked else 0
        scratch = self.new(parts * self.batch * self.heads, scratch_numel)
        outputs = (dq, dk, dv, dgamma, self.or_q(dmu), dS_initial, dS0, self.length, *self.strides, *launch_utils.strides(dy))
        options = {"BLOCK_T": steps, "SCRATCH": scratch_numel, **block_options, **self.options}
        dS_final, grid = dlast.mT.contiguous(), (parts, self.batch * self.heads)
        gates = (self.gamma, self.or_q(self.mu), self.or_q(self.pos))
        if self.chunked:
            gram, chunks = self._gram(), self.checkpoints
            rows = self.new(self.batch * self.heads, parts, chunks, _chunk_backward.ROWS.value, self.checkpoint_interval, slots)
            dlasts = self.new(self.batch, self.heads, chunks, self.m, self.d)
            chunk_grid = (chunks, self.batch * self.heads, parts)
            common = self._options("D", "M", "H", "HAS_POS", "EVEN_T", "CHECKPOINT_INTERVAL", "BLOCK_D", "num_stages")
            common |= {"BLOCK_M": slots, "num_warps": config.warps_parallel}
            _chunk_backward.lattice_backward_pre_kernel[chunk_grid](
                self.q, self.k, self.v, gram, self.S0, checkpoints, unsafe, rows, dy, dq, self.length, *self.strides[:9],
                *launch_utils.strides(dy), VARIANT=self.options["VARIANT"], GROUP_T=config.group_t, **common,
            )  # fmt: skip
            _chunk_backward.lattice_chunk_backward_kernel[grid](
                self.q, self.k, self.v, *gates, gram, self.S0, checkpoints, last, unsafe, rows, scales, dy, dS_final, scratch,
                dlasts,
                *outputs, GROUP_T=config.group_t, **options,
            )  # fmt: skip
            _chunk_backward.lattice_backward_post_kernel[chunk_grid](
                self.v, gram, self.S0, checkpoints, unsafe, rows, dlasts, dy, dv, dgamma, self.or_q(dmu), self.length,
                *self.strides[6:9], *launch_utils.strides(dy), FORGET=self.options["FORGET"], **common,
            )  # fmt: skip
        else:
            _backward.lattice_backward_kernel[grid](
                self.q, self.k, self.v, *gates, self.S0, checkpoints, dy, dS_final, scratch, *outputs, PROJECT=self.project,
                **options,
            )  # fmt: skip
        return (
            dq,
            dk,
            dv[0] if parts == 1 else dv.sum(0).to(self.v.dtype),
            (dgamma[0] if parts == 1 else dgamma.sum(0)).to(self.gamma.dtype),
            None if dmu is None or self.mu is None else (dmu[0] if parts == 1 else dmu.sum(0)).to(self.mu.dtype),
            dS0.sum(0).mT,
            dS_initial.mT,
        )


class _Lattice(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, mu: Tensor | None, S0: Tensor, S: Tensor, rule: UpdateRule,
        pos: Tensor | None, config: LaunchConfig,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        y, last, saved = _LatticeLaunch(q, k, v, gamma, mu, S0, rule, pos, config).forward(S, keep=any(ctx.needs_input_grad))
        ctx.save_for_backward(q, k, v, gamma, mu, S0, pos, *saved)
        ctx.rule, ctx.config = rule, config
        return y, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dlast: Tensor) -> tuple[Any, ...]:
        q, k, v, gamma, mu, S0, pos, *saved = ctx.saved_tensors
        launch = _LatticeLaunch(q, k, v, gamma, mu, S0, ctx.rule, pos, ctx.config)
        grads = launch.backward(saved, dy, dlast)
        return (*(grad if want else None for want, grad in zip(ctx.needs_input_grad[:7], grads, strict=True)), *(None,) * 3)
