"""All-to-all context parallelism, compared in exchange.py: ranks exchange tokens for heads, so that each runs 1 / P of the heads
over the whole sequence.

Between the two all-to-alls a rank computes what a tensor-parallel rank would, for all P T tokens. Each tensor is sent once, in its
own dtype, and copied once. For Mamba and Longhorn the exchange encloses the convolution and the scan, as in megatron-core's Mamba
with context parallelism: x and z are exchanged before the convolution, and y after the scan. x_proj's output is a sum over all
channels, to which each rank adds its part. This takes half the bytes of exchanging the recurrences' own inputs and outputs. For
other mixers the inputs and outputs of `run_recurrence` are exchanged.

Parameters are whole on every rank, as in the other forms; a rank reads its share, and the gradient of the others' is zero.

Shapes: B batch, T tokens of a rank, P ranks, H heads or channels, D channels.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels.protocol import Inputs, Recurrence, State
from baton.kernels.short_conv.recurrence import ShortConv
from baton.models import mixer
from baton.models.ssm_block import SSMBlock
from baton.parallel.context_parallel import ContextLink

_CONV = ShortConv("silu")


class HeadExchange:
    """This rank's part in the exchange. pos: of the whole sequence, [B, P T]. messages, bytes: sent by this rank so far."""

    def __init__(self, rank: int, ranks: int, pos: Tensor) -> None:
        self.rank, self.ranks, self.pos = rank, ranks, pos
        self.messages = self.bytes = 0

    def to_heads(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """[B, T, H, ..] of this rank's tokens each to [B, P T, H / P, ..] of its heads."""
        found: tuple[Tensor, ...] = _ToHeads.apply(self, *xs)
        return found

    def to_tokens(self, x: Tensor) -> Tensor:
        """[B, P T, H / P, ..] of this rank's heads to [B, T, H, ..] of its tokens."""
        found: Tensor = _ToTokens.apply(self, x)
        return found

    def share(self, x: Tensor, dim: int = 0) -> Tensor:
        """This rank's rows, or columns, of a parameter."""
        return x.chunk(self.ranks, dim)[self.rank]

    def run_recurrence(
        self, link: ContextLink | None, recurrence: Recurrence, inputs: Inputs, pos: Tensor, state: State | None, where: str,
        need_final_state: bool = True,
    ) -> tuple[Tensor, State]:  # fmt: skip
        """In the place of `parallel.state_passing.run_recurrence`, for inputs that all have heads; no State leaves, for nothing
        comes behind."""
        num_time_inputs = recurrence.num_time_inputs
        own = (*self.to_heads(*inputs[:num_time_inputs]), *map(self.share, inputs[num_time_inputs:]))
        return self.to_tokens(recurrence.forward_no_state(own, self.pos, None)), {}

    def gated_scan(self, block: SSMBlock, x_BTM: Tensor) -> tuple[Tensor, State]:
        """In the place of `SSMBlock.forward`."""
        rank, d_state, step = block.config.step_rank(block.context.d_model), block.config.d_state, block.config.step_name
        assert isinstance(block.D, Tensor)
        x, z = self.to_heads(*block.in_proj(x_BTM, block.in_proj.local_splits))
        x, _ = _CONV.run((x, self.share(block.conv_weight), self.share(block.conv_bias)), self.pos, None)
        x, part = _Beside.apply(x, self.share(block.x_proj.weight, 1).to(x.dtype))
        dt_low_rank, B, C = _Summed.apply(self, part).split([rank, d_state, d_state], dim=-1)
        dt_weight = block.get_parameter(f"{step}_proj.weight")
        dt = F.linear(dt_low_rank, self.share(dt_weight).to(dt_low_rank.dtype))
        inputs = block.scan_inputs(x, dt, B, C, block.D, z, block.get_parameter(f"{step}_bias"))
        num_time_inputs = block.recurrence.num_time_inputs
        y, _ = block.recurrence.run((*inputs[:num_time_inputs], *map(self.share, inputs[num_time_inputs:])), self.pos, None)
        return block.out_proj(self.to_tokens(y)), {}

    def move_to_heads(self, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """All are on their way before the first is waited for; received rows lie as they should where B is 1."""
        begun = [self._begin(x.unflatten(2, (self.ranks, -1)).movedim(2, 0)) for x in xs]
        return tuple(wait().movedim(0, 1).flatten(1, 2) for wait in begun)

    def move_to_tokens(self, xs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The way back: where B is 1 rows are sent as they lie."""
        begun = [self._begin(x.unflatten(1, (self.ranks, -1)).movedim(1, 0)) for x in xs]
        return tuple(wait().movedim(0, 2).flatten(2, 3) for wait in begun)

    def sum(self, x: Tensor) -> Tensor:
        """x, which is overwritten, over all ranks."""
        dist.all_reduce(x)
        self._count(2 * x.nbytes)
        return x

    def _begin(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin to send x[p] to rank p; the result waits for what they sent, in this order."""
        x = x.contiguous()
        found = torch.empty_like(x)
        work = dist.all_to_all_single(found, x, async_op=True)
        self._count(x.nbytes)

        def wait() -> Tensor:
            work.wait()
            return found

        return wait

    def _count(self, nbytes: int) -> None:
        """Of a collective that sends all but this rank's own share of so many bytes."""
        self.messages += 1
        self.bytes += nbytes * (self.ranks - 1) // self.ranks


@contextmanager
def over_heads(exchange: HeadExchange) -> Iterator[None]:
    """Within it all that models carry is exchanged for heads."""

    def forward(self: SSMBlock, x_BTM: Tensor, *given: Any) -> tuple[Tensor, State]:
        return exchange.gated_scan(self, x_BTM)

    before = mixer.run_recurrence, SSMBlock.forward
    mixer.run_recurrence, SSMBlock.forward = exchange.run_recurrence, forward  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        mixer.run_recurrence, SSMBlock.forward = before  # type: ignore[method-assign]


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: HeadExchange, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return exchange.move_to_heads(xs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        return (None, *ctx.exchange.move_to_tokens(dys))


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: HeadExchange, x: Tensor) -> Tensor:
        ctx.exchange = exchange
        return exchange.move_to_tokens([x])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return (None, *ctx.exchange.move_to_heads([dy]))


class _Summed(torch.autograd.Function):
    """A sum over the ranks of parts, which each then uses for its own heads: so its gradient is a sum as well."""

    @staticmethod
    def forward(ctx: Any, exchange: HeadExchange, part: Tensor) -> Tensor:
        ctx.exchange = exchange
        ctx.mark_dirty(part)
        return exchange.sum(part)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return None, ctx.exchange.sum(dy.clone(memory_format=torch.contiguous_format))


class _Beside(torch.autograd.Function):
    """x, for what else reads it, and x w^T: as `parallel.linear`, its gradient from there is the product's starting value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, w)
        return x.view_as(x), F.linear(x, w)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        rows = dy.flatten(0, 1)
        return torch.addmm(dx.flatten(0, 1), rows, w).view_as(x), rows.mT @ x.flatten(0, 1)
