"""All the memories that a span of tokens sees, chosen at once, by one launch.

The one thing to know: publications of a lane are at least a window apart, so a block of a window's tokens has at most one. What is
chosen are rows, as numbers; `joint_attention` copies them, and knows where the copies of each are.
"""

import torch
from torch import Tensor

from baton.kernels.common import launch_utils
from baton.kernels.common.launch_utils import int32_positions
from baton.kernels.eidetic_attention.chunked import Options
from baton.kernels.eidetic_attention.joint_attention_launch import Visibility
from baton.kernels.protocol import State

_TOKENS = 128  # of a step


@torch.no_grad()
def select_memories(
    score: Tensor, options: Options, *, pos: Tensor, state: State | None, need_last: bool = True
) -> tuple[Visibility, Tensor | None]:
    """What the tokens of a span of any length see, and the best tokens of the last one's document at the span's end.

    score: float32 [B, T], on a GPU. pos: int32 or int64 [B, T]. state: as `op.state_specs` describes it; None: nothing has been
    read. The best are rows of the entries followed by the span's tokens, int32 [B, n_eidetic] in the order of time, -1 behind
    them; None where they are not wanted, and without eidetic tokens.
    """
    from baton.kernels.eidetic_attention import topk_memory_kernels

    (batch, length), eidetic, fading, old = pos.shape, options.n_eidetic, options.n_fading, state is not None
    blocks, known = -(-length // options.window), {} if state is None else state

    def numbers(*shape: int, wanted: int = 1) -> Tensor | None:
        return torch.empty(batch, *shape, dtype=torch.int32, device=pos.device) if wanted else None

    limit = torch.empty(batch, length, dtype=torch.int32, device=pos.device)
    seen = Visibility(
        limit,
        numbers(length, wanted=options.sliding),
        numbers(length, wanted=eidetic + fading),
        numbers(old + blocks, wanted=eidetic + fading),
        numbers(old + blocks, eidetic + fading, wanted=eidetic + fading),
        numbers(old * eidetic + length, wanted=eidetic),
        numbers(old * fading + length, wanted=fading),
    )
    last = numbers(eidetic, wanted=eidetic and need_last)
    entered = {name: known[name].contiguous() for name in ("seen", "score", "where", "frozen") if name in known}
    if "frozen" in entered:
        entered["frozen"] = entered["frozen"].view(torch.int8)
    read = (entered.get("seen"), score.contiguous(), *(entered.get(name) for name in ("score", "where", "frozen")))
    topk_memory_kernels.topk_memory_kernel[(blocks + (last is not None), batch)](
        int32_positions(pos), *(limit if x is None else x for x in (*read, *seen, last)), length, blocks,
        WINDOW=options.window, EIDETIC=eidetic, FADING=fading, FAR=int(options.sliding), HAS_STATE=int(old),
        BLOCK_M=launch_utils.next_power_of_2(max(eidetic, 16)), BLOCK_F=launch_utils.next_power_of_2(max(fading, 16)),
        BLOCK_T=_TOKENS,
        num_warps=1,
    )  # fmt: skip
    return seen, last
