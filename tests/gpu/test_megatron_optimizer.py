"""Compares training with megatron-core's DDP and distributed optimizer, for the same model, batches and layout.

megatron-core reduce-scatters gradients into its own buffers, shards the optimizer by these buffers, and computes the norm and the
clip itself; neither DeepSpeed nor training.step.executor is involved. The tests need GPUs.
"""

import pytest
import torch
import torch.distributed as dist
from support.compare import relative_error
from support.models import micro_batches, model_of, training

from baton.data_pipeline.packing import IGNORE_INDEX, Batch
from baton.parallel.param_layout import gather_parameters, initialize_parameters, named_layouts
from baton.training.build import build, build_model
from baton.training.lr_schedule import learning_rate
from baton.training.step.executor import StepExecutor

pytestmark = pytest.mark.gpu
STEPS = 3


def own(mesh, step, config):
    found = micro_batches(step, mesh.data_rank, mesh.layout.data, config.micro_batch_size, mesh.context_rank, mesh.layout.context)
    return [Batch(*(x.to(mesh.device) for x in (b.tokens, b.labels, b.pos))) for b in found]


def megatron_steps(mesh, mixer):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, ParamGroupOverride, ParamKey, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    config = training()
    o = config.optimizer
    model = build_model(model_of(mixer), config, mesh.device, mesh)
    initialize_parameters(model, config.seed, mesh.tensor_rank, mesh.layout.tensor)
    for _, p, layout in named_layouts(model):
        p.undecayed = not layout.decay
    # per-token loss: nothing is divided by the number of data ranks
    megatron = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=2,
        tensor_model_parallel_size=mesh.layout.tensor,
        calculate_per_token_loss=True,
    )
    ddp = DistributedDataParallel(
        megatron, DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True), model
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=o.lr,
            weight_decay=o.weight_decay,
            adam_beta1=o.betas[0],
            adam_beta2=o.betas[1],
            adam_eps=o.eps,
            clip_grad=o.clip_norm,
            params_dtype=torch.float32,
            use_distributed_optimizer=True,
        ),
        [ddp],
        config_overrides={ParamKey(attr="undecayed"): ParamGroupOverride(wd_mult=0.0)},
        use_gloo_process_groups=False,
    )
    rows = []
    for step in range(STEPS):
        batches = own(mesh, step, config)
        labels = torch.stack([(b.labels != IGNORE_INDEX).sum() for b in batches]).sum()
        dist.all_reduce(labels, group=mesh.data_group)
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        total = torch.zeros((), device=mesh.device)
        for batch in batches:
            loss = model.loss(ddp(batch.tokens, batch.pos)[0], batch.labels) / labels
            loss.backward()
            total += loss.detach()
        for _, p, layout in named_layouts(model):
            if "tensor" in layout.partial_over:
                dist.all_reduce(p.main_grad, group=mesh.tensor_group)
        ddp.finish_grad_sync()
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = learning_rate(step, config), o.weight_decay * group["wd_mult"]
        updated, norm, _ = optimizer.step()
        assert updated
        dist.all_reduce(total, group=mesh.data_group)
        rows.append((float(total), float(norm)))
    return rows, gather_parameters(model, mesh.tensor_group)


def baton_steps(mesh, mixer):
    config = training()
    train_state = build(model_of(mixer), config, mesh)
    executor = StepExecutor(train_state.model, train_state.engine, mesh)
    found = [executor.step(own(mesh, step, config), learning_rate(step, config)) for step in range(STEPS)]
    return [(r.loss, r.grad_norm) for r in found], gather_parameters(train_state.model, mesh.tensor_group)


@pytest.mark.parametrize("mixer", ["mamba", "gsa", "mamba2"])
def test_deepspeed_and_megatron_optimizers_agree(gpu_pool, mixer):
    layout = {"tensor": 2, "data": 2} if gpu_pool.size >= 4 else {"data": gpu_pool.size}
    expected = gpu_pool.run(megatron_steps, mixer, **layout)
    for zero in (0, 1, 2):
        for (rows, parameters), (want_rows, want) in zip(gpu_pool.run(baton_steps, mixer, zero=zero, **layout), expected):
            for row, want_row in zip(rows, want_rows):
                assert row == pytest.approx(want_row, rel=1e-5), zero
            for name, value in want.items():
                assert relative_error(parameters[name], value) <= 1e-5, (zero, name)
