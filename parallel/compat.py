"""What megatron-core and DeepSpeed assume about the machine, undone in this one file.

megatron-core 0.16.1 asks torch.cuda for the current device in its collectives, and DeepSpeed 0.19.8 compiles a C++ extension
at start-up that only inference uses. Without a CUDA device the first fails and the second needs a compiler.
"""

import os

import torch

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_OF_CUDA = {name: getattr(torch.cuda, name) for name in ("current_device", "synchronize")}


def install(device: torch.device) -> None:
    """Prepare this process, before either library builds anything. Idempotent.

    device: where the model lives; one that is no GPU replaces the two torch.cuda functions that megatron-core calls, until the
    process groups are destroyed: Triton's driver asks one of them too.
    """
    os.environ["LOCAL_RANK"] = str(device.index or 0)  # DeepSpeed insists on it and takes it for the CUDA device
    # a hardware queue per stream: see sequence_link, which refuses a single one
    os.environ.setdefault(QUEUES, "32")
    if device.type != "cuda":
        os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported; without it a warning and a guess
        torch.cuda.current_device = lambda: device  # type: ignore[assignment, return-value]
        torch.cuda.synchronize = lambda device=None: None
    import deepspeed.ops

    # A C++ extension for inference_all_reduce, compiled (28 s) or fatal at every fresh engine; training never calls it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def destroy_process_groups() -> None:
    """End this process's world: megatron-core's groups, those that DeepSpeed caches, and torch's."""
    import deepspeed.comm.comm
    import torch.distributed as dist
    from deepspeed.utils import groups
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if deepspeed.comm.comm.cdb is not None:
        deepspeed.comm.comm.destroy_process_group()
        deepspeed.comm.comm.cdb = None
        groups.mpu = None
    if dist.is_initialized():
        dist.destroy_process_group()
    for name, function in _OF_CUDA.items():
        setattr(torch.cuda, name, function)
