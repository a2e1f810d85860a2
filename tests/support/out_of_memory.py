"""A callback that allocates more memory than any machine has after a step, unless the run recomputes everything."""

import torch

from baton.training.callbacks.callback import Callback


class AsksForTooMuch(Callback):
    """after: optimizer steps of the run."""

    def __init__(self, context, after):
        self.recompute, self.after = context.settings.training.recompute, after

    def after_step(self, progress, result):
        if progress.step == self.after and self.recompute != "full":
            torch.empty(1 << 60, dtype=torch.int8)
