"""Collectives over the tensor group, as autograd functions.

With layout.sequence_parallel tensor ranks share the residual stream, and each has a part of the tokens: of the N = B T tokens of a
micro-batch, flat in memory, rank r has tokens [r n, (r + 1) n) with n = ceil(N / ranks). Where ranks do not divide N, as in
decoding a token at a time, the last parts are padded with rows that are no tokens: gathering drops them and scattering makes them
zero.
"""

import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from baton.parallel.megatron import parallel_state, tensor_parallel


def tensor_size() -> int:
    """Ranks of this process's tensor group; 1 where no groups were made, as in a program that uses the modules alone."""
    ready = parallel_state.model_parallel_is_initialized()
    return int(parallel_state.get_tensor_model_parallel_world_size()) if ready else 1


def copy_to_tensor_group(x: Tensor) -> Tensor:
    """Identity whose backward sums the gradient over the tensor group: for a replicated input of split channels."""
    return x if tensor_size() == 1 else tensor_parallel.copy_to_tensor_model_parallel_region(x)


def sum_over_tensor_group(x: Tensor) -> Tensor:
    """The sum of all tensor ranks' x, whose backward is the identity."""
    return x if tensor_size() == 1 else tensor_parallel.reduce_from_tensor_model_parallel_region(x)


def gather_from_tensor_group(x: Tensor) -> Tensor:
    """All tensor ranks' x, one after the other in the last dimension."""
    return x if tensor_size() == 1 else tensor_parallel.gather_from_tensor_model_parallel_region(x)


def tokens_per_rank(tokens: int, tensor_size: int) -> int:
    """Rows of each rank's part of this many tokens."""
    return -(-tokens // tensor_size)


def gather_tokens(part: Tensor, shape: Sequence[int]) -> Tensor:
    """Every rank's part [tokens_per_rank(N), d_model] put together on every rank: [*shape, d_model], N tokens in `shape`.

    For consumers that each find only this rank's part of the gradient: in backward the parts are summed, each rank having the sum
    for its own tokens.
    """
    whole = tensor_parallel.gather_from_sequence_parallel_region(part)
    return whole[: math.prod(shape)].view(*shape, part.shape[-1])


def own_tokens(whole: Tensor) -> Tensor:
    """This rank's part [tokens_per_rank(N), d_model] of what every rank has whole, [..., d_model] with N tokens. Each rank has the
    gradient of its own part alone: `whole` comes from `copy_to_tensor_group`, which sums them."""
    size = tensor_size()
    return pad_to_parts(whole.flatten(0, -2), size).chunk(size)[parallel_state.get_tensor_model_parallel_rank()]


def pad_to_parts(x: Tensor, tensor_size: int, value: int = 0) -> Tensor:
    """x padded with rows of `value` to equal parts."""
    missing = -len(x) % tensor_size
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing), value=value) if missing else x
