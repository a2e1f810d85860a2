"""On a GPU: the kernels against float64, training against the CPU, and the same bits every time."""

import pytest
import torch
from support.compare import relative_error
from support.models import micro_batches, model_of, training
from support.recurrences import positions, seeded

from baton.data_pipeline.packing import Batch
from baton.kernels.common.kernel_check import check
from baton.kernels.protocol import LinearRecurrence
from baton.kernels.registry import recurrences
from baton.models.forward_context import ForwardContext
from baton.models.library import language_model
from baton.models.mixer import build_mixer
from baton.models.mixer_context import MixerContext
from baton.models.settings import SMALL_WIDTH, kinds
from baton.parallel.config import LayoutConfig
from baton.parallel.context_parallel import ContextLink
from baton.parallel.param_layout import gather_parameters, initialize_parameters
from baton.parallel.tensor import megatron_config
from baton.training.build import build, make_deterministic
from baton.training.checkpoint.shard_boxes import optimizer_boxes
from baton.training.evaluation.generation import Sampling, generate, step_recorder
from baton.training.lr_schedule import learning_rate
from baton.training.step.executor import StepExecutor

pytestmark = pytest.mark.gpu
STEPS = 5


@pytest.fixture
def deterministic():
    """Kernels whose result varies from run to run are refused, as in training."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("extreme", [False, True], ids=["smooth", "extreme"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recurrence", recurrences(), ids=str)
def test_every_recurrence_on_the_gpu_is_its_definition(recurrence, dtype, extreme, deterministic):
    """Against the loop over tokens in float64 on the CPU, on the same rounded inputs; and the same bits again."""
    finding = check(recurrence, torch.device("cuda"), dtype, extreme=extreme)
    assert finding.passed, str(finding)


@pytest.mark.parametrize("recurrence", recurrences(), ids=str)
def test_runs_have_the_same_bits_unasked(recurrence):
    """Whether or not PyTorch's operators beside the kernels were asked to."""
    for _ in range(3):
        finding = check(recurrence, torch.device("cuda"), torch.bfloat16)
        assert finding.passed, str(finding)


LINEAR = [r for r in recurrences() if isinstance(r, LinearRecurrence)]


@pytest.mark.parametrize("recurrence", LINEAR, ids=str)
def test_what_a_span_does_to_states_and_cotangents_is_known_early(recurrence, deterministic):
    """`begin` and `begin_backward` on the GPU in float32 are the CPU's in float64."""
    inputs, state = recurrence.example(seeded(0), 3, 70, torch.float32, wide=True)
    inputs, pos, g = recurrence.smooth(inputs), positions(seeded(1), 3, 70, 0.01), seeded(2)

    def begun(device, dtype):
        own = tuple(x.to(device, dtype) for x in inputs)
        entering = {leaf.name: state[leaf.name].to(device, leaf.dtype) for leaf in recurrence.state_specs(own)}
        transition, effect = recurrence.begin(own, pos.to(device))
        dy = torch.randn(recurrence.run(own, pos.to(device), entering)[0].shape, generator=g.manual_seed(3)).to(device, dtype)
        cotangents = recurrence.begin_backward(own, pos.to(device), transition, entering, dy)
        left, right = cotangents.apply(entering), effect.apply(entering)
        return {**{f"{name} right": x for name, x in right.items()}, **{f"{name} left": x for name, x in left.items()}}

    expected, found = begun("cpu", torch.float64), begun("cuda", torch.float32)
    for name, want in expected.items():
        assert relative_error(found[name].cpu(), want) <= 2e-5, name


def to(batch, device):
    return Batch(batch.tokens.to(device), batch.labels.to(device), batch.pos.to(device))


def steps(mesh, compute_dtype="float32", save_at=None, mixer="mamba"):
    """Losses and norms of a few steps, the parameters after them, and the optimizer state at `save_at`."""
    config = training(compute_dtype=compute_dtype)
    make_deterministic(config)
    train_state = build(model_of(mixer), config, mesh)
    executor, rows, saved = StepExecutor(train_state.model, train_state.engine, mesh), [], None
    for step in range(STEPS):
        spans = (mesh.context_rank, mesh.layout.context)
        own = micro_batches(step, mesh.data_rank, mesh.layout.data, config.micro_batch_size, *spans)
        batches = [to(b, mesh.device) for b in own]
        result = executor.step(batches, learning_rate(step, config))
        rows.append((result.loss, result.grad_norm))
        if step == save_at:
            found = optimizer_boxes(train_state.model, train_state.engine, mesh, for_save=False)
            saved = {key: [r.data.cpu().clone() for r in boxes] for key, boxes in found.items()}
    return rows, gather_parameters(train_state.model, mesh.tensor_group), saved


