"""Every mixer of Baton in plain PyTorch, with its State as a dictionary of tensors.

Each is a function of its parameters p (by name, as in the weights' files), its settings c (with `shared`, the tensors of this pass
that layers hand on), the inputs x [batch, tokens, width], the tokens' positions in their documents [batch, tokens], and the State
before them (None: nothing was read). It returns the outputs and the State behind the last token. Matrix products are in x's dtype,
everything between them in float32 (float64 for float64).

Shapes: B batch, T tokens, H heads, K width of a head's keys, V of its values.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.common.explicit_attention import explicit_attention
from baton.models.interchange.remote.layers_baton import (
    FEATURE_MAPS,
    Parameters,
    Result,
    Settings,
    State,
    convolution,
    heads,
    linear,
    precise,
    rms_norm,
    rotary,
    unit,
)
from baton.models.interchange.remote.layers_baton import part_of as _of
from baton.models.interchange.remote.recurrences_baton import run
from baton.models.interchange.remote.rwkv_baton import channel_mix, rwkv6, rwkv7
from baton.models.interchange.remote.state_spaces_baton import longhorn, mamba, mamba2, mamba3, rg_lru, s4d

# ---------------------------------------------------------------------------------------------------------------- linear attention


def gla(p: Parameters, c: Settings, x: Tensor, pos: Tensor, state: State | None, eps: float) -> Result:
    q, k, v = (linear(x, p[f"in_proj.{part}.weight"]) for part in ("q", "k", "v"))
    gate = linear(x, p["in_proj.gate.weight"]) if c["output_gate"] else None
    mapped, d_key = FEATURE_MAPS[c["feature_map"]], q.shape[-1] // c["heads"]
    logits = precise(linear(linear(x, p["code_proj.weight"]), p["decay_proj.weight"])) + p["decay_bias"]
    g = F.logsigmoid(logits) / c["gate_logit_normalizer"]
    inputs = *(heads(precise(mapped(a)), d_key) for a in (q, k)), heads(precise(v), v.shape[-1] // c["heads"]), heads(g, d_key)
    o, S = run("gated_linear_attention", *inputs, gate="key", scale=d_key**-0.5, pos=pos, initial_state=_of(state, "S"))
    return _gated_output(p, o, gate, x, eps), {"S": S}


def retnet(p: Parameters, c: Settings, x: Tensor, pos: Tensor, state: State | None, eps: float) -> Result:
    q, k, v = (linear(x, p[f"in_proj.{part}.weight"]) for part in ("q", "k", "v"))
    gate = linear(x, p["in_proj.gate.weight"]) if c["output_gate"] else None
    mapped, d_key = FEATURE_MAPS[c["feature_map"]], c["d_key"]
    q, k = (precise(rotary(heads(mapped(a), d_key), pos, c["rope_theta"], d_key)) for a in (q, k))
    count = q.shape[2]
    g = torch.log1p(-torch.exp2(-c["decay_exponent"] - torch.arange(count, dtype=q.dtype, device=x.device)))
    inputs = q, k, heads(precise(v), v.shape[-1] // count), g.expand(*x.shape[:2], -1)
    o, S = run("gated_linear_attention", *inputs, gate="scalar", scale=d_key**-0.5, pos=pos, initial_state=_of(state, "S"))
    return _gated_output(p, o, gate, x, eps), {"S": S}


def linear_attention(p: Parameters, c: Settings, x: Tensor, pos: Tensor, state: State | None, eps: float) -> Result:
    q, k, v = (linear(x, p[f"in_proj.{part}.weight"]) for part in ("q", "k", "v"))
    mapped, summed = FEATURE_MAPS[c["feature_map"]], c["normalization"] == "sum"
    q, k, v = (heads(precise(a), a.shape[-1] // c["heads"]) for a in (mapped(q), mapped(k), v))
    v = F.pad(v, (0, 1), value=1.0) if summed else v
    o, S = run("gated_linear_attention", q, k, v, gate="none", pos=pos, initial_state=_of(state, "S"))
    if not summed:
        return _gated_output(p, o, None, x, eps), {"S": S}
    y = (o[..., :-1] / (o[..., -1:] + 1e-6)).flatten(2)
    return linear(y.to(x.dtype), p["out_proj.weight"]), {"S": S}


def mlstm(p: Parameters, c: Settings, x: Tensor, pos: Tensor, state: State | None, eps: float) -> Result:
    q, k, v, gate = (linear(x, p[f"in_proj.{part}.weight"]) for part in ("q", "k", "v", "gate"))
    i, f = (precise(linear(x, p[f"gates_proj.{part}.weight"])) for part in "if")
    i, f = i + p["input_gate_bias"], f + p["forget_gate_bias"]
    cap, d_key, d_value = c["gate_soft_cap"], q.shape[-1] // i.shape[-1], v.shape[-1] // i.shape[-1]
    i, g = cap * torch.tanh(i / cap), F.logsigmoid(cap * torch.tanh(f / cap))
    inputs = heads(precise(q), d_key), heads(precise(k), d_key), heads(precise(v), d_value), i, g
    h, C = run("mlstm", *inputs, scale=d_key**-0.5, pos=pos, initial_state=_of(state, "C"))
    h = F.layer_norm(h, (d_value,), eps=eps).flatten(2) * p["norm_weight"]
    return linear((h * torch.sigmoid(precise(gate))).to(x.dtype), p["out_proj.weight"]), {"C": C}


def hgrn2(p: Parameters, c: Settings, x: Tensor, pos: Tensor, state: State | None, eps: float) -> Result:
    q, f, v = (linear(x, p[f"in_proj.{part}.weight"]) for part in ("q", "f", "v"))
    d_key, bound = c["d_key"], c["lower_bound"]
    above = torch.sigmoid(-p["bound"]) if c["bounds"] == "learned" else 1 - bound
    k = above * torch.sigmoid(-precise(f))
    g = torch.log1p(-k) if bound else F.logsigmoid(precise(f))
    scale = d_key**-0.5 if c["scale_queries"] else 1.0
    q, k, g = (heads(precise(a), d_key) for a in (F.silu(q), k.to(x.dtype), g))
    v = heads(precise(v), v.shape[-1] // k.shape[2])
    o, S = run("gated_linear_attention", q, k, v, g, gate="key", scale=scale, pos=pos, initial_state=_of(state, "S"))
    return linear(rms_norm(o.flatten(2), p["norm.weight"], eps).to(x.dtype), p["out_proj.weight"]), {"S": S}


def _gated_output(p: Parameters, o: Tensor, gate: Tensor | None, x: Tensor, eps: float, act: Any = F.silu) -> Tensor:
    """A norm per head, the gate if there is one, and the output projection."""
    y = rms_norm(o, p["norm.weight"], eps).flatten(2)
    if gate is not None:
        y = y * act(precise(gate))
    return linear(y.to(x.dtype), p["out_proj.weight"])


def gsa(p: Parameters, c: Settings, x: Tensor, pos: Tensor, state: State | None, eps: float) -> Result:
    q, k, v = (linear(x, p[f"in_proj.{part}.weight"]) for part in ("q", "k", "v"))
    mapped = FEATURE_MAPS[c["feature_map"]]
    v = v if c["value_activation"] is None else F.silu(v)
    sums: State = {}
    if c["gate"] == "data_independent":
        logits = p["decay_bias"].expand(*x.shape[:2], -1)
    else:
        logits = precise(linear(x, p["in_proj.alpha.weight"]))
    g = F.logsigmoid(logits) / c["gate_logit_normalizer"]
    if c["gate"] == "abc":
        w = heads(torch.exp(logits.clamp(-30, 30)), c["slots"])
        one = torch.ones_like(w[..., :1])
        z, sums["z"] = run("gated_linear_attention", one, one, w, gate="none", pos=pos, initial_state=_of(state, "z"))
        g = torch.log1p(-(w / z).clamp(max=1 - 1e-6)).flatten(2)
    inputs = *(heads(precise(a), c["head_dim"]) for a in (mapped(q), mapped(k), v)), heads(g, c["slots"])
    before = None if state is None else {name: state[name] for name in ("k", "v")}
    o, state = run("gated_slot_attention", *inputs, slot_activation=c["slot_activation"], pos=pos, initial_state=before)
    y = o.flatten(2)
    y = rms_norm(y if c["output_activation"] is None else F.silu(y), p["norm.weight"], eps)
    return linear(y.to(x.dtype), p["out_proj.weight"]), {**state, **sums}


def delta_net(p: Parameters, c: Settings, x: Tensor, pos: Tensor, state: State | None, eps: float) -> Result:
    rows: State = {}
    tails: State = {}
    for part in ("q", "k", "v"):
        y, tails[f"conv_{part}"] = convolution(
            linear(x, p[f"in_proj.{part}.weight"]), p[f"conv_weights.{part}"], None, pos, _of(state, f"conv_{part}")
        )
        rows[part] = heads(F.silu(y).to(x.dtype), c["d_value"] if part == "v" else c["d_key"])
    beta = c["beta_max"] * torch.sigmoid(precise(linear(x, p["in_proj.beta.weight"])))
    inputs: tuple[Tensor, ...] = unit(rows["q"], eps), unit(rows["k"], eps), precise(rows["v"]), beta
    gate, act = None, torch.sigmoid if c["kind"] == "kda" else F.silu
    if c["kind"] == "gated_delta_net":
        inputs += (-p["A_log"].exp() * F.softplus(precise(linear(x, p["in_proj.dt.weight"])) + p["dt_bias"]),)
        gate = linear(x, p["in_proj.gate.weight"])
    elif c["kind"] == "kda":
        decay = precise(linear(linear(x, p["decay_code_proj.weight"]), p["decay_proj.weight"])) + p["dt_bias"]
        inputs += (-p["A_log"].exp()[:, None] * F.softplus(heads(decay, c["d_key"])),)
        gate = (linear(linear(x, p["gate_code_proj.weight"]), p["gate_proj.weight"]) + p.get("gate_bias", 0.0)).to(x.dtype)
    o, S = run("delta_rule", *inputs, pos=pos, initial_state=_of(state, "S"))
    return _gated_output(p, o, gate, x, eps, act), {**tails, "S": S}


def lattice(p: Parameters, c: Settings, x: Tensor, pos: Tensor, state: State | None, eps: float) -> Result:
    qk, v, gate, step = (linear(x, p[f"in_proj.{part}.weight"]) for part in ("qk", "v", "gate", "step"))
    rows, tail = [], qk
    for name, normalized in (("conv_q", c["unit_queries"]), ("conv_k", c["unit_keys"])):
        y, tail = convolution(qk, p[name], p.get(f"{name}_bias"), pos, _of(state, "conv"))
        y = heads((F.silu(y) if c["conv_activation"] == "silu" else y).to(x.dtype), c["slots"])
        rows.append(unit(y, eps) if normalized else precise(y))
    gamma = c["step_max"] * torch.sigmoid(precise(step) + p["step_bias"])
    scale = c["head_dim"] ** -0.5 if c["value_scale"] is None else c["value_scale"]
    count = gamma.shape[-1]
    slots = p["S0"] if "S0" in p else torch.eye(c["head_dim"], c["slots"], dtype=gamma.dtype, device=x.device).expand(count, -1, -1)
    options: dict[str, Any] = {"variant": c["variant"], "project": c["project"]}
    if c["forget"]:
        options["mu"] = torch.sigmoid(precise(linear(x, p["in_proj.forget.weight"])) + p["forget_bias"])
    if c["sparsity"]:
        options["tau"] = c["sparsity"] * gamma
    inputs = *rows, heads(precise(scale * v), c["head_dim"]), gamma, slots
    o, S = run("lattice", *inputs, **options, pos=pos, initial_state=_of(state, "S"))
    y = o.flatten(2)
    if c["output_norm"]:
        y = rms_norm(y, p["norm.weight"], eps)
    return linear((y * F.gelu(precise(gate))).to(x.dtype), p["out_proj.weight"]), {"conv": tail, "S": S}


def ttt(p: Parameters, c: Settings, x: Tensor, pos: Tensor, state: State | None, eps: float) -> Result:
    qk, v, gate, step = (linear(x, p[f"in_proj.{part}.weight"]) for part in ("qk", "v", "gate", "step"))
    rows, tail, d = [], qk, c["head_dim"]
    for name in ("conv_q", "conv_k"):
        y, tail = convolution(qk, p[name], p[f"{name}_bias"], pos, _of(state, "conv"))
        rows.append(rotary(heads(y.to(x.dtype), d), pos % c["mini_batch"], c["rope_theta"], d))
    names = ("W1", "b1") if c["model"] == "linear" else ("W1", "b1", "W2", "b2")
    base = c["base_lr"] or (1.0 if c["model"] == "linear" else 0.1)
    norm = p["inner_norm_weight"], p["inner_norm_bias"]
    lr = base / d * torch.sigmoid(precise(step) + p["step_bias"])
    inputs = *map(precise, (*rows, heads(v, d))), lr, p["token_scale"].clamp(min=0.0), *norm, *(p[name] for name in names)
    before = None if state is None else {name: a for name, a in state.items() if name != "conv"}
    z, trained = run("ttt", *inputs, pos=pos, initial_state=before)
    o = rows[0] + F.layer_norm(precise(z.to(x.dtype)), (d,), eps=1e-6) * norm[0] + norm[1]
    y = rms_norm(o.flatten(2), p["norm.weight"], eps) * F.gelu(precise(gate))
    return linear(y.to(x.dtype), p["out_proj.weight"]), {"conv": tail, **trained}


# ----------------------------------------------------------------------------------------------------------------------- attention


def attention(p: Parameters, c: Settings, x: Tensor, pos: Tensor, state: State | None, eps: float) -> Result:
    """The State has the keys, rotated, and values that later tokens may attend to."""
    q, k, v = (linear(x, p[f"in_proj.{part}.weight"]) for part in ("q", "k", "v"))
    if c["qkv_bias"]:
        q, k, v = ((a + p[f"qkv_bias.{part}"]).to(x.dtype) for part, a in (("q", q), ("k", k), ("v", v)))
    q, k, v = (heads(a, c["head_dim"]) for a in (q, k, v))
    if c["qk_norm"]:
        q, k = (rms_norm(a, p[f"{part}_norm.weight"], eps).to(x.dtype) for part, a in (("q", q), ("k", k)))
    if c["rope_theta"] is not None:
        angles = c["rope_theta"], int(c["head_dim"] * c["rope_fraction"]), c["rope_scaling"]
        q, k = rotary(q, pos, *angles), rotary(k, pos, *angles)
    if state is not None:
        k, v = torch.cat((state["k"], k), dim=1), torch.cat((state["v"], v), dim=1)
    length, seen = q.shape[1], k.shape[1] - q.shape[1]
    # a token sees what is at most `pos` tokens before it, which is its document, and inside the window
    distance = torch.arange(seen, seen + length, device=x.device)[:, None] - torch.arange(seen + length, device=x.device)
    visible = (distance >= 0) & (distance <= pos[:, :, None]) & (distance < (c["window"] or k.shape[1]))
    if c["sinks"] or c["score_soft_cap"] is not None:
        sinks = p["sinks"].expand(*q.shape[:3]) if c["sinks"] else None
        y = explicit_attention(q, k, v, visible, c["head_dim"] ** -0.5, sinks, c["score_soft_cap"]).flatten(2)
    else:
        keys, values = (a.repeat_interleave(q.shape[2] // k.shape[2], dim=2).transpose(1, 2) for a in (k, v))
        y = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=visible[:, None]).transpose(1, 2).flatten(2)
    if c["output_gate"]:
        y = (precise(y) * torch.sigmoid(precise(linear(x, p["in_proj.gate.weight"])))).to(x.dtype)
    kept = k.shape[1] if c["window"] is None else min(k.shape[1], c["window"] - 1)
    return linear(y, p["out_proj.weight"]), {"k": _last(k, kept), "v": _last(v, kept)}


def swiglu(p: Parameters, c: Settings, x: Tensor, pos: Tensor, state: State | None, eps: float) -> Result:
    gate, up = linear(x, p["in_proj.gate.weight"]), linear(x, p["in_proj.up.weight"])
    return linear((F.silu(precise(gate)) * precise(up)).to(x.dtype), p["out_proj.weight"]), {}


def bmojo(p: Parameters, c: Settings, x: Tensor, pos: Tensor, state: State | None, eps: float) -> Result:
    """Attention over a window, over outputs of a state space model, and over the tokens that these predict worst."""
    ssm_state = None if state is None else {name[4:]: a for name, a in state.items() if name.startswith("ssm.")}
    ssm = {name[4:]: a for name, a in p.items() if name.startswith("ssm.")}
    fading, ssm_state = mamba(ssm, c["ssm"], x, pos, ssm_state, eps)
    if c["fading_norm"]:
        fading = rms_norm(fading, None, eps).to(x.dtype)
    final: State = {f"ssm.{name}": a for name, a in ssm_state.items()}
    score, final["y"] = _innovation(fading.detach(), c, pos, _of(state, "y"))
    q = heads(linear(x, p["q_proj.weight"]), c["head_dim"])
    rows = {}
    for part in ("k", "v"):
        row = linear(x, p[f"kv_proj.{part}.weight"])
        if c["d_conv"] is not None:
            row, final[f"conv_{part}"] = convolution(row, p[f"conv_weights.{part}"], None, pos, _of(state, f"conv_{part}"))
            row = row.to(x.dtype)
        rows[part] = heads(row, c["head_dim"])
        rows[f"fading_{part}"] = heads(linear(fading, p[f"kv_proj.{part}.weight"]), c["head_dim"])
    memory = None if state is None else {name: a for name, a in state.items() if name in _MEMORY}
    y, memory = _eidetic_attention(q, rows, score, c, pos, memory)
    out = linear(y.flatten(2).to(x.dtype), p["out_proj.weight"])
    return out + fading if c["add_ssm_output"] else out, {**final, **memory}


def _innovation(y: Tensor, c: Settings, pos: Tensor, tail: Tensor | None) -> tuple[Tensor, Tensor]:
    """Size of each output's difference from a mean of those before it, [B, T], and the last `predictor` outputs."""
    count, length = c["predictor"], y.shape[1]
    weights = [1 / count if c["predictor_weights"] == "uniform" else 0.5**n / (1 - 0.5**count) for n in range(1, count + 1)]
    outputs = torch.cat((y.new_zeros(y.shape[0], count, y.shape[2]) if tail is None else tail, y), dim=1)
    error = precise(y)
    for back, weight in enumerate(weights, 1):
        before = precise(outputs[:, count - back : count - back + length])
        error = error - weight * torch.where((pos >= back)[..., None], before, 0.0)
    norms = {"l2": error.square().mean(-1).sqrt(), "l1": error.abs().mean(-1), "max": error.abs().amax(-1)}
    return norms[c["innovation_norm"]], _last(outputs, count)


