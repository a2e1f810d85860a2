"""The elementary functions that torch takes from oneMKL on a CPU, each called once, on one thread, before anybody calls it on two.

The one thing to know: oneMKL finds the routine behind a function when it is first called, and a second thread that calls it
meanwhile may be given a far less accurate one: exp is then wrong by 1e-4, in that thread's whole share, this once
(https://github.com/pytorch/pytorch/issues/188792). One process in a few hundred would start from other values than the next, or
take another first step, and nothing would say so.
"""

import torch

FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp"),
    *("log", "log10", "log2", "sin", "sqrt", "tan", "tanh", "trunc"),
)
"""What ATen/cpu/vml.h hands on, for float32 and for float64."""


def warm_up() -> None:
    """Call each once for each dtype. What is forked from this process need not."""
    for dtype in (torch.float32, torch.float64):
        x = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in FUNCTIONS:
            getattr(torch, name)(x)
