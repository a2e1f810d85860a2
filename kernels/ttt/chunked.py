"""Test-time training, a chunk of tokens at a time: the dual form (Sun et al. 2024, section 2.5), for mini-batches that begin
anywhere in it.

The tokens of a mini-batch take their gradients at the same weights, so nothing in it is sequential. A chunk is as long as a
mini-batch. So its tokens are of three kinds at most, whatever documents begin in it:

- still in the mini-batch that was entered,
- in the next one of the same document, whose weights contain the gradients of all of the former,
- in mini-batches that begin a document, at the initial weights. Of these there may be several.

Each kind is computed for all tokens, and every token takes the outputs of its own. So nothing is asked of the host.

Shape suffixes: B batch, H heads, L tokens of a chunk, D width of a head, E outputs of a layer.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.common.chunked_autograd import run_chunked, state_dtype
from baton.kernels.protocol import Inputs, State
from baton.kernels.ttt.reference import inner_gradients, state_names

_TIME_INPUTS = 4

Weights = list[Tensor]


def ttt_chunked(inputs: Inputs, *, pos: Tensor, state: State) -> tuple[Tensor, State]:
    """As `op.ttt`, which checks the arguments."""
    return run_chunked(_step, inputs, _TIME_INPUTS, pos=pos, state=state, chunk=inputs[_TIME_INPUTS].shape[0])


def _step(inputs: Inputs, pos: Tensor | None, state: State) -> tuple[Tensor, State]:
    assert pos is not None
    dtype = state_dtype(*inputs)
    q, k, v, lr, step_scale, norm_weight, norm_bias, *initial = (x.to(dtype) for x in inputs)
    q_BHLD, k_BHLD, v_BHLD = (x.transpose(1, 2) for x in (q, k, v))
    names, count, size = state_names(len(initial) // 2), len(initial), step_scale.shape[0]
    moved, sums = ([state[name] for name in part] for part in (names[:count], names[count:]))

    place_BL, at_L = pos % size, torch.arange(pos.shape[1], device=pos.device)
    fresh_BL = (pos == 0).cumsum(1) > 0
    next_BL = ((place_BL == 0).cumsum(1) > 0) & ~fresh_BL
    entered_BL = ~(fresh_BL | next_BL)
    distance_LL = at_L[:, None] - at_L
    seen_BLL = (distance_LL >= 0) & (distance_LL <= place_BL[:, :, None])  # in the same mini-batch
    lr_BHL = lr.transpose(1, 2)
    share_BHLL = seen_BLL[:, None] * lr_BHL[:, :, None]
    scale_BL1 = step_scale[place_BL][:, None, :, None]

    def part(weights: Weights, before: Weights | None) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Outputs at these weights, and what each layer read with its gradients. before: sums of earlier tokens' gradients."""
        read, grads = inner_gradients(k_BHLD, v_BHLD, weights, norm_weight[:, None], norm_bias[:, None])
        z = q_BHLD
        for n, (x, grad) in enumerate(zip(read, grads, strict=True)):
            z = z if n == 0 else F.gelu(z, approximate="tanh")
            step = ((z @ x.mT + 1) * share_BHLL) @ grad  # of W, and 1 of b
            if before is not None:
                step = step + z @ before[2 * n] + before[2 * n + 1][:, :, None]
            z = z @ weights[2 * n] + weights[2 * n + 1][:, :, None] - scale_BL1 * step
        return z, read, grads

    def added(read: Sequence[Tensor], grads: Sequence[Tensor], tokens_BL: Tensor) -> Weights:
        """Sums of these tokens' gradients to W and b of each layer."""
        weighted = [(tokens_BL[:, None] * lr_BHL)[..., None] * grad for grad in grads]
        return [x for read_n, grad in zip(read, weighted, strict=True) for x in (read_n.mT @ grad, grad.sum(2))]

    entered = part([w + m for w, m in zip(initial, moved, strict=True)], sums)
    of_entered = added(*entered[1:], entered_BL)
    merged = [m - step_scale[-1] * (s + a) for m, s, a in zip(moved, sums, of_entered, strict=True)]
    following = part([w + m for w, m in zip(initial, merged, strict=True)], None)
    fresh = part([w.expand(len(q), *w.shape) for w in initial], None)

    y_BHLD = _select(entered_BL[:, None, :, None], next_BL[:, None, :, None], entered[0], following[0], fresh[0])
    last, then = entered_BL[:, -1], next_BL[:, -1]
    # of the gradients at the end those of the last token's mini-batch remain
    in_last = [added(*parts[1:], seen_BLL[:, -1]) for parts in (entered, following, fresh)]
    state = {}
    for n, name in enumerate(names[:count]):
        rows, following_rows = (x.reshape(-1, *(1 for _ in initial[n].shape)) for x in (last, then))
        state[name] = _select(rows, following_rows, moved[n], merged[n], torch.zeros_like(merged[n]))
        state[f"{name}_grad"] = _select(rows, following_rows, sums[n] + in_last[0][n], in_last[1][n], in_last[2][n])
    return y_BHLD.transpose(1, 2).to(inputs[0].dtype), {name: state[name] for name in names}


def _select(first: Tensor, second: Tensor, *of: Tensor) -> Tensor:
    """of[0] where `first`, of[1] where `second`, else of[2]."""
    return torch.where(first, of[0], torch.where(second, of[1], of[2]))
