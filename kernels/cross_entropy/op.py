"""The two halves of a vocabulary-parallel cross-entropy: partial sums over this rank's columns, then the gradient.

Between the halves ranks exchange three numbers per row. The gradient overwrites the logits, so that one tensor of a chunk's logits
exists, in its own dtype.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from baton.kernels.cross_entropy.triton_launch import gradient_triton, partial_sums_triton, use_triton
from baton.kernels.errors import expect_tensor

_KERNEL = "cross_entropy"


class Partial(NamedTuple):
    """Of this rank's columns, float32 (float64) [N]: the largest logit, the sum of exp(logit - largest), and the label's logit, 0
    if the label's column is on another rank."""

    largest: Tensor
    total: Tensor
    own: Tensor


def partial_sums(logits: Tensor, labels: Tensor, first: int) -> Partial:
    """Partial sums of the softmax over this rank's columns.

    Args:
        logits: [N, columns], columns first, first + 1, ... of the vocabulary.
        labels: int64 [N]; values outside the vocabulary are allowed.

    Raises:
        KernelError: labels of another shape or device.
    """
    expect_tensor(_KERNEL, "labels", labels, ("N",), (logits.shape[0],), logits.device)
    if use_triton(logits):
        return Partial(*partial_sums_triton(logits, labels, first))
    values = _precise(logits)
    largest = values.amax(1)
    here = (labels >= first) & (labels < first + logits.shape[1])
    column = (labels - first).clamp(0, logits.shape[1] - 1)
    own = torch.where(here, values.gather(1, column[:, None])[:, 0], 0.0)
    return Partial(largest, (values - largest[:, None]).exp_().sum(1), own)


def gradient(logits: Tensor, labels: Tensor, first: int, largest: Tensor, total: Tensor) -> Tensor:
    """dlogits = softmax(logits) - one_hot(label), written over the logits; zero in rows whose label is negative.

    largest, total: [N], over all columns of the vocabulary.
    """
    if use_triton(logits):
        return gradient_triton(logits, labels, first, largest, total)
    values = (_precise(logits) - largest[:, None]).exp_().div_(total[:, None])
    here = (labels >= first) & (labels < first + logits.shape[1])
    column = (labels - first).clamp(0, logits.shape[1] - 1)
    values.scatter_add_(1, column[:, None], -here.to(values.dtype)[:, None])
    values.masked_fill_((labels < 0)[:, None], 0.0)
    return logits.copy_(values)


def _precise(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
