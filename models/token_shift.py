"""RWKV's token shift: each token's vector mixed with that of the token before it, a share per channel.

The token before is a short convolution's tap of width 2, whose tail of one vector is the State. Every rank of the tensor group has
the whole vectors, so the tail is replicated.

Shapes: B batch, T time, M d_model.
"""

from torch import Tensor

from baton.kernels.protocol import State
from baton.kernels.short_conv.recurrence import ShortConv
from baton.models import cached_constants
from baton.models.forward_context import ForwardContext
from baton.models.mixer import Mixer

_DIFFERENCE = ShortConv()


def difference(
    mixer: Mixer, x_BTM: Tensor, pos_BT: Tensor, state: State | None, forward_context: ForwardContext, precise_like: Tensor
) -> tuple[Tensor, State]:
    """x_{t-1} - x_t in x's dtype, where x_{t-1} is 0 at a document's start, and the State {shift [B, 1, M]}.

    precise_like: a tensor of the dtype that the parameters have.
    """
    width, dtype, device = x_BTM.shape[2], precise_like.dtype, x_BTM.device
    taps, bias = cached_constants.taps_of_difference(width, dtype, device), cached_constants.zeros(width, dtype, device)
    tail = None if state is None else {"conv": state["shift"]}
    delta_BTM, tail = mixer.run_recurrence(_DIFFERENCE, (x_BTM, taps, bias), pos_BT, tail, forward_context)
    return delta_BTM, {"shift": tail["conv"]}


def mixed(x_BTM: Tensor, delta_BTM: Tensor, mix_M: Tensor) -> Tensor:
    """x_t + mix (x_{t-1} - x_t), rounded once, to x's dtype."""
    return x_BTM.to(mix_M.dtype).addcmul(delta_BTM, mix_M).to(x_BTM.dtype)
