"""What DeepSpeed is told: the mesh under its names, and every setting that matters."""

from typing import Any

import torch.distributed as dist

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


def deepspeed_config(stage: int) -> dict[str, Any]:
    """Every DeepSpeed setting that matters, stated.

    There is no bf16 block on purpose: it would cast every parameter, also those that must stay fp32.
    stage: of ZeRO.
    """
    return {
        # DeepSpeed checks train_batch_size = micro_batch_size * accumulation * data ranks and uses it for nothing else here.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # coalesce_grad_reduction insists on True
        "managed_gradient_accumulation": stage == 2,
        # The loss is divided by the labels of the whole global batch before backward; nothing else is divided anywhere.
        "gradient_allreduce_op": "sum",
        "prescale_gradients": False,
        "gradient_clipping": 0.0,  # norm and clip are zero.Engine's
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            # at stage 2 these two send each gradient to its owner alone; without them everybody is sent everything
            "contiguous_gradients": stage == 2,
            "use_multi_rank_bucket_allreduce": False,
            "reduce_scatter": True,
            "round_robin_gradients": False,
            "reduce_bucket_size": 500_000_000,
            "allgather_bucket_size": 500_000_000,
        },
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        # it waits for the GPU in every forward pass, which keeps the host from running ahead and cannot be recorded in a CUDA graph
        "timers": {"throughput": {"enabled": False}},
        "disable_allgather": False,
        "dump_state": False,
    }
