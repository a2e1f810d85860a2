"""B'MOJO's attention on a GPU: all memories of a span are chosen first, then one fused attention reads window and memories. And the
score that chooses."""

import torch
from torch import Tensor

from baton.kernels import tiles as table
from baton.kernels.eidetic_attention.chunked import TAILS, Options
from baton.kernels.eidetic_attention.memory import take
from baton.kernels.eidetic_attention.published import Published, publish
from baton.kernels.protocol import Inputs, State
from baton.kernels.window_attention.chunked import history, new_tails
from baton.kernels.window_attention.fused import KERNEL, Seen, Tiles, joint_attention, shape_of

_ROWS, _CHANNELS = 16, 256  # of a block that a score is summed over


def eidetic_attention_triton(
    inputs: Inputs, options: Options, *, pos: Tensor, state: State, fresh: bool = False, tiles: Tiles | None = None,
    state_wanted: bool = True,
) -> tuple[Tensor, State]:  # fmt: skip
    """As `op.eidetic_attention`, which checks the arguments. Products are of bfloat16 where q, k and v have 16 bits. fresh: nothing
    has been read, so nothing is put before keys and values, and of the State only what leaves is made, in its shapes."""
    q, k, v, fading_k, fading_v, score = inputs
    if tiles is None:
        batch, length, heads, dim = q.shape
        sizes = {"batch": batch, "tokens": length, "heads": heads, "groups": k.shape[2], "dim": dim, "window": options.window}
        tiles = table.choose(KERNEL, Tiles(), q.device, shape_of(dim), sizes)
    pos, read = pos.to(torch.int32), torch.arange(q.shape[1], dtype=torch.int32, device=q.device)
    read = torch.minimum(read if fresh else read + state["seen"][:, None].to(torch.int32), pos)
    # a view's gradient is added to those of what is chosen when that of a history would be
    keys, values = ((x.view_as(x) if fresh else history(state[name], x)).to(q.dtype) for name, x in (("k", k), ("v", v)))
    far_k = far_v = memory_k = memory_v = far_limit = memory = None
    if options.sliding:
        far_k, far_v = (history(state[name], x).to(q.dtype) for name, x in (("fading_k", fading_k), ("fading_v", fading_v)))
        far_limit = read.clamp(max=2 * options.window - 1)
    if options.n_fading + options.n_eidetic:
        memory = publish(
            k, v, fading_k, fading_v, score, window=options.window, n_fading=options.n_fading, n_eidetic=options.n_eidetic,
            pos=pos, state=None if fresh else state, at_once=True, last_wanted=state_wanted,
        )  # fmt: skip
    limit = read.clamp(max=options.window - 1)
    if memory is None:
        seen = Seen(limit, far_limit)
    else:
        seen = Seen(limit, far_limit, memory.slot.contiguous(), memory.begin.contiguous(), memory.valid.view(torch.int8))
        memory_k, memory_v = memory.k.to(q.dtype), memory.v.to(q.dtype)
    y = joint_attention(
        q,
        keys,
        values,
        seen,
        far=(far_k, far_v),
        memory=(memory_k, memory_v),
        window=options.window,
        scale=options.scale,
        tiles=tiles,
    )
    if not state_wanted:
        return y, {}
    return y, _leaving(inputs, memory, read[:, -1].to(torch.int64) + 1, pos.to(torch.int64), state, fresh)


def _leaving(inputs: Inputs, memory: Published | None, seen: Tensor, pos: Tensor, state: State, fresh: bool) -> State:
    """As `chunked.leave`, of memories that are known. seen: tokens read so far of the last token's document, [B]."""
    rows = {name: x for name, x in zip(TAILS, inputs[1:], strict=False) if name in state}
    sizes = {name: state[name].shape[1] for name in rows}
    # of a span that is as long as a tail, the tail before it is not read
    ends = {name: x if x.shape[1] >= sizes[name] else history(state[name], x) for name, x in rows.items()}
    leaving = {"seen": seen, **new_tails(ends, sizes, seen)}
    if memory is not None:
        slot = memory.slot[:, -1].to(torch.int64)
        at = slot.clamp(min=0)[:, None]
        frozen = memory.valid.gather(1, at[:, :, None].expand(-1, -1, memory.valid.shape[2]))[:, 0] & (slot >= 0)[:, None]
        leaving["frozen"] = frozen
        slot, hidden = at.view(-1, 1, 1, 1, 1), ~frozen[:, :, None, None]
        for name, x in (("frozen_k", memory.k), ("frozen_v", memory.v)):
            leaving[name] = x.gather(1, slot.expand(-1, 1, *x.shape[2:]))[:, 0].masked_fill(hidden, 0.0)
        if memory.last is not None:
            _, k, v, _, _, score = inputs
            row, valid = memory.last
            best = {"best_k": k, "best_v": v, "score": score, "where": pos}
            taken = take([(None if fresh else state[name], x) for name, x in best.items()], row, valid)
            leaving |= dict(zip(best, taken, strict=True))
            leaving["where"] = leaving["where"].masked_fill(~valid, -1)
    return {name: leaving[name] for name in state}


def innovation_triton(y: Tensor, weights: Tensor, pos: Tensor, tail: Tensor) -> Tensor:
    """The score of `op.innovation`, which checks the arguments; tensors of 32 or 16 bits."""
    from baton.kernels.eidetic_attention import foretold

    batch, length, channels = y.shape
    score = torch.empty(batch, length, dtype=torch.float32, device=y.device)
    foretold.innovation_kernel[(-(-length // _ROWS), batch)](
        y.contiguous(), tail.contiguous(), weights.contiguous(), pos.contiguous(), score, length, C=channels, N=weights.shape[0],
        BT=_ROWS, BC=min(_CHANNELS, table.power_of_two(channels)), num_warps=4,
    )  # fmt: skip
    return score
