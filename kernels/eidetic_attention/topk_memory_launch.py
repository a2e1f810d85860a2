"""Selection of all memories that the tokens of a span see, by one kernel launch.

Publications of a lane are at least a window apart, so a block of `window` tokens contains at most one. The selection is a list of
row numbers; `joint_attention` copies the rows, and records where the copies of each row are.
"""

import torch
from torch import Tensor

from baton.kernels.common import launch_utils
from baton.kernels.common.launch_utils import LazyModule, int32_positions
from baton.kernels.eidetic_attention.chunked import Options
from baton.kernels.eidetic_attention.joint_attention_launch import Visibility
from baton.kernels.protocol import State

_kernels = LazyModule("baton.kernels.eidetic_attention.topk_memory_kernels")

_TOKENS = 128  # tokens of a step


@torch.no_grad()
def select_memories(
    score: Tensor, options: Options, *, pos: Tensor, state: State | None, need_last: bool = True
) -> tuple[Visibility, Tensor | None]:
    """The visibility of the tokens of a span of any length, and the best tokens of the last token's document at the span's end.

    score: float32 [B, T], on a GPU. pos: int32 or int64 [B, T]. state: as `op.state_specs` describes it; None: nothing has been
    read. The best tokens are rows of the entries followed by the span's tokens, int32 [B, n_eidetic] in time order, padded with -1;
    None if not needed, and without eidetic tokens.
    """
    (batch, length), eidetic, fading, old = pos.shape, options.n_eidetic, options.n_fading, state is not None
    blocks, known = -(-length // options.window), {} if state is None else state

    def int32_or_none(*shape: int, needed: int = 1) -> Tensor | None:
        return torch.empty(batch, *shape, dtype=torch.int32, device=pos.device) if needed else None

    limit = torch.empty(batch, length, dtype=torch.int32, device=pos.device)
    seen = Visibility(
        limit,
        int32_or_none(length, needed=options.sliding),
        int32_or_none(length, needed=eidetic + fading),
        int32_or_none(old + blocks, needed=eidetic + fading),
        int32_or_none(old + blocks, eidetic + fading, needed=eidetic + fading),
        int32_or_none(old * eidetic + length, needed=eidetic),
        int32_or_none(old * fading + length, needed=fading),
    )
    last = int32_or_none(eidetic, needed=eidetic and need_last)
    entered = {name: known[name].contiguous() for name in ("seen", "score", "where", "frozen") if name in known}
    if "frozen" in entered:
        entered["frozen"] = entered["frozen"].view(torch.int8)
    read = (entered.get("seen"), score.contiguous(), *(entered.get(name) for name in ("score", "where", "frozen")))
    _kernels.topk_memory_kernel[(blocks + (last is not None), batch)](
        int32_positions(pos), *(limit if x is None else x for x in (*read, *seen, last)), length, blocks,
        WINDOW=options.window, EIDETIC=eidetic, FADING=fading, FAR=int(options.sliding), HAS_STATE=int(old),
        BLOCK_M=launch_utils.next_power_of_2(max(eidetic, 16)), BLOCK_F=launch_utils.next_power_of_2(max(fading, 16)),
        BLOCK_T=_TOKENS, num_warps=1,
    )  # fmt: skip
    return seen, last
