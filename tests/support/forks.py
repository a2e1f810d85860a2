"""Ranks of a run without what they cost: forked from a process that has paid for the imports. They are the worker's own code."""

import os
import signal
import socket
from pathlib import Path

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def _rank(attempt: str, rank: int, listener: socket.socket) -> None:
    """What a started rank does, without its imports."""
    from baton.launcher import worker
    from baton.training import stopping
    from baton.training.errors import StoppedError

    log = os.open(Path(attempt) / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    names = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": listener.getsockname()[1],
    }
    os.environ.update({name: str(value) for name, value in names.items()})
    if rank == 0:
        os.environ["BATON_LISTEN_FD"] = str(listener.fileno())
    stopping.install()
    try:
        worker._run(Path(attempt) / "config.yaml")
    except StoppedError as stopped:
        os._exit(stopped.exit_status)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def serve(connection) -> None:
    """The process that has paid: for each attempt two ranks, whose pids it sends, and then their statuses."""
    import torch
    import torch._dynamo

    import baton.launcher.worker
    import baton.models.mixers.mamba
    import baton.training.loop  # noqa: F401 (this is what is paid for)
    from baton.parallel import compat

    compat.install(torch.device("cpu"))
    import deepspeed  # noqa: F401

    torch.set_num_threads(1)
    while (attempt := connection.recv()) is not None:
        listener = socket.create_server(("127.0.0.1", 0))
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # as launcher.processes does
        pids = []
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                _rank(attempt, rank, listener)
            pids.append(pid)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        listener.close()
        connection.send(pids)
        connection.send([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
