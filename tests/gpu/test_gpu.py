"""On a GPU: the kernels against float64, training against the CPU, and the same bits every time."""

import pytest
import torch
from support.compare import relative_error
from support.models import MODEL, micro_batches, training

from baton.kernels.longhorn.op import longhorn
from baton.kernels.selective_scan.op import selective_scan
from baton.kernels.short_conv.op import short_conv
from baton.parallel.layout import gather_parameters
from baton.training.build import build, make_deterministic
from baton.training.checkpoint.rectangles import optimizer_rectangles
from baton.training.executor import StepExecutor, TokenBatch
from baton.training.schedule import learning_rate

pytestmark = pytest.mark.gpu
STEPS = 5


def positions(b, t, g):
    starts = torch.rand(b, t, generator=g) < 0.1
    pos = torch.zeros(b, t, dtype=torch.int32)
    for i in range(t):
        before = pos[:, i - 1] + 1 if i else torch.full((b,), 3, dtype=torch.int32)
        pos[:, i] = torch.where(starts[:, i], 0, before)
    return pos


def scan_inputs(g, b=3, t=45, d=37, n=5):
    make = lambda *s: torch.randn(*s, generator=g, dtype=torch.float64)  # noqa: E731
    return [make(b, t, d), torch.nn.functional.softplus(make(b, t, d)), -make(d, n).exp(), make(b, t, n), make(b, t, n), make(d)], (
        make(b, d, n)
    )


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)])
def test_selective_scan_on_the_gpu(dtype, limit):
    g = torch.Generator().manual_seed(0)
    tensors, state = scan_inputs(g)
    pos = positions(3, 45, g)
    # A, D and the state are fp32 in every model; what is rounded is rounded before the reference sees it
    tensors = [x.to(torch.float32 if i in (2, 5) else dtype) for i, x in enumerate(tensors)]
    state, dy, dstate = state.float(), torch.randn(3, 45, 37, generator=g).to(dtype), torch.randn(3, 37, 5, generator=g)

    def run(device, cast):
        leaves = [x.to(device).to(cast or x.dtype).requires_grad_() for x in (*tensors, state)]
        y, out = selective_scan(*leaves[:6], pos=pos.to(device), initial_state=leaves[6])
        torch.autograd.backward([y, out], [dy.to(device).to(y.dtype), dstate.to(device).to(out.dtype)])
        return [y, out, *(x.grad for x in leaves)]

    expected, found = run("cpu", torch.float64), run("cuda", None)
    for want, got in zip(expected, found):
        assert relative_error(got, want) <= limit
    assert all(torch.equal(a, b) for a, b in zip(found, run("cuda", None))), "two runs differ"


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)])
def test_longhorn_on_the_gpu(dtype, limit):
    g = torch.Generator().manual_seed(2)
    make = lambda *s: torch.randn(*s, generator=g)  # noqa: E731
    # x, k and q are activations; beta, D and the state are fp32 in every model
    rounded = [v.to(dtype) for v in (make(3, 45, 37), make(3, 45, 5), make(3, 45, 5))]
    tensors = [*rounded, torch.sigmoid(make(3, 45, 37)), make(37), make(3, 37, 5)]
    pos, dy, dstate = positions(3, 45, g), make(3, 45, 37).to(dtype), make(3, 37, 5)

    def run(device, cast):
        leaves = [v.to(device).to(cast or v.dtype).requires_grad_() for v in tensors]
        y, out = longhorn(*leaves[:5], pos=pos.to(device), initial_state=leaves[5])
        torch.autograd.backward([y, out], [dy.to(device).to(y.dtype), dstate.to(device).to(out.dtype)])
        return [y, out, *(v.grad for v in leaves)]

    found = run("cuda", None)
    for want, got in zip(run("cpu", torch.float64), found):
        assert relative_error(got, want) <= limit
    assert all(torch.equal(a, b) for a, b in zip(found, run("cuda", None))), "two runs differ"


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)])
def test_short_conv_on_the_gpu(dtype, limit):
    g = torch.Generator().manual_seed(1)
    x, w, b, tail = (torch.randn(*s, generator=g) for s in [(3, 45, 37), (37, 4), (37,), (3, 3, 37)])
    x, tail, pos = x.to(dtype), tail.to(dtype), positions(3, 45, g)
    dy = torch.randn(3, 45, 37, generator=g).to(dtype)

    def run(device, cast):
        leaves = [v.to(device).to(cast or v.dtype).requires_grad_() for v in (x, w, b, tail)]
        y, _ = short_conv(*leaves[:3], pos=pos.to(device), tail=leaves[3], activation="silu")
        y.backward(dy.to(device).to(y.dtype))
        return [y, *(v.grad for v in leaves)]

    for want, got in zip(run("cpu", torch.float64), run("cuda", None)):
        assert relative_error(got, want) <= limit


def to(batch, device):
    return TokenBatch(batch.tokens.to(device), batch.labels.to(device), batch.pos.to(device))


def steps(mesh, precision="float32", save_at=None):
    """Losses and norms of a few steps, the parameters after them, and the optimizer state at `save_at`."""
    config = training(precision=precision)
    make_deterministic(config)
    built = build(MODEL, config, mesh)
    executor, rows, saved = StepExecutor(built.model, built.engine, mesh), [], None
    for step in range(STEPS):
        batches = [to(b, mesh.device) for b in micro_batches(step, mesh.data_rank, mesh.layout.data, config.micro_batch)]
        result = executor.step(batches, learning_rate(step, config))
        rows.append((result.loss, result.grad_norm))
        if step == save_at:
            found = optimizer_rectangles(built.model, built.engine, mesh, for_save=False)
            saved = {key: [r.data.cpu().clone() for r in rectangles] for key, rectangles in found.items()}
    return rows, gather_parameters(built.model, mesh.tensor_group), saved


def same_rows(found, expected, rel):
    for (loss, norm), (want_loss, want_norm) in zip(found, expected):
        assert loss == pytest.approx(want_loss, rel=rel)
        assert norm == pytest.approx(want_norm, rel=rel)


@pytest.mark.parametrize("layout", [{"data": 1}, {"data": 2}, {"tensor": 2}, {"tensor": 2, "data": 2}], ids=str)
def test_training_on_gpus_equals_training_on_the_cpu(pool, gpu_pool, layout):
    ranks = layout.get("data", 1) * layout.get("tensor", 1)
    if ranks > gpu_pool.size:
        pytest.skip(f"needs {ranks} GPUs, there are {gpu_pool.size}")
    rows, parameters, _ = pool.run(steps, data=1)[0]
    for found, got, _ in gpu_pool.run(steps, **layout):
        same_rows(found, rows, 1e-4)
        for name, value in parameters.items():
            assert relative_error(got[name], value) <= 1e-4, name


def test_bfloat16_follows_float32(gpu_pool):
    exact, _, _ = gpu_pool.run(steps, data=1)[0]
    found, _, _ = gpu_pool.run(steps, precision="bfloat16", data=1)[0]
    same_rows(found, exact, 5e-2)
    assert found != exact


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_equal_runs_give_equal_bits(gpu_pool, precision):
    first, second = (gpu_pool.run(steps, precision=precision, save_at=3, data=1)[0] for _ in range(2))
    assert first[0] == second[0]
    for key, parts in first[2].items():
        assert all(torch.equal(a, b) for a, b in zip(parts, second[2][key])), key
