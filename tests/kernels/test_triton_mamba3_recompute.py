"""Mamba-3's queries, keys and values are the same when the backward pass makes them again, and are not kept until then."""

import pytest
import torch
from support.gla import DEVICE, SMALL
from support.recurrences import positions, seeded

from baton.kernels.gated_linear_attention import op as gla_op
from baton.kernels.gated_linear_attention import triton_launch as gla_launch
from baton.kernels.mamba3 import torch_impl as of_one
from baton.kernels.mamba3.recurrence import Mamba3
from baton.kernels.mamba3_mimo import torch_impl as of_several
from baton.kernels.mamba3_mimo.recurrence import Mamba3MIMO

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in matmul")  # of pairs that a mask takes away
TOKENS = 19


@pytest.mark.parametrize(
    ("kind", "module", "turned", "written"),
    [(Mamba3, of_one, "rotated_triton", "head_scale"), (Mamba3MIMO, of_several, "rotated_of_several_triton", "inputs_triton")],
)
def test_what_is_made_again_has_the_same_bits(kind, module, turned, written, monkeypatch):
    """With documents and an entering State."""
    for place in (module, gla_op):
        monkeypatch.setattr(place, "use_triton", lambda *_: True)
    monkeypatch.setattr(gla_launch, "_DEFAULT", SMALL)
    calls = {turned: 0, written: 0}

    def counted(name, function):
        def run(*args):
            calls[name] += 1
            return function(*args)

        return run

    for name in calls:
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    inputs, state = kind().example(seeded(0), 1, TOKENS, torch.float32, wide=False)
    pos, found = positions(seeded(1), 1, TOKENS, 0.1).to(DEVICE), []
    for recompute in (False, True):
        calls.update(dict.fromkeys(calls, 0))
        leaves = [x.to(DEVICE).requires_grad_() for x in inputs]
        initial = {name: x.to(DEVICE).requires_grad_() for name, x in state.items()}
        y, final = kind(recompute_activations=recompute).run(tuple(leaves), pos, initial)
        assert set(calls.values()) == {1}
        outputs = [y, *final.values()]
        cotangents = [torch.randn(x.shape, generator=seeded(2)).to(DEVICE, x.dtype) for x in outputs]
        for again in range(2):
            grads = torch.autograd.grad(outputs, [*leaves, *initial.values()], cotangents, retain_graph=again == 0)
            assert calls == dict.fromkeys(calls, 1 + recompute * (again + 1))
            found.append([*outputs, *grads])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
    assert all(x.isfinite().all() and x.abs().sum() > 0 for x in found[0])
