"""How a model is spread: the process mesh, tensor parallelism, parameter layouts, ZeRO, and the handing over of States."""

import warnings

# megatron-core says these when it is imported, and again for every layer; neither is about anything that is used here
warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed.*")
warnings.filterwarnings("ignore", message=".*tp_group is None.*")
warnings.filterwarnings("ignore", message=".*all_gather_into_tensor.*deprecated.*")
