"""Cross-entropy of a vocabulary that is split over the tensor group, fused with the head and computed in chunks of tokens.

The gradients are computed in the forward pass while a chunk's logits exist, so logits are neither saved nor computed twice. The
backward pass scales the gradients by the gradient of the loss, a scalar.

Shapes: N tokens of a micro-batch.
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
from baton.parallel.tensor_group import tensor_size


def linear_cross_entropy(
    hidden: Tensor, parameter: Tensor, weight: Tensor, labels: Tensor, *, vocab_size: int, chunk: int, sum_gradient: bool
) -> Tensor:  # fmt: skip
    """Summed negative log-likelihood (nats, float32 or float64 scalar) of labels under softmax(hidden weight^T). Rows of padding
    have no part in it: their logits do not count, and their gradients are 0.

    Args:
        hidden: [N, d_model] in the compute type, the same on every tensor rank.
        parameter: this rank's rows of the head, [vocab / tensor ranks, d_model]; its gradient has its own dtype.
        weight: the parameter in the compute type, without a graph.
        labels: int64 [N]; negative ones are ignored.
        vocab_size: tokens of the vocabulary; further rows of the head are padding.
        chunk: tokens whose logits exist at once.
        sum_gradient: sum hidden's gradient over the tensor group; if false, each rank keeps its part.
    """
    total: Tensor = _LinearCrossEntropy.apply(
        hidden, parameter, weight, labels, vocab_size, chunk, sum_gradient, torch.is_grad_enabled()
    )
    return total


def token_cross_entropy(logits: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
    """Negative log-likelihood of each label, float32 or float64 [N], 0 where a label is negative. Without a gradient.

    logits: this rank's columns, [N, vocab / tensor ranks]; those of padding are overwritten.
    """
    return _softmax_statistics(logits, labels, vocab_size)[0]


def _softmax_statistics(logits: Tensor, labels: Tensor, vocab_size: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """Per row over the whole vocabulary: loss, largest logit, sum of exponentials relative to it. And this rank's first column."""
    several = tensor_size() > 1
    first = parallel_state.get_tensor_model_parallel_rank() * logits.shape[1] if several else 0
    if first + logits.shape[1] > vocab_size:
        # not infinite: a rank may have nothing but padding, and differences of its logits must be numbers
        logits[:, max(0, vocab_size - first) :] = torch.finfo(logits.dtype).min
    local = partial_sums(logits, labels, first)
    largest, total, label_logit = local
    if several:
        group = parallel_state.get_tensor_model_parallel_group()
        largest = largest.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        sums = torch.stack((total * (local.largest - largest).exp(), label_logit))
        dist.all_reduce(sums, group=group)
        total, label_logit = sums
    return torch.where(labels < 0, 0.0, total.log() + largest - label_logit), largest, total, first


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, parameter: Tensor, weight: Tensor, labels: Tensor, vocab_size: int, chunk: int,
        sum_gradient: bool, need_backward: bool,
    ) -> Tensor:  # fmt: skip
        need_dhidden, need_dparameter = (need_backward and needed for needed in ctx.needs_input_grad[:2])
        dhidden = torch.empty_like(hidden) if need_dhidden else None
        dparameter = torch.empty_like(parameter) if need_dparameter else None
        loss = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        for begin in range(0, len(hidden), chunk):
            rows = slice(begin, begin + chunk)
            logits = F.linear(hidden[rows], weight)
            losses, largest, total, first = _softmax_statistics(logits, labels[rows], vocab_size)
            loss += losses.sum()
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
        ctx.gradients = dhidden, dparameter
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Any, ...]:
        if ctx.gradients is None:
            raise RuntimeError("linear_cross_entropy: backward has already run and freed the gradients; run the forward pass again")
        # scaled in place: they belong to this backward pass alone
        gradients, ctx.gradients = ctx.gradients, None
        return (*(None if x is None else x.mul_(dloss) for x in gradients), *(None,) * 6)
