"""Backpropagation through time over segments: the States that lanes carry from step to step."""
