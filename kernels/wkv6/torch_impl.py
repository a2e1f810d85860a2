"""RWKV-6's recurrence in PyTorch around gated linear attention, whose Triton kernels a GPU runs.

The states are those of gated linear attention, and a token reads what the token before it leaves. So each token reads with the r
of the next one, and the outputs are the next token's; the first token reads the state that arrives. No decay is divided by.

Shape suffixes: B batch, T time, H heads, K d_key, V d_value.
"""

from torch import Tensor
from torch.nn.functional import pad

from baton.kernels.common.chunked_autograd import state_dtype
from baton.kernels.gated_linear_attention.op import gated_linear_attention


def wkv6_torch(
    r: Tensor, k: Tensor, v: Tensor, g: Tensor, u: Tensor, *, pos: Tensor | None, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `op.wkv6`, which checks the arguments."""
    dtype = state_dtype(r, k, v, g, u)
    next_BTHK = pad(_reading(r[:, 1:], None if pos is None else pos[:, 1:]), (0, 0, 0, 0, 0, 1))
    y_BTHV, S_BHKV = gated_linear_attention(next_BTHK, k, v, g, gate="key", pos=pos, initial_state=initial_state)
    own_BTHV = (r * k * u).sum(-1, keepdim=True, dtype=dtype) * v
    y_BTHV = pad(y_BTHV[:, :-1], (0, 0, 0, 0, 1, 0)).to(dtype) + own_BTHV
    if initial_state is not None:
        # no matrix product, which autocast would round
        first_BHKV = _reading(r[:, :1], None if pos is None else pos[:, :1])[:, 0, :, :, None] * initial_state
        y_BTHV = y_BTHV + pad(first_BHKV.sum(2)[:, None], (0, 0, 0, 0, 0, r.shape[1] - 1))
    return y_BTHV.to(r.dtype), S_BHKV


def _reading(r_BTHK: Tensor, pos_BT: Tensor | None) -> Tensor:
    """r, and 0 where a document starts, whose first token reads nothing of the tokens before."""
    return r_BTHK if pos_BT is None else r_BTHK.masked_fill((pos_BT == 0)[:, :, None, None], 0.0)
