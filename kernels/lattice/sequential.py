"""Lattice's recurrence on the slots themselves, for every variant and option.

It runs `step_loop` on the slots and costs a few passes over d x m numbers per token.
"""

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from baton.kernels.lattice.step_loop import DocumentStarts, StepLoop, Tokens, known_h
from baton.kernels.lattice.variant import UpdateRule


def run_sequential(rule: UpdateRule, tokens: Tokens, starts: DocumentStarts | None, S: Tensor) -> tuple[Tensor, Tensor]:
    """Run a chunk of tokens, shaped as in `step_loop`.

    S: initial slots [N, d, m]. With projection they have norm 1, and their gradient's component along them is meaningless.

    Returns:
        y, [L, N, d, 1], and the final slots, with exact gradients to tokens, S and the slots that documents start with.
    """
    S0 = None if starts is None else starts.slots
    return _Sequential.apply(rule, starts, S0, *tokens, S)


class _Sequential(Function):
    @staticmethod
    def forward(
        ctx: Any, rule: UpdateRule, starts: DocumentStarts | None, S0: Tensor | None, *tensors: Any
    ) -> tuple[Tensor, Tensor]:
        q, k, v, gamma, mu, tau, S = tensors
        ctx.loop = loop = StepLoop(rule, starts, known_h(rule, v), k, gamma, mu, tau, S)
        ctx.save_for_backward(q)
        return loop.states[1:] @ q.mT, loop.states[-1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dS: Tensor) -> tuple[Any, ...]:
        (q,), loop = ctx.saved_tensors, ctx.loop
        grads = loop.backward(dy, q, dS)
        dq = dy.mT @ loop.states[1:]
        return None, None, grads.dloaded, dq, grads.k, known_h(loop.rule, grads.h), grads.gamma, grads.mu, grads.tau, grads.S
