"""AdamW's update of a flat partition of parameters, in one pass over its memory."""

from baton.kernels.adamw.op import AdamWStep, adamw_step, launch_forms

__all__ = ["AdamWStep", "adamw_step", "launch_forms"]