def same_rows(found, expected, rel):
    for (loss, norm), (want_loss, want_norm) in zip(found, expected):
        assert loss == pytest.approx(want_loss, rel=rel)
        assert norm == pytest.approx(want_norm, rel=rel)


LAYOUTS = [
    {"data": 1},
    {"data": 2},
    {"data": 2, "zero": 0},
    {"data": 2, "zero": 2},
    {"tensor": 2},
    {"tensor": 2, "data": 2},
    {"tensor": 2, "data": 2, "sequence_parallel": True},
    {"context": 2},
    {"context": 2, "context_comm": "early"},
    {"context": 2, "context_comm": "all_gather"},
    {"pipeline": 2},
    {"pipeline": 2, "tensor": 2, "sequence_parallel": True},
    {"pipeline": 2, "context": 2},
    {"pipeline": 3, "zero": 0},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_training_on_gpus_equals_training_on_the_cpu(pool, gpu_pool, layout):
    ranks = LayoutConfig(**layout).world_size
    if ranks > gpu_pool.size:
        pytest.skip(f"needs {ranks} GPUs, there are {gpu_pool.size}")
    rows, parameters, _ = pool.run(steps, data=1)[0]
    seen = set()
    for found, got, _ in gpu_pool.run(steps, **layout):
        same_rows(found, rows, 1e-4)
        seen |= got.keys()
        for name, value in got.items():
            assert relative_error(value, parameters[name]) <= 1e-4, name
    assert seen == parameters.keys()


EXTRA = ("groups", "qwen", "bare", "ablated", "static", "t2r", "falcon", "added", "full_attention")


@pytest.mark.parametrize("mixer", [*(kind for kind in kinds() if kind != "mamba"), *EXTRA])
def test_every_mixer_trains_on_gpus_as_on_the_cpu(pool, gpu_pool, mixer):
    layout = {"tensor": 2, "data": 2} if gpu_pool.size >= 4 else {"data": 1}
    rows, parameters, _ = pool.run(steps, data=1, mixer=mixer)[0]
    for found, got, _ in gpu_pool.run(steps, **layout, mixer=mixer):
        same_rows(found, rows, 1e-4)
        for name, value in parameters.items():
            assert relative_error(got[name], value) <= 1e-4, name


@pytest.mark.parametrize("mixer", ["mamba", "gsa", "lattice", "bmojo", "gated_delta_net"])
def test_states_go_from_gpu_to_gpu(pool, gpu_pool, mixer):
    if gpu_pool.size < 2:
        pytest.skip(f"needs 2 GPUs, there are {gpu_pool.size}")
    rows, parameters, _ = pool.run(steps, data=1, mixer=mixer)[0]
    for found, got, _ in gpu_pool.run(steps, context=gpu_pool.size, mixer=mixer):
        same_rows(found, rows, 1e-4)
        for name, value in parameters.items():
            assert relative_error(got[name], value) <= 1e-4, name


@pytest.mark.timeout(900)  # kernels of every kind are compiled
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_are_segments_bit_for_bit_on_gpus(gpu_pool, ranks):
    """Outputs, leaving State and the entering State's cotangent of every kind; by relay, early, and gathered."""
    if gpu_pool.size < ranks:
        pytest.skip(f"needs {ranks} GPUs, there are {gpu_pool.size}")
    by = {
        exchange: gpu_pool.run(spans, timeout_s=400, context=ranks, context_comm=exchange)
        for exchange in ("ring", "early", "all_gather")
    }
    for exchange in ("ring", "early"):
        alone = gpu_pool.run(spans, ranks, exchange, timeout_s=400, data=1)[0]
        held_to(alone, [by["ring"]] if exchange == "ring" else [by["early"], by["all_gather"]])


def held_to(alone, layouts):
    """To one rank's results, bit for bit."""
    for kind, (outputs, leaving, entering) in alone.items():
        for of_ranks in layouts:
            assert all(torch.equal(rank[kind][0][0], outputs[n]) for n, rank in enumerate(of_ranks)), kind
            assert all(torch.equal(of_ranks[-1][kind][1][name], x) for name, x in leaving.items()), kind
            assert all(torch.equal(of_ranks[0][kind][2][name], x) for name, x in entering.items()), kind


def spans(mesh, pieces=None, exchange="ring"):
    """Of a mixer of each kind with a State: outputs of this rank's span (or of all pieces), leaving State, entering cotangent."""
    torch.use_deterministic_algorithms(True)
    link = mesh.link or ContextLink(0, [0], mesh.device, exchange=exchange)
    count, results = pieces or mesh.layout.context, {}
    for kind, settings in kinds().items():
        if settings.small().state_grows:
            continue
        context = MixerContext(SMALL_WIDTH, 1, 1e-5, megatron_config(1), torch.float32)
        with mesh.device:
            layer = build_mixer(settings.small(), context)
        initialize_parameters(layer, 1, 0, 1)
        g = seeded(3)
        length = 16 * count
        x, dy = (torch.randn(2, length, SMALL_WIDTH, generator=g).to(mesh.device) for _ in range(2))
        pos = positions(seeded(4), 2, length, 0.08).to(mesh.device)
        entering, outputs, cuts = None, [], []
        if link.rank == 0:
            with torch.no_grad():
                _, entering = layer(x[:, :12].flip(1), torch.arange(12, device=mesh.device).repeat(2, 1), None)
            entering = {name: s.clone().requires_grad_(s.is_floating_point()) for name, s in entering.items()}
        state = entering
        for n in range(count) if pieces else [mesh.context_rank]:
            span = slice(16 * n, 16 * (n + 1))
            y, state = layer(x[:, span], pos[:, span], state, ForwardContext(link))
            outputs.append(y)
            cuts.append(dy[:, span])
        last = link.rank == link.size - 1
        moving = [s for s in state.values() if s.requires_grad] if last else []
        torch.autograd.backward([*outputs, *moving], [*cuts, *map(torch.ones_like, moving)])
        link.wait()
        of = {} if entering is None else {name: s.grad.cpu() for name, s in entering.items() if s.grad is not None}
        results[kind] = [y.detach().cpu() for y in outputs], {n: s.detach().cpu() for n, s in state.items()}, of
    return results


def test_bfloat16_follows_float32(gpu_pool):
    exact, _, _ = gpu_pool.run(steps, data=1)[0]
    found, _, _ = gpu_pool.run(steps, compute_dtype="bfloat16", data=1)[0]
    same_rows(found, exact, 5e-2)
    assert found != exact


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_equal_runs_give_equal_bits(gpu_pool, compute_dtype):
    first, second = (gpu_pool.run(steps, compute_dtype=compute_dtype, save_at=3, data=1)[0] for _ in range(2))
    assert first[0] == second[0]
    for key, parts in first[2].items():
        assert all(torch.equal(a, b) for a, b in zip(parts, second[2][key])), key


@pytest.mark.parametrize("mixer", [*(kind for kind in kinds() if kind != "swiglu"), "t2r", "falcon", "full_attention", "whole"])
def test_text_is_that_of_the_cpu_and_recorded_steps_write_the_same(mixer):
    g, model = seeded(4), language_model(model_of(mixer), seed=2)
    prompts = [torch.randint(61, (length,), generator=g).tolist() for length in (5, 17, 1, 17)]
    words = {"tokens": 40, "vocab_size": 61, "stop": None, "seeds": [3, 1, 4, 1]}
    expected = generate(model, prompts, **words, sampling=Sampling(0))
    model.cuda()
    recorder = step_recorder(model)
    assert recorder is not None
    assert generate(model, prompts, **words, sampling=Sampling(0)) == expected
    for sampling in (Sampling(0), Sampling(0.9), Sampling(1.0, 20, 0.8)):
        plain = generate(model, prompts, **words, sampling=sampling, ended=lambda row, ids: len(ids) == 40 - 9 * row)
        recorded = generate(
            model, prompts, **words, sampling=sampling, ended=lambda row, ids: len(ids) == 40 - 9 * row, recorder=recorder
        )
        assert recorded == plain, sampling
