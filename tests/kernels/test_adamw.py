"""AdamW's update of a partition is torch.optim.AdamW's, over several steps; the kernel too, interpreted where there is no GPU."""

from types import SimpleNamespace

import pytest
import torch
from support.bounds import reached_by_address
from support.compare import relative_error
from support.recurrences import seeded

from baton.kernels.adamw import AdamWStep, launch_forms, prepare_adamw, triton_launch
from baton.kernels.adamw.triton_launch import prepare_triton
from baton.kernels.errors import KernelError

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SETTINGS = {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
SCALE = 0.3


def operators(*tensors_and_starts, copies=None):
    *tensors, settings = tensors_and_starts
    prepare_adamw(*tensors, copies)(settings)


def kernel(*tensors_and_starts, copies=None):
    *tensors, settings = tensors_and_starts
    copies = [None] * len(tensors[3]) if copies is None else copies
    with reached_by_address(*tensors[3], *(x for x in copies if x is not None)):
        prepare_triton(*tensors, copies)(settings.scalars())


def fragments(shapes, gap):
    """Starts and the length of a flat tensor with a gap behind each gradient."""
    starts, end = [], 0
    for shape in shapes:
        starts.append(end)
        end += torch.Size(shape).numel() + gap
    return starts, end


@pytest.mark.parametrize("run", [operators, kernel])
@pytest.mark.parametrize(
    ("shapes", "gap"), [([(64, 96), (8,), (1, 20), (4096,)], 0), ([(33, 251), (7,), (0,), (1,), (5, 5)], 3)], ids=["even", "odd"]
)
def test_it_is_torchs(run, shapes, gap):
    g = seeded(0)
    starts, n = fragments(shapes, gap)
    start_values = torch.randn(n, generator=g)
    wanted = [start_values[at : at + torch.Size(s).numel()].double().view(s).requires_grad_() for s, at in zip(shapes, starts)]
    optimizer = torch.optim.AdamW(wanted, **SETTINGS)
    p, m, v = start_values.clone().to(DEVICE), torch.zeros(n, device=DEVICE), torch.zeros(n, device=DEVICE)
    for step in range(1, 5):
        grads = [torch.randn(s, generator=g) * 10.0 ** (step - 3) for s in shapes]
        for x, grad in zip(wanted, grads, strict=True):
            x.grad = SCALE * grad.double()
        optimizer.step()
        run(p, m, v, [x.to(DEVICE) for x in grads], starts, AdamWStep(**SETTINGS, step=step, grad_scale=SCALE))
    moved = start_values.clone().double()
    for x, at in zip(wanted, starts, strict=True):
        moved[at : at + x.numel()] = x.detach().view(-1)
    assert relative_error(p.double().cpu() - start_values, moved - start_values) <= 1e-5
    for found, name in ((m, "exp_avg"), (v, "exp_avg_sq")):
        of_torch = torch.zeros(n, dtype=torch.float64)
        for x, at in zip(wanted, starts, strict=True):
            of_torch[at : at + x.numel()] = optimizer.state[x][name].view(-1)
        assert relative_error(found.double().cpu(), of_torch) <= 1e-6, name


@pytest.mark.parametrize("run", [operators, kernel])
@pytest.mark.parametrize(
    "shapes", [[(33, 25), (7,)], [(64, 96), (4,), (8,)], [(64, 96), (16,), (8,)]], ids=["odd", "of 8 bytes", "of 16 bytes"]
)
def test_moments_in_bfloat16_are_rounded_to_nearest_behind_the_step(run, shapes):
    """Beside the equations in float64, from moments that bfloat16 has."""
    g = seeded(1)
    starts, n = fragments(shapes, 0)
    start, m, v = (torch.randn(n, generator=g) for _ in range(3))
    m, v = m.bfloat16(), v.square().bfloat16()
    grads, settings = [torch.randn(s, generator=g) for s in shapes], AdamWStep(**SETTINGS, step=3, grad_scale=SCALE)
    (b1, b2), gradient = SETTINGS["betas"], SCALE * torch.cat([x.flatten() for x in grads]).double()
    wanted_m = b1 * m.double() + (1 - b1) * gradient
    wanted_v = b2 * v.double() + (1 - b2) * gradient.square()
    update = (wanted_m / (1 - b1**3)) / ((wanted_v / (1 - b2**3)).sqrt() + SETTINGS["eps"])
    wanted = start.double() * (1 - SETTINGS["lr"] * SETTINGS["weight_decay"]) - SETTINGS["lr"] * update
    found = [x.clone().to(DEVICE) for x in (start, m, v)]
    run(*found, [x.to(DEVICE) for x in grads], starts, settings)
    parameters, *moments = (x.cpu() for x in found)
    assert relative_error(parameters.double() - start, wanted - start) <= 1e-5
    for moment, exact in zip(moments, (wanted_m, wanted_v), strict=True):
        assert moment.dtype == torch.bfloat16
        # float32 has a different neighbour only where it is a tie
        assert int((moment != exact.bfloat16()).sum()) <= 1
        assert relative_error(moment.double(), exact) > 1e-4, "it is rounded"


@pytest.mark.parametrize("run", [operators, kernel])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shapes", "gap"), [([(64, 96), (8,), (4096,)], 0), ([(33, 251), (7,), (5, 5)], 3)], ids=["even", "odd"])
def test_copies_are_the_new_parameters_rounded(run, dtype, shapes, gap):
    """The update is the one without copies to the bit, and one gradient, between two that have a copy, has none."""
    g = seeded(2)
    starts, n = fragments(shapes, gap)
    start = torch.randn(n, generator=g)
    grads, settings = [torch.randn(s, generator=g).to(DEVICE) for s in shapes], AdamWStep(**SETTINGS, step=2, grad_scale=SCALE)
    copies = [torch.full(s, torch.nan, dtype=dtype, device=DEVICE) for s in shapes]
    found, alone = ([start.clone().to(DEVICE), torch.zeros(n, device=DEVICE), torch.zeros(n, device=DEVICE)] for _ in range(2))
    run(*found, grads, starts, settings, copies=[copies[0], None, copies[2]])
    run(*alone, grads, starts, settings)
    assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))
    assert bool(copies[1].isnan().all())
    for number in (0, 2):
        updated = found[0][starts[number] : starts[number] + grads[number].numel()].view(shapes[number])
        assert torch.equal(copies[number], updated.to(dtype))


