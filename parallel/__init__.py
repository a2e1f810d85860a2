"""Parallelism: the process mesh, tensor, context and pipeline parallelism, parameter layouts, ZeRO, and State passing."""

import warnings

# megatron-core warns of these on import and for every layer; neither concerns anything used here
warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed.*")
warnings.filterwarnings("ignore", message=".*tp_group is None.*")
warnings.filterwarnings("ignore", message=".*all_gather_into_tensor.*deprecated.*")
