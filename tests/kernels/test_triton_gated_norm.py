"""A norm beside a gate: the operator and its Triton kernels against torch's functions in float64; on a CPU the kernels are
interpreted."""

import pytest
import torch
import torch.nn.functional as F
from support.compare import relative_error
from support.recurrences import seeded

from baton.kernels.errors import KernelError
from baton.kernels.gated_norm import gated_norm
from baton.kernels.gated_norm.triton_launch import blocks_of_program, gated_norm_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 5e-3}
EPS = 1e-3
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "sigmoid": torch.sigmoid}
FORMS = {
    "gla": {},
    "kda": {"activation": "sigmoid"},
    "gelu": {"activation": "gelu"},
    "mlstm": {"activation": "sigmoid", "center": True},
    "mamba2": {"gate_first": True, "skip": True},
    "without a skip": {"gate_first": True},
}


def plain(x, z, weight, u=None, factors=None, *, activation="silu", gate_first=False, center=False):
    """In float64, as the docstring has it."""
    z = z.view(x.shape)
    if u is not None:
        x = x + factors.repeat_interleave(x.shape[-2] * x.shape[-1] // len(factors)).view(x.shape[-2:]) * u
    if gate_first:
        x = x * F.silu(z)
    if center:
        x = x - x.mean(-1, keepdim=True)
    y = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
    return (y if gate_first else y * ACTIVATIONS[activation](z)).flatten(-2)


@pytest.mark.parametrize("own", [False, True], ids=["one weight", "rows have weights"])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("run", ["op", "kernel"])
@pytest.mark.parametrize("form", FORMS)
def test_it_is_the_formula(form, run, dtype, own):
    """Rows of all sizes, one of them zeros; widths of no power of two; columns of wider rows; several programs, the last of which
    has less to do."""
    options, g = dict(FORMS[form]), seeded(0)
    skips, tokens, rows, width, found = options.pop("skip", False), (2, 41), 3, 20, []
    x, u = ((torch.randn(*tokens, rows, width, generator=g) * torch.logspace(-2, 2, 41)[:, None, None]).to(dtype) for _ in range(2))
    x[0, 1], u[0, 1] = 0, 0
    wide = torch.randn(*tokens, 2 * rows * width + 7, generator=g).to(dtype)
    weight = torch.randn(*((rows, width) if own else (width,)), generator=g)
    factors, dy = torch.randn(12, generator=g), torch.randn(*tokens, rows * width, generator=g).to(dtype)
    for place, cast in (("cpu", torch.float64), (DEVICE if run == "kernel" else "cpu", None)):
        leaves = [t.to(place, cast or t.dtype).requires_grad_() for t in (x, wide, weight, u, factors)]
        own_x, own_wide, own_weight, *skip = leaves
        z = own_wide[..., 5 : 5 + rows * width]
        if cast:
            y = plain(own_x, z.reshape(own_x.shape), own_weight, *(skip if skips else ()), **options)
        else:
            options |= {"skip": tuple(skip)} if skips else {}
            view = torch.stack((own_x, own_x), -1)[..., 0]
            if run == "op":
                y = gated_norm(view, z, own_weight, EPS, **options)
            else:
                y = gated_norm_triton(view, z, own_weight, EPS, dtype, most_blocks=3, **options)
            assert (y.dtype, view.is_contiguous()) == (dtype, False)
        read = leaves if skips else leaves[:3]
        found.append([y, *torch.autograd.grad(y, read, dy.to(place, y.dtype))])
    for name, want, have in zip(("y", "x", "z", "weight", "u", "factors"), *found, strict=False):
        assert have.dtype == (torch.float32 if name in ("weight", "factors") else dtype), name
        # on a CPU the gate and the sums of a bfloat16 run round what lies between them
        assert relative_error(have.double().cpu(), want) <= LIMITS[dtype], name


@pytest.mark.parametrize("form", FORMS)
def test_poisoned_neighbours_are_not_read(form):
    """What lies between and behind the rows of x, z, u and dy is NaN."""
    options, g = dict(FORMS[form]), seeded(0)
    skips, found = options.pop("skip", False), []
    given = [torch.randn(33, 2, 5, generator=g) for _ in range(4)]
    for poison in (False, True):
        leaves = []
        for t in given:
            around = torch.full((40, 30), torch.nan, device=DEVICE)
            around[:33, 11:21] = t.flatten(1)
            leaves.append(around[:33, 11:21] if poison else t.to(DEVICE).flatten(1))
        x, z, u, dy = leaves
        x, z, u = (t.requires_grad_() if not poison else t.detach().requires_grad_() for t in (x, z, u))
        weight = torch.ones(5, device=DEVICE).requires_grad_()
        options |= {"skip": (u.unflatten(1, (2, 5)), torch.arange(10.0, device=DEVICE))} if skips else {}
        y = gated_norm_triton(x.unflatten(1, (2, 5)), z, weight, EPS, torch.float32, most_blocks=2, **options)
        found.append([y, *torch.autograd.grad(y, (x, z, weight, *((u,) if skips else ())), dy)])
    for want, have in zip(*found, strict=True):
        assert torch.equal(want, have)


def test_programs_have_fewer_blocks_where_there_are_few():
    assert [blocks_of_program(tokens, 1, 2, 32) for tokens in (1, 1024, 4096, 65536, 1 << 20)] == [1, 1, 4, 32, 32]
    assert blocks_of_program(2048, 12, 32, 32) == 1
    assert blocks_of_program(65536, 12, 32, 32) == 32


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("form", "rows", "width"), [("gla", 4, 512), ("kda", 16, 128), ("mlstm", 4, 512), ("mamba2", 1, 4096), ("mamba2", 1, 5120)]
)
def test_the_sizes_of_runs(form, rows, width):
    """More blocks than programs; twice the same bits."""
    options, g = dict(FORMS[form]), seeded(0)
    skips, found = options.pop("skip", False), []
    x, u = (torch.randn(2, 3000, rows, width, generator=g).to(torch.bfloat16) for _ in range(2))
    z, dy = (torch.randn(2, 3000, rows * width, generator=g).to(torch.bfloat16) for _ in range(2))
    weight, factors = torch.randn(width, generator=g), torch.randn(rows * width // 64, generator=g)
    for cast in (torch.float64, None, None):
        leaves = [t.to(DEVICE, cast or t.dtype).requires_grad_() for t in (x, z, weight, u, factors)]
        skip = leaves[3:] if skips else []
        if cast:
            y = plain(*leaves[:3], *skip, **options)
        else:
            y = gated_norm(*leaves[:3], EPS, **options, skip=tuple(skip) if skips else None)
        found.append([y, *torch.autograd.grad(y, (*leaves[:3], *skip), dy.to(DEVICE, y.dtype))])
    for want, have, again in zip(*found, strict=True):
        assert relative_error(have.double(), want) <= LIMITS[torch.bfloat16]
        assert torch.equal(have, again)


def test_what_does_not_fit_is_refused():
    x, z, weight = torch.ones(2, 3, 5), torch.ones(2, 15), torch.ones(5)
    for message, call in (
        (r"z has shape \(2, 3, 5\), expected \(x's 0, rows d\) = \(2, 15\)", lambda: gated_norm(x, x, weight, EPS)),
        (r"weight has shape \(4,\), expected \(d,\) = \(5,\)", lambda: gated_norm(x, z, torch.ones(4), EPS)),
        (r"weight has shape \(5, 3\), expected \(rows, d\) = \(3, 5\)", lambda: gated_norm(x, z, torch.ones(5, 3), EPS)),
        ("activation is 'tanh'", lambda: gated_norm(x, z, weight, EPS, activation="tanh")),
        ("with gate_first neither center", lambda: gated_norm(x, z, weight, EPS, gate_first=True, center=True)),
        ("a skip goes with gate_first", lambda: gated_norm(x, z, weight, EPS, skip=(x, weight))),
        (r"u has shape \(2, 15\)", lambda: gated_norm(x, z, weight, EPS, gate_first=True, skip=(z, weight))),
        (r"divides rows d = 15", lambda: gated_norm(x, z, weight, EPS, gate_first=True, skip=(x, torch.ones(4)))),
    ):
        with pytest.raises(KernelError, match=f"gated_norm: .*{message}"):
            call()
