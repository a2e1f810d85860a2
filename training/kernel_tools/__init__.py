"""A run's kernels: compiled ahead of time, autotuned, checked against their definitions."""
