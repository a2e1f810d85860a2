"""Gated slot attention on a GPU: two passes of gated linear attention, keys written to the slots and values read from them.

The one thing to know: the passes share their gate, and what a slot takes in is 1 - alpha; autograd adds up what the log-decays get
from all three.
"""

import torch
from torch import Tensor

from baton.kernels.gated_linear_attention.arguments import Tiles
from baton.kernels.gated_linear_attention.triton import gla_effect, gla_triton
from baton.kernels.gated_slot_attention.reference import LINKS, Link
from baton.kernels.protocol import State


def gsa_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    *,
    scale: float,
    link: Link,
    pos: Tensor | None,
    initial_state: State | None,
    tiles: Tiles | None = None,
) -> tuple[Tensor, State]:
    """As `op.gated_slot_attention`, which checks the arguments."""
    arriving = {"k": None, "v": None} if initial_state is None else initial_state
    write = _strength(log_alpha).to(v.dtype)
    # what the link makes of a score is as far off as the score is: not rounded in between
    scores, keys = gla_triton(
        q, k, write, log_alpha, gate="value", scale=scale, pos=pos, initial_state=arriving["k"], dtype=torch.float32, tiles=tiles
    )
    weights = LINKS[link](scores).to(q.dtype)
    y, values = gla_triton(weights, write, v, log_alpha, gate="key", scale=1.0, pos=pos, initial_state=arriving["v"], tiles=tiles)
    return y, {"k": keys, "v": values}


def gsa_effect(k: Tensor, v: Tensor, log_alpha: Tensor, *, pos: Tensor | None, tiles: Tiles | None = None) -> State:
    """What a span adds to slots of zeros: neither queries nor link nor outputs, and without gradients."""
    write = _strength(log_alpha).to(v.dtype)
    return {
        "k": gla_effect(k, write, log_alpha, gate="value", pos=pos, tiles=tiles),
        "v": gla_effect(write, v, log_alpha, gate="key", pos=pos, tiles=tiles),
    }


def _strength(log_alpha: Tensor) -> Tensor:
    """1 - alpha, which itself would lose the gates that matter most, those that keep nearly all."""
    return -torch.expm1(log_alpha.float())
