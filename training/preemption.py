"""Stop requests: signal handlers only set a flag, and all ranks agree on it at a step boundary, where it is safe to save.

Torch-free until ranks agree. Python runs a handler only between two bytecodes, so a rank inside a collective notices late;
ending it in time is the task of the process that started it.
"""

import signal
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from baton.parallel.mesh import Mesh
    from baton.parallel.side_stream import SideStream

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
"""SIGUSR1: the job's time is nearly up. SIGTERM: the job is being ended (preempted, requeued, cancelled)."""

_received: list[int] = []


def install_handlers() -> None:
    """From here on the signals request a stop instead of ending the process. The process that starts a rank may block them
    until then."""
    for number in SIGNALS:
        signal.signal(number, _on_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _on_signal(number: int, frame: Any) -> None:
    _received.append(number)  # a second signal, and a second of the same, changes nothing


def stop_requested() -> bool:
    """Whether this rank has received a stop signal."""
    return bool(_received)


def sync_stop_request(mesh: "Mesh", waited: float = 0.0) -> tuple[bool, float]:
    """Whether any rank has received a stop signal, and the longest data wait of the ranks in seconds, in one all-reduce. Every
    rank calls it at the same step boundary and has the same result. It does not wait for what a GPU still has to do."""
    if mesh.world_size == 1:
        return stop_requested(), waited
    import torch
    import torch.distributed as dist

    with _own_stream(mesh.device).use():
        both = torch.tensor([float(stop_requested()), waited], dtype=torch.float64, device=mesh.device)
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        flag, longest = both.tolist()
    return bool(flag), longest


@cache
def _own_stream(device: "torch.device") -> "SideStream":
    """A stream on which nothing else is done."""
    from baton.parallel.side_stream import SideStream

    return SideStream(device)
