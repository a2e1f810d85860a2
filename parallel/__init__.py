"""How a model is spread: the process mesh, tensor parallelism, parameter layouts, ZeRO, and the handing over of States."""
