"""AdamW's update of a flat partition of parameters, in one pass over its memory."""

from baton.kernels.adamw.op import AdamWStep, launch_forms, prepare_adamw

__all__ = ["AdamWStep", "launch_forms", "prepare_adamw"]
