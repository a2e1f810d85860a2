"""Calls each elementary function that torch takes from oneMKL once, on one thread, before any other thread can call it.

oneMKL selects the implementation of a function at its first call. A second thread that calls the function at the same time may get
a far less accurate one: exp is then wrong by 1e-4 in that thread's whole range, for this call only
(https://github.com/pytorch/pytorch/issues/188792). Without this, one process in a few hundred would start from other initial
values, or take another first step.
"""

import torch

FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp"),
    *("log", "log10", "log2", "sin", "sqrt", "tan", "tanh", "trunc"),
)
"""The functions that ATen/cpu/vml.h takes from oneMKL, for float32 and float64."""


def warm_up() -> None:
    """Call each function once for each dtype. Processes forked from this one need not."""
    for dtype in (torch.float32, torch.float64):
        x = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in FUNCTIONS:
            getattr(torch, name)(x)
