"""Mamba, Mamba-2, Mamba-3, Longhorn, S4D and the RG-LRU in plain PyTorch. Arguments and results are described in mixers_baton.

Shapes: B batch, T tokens, D channels, N states of a channel.
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
    rms_norm,
)
from baton.models.interchange.remote.recurrences_baton import run

BLOCKS = {"mamba": "xz", "no_gate": "x", "h3": "qkv"}
"""Parts of the projection in each block."""


def mamba(p: Parameters, c: Settings, x: Tensor, pos: Tensor, state: State | None, eps: float) -> Result:
    inner, gate, tail, parts = _ssm_inputs(p, c, x, pos, state, [part for part in ("dt", "B", "C") if part in c["selective"]])
    if c["projection_norm_eps"] is not None:
        weights = {name: p[f"{name}_norm"] if c["projection_norm_weights"] else None for name in parts}
        parts = {name: rms_norm(part, weights[name], c["projection_norm_eps"]).to(x.dtype) for name, part in parts.items()}
    steps = precise(linear(parts["dt"], p["dt_proj.weight"])) if "dt" in parts else precise(torch.zeros_like(inner))
    u, dt, A, h = precise(inner), F.softplus(steps + p["dt_bias"]), -torch.exp(p["A_log"]), part_of(state, "h")
    said = {"pos": pos, "discretization": c["discretization"]}
    if "B" in parts and "C" in parts:
        y, h = run("selective_scan", u, dt, A, precise(parts["B"]), precise(parts["C"]), _skip(p, dt), initial_state=h, **said)
    else:
        # each channel has a B or C of its own: every state is a channel of one state
        B, C = (precise(parts[name])[:, :, None] if name in parts else p[name] for name in ("B", "C"))
        wide, one = dt[..., None].expand(*dt.shape, len(A[0])).flatten(2), torch.ones_like(dt[..., :1])
        inputs = (B * u[..., None]).flatten(2), wide, A.reshape(-1, 1), one, one, torch.zeros_like(A).flatten()
        y, h = run("selective_scan", *inputs, initial_state=None if h is None else h.reshape(len(x), -1, 1), **said)
        y, h = (heads(y, len(A[0])) * C).sum(-1) + _skip(p, dt) * u, h.reshape(len(x), *A.shape)
    return linear(_gated(y, gate, c, x), p["out_proj.weight"]), {"conv": tail, "h": h}


def longhorn(p: Parameters, c: Settings, x: Tensor, pos: Tensor, state: State | None, eps: float) -> Result:
    inner, gate, tail, parts = _ssm_inputs(p, c, x, pos, state, ["beta", "k", "q"])
    logits = precise(linear(parts["beta"], p["beta_proj.weight"]))
    beta = torch.sigmoid(logits + p["beta_bias"] if "beta_bias" in p else logits)
    inputs = precise(inner), precise(parts["k"]), precise(parts["q"]), beta, _skip(p, beta)
    y, S = run("longhorn", *inputs, pos=pos, initial_state=part_of(state, "S"))
    return linear(_gated(y, gate, c, x), p["out_proj.weight"]), {"conv": tail, "S": S}


def _ssm_inputs(
    p: Parameters, c: Settings, x: Tensor, pos: Tensor, state: State | None, names: list[str]
) -> tuple[Tensor, Tensor | None, Tensor, dict[str, Tensor]]:
    """What Mamba, S4D and Longhorn share: the scan's input, the gate if there is one, the convolution's tail, and what all channels
    share, of which "dt" and "beta" are low-rank codes, the others as wide as the state."""
    projected = {name: linear(x, p[f"in_proj.{name}.weight"]) for name in BLOCKS[_block(c)]}
    h3 = _block(c) == "h3"
    inner, gate = projected["k" if h3 else "x"], projected.get("q" if h3 else "z")
    inner, tail = convolution(inner, p["conv_weight"], p["conv_bias"], pos, part_of(state, "conv"))
    inner = inner.to(x.dtype) * projected["v"] if h3 else F.silu(inner).to(x.dtype)
    if not names:
        return inner, gate, tail, {}
    shared = linear(inner, p["x_proj.weight"])
    states = sum(name not in ("dt", "beta") for name in names) * c["d_state"]
    widths = [shared.shape[-1] - states if name in ("dt", "beta") else c["d_state"] for name in names]
    return inner, gate, tail, dict(zip(names, shared.split(widths, dim=-1), strict=True))


def _block(c: Settings) -> str:
    return str(c.get("block", "mamba"))


def _gated(y: Tensor, gate: Tensor | None, c: Settings, x: Tensor) -> Tensor:
    """The scan's output y behind the block's gate, in x's dtype."""
    if gate is None:
        return y.to(x.dtype)
    return y.to(x.dtype) * gate if _block(c) == "h3" else (y * F.silu(precise(gate))).to(x.dtype)


def _skip(p: Parameters, like: Tensor) -> Tensor:
    return p["D"] if "D" in p else like.new_zeros(like.shape[-1])


