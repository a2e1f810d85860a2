"""The recurrences themselves, one folder each: no processes, no modules, no configuration, and nothing of baton imported.

The one thing to know: every recurrence takes the state that arrives and returns the state that leaves, and splitting a
sequence anywhere changes neither. `protocol` says what a State is; each folder's `op.py` holds its public function.
"""

from baton.kernels.common.mkl_warmup import warm_up

warm_up()  # here, because whoever computes anything imports this before it starts a thread
