"""Gated linear attention's Triton kernels compared with the definition: arguments, gradients and limits of tests."""

import torch
import torch.nn.functional as F

from baton.kernels.gated_linear_attention.launch_args import LaunchConfig
from baton.kernels.gated_linear_attention.reference import gla_reference
from baton.kernels.gated_linear_attention.triton_launch import gla_triton
from support.compare import relative_error
from support.recurrences import positions, seeded

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = LaunchConfig(chunk=16, x=16, x_gated=16, x_read=16, x_prepared=16, x_shared=16, y=16, y_gated=16, target_programs=1)
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 5e-3}


def example(gate, sizes, dtype=torch.float32, strength=1.0):
    """Arguments by name in float64, of which `dtype` loses nothing, and cotangents. strength: of gates, which are then extreme."""
    batch, tokens, queries, keys, heads, d_key, d_value = sizes
    g = seeded(0)

    def randn(*shape, dtype=dtype):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).double()

    given = {
        "q": randn(batch, tokens, queries, d_key),
        "k": randn(batch, tokens, keys, d_key),
        "v": randn(batch, tokens, heads, d_value),
    }
    shape = {"scalar": (heads,), "key": (heads, d_key), "value": (heads, d_value)}.get(gate)
    gates = None if shape is None else F.logsigmoid(randn(batch, tokens, *shape)) * strength * randn(batch, tokens, *shape) ** 2
    given["g"] = None if gates is None else gates.to(dtype).double()
    given["initial_state"] = randn(batch, heads, d_key, d_value, dtype=torch.float32)
    read = max(queries, heads)
    return given, (randn(batch, tokens, read, d_value), randn(batch, heads, d_key, d_value, dtype=torch.float32))


def with_gradients(run, given, cotangents, **options):
    leaves = {name: x.detach().clone().requires_grad_() for name, x in given.items() if x is not None}
    y, leaving = run(**{**given, **leaves}, **options)
    grads = torch.autograd.grad(
        [y, leaving], list(leaves.values()), [d.to(y.device, x.dtype) for x, d in zip((y, leaving), cotangents)]
    )
    return {"y": y, "leaving": leaving, **dict(zip(leaves, grads))}


def rounded(given, dtype):
    return {
        name: None if x is None else x.to(DEVICE, torch.float32 if name == "initial_state" else dtype) for name, x in given.items()
    }


def compare(gate, sizes, config, *, starts, dtype=torch.float32, strength=1.0, op=gla_triton):
    given, cotangents = example(gate, sizes, dtype, strength)
    pos = positions(seeded(1), *sizes[:2], 0.1) if starts else None
    options = {"gate": gate, "scale": 0.3}
    expected = with_gradients(gla_reference, given, cotangents, pos=pos, **options)
    own_pos = None if pos is None else pos.to(DEVICE)
    options |= {} if config is None else {"config": config}
    found = with_gradients(op, rounded(given, dtype), cotangents, pos=own_pos, **options)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape
        assert relative_error(found[name].double().cpu(), value) <= LIMITS[dtype], name
