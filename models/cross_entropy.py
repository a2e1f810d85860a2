"""The loss of a vocabulary that is split over the tensor group: logits, softmax and all gradients, a chunk of tokens at a time.

The one thing to know: the gradients are made in the forward pass, while a chunk's logits are there, so no logits are made twice and
none are kept; the backward pass scales them by the loss's own gradient, a number.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from baton.kernels.cross_entropy import gradient, partial_sums
from baton.parallel.linear import accumulate_product
from baton.parallel.megatron import parallel_state
from baton.parallel.tensor import tensor_size


def linear_cross_entropy(
    hidden: Tensor, parameter: Tensor, weight: Tensor, labels: Tensor, *, chunk: int, sum_gradient: bool
) -> Tensor:  # fmt: skip
    """Summed negative log-likelihood (nats, float32 or float64 scalar) of labels under softmax(hidden weight^T).

    Args:
        hidden: [N, d_model] in the compute type, the same on every tensor rank.
        parameter: this rank's rows of the head, [vocab / tensor ranks, d_model]; its gradient is in its own dtype.
        weight: the parameter in the compute type, without a graph.
        labels: int64 [N]; a negative one counts nothing.
        chunk: tokens whose logits exist at once.
        sum_gradient: whether hidden's gradient is summed over the tensor group here; else each rank is left with its part.
    """
    total: Tensor = _LinearCrossEntropy.apply(hidden, parameter, weight, labels, chunk, sum_gradient, torch.is_grad_enabled())
    return total


def token_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Negative log-likelihood of each label, float32 or float64 [N], of this rank's columns of logits [N, vocab / tensor ranks]; 0
    where a label is negative. Without a gradient."""
    return _summed(logits, labels)[0]


def _summed(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Of rows: their loss, largest logit, sum of exponentials relative to it, all over the whole vocabulary; this rank's first
    column."""
    several = tensor_size() > 1
    first = parallel_state.get_tensor_model_parallel_rank() * logits.shape[1] if several else 0
    found = partial_sums(logits, labels, first)
    largest, total, own = found
    if several:
        group = parallel_state.get_tensor_model_parallel_group()
        largest = largest.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        both = torch.stack((total * (found.largest - largest).exp(), own))
        dist.all_reduce(both, group=group)
        total, own = both
    return torch.where(labels < 0, 0.0, total.log() + largest - own), largest, total, first


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, parameter: Tensor, weight: Tensor, labels: Tensor, chunk: int, sum_gradient: bool, backwards: bool
    ) -> Tensor:  # fmt: skip
        of_hidden, of_parameter = (backwards and wanted for wanted in ctx.needs_input_grad[:2])
        dhidden = torch.empty_like(hidden) if of_hidden else None
        dparameter = torch.empty_like(parameter) if of_parameter else None
        loss = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        for begin in range(0, len(hidden), chunk):
            rows = slice(begin, begin + chunk)
            logits = F.linear(hidden[rows], weight)
            of_rows, largest, total, first = _summed(logits, labels[rows])
            loss += of_rows.sum()
            if dhidden is None and dparameter is None:
                continue
            dlogits = gradient(logits, labels[rows], first, largest, total)
            if dhidden is not None:
                torch.mm(dlogits, weight, out=dhidden[rows])
            if dparameter is not None:
                accumulate_product(dparameter, dlogits.mT, hidden[rows], first=begin == 0)
            del logits, dlogits
        if dhidden is not None and sum_gradient and tensor_size() > 1:
            dist.all_reduce(dhidden, group=parallel_state.get_tensor_model_parallel_group())
        ctx.found = dhidden, dparameter
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Any, ...]:
        # in their own place: what was made for this pass is for this pass alone
        if ctx.found is None:
            raise RuntimeError("linear_cross_entropy: the gradients of this loss have been taken, and are not kept")
        found, ctx.found = ctx.found, None
        return (*(None if x is None else x.mul_(dloss) for x in found), *(None,) * 5)
