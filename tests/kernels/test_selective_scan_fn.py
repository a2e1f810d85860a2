"""`selective_scan_fn` compared with a loop over the paper's equations in mamba_ssm's layout: values, gradients, and split
sequences."""

import pytest
import torch
import torch.nn.functional as F
from support.compare import relative_error
from support.recurrences import gradients, seeded

from baton.kernels.errors import KernelError
from baton.kernels.selective_scan import selective_scan_fn

BATCH, DIM, DSTATE, LENGTH = 2, 6, 3, 11


def arguments(groups=None, **absent):
    """Every tensor argument by name, float64."""
    g = seeded(0)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    projected = (BATCH, DSTATE, LENGTH) if groups is None else (BATCH, groups, DSTATE, LENGTH)
    return {
        "u": randn(BATCH, DIM, LENGTH), "delta": randn(BATCH, DIM, LENGTH), "A": -randn(DIM, DSTATE).exp(), "B": randn(*projected),
        "C": randn(*projected), "D": randn(DIM), "z": randn(BATCH, DIM, LENGTH), "delta_bias": randn(DIM),
        "initial_state": randn(BATCH, DIM, DSTATE),
    }  # fmt: skip


def loop(u, delta, A, B, C, D=None, z=None, delta_bias=None, initial_state=None):
    """Algorithm 2 token by token: out and the last state."""
    delta = F.softplus(delta if delta_bias is None else delta + delta_bias[:, None])
    B, C = (x[:, None] if x.dim() == 3 else x for x in (B, C))
    B, C = (x.repeat_interleave(DIM // x.shape[1], dim=1) for x in (B, C))
    h, outs = torch.zeros(BATCH, DIM, DSTATE, dtype=u.dtype) if initial_state is None else initial_state, []
    for t in range(u.shape[2]):
        dt = delta[:, :, t, None]
        h = torch.exp(dt * A) * h + dt * B[..., t] * u[:, :, t, None]
        outs.append((h * C[..., t]).sum(-1))
    out = torch.stack(outs, dim=2)
    out = out if D is None else out + D[:, None] * u
    return (out if z is None else out * F.silu(z)), h


@pytest.mark.parametrize("groups", [None, 1, 3])
@pytest.mark.parametrize("absent", [(), ("D", "z", "delta_bias", "initial_state")], ids=["every argument", "the required ones"])
def test_values_and_gradients_are_those_of_a_loop_over_the_equations(groups, absent):
    leaves = {name: x.requires_grad_() for name, x in arguments(groups).items() if name not in absent}
    found = selective_scan_fn(**leaves, delta_softplus=True, return_last_state=True)
    expected = loop(**leaves)
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) <= 1e-12
    both = (gradients(outputs, list(leaves.values()), seeded(1)) for outputs in (found, expected))
    for name, one, other in zip(leaves, *both, strict=True):
        assert relative_error(one, other) <= 1e-11, name


def test_a_split_sequence_continues_from_its_state():
    given = arguments()
    whole, last = selective_scan_fn(**given, delta_softplus=True, return_last_state=True)
    state, outs = given.pop("initial_state"), []
    for own in (slice(0, 4), slice(4, None)):
        segment = {name: x[..., own] if name in ("u", "delta", "z", "B", "C") else x for name, x in given.items()}
        out, state = selective_scan_fn(**segment, delta_softplus=True, return_last_state=True, initial_state=state)
        outs.append(out)
    assert relative_error(torch.cat(outs, dim=2), whole) <= 1e-14
    assert torch.equal(state, last)


def test_arguments_are_taken_by_position_in_the_order_of_mamba_ssm():
    named = arguments()
    del named["initial_state"]
    out = selective_scan_fn(*named.values(), True)
    assert isinstance(out, torch.Tensor)
    assert torch.equal(out, selective_scan_fn(**named, delta_softplus=True))


def test_what_is_not_supported_is_refused():
    given = arguments()
    with pytest.raises(KernelError, match=r"A has dtype torch\.complex128, expected a real dtype"):
        selective_scan_fn(**{**given, "A": given["A"].to(torch.complex128)})
    with pytest.raises(KernelError, match=r"B has shape \(6, 3\), expected \(batch, dstate, seqlen\)"):
        selective_scan_fn(**{**given, "B": given["A"]})
    with pytest.raises(KernelError, match="B has 4 groups and C has 4, expected one number that divides dim=6"):
        selective_scan_fn(**{**given, **{name: given[name][:, None].expand(-1, 4, -1, -1) for name in ("B", "C")}})