_MEMORY = ("k", "v", "fading_k", "fading_v", "best_k", "best_v", "score", "where", "frozen_k", "frozen_v", "frozen", "seen")


def _eidetic_attention(q: Tensor, rows: State, score: Tensor, c: Settings, pos: Tensor, state: State | None) -> Result:
    """A loop over tokens. In the State the newest rows are last; `seen` of them are tokens of the current document."""
    window, n_best = c["window"], c["eidetic"]
    n_fading, sliding = (c["fading_tokens"] if c["fading"] == "chunk" else 0), c["fading"] == "sliding"
    tail = 2 * window - 1 if sliding else n_fading
    group, device = q.shape[2] // rows["k"].shape[2], q.device
    s = dict(state) if state is not None else _empty_memory(rows["k"], score, window, tail, n_best, n_best + n_fading)
    outputs = []
    for t in range(q.shape[1]):
        at = pos[:, t]
        s["seen"] = torch.minimum(s["seen"], at)
        # what was selected is published at multiples of the window, and attended until the next one
        s["score"] = torch.where((at == 0)[:, None], -torch.inf, s["score"])
        s["frozen"] = s["frozen"] & (at >= window)[:, None]
        publish = (at >= window) & (at % window == 0)
        if bool(publish.any()):
            newest = torch.arange(n_fading, 0, -1, device=device) <= s["seen"][:, None]
            valid = torch.cat((s["score"] > -torch.inf, newest), dim=1)
            s["frozen"] = torch.where(publish[:, None], valid, s["frozen"])
            for part in ("k", "v"):
                selected = torch.cat((s[f"best_{part}"], _last(s[f"fading_{part}"], n_fading)), dim=1)
                s[f"frozen_{part}"] = torch.where(publish[:, None, None, None], selected, s[f"frozen_{part}"])
        new = {name: row[:, t] for name, row in rows.items()}
        s |= {name: torch.cat((s[name], row[:, None]), dim=1) for name, row in new.items()}
        ages = torch.arange(window - 1, -1, -1, device=device)
        visible = [ages <= s["seen"][:, None], s["frozen"]]
        keys, values = [s["k"], s["frozen_k"]], [s["v"], s["frozen_v"]]
        if sliding:
            ages = torch.arange(2 * window - 1, window - 1, -1, device=device)
            visible.append(ages <= s["seen"][:, None])
            keys.append(s["fading_k"][:, :window])
            values.append(s["fading_v"][:, :window])
        K, V = (torch.cat(parts, dim=1).repeat_interleave(group, dim=2).transpose(1, 2) for parts in (keys, values))
        mask = torch.cat(visible, dim=1)[:, None, None]
        outputs.append(F.scaled_dot_product_attention(q[:, t, :, None], K, V, attn_mask=mask)[:, :, 0])
        for part in ("k", "v"):
            s[part], s[f"fading_{part}"] = _last(s[part], window - 1), _last(s[f"fading_{part}"], tail)
        s["seen"] = s["seen"] + 1
        if n_best:
            s |= _with_candidate(s, new["k"], new["v"], score[:, t], at)
    return torch.stack(outputs, dim=1), s


