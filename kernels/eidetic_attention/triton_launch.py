"""B'MOJO's attention and innovation score on a GPU. All memories of a span are selected first, then one joint attention reads
window and memories.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.common import launch_utils
from baton.kernels.common.attention_tails import concat_tail, new_tails, seen_after
from baton.kernels.common.launch_utils import LazyModule
from baton.kernels.compile import launch_configs
from baton.kernels.eidetic_attention.chunked import TAILS, Options
from baton.kernels.eidetic_attention.joint_attention_launch import MemorySources, Visibility, joint_attention
from baton.kernels.eidetic_attention.launch_config import KERNEL, LaunchConfig, default_launch_config, shape_of
from baton.kernels.eidetic_attention.topk_memory import gather_rows
from baton.kernels.eidetic_attention.topk_memory_launch import select_memories
from baton.kernels.protocol import Inputs, State

_kernels = LazyModule("baton.kernels.eidetic_attention.innovation_kernels")

_ROWS, _CHANNELS = 16, 256  # block of y from which scores are summed


def eidetic_attention_triton(
    inputs: Inputs, options: Options, *, pos: Tensor, state: State, fresh: bool = False, config: LaunchConfig | None = None,
    need_final_state: bool = True,
) -> tuple[Tensor, State]:  # fmt: skip
    """As `op.eidetic_attention`, which checks the arguments. Products use bfloat16 where q, k and v have 16 bits.

    fresh: nothing has been read, so keys and values have no tail, and of the State only the shapes are used.
    """
    q, k, v, fading_k, fading_v, score = inputs
    if config is None:
        batch, length, heads, dim = q.shape
        sizes = {"batch": batch, "tokens": length, "heads": heads, "groups": k.shape[2], "dim": dim, "window": options.window}
        config = launch_configs.choose(KERNEL, default_launch_config(dim, whole=False), q.device, shape_of(dim), sizes)
    read = {} if fresh else state
    seen, last = select_memories(score, options, pos=pos, state=None if fresh else state, need_last=need_final_state)
    keys, values = ((concat_tail(read[name], x) if read else x).to(q.dtype) for name, x in (("k", k), ("v", v)))
    rows: dict[str, Tensor] = {}
    far_k = far_v = None
    if options.sliding:
        before = (0, 0, 0, 0, options.fading_rows, 0)
        far_k, far_v = (
            (concat_tail(read[name], x) if read else F.pad(x, before)).to(q.dtype)
            for name, x in (("fading_k", fading_k), ("fading_v", fading_v))
        )
    elif options.n_fading:
        rows = {"fading_k": fading_k, "fading_v": fading_v}
        rows |= {name: read[leaf] for name, leaf in (("tail_k", "fading_k"), ("tail_v", "fading_v")) if read}
    rows |= {name: read[name] for name in ("best_k", "best_v", "frozen_k", "frozen_v") if name in read}
    y = joint_attention(
        q,
        keys,
        values,
        seen,
        far=(far_k, far_v),
        sources=MemorySources(**{name: x.to(q.dtype) for name, x in rows.items()}),
        fading=options.n_fading,
        window=options.window,
        scale=options.scale,
        config=config,
    )
    if not need_final_state:
        return y, {}
    return y, _final_state(inputs, options, seen, last, pos.to(torch.int64), state, fresh)


def _final_state(
    inputs: Inputs, options: Options, seen: Visibility, last: Tensor | None, pos: Tensor, state: State, fresh: bool
) -> State:  # fmt: skip
    """As `chunked.final_state`, from the selection. last: rows of the best tokens; see `select_memories`."""
    _, k, v, fading_k, fading_v, score = inputs
    rows = {name: x for name, x in zip(TAILS, inputs[1:], strict=False) if name in state}
    sizes = {name: state[name].shape[1] for name in rows}
    # a span as long as a tail replaces it
    ends = {name: x if x.shape[1] >= sizes[name] else concat_tail(state[name], x) for name, x in rows.items()}
    read = seen_after(pos.shape[1], pos, state["seen"])
    final = {"seen": read, **new_tails(ends, sizes, read)}

    def taken(sources: dict[str, Tensor], row: Tensor) -> list[Tensor]:
        return gather_rows([(None if fresh else state[name], x) for name, x in sources.items()], row, row >= 0)

    if seen.row is not None and seen.slot is not None:
        # the next span begins with the memory that the last token sees: the frozen one, or the last one published
        slot = seen.slot[:, -1].to(torch.int64)
        row = seen.row.gather(1, slot.clamp(min=0)[:, None, None].expand(-1, 1, seen.row.shape[2]))[:, 0]
        row = row.masked_fill((slot < 0)[:, None], -1)
        keeps = None if fresh else (slot == 0)[:, None]
        new_row = row if keeps is None else row.masked_fill(keeps, -1)
        best_row, fading_row = new_row.split((options.n_eidetic, options.n_fading), dim=1)
        frozen: list[tuple[Tensor, Tensor]] = []
        if last is not None:
            both = taken({"best_k": k, "best_v": v}, torch.cat((best_row, last), dim=1))
            (new_k, best_k), (new_v, best_v) = (x.split(options.n_eidetic, dim=1) for x in both)
            # copies: a view would also keep the published rows alive
            final |= {"best_k": best_k.clone(), "best_v": best_v.clone()}
            final["score"], where = taken({"score": score, "where": pos}, last)
            final["where"] = where.masked_fill(last < 0, -1)
            frozen.append((new_k, new_v))
        if options.n_fading:
            new_k, new_v = taken({"fading_k": fading_k, "fading_v": fading_v}, fading_row)
            frozen.append((new_k, new_v))
        final["frozen"] = row >= 0
        for name, parts in zip(("frozen_k", "frozen_v"), zip(*frozen, strict=True), strict=True):
            final[name] = torch.cat(parts, dim=1)
            if keeps is not None:
                final[name] = torch.where((keeps & final["frozen"])[:, :, None, None], state[name], final[name])
    return {name: final[name] for name in state}


def innovation_triton(y: Tensor, weights: Tensor, pos: Tensor, tail: Tensor, norm: str = "l2") -> Tensor:
    """The score of `op.innovation`, which checks the arguments; tensors of 32 or 16 bits."""
    batch, length, channels = y.shape
    score = torch.empty(batch, length, dtype=torch.float32, device=y.device)
    _kernels.innovation_kernel[(-(-length // _ROWS), batch)](
        y.contiguous(), tail.contiguous(), weights.contiguous(), pos.contiguous(), score, length, C=channels, N=weights.shape[0],
        NORM=norm, BLOCK_T=_ROWS, BLOCK_C=min(_CHANNELS, launch_utils.next_power_of_2(channels)), num_warps=4,
    )  # fmt: skip
    return score
