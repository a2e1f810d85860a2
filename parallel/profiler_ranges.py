"""Named ranges in a profiler's trace. Outside of a profiled step a range does nothing, so every layer may have one."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.profiler import record_function

EXCHANGE, RECURRENCE, MARK, STEP = "exchange: ", "recurrence: ", "mark: ", "ProfilerStep#"
"""Prefixes of names: waiting for other ranks; a recurrence in forward; the end of a part of a step; a step (torch's name)."""


_NOTHING = nullcontext()


def profiler_range(kind: str, name: object) -> AbstractContextManager[Any]:
    """The body has this kind and name in the trace; a null context when no trace is recorded."""
    return record_function(f"{kind}{name}") if torch.autograd._profiler_enabled() else _NOTHING