def _with_candidate(s: State, k: Tensor, v: Tensor, score: Tensor, at: Tensor) -> State:
    """The best tokens when one more may be among them. The smallest score goes; of equal ones, that of the youngest token."""
    scores, where = torch.cat((s["score"], score[:, None]), dim=1), torch.cat((s["where"], at[:, None].to(torch.int64)), dim=1)
    smallest = scores == scores.amin(1, keepdim=True)
    leaves = torch.where(smallest, where, -2).argmax(1)
    # the new one takes the place of the one that goes, unless it goes itself
    replaced = torch.arange(scores.shape[1] - 1, device=score.device) == leaves[:, None]
    found = {"score": torch.where(replaced, score[:, None], s["score"]), "where": torch.where(replaced, where[:, -1:], s["where"])}
    for name, row in (("best_k", k), ("best_v", v)):
        found[name] = torch.where(replaced[..., None, None], row[:, None], s[name])
    return found


def _empty_memory(k: Tensor, score: Tensor, window: int, tail: int, n_best: int, n_frozen: int) -> State:
    sizes = {"": window - 1, "fading_": tail, "best_": n_best, "frozen_": n_frozen}
    rows = {f"{name}{part}": k.new_zeros(k.shape[0], size, *k.shape[2:]) for name, size in sizes.items() for part in ("k", "v")}
    batch, device = k.shape[0], k.device
    return {
        **rows,
        "score": torch.full((batch, n_best), -torch.inf, dtype=score.dtype, device=device),
        "where": torch.full((batch, n_best), -1, dtype=torch.int64, device=device),
        "frozen": torch.zeros(batch, n_frozen, dtype=torch.bool, device=device),
        "seen": torch.zeros(batch, dtype=torch.int32, device=device),
    }


def _last(x: Tensor, count: int) -> Tensor:
    return x[:, x.shape[1] - count :]


MIXERS: dict[str, Callable[..., Result]] = {
    "attention": attention,
    "bmojo": bmojo,
    "channel_mix": channel_mix,
    "delta_net": delta_net,
    "gated_delta_net": delta_net,
    "gla": gla,
    "gsa": gsa,
    "hgrn2": hgrn2,
    "kda": delta_net,
    "lattice": lattice,
    "linear_attention": linear_attention,
    "longhorn": longhorn,
    "mamba": mamba,
    "mamba2": mamba2,
    "mamba3": mamba3,
    "mlstm": mlstm,
    "retnet": retnet,
    "rg_lru": rg_lru,
    "rwkv6": rwkv6,
    "rwkv7": rwkv7,
    "s4d": s4d,
    "swiglu": swiglu,
    "ttt": ttt,
}
