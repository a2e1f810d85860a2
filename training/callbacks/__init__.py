"""What a run does around its optimizer steps, one callback in each file; `callback` documents the hooks.

A callback of one's own is a subclass of `callback.Callback`. The run file names it in `training.callbacks`, by module path
(`my_package.histograms:WeightHistograms`) or by an entry point of the group `baton.callbacks`, with its keyword arguments.
"""