def mamba2(p: Parameters, c: Settings, x: Tensor, pos: Tensor, state: State | None, eps: float) -> Result:
    z, inner, dt = (linear(x, p[f"in_proj.{part}.weight"]) for part in ("z", "x", "dt"))
    inner, conv_x = convolution(inner, p["conv_weight"], p["conv_bias"], pos, part_of(state, "conv_x"))
    shared = linear(x, p["bc_proj.weight" if c["n_groups"] == 1 else "in_proj.bc.weight"])
    shared, conv_bc = convolution(shared, p["bc_conv_weight"], p["bc_conv_bias"], pos, part_of(state, "conv_bc"))
    # by group: B and C of the first, B and C of the second
    B, C = precise(F.silu(shared).to(x.dtype)).unflatten(2, (c["n_groups"], 2, -1)).unbind(3)
    dt = F.softplus(precise(dt) + p["dt_bias"])
    inner = heads(precise(F.silu(inner).to(x.dtype)), c["head_dim"])
    inputs = C, B, inner * dt[..., None], -torch.exp(p["A_log"]) * dt
    y, S = run("gated_linear_attention", *inputs, gate="scalar", pos=pos, initial_state=part_of(state, "S"))
    y = (y + p["D"][:, None] * inner).flatten(2) * F.silu(precise(z))
    size = c["norm_group_size"] or y.shape[-1] // c["n_groups"]
    y = (rms_norm(heads(y, size), None, eps).flatten(2) * p["norm.weight"]).to(x.dtype)
    return linear(y, p["out_proj.weight"]), {"conv_x": conv_x, "conv_bc": conv_bc, "S": S}


def mamba3(p: Parameters, c: Settings, x: Tensor, pos: Tensor, state: State | None, eps: float) -> Result:
    z, inner, dt, A, lam = (linear(x, p[f"in_proj.{part}.weight"]) for part in ("z", "x", "dt", "A", "lam"))
    shared = linear(x, p["bc_proj.weight" if c["n_groups"] == 1 else "in_proj.bc.weight"])
    several = "mimo_x" in p
    inputs_of_heads = (c["mimo_rank"],) if several else ()
    B, C = shared.unflatten(2, (c["n_groups"], 2, *inputs_of_heads, c["d_state"])).unbind(3)
    B, C = (precise(rms_norm(part, p[f"{name}_norm.weight"], eps).to(x.dtype)) for name, part in (("B", B), ("C", C)))
    dt, A = F.softplus(precise(dt) + p["dt_bias"]), F.softplus(precise(A)).clamp(min=c["A_floor"])
    theta = math.pi * torch.tanh(precise(linear(x, p["angle_proj.weight"])))
    by_token = precise(heads(inner, c["head_dim"])), B, C, dt, -A * dt, torch.sigmoid(precise(lam)), theta
    inputs = *by_token, p["B_bias"], p["C_bias"], p["D"]
    if several:
        y, state = run("mamba3_mimo", *inputs, p["mimo_x"], pos=pos, initial_state=state)
    else:
        y, state = run("mamba3", *inputs, pos=pos, initial_state=state)
    if c["output_norm"]:
        y = rms_norm(y.to(x.dtype), None, eps) * heads(p["norm.weight"], c["head_dim"])
    z = heads(precise(z), c["head_dim"])
    if several:
        mimo_z, mimo_o = (p[name].transpose(0, 1) for name in ("mimo_z", "mimo_o"))
        y = (mimo_o * precise(y) * F.silu(z[:, :, None] * mimo_z)).sum(2)
    else:
        y = y * F.silu(z)
    return linear(y.flatten(2).to(x.dtype), p["out_proj.weight"]), state


def rg_lru(p: Parameters, c: Settings, x: Tensor, pos: Tensor, state: State | None, eps: float) -> Result:
    inner, gate = linear(x, p["in_proj.x.weight"]), linear(x, p["in_proj.gate.weight"])
    inner, tail = convolution(inner, p["conv_weight"], p["conv_bias"], pos, part_of(state, "conv"))
    inner = inner.to(x.dtype)
    blocks = heads(inner, p["W_a"].shape[-1])
    r, i = (
        torch.sigmoid(precise(torch.einsum("bthi,hij->bthj", blocks, p[f"W_{name}"].to(x.dtype)).flatten(2)) + p[f"b_{name}"])
        for name in ("a", "x")
    )
    inputs = precise((i * inner).to(x.dtype)), c["c"] * F.logsigmoid(p["Lambda"]) * r
    y, h = run("rg_lru", *inputs, pos=pos, initial_state=part_of(state, "h"))
    return linear((y * F.gelu(precise(gate))).to(x.dtype), p["out_proj.weight"]), {"conv": tail, "h": h}


def s4d(p: Parameters, c: Settings, x: Tensor, pos: Tensor, state: State | None, eps: float) -> Result:
    inner, gate, tail, _ = _ssm_inputs(p, c, x, pos, state, [])
    dt, A = p["log_dt"].exp()[:, None], torch.complex(-p["A_log"].exp(), p["A_imag"])
    C = torch.view_as_real(torch.view_as_complex(p["C"]) * torch.expm1(dt * A) / A)
    h = part_of(state, "h")
    inputs = precise(inner), dt * A.real, dt * A.imag, C
    y, h = run("s4d", *inputs, pos=pos, initial_state=None if h is None else h.squeeze(-1))
    y = _gated(y.to(x.dtype) + p["D"] * inner, gate, c, x)
    return linear(y, p["out_proj.weight"]), {"conv": tail, "h": h[..., None]}
