"""training.offload_kv: a step with keys and values of earlier segments in the host's memory has the bits of one without.

Models with full attention with grouped heads, sinks and a soft cap, packed documents, several micro-batches, over context ranks,
tensor ranks and stages; and on a GPU, where also the peak of its memory is measured.
"""

import pytest
import torch
from support.models import SEQUENCE_LENGTH, SEQUENCES, model_of, step_batch, training

from baton.data_pipeline.packing import Batch
from baton.models.config import ModelConfig
from baton.models.settings import kinds
from baton.parallel.config import LayoutConfig
from baton.parallel.earlier_keys import OffloadedKeys
from baton.parallel.param_layout import initialize_parameters
from baton.parallel.pipeline import StepSchedule
from baton.training.build import build, build_model, make_deterministic
from baton.training.config import BpttConfig
from baton.training.evaluation.long_context import forward_segments
from baton.training.step.executor import StepExecutor
from baton.training.step.microbatch_runner import MicrobatchRunner

SEGMENTS = 4
ROWS = SEQUENCES // 2
"""Sequences of a micro-batch: a step has two."""
MODEL = model_of("full_attention")


def settings(offload, compute_dtype, **changes):
    bptt = BpttConfig(mode="exact", segment=SEQUENCE_LENGTH // SEGMENTS)
    return training(bptt=bptt, offload_kv=offload, compute_dtype=compute_dtype, **changes)


def batches_of(mesh, step):
    """This rank's spans of every segment of the step's sequences, in two micro-batches."""
    whole, size = step_batch(step), mesh.layout.context
    parts = [whole.segment(s * size + mesh.context_rank, SEGMENTS * size) for s in range(SEGMENTS)]
    own = [torch.cat([getattr(part, name) for part in parts], dim=1).to(mesh.device) for name in ("tokens", "labels", "pos")]
    return [Batch(*(x[rows] for x in own)) for rows in torch.arange(SEQUENCES).split(ROWS)]


def gradients(mesh, offload, compute_dtype, recompute):
    """The loss, this rank's gradients, the norms of two steps, and an evaluation's hidden vectors and States."""
    config = settings(offload, compute_dtype, recompute=recompute)
    if mesh.device.type == "cuda":
        make_deterministic(config)
    model = build_model(MODEL, config, mesh.device, mesh)
    initialize_parameters(model, 1, mesh.tensor_rank, mesh.layout.tensor)
    schedule, batches = StepSchedule(SEGMENTS, SEGMENTS), batches_of(mesh, 0)
    runner = MicrobatchRunner(model, batches, 0.01, schedule, None, model.forward_context)
    for operation in schedule.operations(model.stage.index, model.stage.count, len(batches)):
        runner.run_operation(operation)
    runner.finish()
    model.link.wait()
    if mesh.pipeline is not None:
        mesh.pipeline.wait()
    assert not runner.mismatched_states()
    found = {"loss": runner.total, **{name: p.grad for name, p in model.named_parameters()}}
    store = model.link.key_store
    assert store.offload is offload
    layers = sum("attention" in MODEL.layers[n] for n in model.stage.layers)
    assert all(isinstance(kept, OffloadedKeys) is offload for kept in store.kept())
    assert bool(store.kept()) is bool(layers)
    # the layers' k and v, of one micro-batch at a time
    heads = MODEL.mixers["attention"].kv_heads // mesh.layout.tensor
    tokens = ROWS * (SEGMENTS - 1) * SEQUENCE_LENGTH // SEGMENTS // mesh.layout.context
    numbers = 2 * tokens * heads * MODEL.mixers["attention"].head_dim * layers * offload
    assert store.host.nbytes == numbers * (4 + 2 * (1 if compute_dtype == "bfloat16" else 2))
    if mesh.pipeline is None:
        with torch.no_grad():
            parts = [batches[0].segment(s, SEGMENTS) for s in range(SEGMENTS)]
            for s, (_, hidden, states) in enumerate(forward_segments(model, parts, SEGMENTS, model.forward_context)):
                found[f"hidden {s}"] = hidden
                found |= {f"{name} {n} {s}": x for n, state in states.items() for name, x in state.items()}
        model.link.wait()
    return {name: x.detach().cpu() for name, x in found.items()}


def steps(mesh, offload):
    """Losses and norms of two steps with the optimizer."""
    config = settings(offload, "float32")
    train_state = build(MODEL, config, mesh)
    executor = StepExecutor(train_state.model, train_state.engine, mesh, schedule=StepSchedule(SEGMENTS, SEGMENTS))
    results = [executor.step(batches_of(mesh, step), 1e-2) for step in range(2)]
    return [(one.loss, one.grad_norm) for one in results]


def both(mesh, compute_dtype, recompute):
    return [gradients(mesh, offload, compute_dtype, recompute) for offload in (False, True)]


def both_in_steps(mesh):
    return [steps(mesh, offload) for offload in (False, True)]


def assert_same_bits(results):
    for kept, offloaded in results:
        assert kept.keys() == offloaded.keys()
        differing = [name for name, x in kept.items() if not torch.equal(x, offloaded[name])]
        assert not differing
        if (grad := kept.get("shared.attention.mixer.in_proj.weight")) is not None:  # of queries, keys and values
            assert grad.isfinite().all()
            assert (grad != 0).any(dim=1).all()


LAYOUTS = [{}, {"context": 2}, {"tensor": 2}, {"pipeline": 2}, {"context": 2, "tensor": 2}]


FORMS = [("float32", "none"), ("bfloat16", "full")]
OFTEN = [({"pipeline": 2}, FORMS[0]), ({"context": 2, "tensor": 2}, FORMS[1])]


@pytest.mark.parametrize(
    ("layout", "compute_dtype", "recompute"),
    [
        pytest.param(layout, *form, marks=() if (layout, form) in OFTEN else pytest.mark.long)
        for layout in LAYOUTS
        for form in FORMS
    ],
    ids=str,
)
def test_a_step_with_offloaded_keys_has_the_same_bits(pool, layout, compute_dtype, recompute):
    assert_same_bits(pool.run(both, compute_dtype, recompute, **layout))


@pytest.mark.long  # the gradients that they are made of have the same bits, see above
@pytest.mark.parametrize("layout", [{}, {"context": 2, "zero": 1}, {"context": 2, "data": 2, "zero": 1}], ids=str)
def test_steps_with_offloaded_keys_have_the_same_bits(pool, layout):
    for kept, offloaded in pool.run(both_in_steps, **layout):
        assert kept == offloaded
        assert len({loss for loss, _ in kept}) == 2


@pytest.mark.gpu
@pytest.mark.timeout(600)  # kernels are compiled
@pytest.mark.parametrize(("compute_dtype", "recompute"), [("float32", "none"), ("bfloat16", "full")])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_step_on_gpus_with_offloaded_keys_has_the_same_bits(gpu_pool, layout, compute_dtype, recompute):
    if gpu_pool.size < (ranks := LayoutConfig(**layout).world_size):
        pytest.skip(f"needs {ranks} GPUs, there are {gpu_pool.size}")
    assert_same_bits(gpu_pool.run(both, compute_dtype, recompute, timeout_s=500, **layout))


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_a_gpu_keeps_as_much_less_as_the_host_has(gpu_pool):
    """Four layers of full attention, eight segments of 2048 tokens, in bfloat16: keys, values and gradients are most of the peak.
    The second time in the memory of the first."""
    ((kept, offloaded, host),) = gpu_pool.run(peaks, timeout_s=500, data=1)
    numbers = LONG.n_layers * 2 * 512 * 7 * 2048
    assert host == [numbers * (2 + 4)] * 2
    # a segment's gradients of a layer, in float32, are on their way
    assert kept - offloaded >= host[0] - 4 * 2 * 512 * 2048 - (8 << 20)


LONG = ModelConfig(
    d_model=256,
    n_layers=4,
    vocab_size=128,
    pattern=["attention"],
    mixers={"attention": kinds()["attention"](heads=8, kv_heads=8, head_dim=64, window=None)},
)


def peaks(mesh):
    """Bytes of the GPU at most without and with offloading, and of the host after two times; gradients have the same bits."""
    length, segments = 16384, 8
    g = torch.Generator().manual_seed(3)
    tokens = torch.randint(128, (1, length), generator=g)
    pos = torch.arange(length, dtype=torch.int32)[None] % 9000
    batch = Batch(*(x.to(mesh.device) for x in (tokens, tokens.roll(-1, 1), pos)))
    found, host, grads = [], [], []
    for offload in (False, True):
        config = training(
            sequence_length=length,
            global_batch_tokens=length,
            micro_batch_size=1,
            compute_dtype="bfloat16",
            bptt=BpttConfig(mode="exact", segment=length // segments),
            offload_kv=offload,
        )
        make_deterministic(config)
        model = build_model(LONG, config, mesh.device, mesh)
        initialize_parameters(model, 1, 0, 1)
        schedule = StepSchedule(segments, segments)
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            runner = MicrobatchRunner(model, [batch], 1e-4, schedule, None, model.forward_context)
            for operation in schedule.operations(0, 1, 1):
                runner.run_operation(operation)
            runner.finish()
            assert not runner.mismatched_states()
            host += [model.link.key_store.host.nbytes] * offload
            grads.append({name: p.grad.cpu() for name, p in model.named_parameters()})
        found.append(torch.cuda.max_memory_allocated())
        del model, runner
    for other in grads[1:]:
        assert all(torch.equal(x, other[name]) for name, x in grads[0].items())
    return *found, host
