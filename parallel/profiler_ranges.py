"""Names for stretches of a rank's work, as a profiler's trace shows them.

The one thing to know: outside of a profiled step a span is nothing, so that every layer may have one.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.profiler import record_function

EXCHANGE, RECURRENCE, MARK, STEP = "exchange: ", "recurrence: ", "mark: ", "ProfilerStep#"
"""How names begin: waiting for other ranks; a recurrence in forward; what ends here of a step; a whole step (torch's own word)."""


_NOTHING = nullcontext()


def profiler_range(kind: str, name: object) -> AbstractContextManager[Any]:
    """What happens within it is called kind and name in the trace that is being made; nothing, where none is."""
    return record_function(f"{kind}{name}") if torch.autograd._profiler_enabled() else _NOTHING