def test_the_tables_of_many_groups_are_made_once():
    """Of groups with copies there are two, of gradients and of copies: the host would wait for each that is made anew."""
    groups = [([torch.zeros(8)], [torch.zeros(8, dtype=torch.bfloat16)]) for _ in range(100)]
    flat, made = [torch.zeros(8) for _ in range(3)], []
    for _ in range(2):
        before = triton_launch._addresses.cache_info().misses
        for grads, copies in groups:
            prepare_triton(*flat, grads, [0], copies)
        made.append(triton_launch._addresses.cache_info().misses - before)
    assert made == [200, 0]


@pytest.mark.parametrize("moments_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
def test_all_forms_are_launched_for_compiling_them_ahead(moments_dtype, compute_dtype, monkeypatch):
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *tensors, ALIGNED, COPIED, **sizes: launched.append((str(COPIED), ALIGNED))

    monkeypatch.setattr(triton_launch, "_kernels", SimpleNamespace(adamw_kernel=Kernel()))
    launch_forms(torch.device("cpu"), moments_dtype, compute_dtype)
    copied = ["None"] if compute_dtype == torch.float32 else ["None", "bf16"]
    assert launched == [(of, aligned) for of in copied for aligned in (True, False)]


def test_what_it_refuses():
    p, m, v = (torch.zeros(8) for _ in range(3))
    for grads, starts, said in (
        ([torch.zeros(4)], [5], r"covers \[5, 9\) of 8"),
        ([torch.zeros(4, dtype=torch.float64)], [0], "float64"),
        ([torch.zeros(4, 2).T], [0], "contiguous"),
    ):
        with pytest.raises(KernelError, match=said):
            prepare_adamw(p, m, v, grads, starts)
    grad, low = torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.bfloat16)
    for copies, said in (
        ([torch.zeros(2, 2)], "float32"),
        ([low.view(4)], "shape"),
        ([low.T], "contiguous"),
        ([low, low.half()], "2 dtypes"),
    ):
        with pytest.raises(KernelError, match=said):
            prepare_adamw(p, m, v, [grad] * len(copies), [0] * len(copies), copies)
    with pytest.raises(KernelError, match="exp_avg_sq"):
        prepare_adamw(p, m, torch.zeros(7), [], [])
