"""Recurrences and other operators, one folder each, with their CPU and Triton implementations.

`protocol` defines State and Recurrence; each folder's `op.py` holds the public function. The package imports nothing else of baton:
no processes, modules or configuration. Every recurrence takes an entering State and returns the State after its last token, and
splitting a sequence anywhere changes neither outputs nor gradients.
"""

from baton.kernels.common.mkl_warmup import warm_up

warm_up()  # here, because every process imports this package before it starts a thread
