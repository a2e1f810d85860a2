"""ZeRO by DeepSpeed, driven in the one mode that is exact however backward is called.

The engine owns the optimizer and nothing else. Parameters are fp32; the executor calls autograd itself and gradients add up in
`.grad`; `engine.step()` sums them over data x sequence, clips by the global norm, steps the optimizer and gathers. "Unmanaged"
gradient accumulation is DeepSpeed's name for that. tests/parallel/test_zero.py compares it with plain PyTorch in every way it
is driven here, and guards every version bump.
"""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from baton.parallel.errors import LayoutError
from baton.parallel.layout import named_layouts
from baton.parallel.mesh import Mesh


class DeepSpeedGroups:
    """The mesh under the names that DeepSpeed asks an `mpu` for.

    It must not have an attribute that begins with `get_sequence_` or is called `initialize_sequence_parallel`: DeepSpeed then
    takes it for another kind of mpu, drops the model-parallel group and computes a wrong gradient norm.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def get_data_parallel_group(self, with_context_parallel: bool = True) -> dist.ProcessGroup:
        return self._mesh.data_group

    def get_data_parallel_world_size(self, with_context_parallel: bool = True) -> int:
        return dist.get_world_size(self._mesh.data_group)

    def get_data_parallel_rank(self, with_context_parallel: bool = True) -> int:
        return dist.get_rank(self._mesh.data_group)

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._mesh.model_group

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self._mesh.model_group)

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self._mesh.model_group)

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        return self._mesh.tensor_group

    def get_tensor_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self._mesh.tensor_group)

    def get_tensor_model_parallel_rank(self) -> int:
        return dist.get_rank(self._mesh.tensor_group)

    def get_tensor_model_parallel_src_rank(self) -> int:
        return dist.get_global_rank(self._mesh.tensor_group, 0)

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self._mesh.layout.pipeline


def deepspeed_config(clip_norm: float) -> dict[str, Any]:
    """Every DeepSpeed setting that matters, stated.

    There is no bf16 block on purpose: it would cast every parameter, also those that must stay fp32.
    clip_norm: global gradient norm above which gradients are scaled down; 0 turns clipping off.
    """
    return {
        # DeepSpeed checks train_batch_size = micro_batch * accumulation * data ranks and uses it for nothing else here.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        # The loss is divided by the labels of the whole global batch before backward; nothing else is divided anywhere.
        "gradient_allreduce_op": "sum",
        "prescale_gradients": False,
        "gradient_clipping": clip_norm,
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 1,
            "overlap_comm": False,
            "contiguous_gradients": False,
            "reduce_scatter": True,
            "round_robin_gradients": False,
            "reduce_bucket_size": 500_000_000,
            "allgather_bucket_size": 500_000_000,
        },
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        "disable_allgather": False,
        "dump_state": False,
    }


def parameter_groups(module: nn.Module, weight_decay: float, rates: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Optimizer groups from the layouts, in the module's order: decayed and not decayed, for each learning rate.

    rates: patterns of parameter names that have a learning rate of their own, the first match counts; a group's "rate" says which
    ("": none). An empty group is left out, and so is a parameter that is not trained.

    Raises:
        LayoutError: a pattern that no parameter's name matches.
    """
    groups: dict[tuple[str, bool], dict[str, Any]] = {}
    for rate in ("", *rates):
        for decay in (True, False):
            name = f"{'' if decay else 'no_'}decay{rate and f' {rate}'}"
            groups[rate, decay] = {"name": name, "rate": rate, "params": [], "weight_decay": weight_decay if decay else 0.0}
    unused = dict.fromkeys(rates)
    for name, parameter, layout in named_layouts(module):
        matching = [rate for rate in rates if fnmatchcase(name, rate)]
        for rate in matching:
            unused.pop(rate, None)
        if parameter.requires_grad:
            groups[matching[0] if matching else "", layout.decay]["params"].append(parameter)
    if unused:
        raise LayoutError(f"training.optimizer.rates: no parameter's name matches {next(iter(unused))!r}")
    return [group for group in groups.values() if group["params"]]


def build_engine(module: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh, clip_norm: float) -> Any:
    """A DeepSpeed ZeRO-1 engine over the optimizer. The module's parameters must be fp32 and already initialised."""
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel("WARNING")
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=optimizer, config=deepspeed_config(clip_norm), mpu=DeepSpeedGroups(mesh), dist_init_required=False
    )
    return engine


def finalise_gradients(module: nn.Module, mesh: Mesh) -> None:
    """Add up the gradients that the layouts call partial, one coalesced all-reduce per group, before the engine's step.

    Raises RuntimeError for a trainable parameter without a gradient: ZeRO-1 skips it silently, and ranks that skip different
    ones exchange buckets that do not match.
    """
    partial: dict[str, list[torch.Tensor]] = {"tensor": []}
    for name, parameter, layout in named_layouts(module):
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            raise RuntimeError(f"{name} has no gradient after backward: every trainable parameter must take part in the loss")
        for group in layout.partial_over:
            partial[group].append(parameter.grad)
    _all_reduce_coalesced(partial["tensor"], mesh.tensor_group)


def _all_reduce_coalesced(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    tensors = list(tensors)
    if not tensors or dist.get_world_size(group) == 1:
        return
    flat = torch.cat([t.reshape(-1) for t in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors])):
        tensor.copy_(part.view_as(tensor))
