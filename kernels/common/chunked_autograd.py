"""Runs a recurrence that is defined for one chunk of tokens over a whole sequence: shared by GLA, GSA, the delta rule and Lattice.

A recurrence provides only the computation of one chunk, in plain differentiable PyTorch. The forward pass runs the chunks in order
and keeps the State between them. The backward pass runs each chunk again with a graph, from the last to the first, with the
gradient of its final State. Gradients are exact, memory grows by one State per chunk, and a chunk's intermediate tensors exist for
one chunk at a time.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels.common.autocast import without_autocast
from baton.kernels.protocol import Inputs, State

Step = Callable[[Inputs, Tensor | None, State], tuple[Tensor, State]]
"""(inputs of a chunk, its pos or None, entering State) -> (outputs [batch, L, ...], leaving State); differentiable."""


def state_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if all tensors are float64, else float32: the dtype of states and gates."""
    return torch.float64 if {x.dtype for x in tensors} == {torch.float64} else torch.float32


def run_chunked(
    step: Step, inputs: Inputs, num_time_inputs: int, *, pos: Tensor | None, state: State, chunk: int, last: Step | None = None
) -> tuple[Tensor, State]:
    """Run `step` over [batch, T, ...] inputs, `chunk` tokens at a time.

    Args:
        inputs: the first `num_time_inputs` have a time dimension, the others are parameters.
        state: the entering State; tensors that are not floating point are carried without a gradient.
        last: replaces `step` for the last chunk where the final State is not needed; returns {} for its State.

    Returns:
        outputs [batch, T, ...] and the final State ({} with `last`), with exact gradients to inputs and state.
    """
    names = tuple(state)
    y, *leaves = _RunChunked.apply(step, last or step, num_time_inputs, names, chunk, pos, *inputs, *state.values())
    return y, dict(zip(names if last is None else (), leaves, strict=True))


def _vjp(outputs: list[Tensor], leaves: list[Tensor], cotangents: list[Tensor | None]) -> list[Tensor | None]:
    """A gradient for each leaf, None for one that has none; outputs that no leaf reaches count nothing."""
    reached = [(y, dy) for y, dy in zip(outputs, cotangents, strict=True) if y.requires_grad]
    wanted = [x for x in leaves if x.requires_grad]
    found = iter(
        torch.autograd.grad([y for y, _ in reached], wanted, [dy for _, dy in reached], allow_unused=True, materialize_grads=True)
    )
    return [next(found) if x.requires_grad else None for x in leaves]


def _piece(inputs: Inputs, num_time_inputs: int, begin: int, end: int) -> Inputs:
    return (*(x[:, begin:end] for x in inputs[:num_time_inputs]), *inputs[num_time_inputs:])


def _alone(x: Tensor) -> Tensor:
    """A State without what lies around it: a view, as of a chunk's last token, would keep the whole chunk alive."""
    return x.clone() if x.untyped_storage().nbytes() > x.numel() * x.element_size() else x


class _RunChunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        step: Step,
        last: Step,
        num_time_inputs: int,
        names: tuple[str, ...],
        chunk: int,
        pos: Tensor | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        inputs, state = tensors[: len(tensors) - len(names)], dict(zip(names, tensors[len(tensors) - len(names) :], strict=True))
        length, kept = inputs[0].shape[1], any(ctx.needs_input_grad)
        outputs: list[Tensor] = []
        borders: list[Tensor] = []
        with without_autocast(inputs[0]):
            for begin in range(0, length, chunk):
                end = min(begin + chunk, length)
                if kept:
                    borders.extend(state.values() if begin == 0 else map(_alone, state.values()))
                run = step if end < length else last
                y, state = run(_piece(inputs, num_time_inputs, begin, end), None if pos is None else pos[:, begin:end], state)
                outputs.append(y)
        ctx.step, ctx.last, ctx.num_time_inputs, ctx.names, ctx.chunk, ctx.pos = step, last, num_time_inputs, names, chunk, pos
        ctx.save_for_backward(*inputs, *borders)
        ctx.n_inputs = len(inputs)
        # contiguous copies: an input handed through unchanged may not be an output, and views would keep the piece alive
        leaves = [leaf.clone(memory_format=torch.contiguous_format) for leaf in state.values()]
        ctx.mark_non_differentiable(*(leaf for leaf in leaves if not leaf.is_floating_point()))
        return torch.cat(outputs, dim=1), *leaves

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *dleaves: Tensor) -> tuple[Any, ...]:
        saved, num_time_inputs, chunk, pos = ctx.saved_tensors, ctx.num_time_inputs, ctx.chunk, ctx.pos
        inputs, borders = saved[: ctx.n_inputs], saved[ctx.n_inputs :]
        length, width = inputs[0].shape[1], len(ctx.names)
        grads = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in inputs]
        cotangents: list[Tensor | None] = list(dleaves)
        for number in reversed(range(-(-length // chunk))):
            begin, end = number * chunk, min((number + 1) * chunk, length)
            with torch.enable_grad(), without_autocast(dy):
                leaves = [x.detach().requires_grad_() for x in _piece(inputs, num_time_inputs, begin, end)]
                entering = [
                    x.detach().requires_grad_(x.is_floating_point()) for x in borders[number * width : (number + 1) * width]
                ]
                run = ctx.step if end < length else ctx.last
                y, leaving = run(
                    tuple(leaves), None if pos is None else pos[:, begin:end], dict(zip(ctx.names, entering, strict=True))
                )
                found = _vjp([y, *leaving.values()], [*leaves, *entering], [dy[:, begin:end], *cotangents])
            for n, (grad, part) in enumerate(zip(grads, found, strict=False)):
                assert part is not None  # inputs are floating point
                if n < num_time_inputs:
                    grad[:, begin:end] = part
                else:
                    grad += part
            cotangents = list(found[len(leaves) :])
        wanted = zip(ctx.needs_input_grad[6:], [*grads, *cotangents], strict=True)
        return (*(None,) * 6, *(grad if want else None for want, grad in wanted))
