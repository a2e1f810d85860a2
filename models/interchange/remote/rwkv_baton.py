"""RWKV-6's and RWKV-7's time mixing and channel mixing in plain PyTorch; arguments and dtypes as in mixers_baton.

Shapes: B batch, T tokens, H heads, K width of a head's keys, V of its values.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.models.interchange.remote.layers_baton import (
    Parameters,
    Result,
    Settings,
    State,
    convolution,
    heads,
    linear,
    part_of,
    precise,
    unit,
)
from baton.models.interchange.remote.recurrences_baton import run


def rwkv6(p: Parameters, c: Settings, x: Tensor, pos: Tensor, state: State | None, eps: float) -> Result:
    delta, tail = _difference(x, pos, state)
    code = torch.tanh(linear(_mixed(x, delta, p["shift_mix.x"]), p["mix_code_proj.weight"]))
    rows = {}
    for name, part in zip("rwkvg", code.split(c["mix_low_rank_dim"], dim=-1), strict=True):
        mix = (precise(linear(part, p[f"mix_{name}_proj.weight"])) + p[f"shift_mix.{name}"]).to(x.dtype)
        rows[name] = _mixed(x, delta, mix)
    r, k, v, gate = (linear(rows[name[0]], p[f"{name}_proj.weight"]) for name in ("r", "k", "v", "gate"))
    code = torch.tanh(linear(rows["w"], p["decay_code_proj.weight"]))
    g = -torch.exp((precise(linear(code, p["decay_proj.weight"])) + p["decay_bias"]).clamp(max=5.0))
    r, k, g = (heads(precise(y), c["d_key"]) for y in (r, k, g))
    inputs = r, k, heads(precise(v), c["d_value"]), g, heads(p["bonus"], c["d_key"])
    o, S = run("wkv6", *inputs, pos=pos, initial_state=part_of(state, "S"))
    o = F.layer_norm(o, (c["d_value"],), eps=c["d_value"] * eps).flatten(2) * p["norm_weight"] + p["norm_bias"]
    return linear((o * F.silu(precise(gate))).to(x.dtype), p["out_proj.weight"]), {"shift": tail, "S": S}


def rwkv7(p: Parameters, c: Settings, x: Tensor, pos: Tensor, state: State | None, eps: float) -> Result:
    delta, tail = _difference(x, pos, state)
    rows = {name: _mixed(x, delta, p[f"shift_mix.{name}"]) for name in "rwkvag"}
    r, k, v = (linear(rows[name], p[f"{name}_proj.weight"]) for name in "rkv")

    def low_rank(name: str, code: Tensor) -> Tensor:
        y = precise(linear(code, p[f"{name}_proj.weight"]))
        return y if name == "gate" else torch.sigmoid(y + p[f"{name}_bias"])

    code = {name: linear(rows[row], p[f"{name}_code_proj.weight"]) for name, row in (("decay", "w"), ("rate", "a"), ("gate", "g"))}
    g = -math.exp(-0.5) * low_rank("decay", torch.tanh(code["decay"]))
    a, gate = low_rank("rate", code["rate"]), low_rank("gate", torch.sigmoid(code["gate"]))
    if c["value_residual"] == "later":
        share = low_rank("residual", linear(rows["v"], p["residual_code_proj.weight"]))
        v = (precise(v) + share * precise(c["shared"]["v_first"] - v)).to(x.dtype)
    elif c["value_residual"] == "first":
        c["shared"]["v_first"] = v
    unit_k = unit(heads(k * p["k_k"], c["d_key"]), 1e-12).to(x.dtype)
    k = (k * (1 + (a - 1) * p["k_a"])).to(x.dtype)
    r, k, a, g = (heads(y, c["d_key"]) for y in (r, k, a, g))
    v = heads(v, c["d_value"])
    inputs = *(precise(y) for y in (r, k, v, unit_k)), -(a * unit_k), g
    o, S = run("generalized_delta_rule", *inputs, pos=pos, initial_state=part_of(state, "S"))
    o = F.layer_norm(o, (c["d_value"],), eps=c["d_value"] * eps).flatten(2) * p["norm_weight"] + p["norm_bias"]
    bonus = ((r * k * p["r_k"]).sum(-1, keepdim=True) * v).flatten(2)
    return linear(((o + bonus) * gate).to(x.dtype), p["out_proj.weight"]), {"shift": tail, "S": S}


def channel_mix(p: Parameters, c: Settings, x: Tensor, pos: Tensor, state: State | None, eps: float) -> Result:
    delta, tail = _difference(x, pos, state)
    hidden = F.relu(linear(_mixed(x, delta, p["shift_mix.k"]), p["in_proj.weight"]))
    y = linear(hidden.square(), p["out_proj.weight"])
    if c["receptance"]:
        receptance = linear(_mixed(x, delta, p["shift_mix.r"]), p["receptance_proj.weight"])
        y = (precise(y) * torch.sigmoid(precise(receptance))).to(y.dtype)
    return y, {"shift": tail}


def _difference(x: Tensor, pos: Tensor, state: State | None) -> tuple[Tensor, Tensor]:
    """x_{t-1} - x_t, and the last x."""
    taps = precise(x.new_tensor([1.0, -1.0])).expand(x.shape[2], -1)
    delta, tail = convolution(x, taps, None, pos, part_of(state, "shift"))
    return delta.to(x.dtype), tail


def _mixed(x: Tensor, delta: Tensor, mix: Tensor) -> Tensor:
    return (precise(x) + precise(delta) * mix).to(x.dtype)
