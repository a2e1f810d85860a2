"""The recurrence on the slots themselves: what every variant and option can run as.

The one thing to know: it is `step_loop` with the slots as they are, and costs a few passes over d x m numbers per token.
"""

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from baton.kernels.lattice.step_loop import Starts, Tokens, Walk, written
from baton.kernels.lattice.variant import Rule


def run_steps(rule: Rule, tokens: Tokens, starts: Starts | None, S: Tensor) -> tuple[Tensor, Tensor]:
    """A chunk of tokens, shaped as `step_loop` says.

    S: entering slots [N, d, m]; with projection they have norm 1, and their gradient's part along them means nothing.

    Returns:
        what is read, [L, N, d, 1], and the leaving slots, with exact gradients to tokens, S and what is loaded at starts.
    """
    loaded = None if starts is None else starts.slots
    return _Steps.apply(rule, starts, loaded, *tokens, S)


class _Steps(Function):
    @staticmethod
    def forward(ctx: Any, rule: Rule, starts: Starts | None, loaded: Tensor | None, *tensors: Any) -> tuple[Tensor, Tensor]:
        q, k, v, gamma, mu, tau, S = tensors
        ctx.walk = walk = Walk(rule, starts, written(rule, v), k, gamma, mu, tau, S)
        ctx.save_for_backward(q)
        return walk.states[1:] @ q.mT, walk.states[-1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dS: Tensor) -> tuple[Any, ...]:
        (q,), walk = ctx.saved_tensors, ctx.walk
        found = walk.back(dy, q, dS)
        dq = dy.mT @ walk.states[1:]
        return None, None, found.loaded, dq, found.k, written(walk.rule, found.h), found.gamma, found.mu, found.tau, found.S
